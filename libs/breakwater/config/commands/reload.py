"""Applying another config to a running plane: `up` follows its file, `config apply` is for containers.

The order is what keeps a plane at work: the file is checked, then NATS and ClickHouse get what it needs, and only then
do services read it. Those of `up` read a copy of the last file that went through all of this, so that one that is
started again meanwhile does not meet a file that is being written.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.rules.signals import config_applied
from breakwater.alerts.store import IncidentLog
from breakwater.config import (
    Config,
    ConfigError,
    changes,
    load_config,
    parse_config,
    require_reloadable,
    unreadable_secrets,
    unusable_programs,
    variables_of,
)
from breakwater.config.store import Configs
from breakwater.kernel.commands import connect, output
from breakwater.kernel.commands.errors import CliError
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process import background
from breakwater.kernel.process.files import write_private
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.process.settings import Settings
from breakwater.local.commands.setup import prepare
from breakwater.local.datadir import DataDir
from breakwater.local.process import for_service
from breakwater.local.simulation import Simulation
from breakwater.local.stack import Stack, nats_server
from breakwater.local.supervisor import ProcessEvent, Supervisor
from breakwater.redaction.rules.redact import Redactor

CHECK_EVERY_S = 1.0


def require_usable(path: Path, config: Config, *, simulate: bool = False) -> None:
    """Raises ConfigError: secrets are missing here, or programs can't be used."""
    if not simulate:
        require_secrets(path, config)
    if wrong := unusable_programs(config):
        raise ConfigError("\n".join([f"{path}: process providers in the config are unusable", *wrong]))


def require_secrets(path: Path, config: Config) -> None:
    """Raises ConfigError: secrets are missing here."""
    if missing := unreadable_secrets(config):
        raise ConfigError("\n".join([f"{path}: secrets in the config are missing", *missing]))


