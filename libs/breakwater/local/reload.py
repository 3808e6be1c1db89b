"""Applies another config to a running local plane: `up` follows its file.

The order keeps the plane working: first the file is checked, then NATS and ClickHouse get what it needs, and only then
do the services read it. The services of `up` read a copy of the last applied file, so that a service that restarts
never reads a file that is half written.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from breakwater.config import (
    Config,
    changes,
    load_config,
    require_reloadable,
    require_usable,
    variables_of,
)
from breakwater.config.servers import announce, prepare
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import CliError
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.process import background, files
from breakwater.kernel.process.outage import Outage
from breakwater.local.datadir import DataDir
from breakwater.local.process import for_service
from breakwater.local.simulation import Simulation
from breakwater.local.stack import Stack, nats_server
from breakwater.local.supervisor import ProcessEvent, Supervisor
from breakwater.replay.summary import HEADING, summary_of_change

CHECK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class StackEvents:
    """The printer of a local stack's events: JSON lines on stdout, or sentences on stderr."""

    logs: Path
    as_json: bool

    def show(self, event: str, text: str, style: str = "dim", **fields: Any) -> None:
        """Prints an event: its name and fields for programs, or the text for people."""
        if self.as_json:
            output.json_line({"event": event, **fields})
        elif text:
            output.note(text, style)

    def show_process_event(self, event: ProcessEvent) -> None:
        """Prints an event of a process. For people it omits that a process has started or ended."""
        text = ""
        style = "dim"
        match event.kind:
            case "ready":
                text = f"  {event.name} is ready{' again' if event.restarts else ''} (pid {event.pid})"
            case "restarting_in":
                times = f", {event.failures} times in a row" if event.failures > 1 else ""
                log = f" (its log: {self.logs / event.name}.log)" if times else ""
                text = f"  {event.name} {event.message}{times}; it restarts in {event.delay_s:g} s{log}"
                style = "yellow"
            case "gave_up":
                text = f"  {event.name} can't continue: {event.message}"
                style = "red"
            case "stopping":
                text = f"  stopping {event.name}"
            case _:
                pass
        optional = {"delay_s": event.delay_s, "failures": event.failures or None, "message": event.message}
        fields: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
        self.show(event.kind, text, style, process=event.name, pid=event.pid, code=event.code, **fields)


class ConfigFollower:
    """The task that applies a local stack's config file whenever it is saved."""

    def __init__(
        self,
        supervisor: Supervisor,
        data: DataDir,
        stack: Stack,
        file: Path,
        events: StackEvents,
        simulation: Simulation | None = None,
    ) -> None:
        """Creates a follower of `file`. The stack's services read a copy of it."""
        self._supervisor = supervisor
        self._data = data
        self._stack = stack
        self._file = file
        self._events = events
        self._simulation = simulation
        self._copy = stack.setup.config
        self._config = load_config(self._copy)
        self._unannounced: list[tuple[Config, Config]] = []
        self._summing_up: asyncio.Task[None] | None = None
        self._refused = False

    async def run(self) -> None:
        """Checks the file every second, until cancelled."""
        try:
            await self._follow()
        finally:
            await self._stop_summing_up()

    async def _follow(self) -> None:
        # The file may have been edited since it was read, so the first check reads it again.
        handled_stamp = stamp = reported_stamp = None
        announcing = Outage("announcing the config")
        while True:
            await asyncio.sleep(background.aligned_delay(CHECK_EVERY_S))
            await announcing.run_logged(self._announce, expected=(CliError, BusError))
            previous_stamp = stamp
            stamp = files.stamp(self._file)
            # Reads the file only if two checks found it unchanged, because half of a file may be valid.
            if stamp is None or stamp == handled_stamp or stamp != previous_stamp:
                continue
            try:
                await self._apply()
                handled_stamp = stamp
                self._refused = False
            except ConfigError as error:
                self._refuse(str(error))
                handled_stamp = stamp
            except Exception as error:  # noqa: BLE001  mostly a server that does not answer; the next check retries
                if reported_stamp != stamp:
                    self._refuse(str(error) or repr(error))
                reported_stamp = stamp

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
        """Applies the file if it has changed. Raises ConfigError, and the errors of servers that don't answer."""
        before = self._config
        source = self._file if self._simulation is None else await self._simulation.follow(self._file)
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
        files.write_private(self._copy, config.text)
        self._config = config
        restarted = self._signal_services(before, config)
        self._unannounced.append((before, config))
        config_changes = changes(before, config)
        lines = [f"  config version {config.version} is applied, in place of {before.version}:"]
        lines += [f"    {line}" for line in config_changes]
        lines += [f"  {name} restarts with its new environment variables" for name in restarted]
        self._events.show(
            "config_applied",
            "\n".join(lines),
            version=config.version,
            before=before.version,
            changes=config_changes,
            restarted=restarted,
        )
        await self._stop_summing_up()
        self._summing_up = asyncio.create_task(self._sum_up(before, config))

    async def _sum_up(self, before: Config, config: Config) -> None:
        """Shows what the applied config would have done with the jobs of the last day."""
        summary = await summary_of_change(self._stack.setup.clickhouse_url.get_secret_value(), before, config)
        if summary:
            text = "\n".join((f"  {HEADING}", *(f"    {line}" for line in summary)))
            self._events.show("config_planned", text, version=config.version, summary=summary)

    async def _stop_summing_up(self) -> None:
        if self._summing_up is not None:
            await background.stop(self._summing_up)

    def _refuse(self, error: str) -> None:
        self._refused = True
        version = self._config.version
        text = f"  the config is not applied, and version {version} stays effective:\n{error}"
        self._events.show("config_not_applied", text, "red", version=version, error=error)

    def _provision_programs(self, config: Config) -> None:
        """Adds users of new programs to NATS, and removes those of removed programs."""
        nats = self._supervisor.keepers.get("nats")
        if nats is not None and config.programs != self._config.programs:
            nats_server(self._data, self._stack.nats_port, config)
            # Restarts NATS. After a mere reload, messages that new users publish would reach no stream.
            nats.signal(signal.SIGTERM)

    def _signal_services(self, before: Config, config: Config) -> tuple[str, ...]:
        """Lets every service read the config. Returns the services that restart for new environment variables."""
        restarted: list[str] = []
        for spec in self._stack.services:
            keeper = self._supervisor.keepers[spec.name]
            service = spec.service or spec.name
            variables = variables_of(config, service)
            if variables - variables_of(before, service):
                keeper.spec = replace(keeper.spec, env={**keeper.spec.env, **for_service(os.environ, variables)})
                keeper.signal(signal.SIGTERM)
                restarted.append(spec.name)
            else:
                keeper.signal(signal.SIGHUP)
        return tuple(restarted)