async def announce(nats_url: str, before: Config, after: Config, by: str) -> None:
    """Notifies people, as of any incident. Raises CliError, BusError."""
    alerts = after.alerts
    rules = IncidentRules(alerts.on_events, alerts.quiet_s, alerts.escalate, alerts.reminders)
    signal_ = config_applied(after.version, before.version, by, changes(before, after), datetime.now(UTC))
    async with connect.bus(nats_url) as client:
        log = IncidentLog(lambda: client, Publisher(lambda: client, "setup"), Redactor.compile(after.redaction))
        await log.apply(signal_, rules)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The servers are prepared for a config, and services may read it."""

    version: str
    before: str | None
    """The version that was applied before; None where none was."""
    changes: tuple[str, ...]
    done: tuple[str, ...]
    """The changes on the servers, a line each."""


async def apply_to_servers(settings: Settings, config: Config, by: str) -> Prepared:
    """All of applying a config but what the services do.

    Raises:
        ConfigError: a running plane can't go over to it.
        CliError, BusError, AnalyticsError, StateUnavailableError: a server does not answer, or refuses.
    """
    async with connect.state(settings.redis_url.get_secret_value()) as redis:
        configs = Configs(redis)
        text = await configs.applied()
        before = None if text is None else parse_config(text, source="the config that was applied last")
        if before is not None:
            require_reloadable(before, config)
        done = await prepare(settings, config)
        if before is not None and before.version != config.version:
            if before.programs != config.programs:
                done += ("programs have changed: `breakwater config nats-users` prints the users of NATS",)
            await announce(settings.nats_url.get_secret_value(), before, config, by)
        await configs.mark_applied(config.text)
    changed = () if before is None else changes(before, config)
    return Prepared(config.version, None if before is None else before.version, changed, done)


@dataclass(frozen=True, slots=True)
class StackEvents:
    """Prints the events of a local stack: as JSON lines on stdout, or as sentences on stderr."""

    logs: Path
    as_json: bool

    def show(self, event: str, text: str, style: str = "dim", **fields: Any) -> None:
        """Prints an event: its name and fields for programs, the text for people."""
        if self.as_json:
            output.json_line({"event": event, **fields})
        elif text:
            output.note(text, style)

    def of_process(self, event: ProcessEvent) -> None:
        """Prints an event of a process. For people, that it has started or ended is no news."""
        text, style = "", "dim"
        match event.kind:
            case "ready":
                text = f"  {event.name} is ready{' again' if event.restarts else ''} (pid {event.pid})"
            case "restarting_in":
                times = f", {event.failures} times in a row" if event.failures > 1 else ""
                log = f" (its log: {self.logs / event.name}.log)" if times else ""
                text = f"  {event.name} {event.message}{times}; it restarts in {event.delay_s:g} s{log}"
                style = "yellow"
            case "gave_up":
                text, style = f"  {event.name} can't continue: {event.message}", "red"
            case "stopping":
                text = f"  stopping {event.name}"
            case _:
                pass
        given = {"delay_s": event.delay_s, "failures": event.failures or None, "message": event.message}
        more: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.show(event.kind, text, style, process=event.name, pid=event.pid, code=event.code, **more)


class ConfigFollower:
    """Applies the config file of a local stack whenever it is saved."""

    def __init__(
        self,
        supervisor: Supervisor,
        data: DataDir,
        stack: Stack,
        file: Path,
        events: StackEvents,
        simulation: Simulation | None = None,
    ) -> None:
        """Follows `file`, from which the copy was made that the stack's services read."""
        self._supervisor, self._data, self._stack, self._file = supervisor, data, stack, file
        self._events, self._simulation = events, simulation
        self._copy = stack.setup.config
        self._config = load_config(self._copy)
        self._unannounced: list[tuple[Config, Config]] = []
        self._refused = False

    async def run(self) -> None:
        """Looks at the file every second, until cancelled."""
        # It may have been edited since it was read: the first look reads it again, which mostly changes nothing.
        handled = seen = reported = None
        announcing = Outage("announcing the config")
        while True:
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))
            await announcing.run_logged(self._announce, expected=(CliError, BusError))
            before, seen = seen, _stamp(self._file)
            # Half of a file may be a valid one: it is read when it is the same at two looks.
            if seen is None or seen == handled or seen != before:
                continue
            try:
                await self._apply()
                handled, self._refused = seen, False
            except ConfigError as error:
                self._refuse(str(error))
                handled = seen
            except Exception as error:  # noqa: BLE001  mostly a server that does not answer: again at the next look
                if reported != seen:
                    self._refuse(str(error) or repr(error))
                reported = seen

    async def _announce(self) -> None:
        while self._unannounced:
            nats_url = self._stack.setup.nats_url.get_secret_value()
            try:
                by = self._file.owner()
            except (KeyError, OSError):
                by = "an unknown user"
            await announce(nats_url, *self._unannounced[0], by)
            del self._unannounced[0]

    async def _apply(self) -> None:
        """Raises ConfigError, and what is raised where a server does not answer."""
        before, source = self._config, self._file
        if self._simulation is not None:
            source = await self._simulation.follow(self._file)
        config = load_config(source)
        if config.version == before.version:
            if self._refused:
                text = f"  the config is valid again, without a change: version {config.version} stays effective"
                self._events.show("config_valid_again", text, "green", version=config.version)
            return
        require_reloadable(before, config)
        require_usable(self._file, config, simulate=self._simulation is not None)
        await prepare(self._stack.setup, config)
        self._provision_programs(config)
        write_private(self._copy, config.text)
        self._config = config
        restarted = self._signal_services(before, config)
        self._unannounced.append((before, config))
        changed = changes(before, config)
        lines = [f"  config version {config.version} is applied, in place of {before.version}:"]
        lines += [f"    {line}" for line in changed]
        lines += [f"  {name} restarts with its new environment variables" for name in restarted]
        self._events.show(
            "config_applied",
            "\n".join(lines),
            version=config.version,
            before=before.version,
            changes=changed,
            restarted=restarted,
        )

    def _refuse(self, error: str) -> None:
        version, self._refused = self._config.version, True
        text = f"  the config is not applied, and version {version} stays effective:\n{error}"
        self._events.show("config_not_applied", text, "red", version=version, error=error)

    def _provision_programs(self, config: Config) -> None:
        """Gives NATS the users of programs that are new, and takes away those that are gone."""
        nats = self._supervisor.keepers.get("nats")
        if nats is not None and config.programs != self._config.programs:
            nats_server(self._data, self._stack.nats_port, config)
            # It is started again. Read again, it lets new users in, and nothing that they publish reaches a stream.
            nats.signal(signal.SIGTERM)

    def _signal_services(self, before: Config, config: Config) -> tuple[str, ...]:
        """Has every service read the config; returns those that were ended for it, to be started again."""
        restarted: list[str] = []
        for spec in self._stack.services:
            keeper, service = self._supervisor.keepers[spec.name], spec.service or spec.name
            named = variables_of(config, service)
            if named - variables_of(before, service):
                keeper.spec = replace(keeper.spec, env={**keeper.spec.env, **for_service(os.environ, named)})
                keeper.signal(signal.SIGTERM)
                restarted.append(spec.name)
            else:
                keeper.signal(signal.SIGHUP)
        return tuple(restarted)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None  # being replaced, or gone: what was applied holds
    return found.st_mtime_ns, found.st_size, found.st_ino
