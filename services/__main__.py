"""Runs one service: `python -m breakwater.services worker`. All of them share one image and this entry point.

The local stack forks its services from one process, where `run_service` runs in each fork.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

if __name__ == "__main__":
    gc.disable()  # collections would take a tenth of the start; `run_service` enables them

import structlog
import uvloop
from pydantic import ValidationError

from breakwater.config import Config, load_config, require_reloadable
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.process import background, files, prctl
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.telemetry import metrics, tracing
from breakwater.kernel.telemetry.logs import configure_logging

NAMES = ("request", "worker", "breaker", "budget", "alerter", "sink", "console")
ALIVE_EVERY_S = 5.0
CONFIG_CHECK_EVERY_S = 2.0
FIRST_ALIVE_EVERY_S = 0.1
GC_THRESHOLD = 50_000
"""Objects. With 5,000, collections took 6 % of a busy worker's CPU; reference cycles wait longer to be freed."""
COLLECT_EVERY_S = 300.0
"""A service that mostly waits would reach the threshold after hours, with all that its cycles hold."""


class Service(Protocol):
    """A service, as its `app.build` returns it: runs until SIGTERM or SIGINT, then stops gracefully."""

    def run(self) -> Coroutine[Any, Any, None]: ...  # noqa: D102

    async def is_alive(self) -> bool:
        """Returns True if the service has subscribed and is connected."""
        ...

    @property
    def reload(self) -> Callable[[Config], Awaitable[None]]:
        """Switches to another config, or reads the secrets of the same one again.

        Raises ConfigError, and keeps the current config, if it can't.
        """
        ...


class ServiceModule(Protocol):
    """The shape of every `services/<name>/app.py`."""

    def build(self, settings: Settings, config: Config) -> Service:
        """Wires the service. Connects to nothing yet.

        Raises:
            ConfigError: a secret that the config names is missing or unusable.
        """
        ...


def main() -> int:
    """Entry point. Exit code 2 for a wrong call, 78 (EX_CONFIG) for a wrong config, which no restart can mend."""
    prctl.hide_memory()
    match sys.argv[1:]:
        case [name] if name in NAMES:
            return run_service(name)
        case _:
            sys.stderr.write(f"usage: python -m breakwater.services {{{','.join(NAMES)}}}\n")
            return 2


def run_service(name: str) -> int:
    """Runs a service as its environment says, and returns its exit code, as `main` does."""
    prctl.set_name(f"bw-{name}")
    hangups = Hangups()
    try:
        settings = Settings()
        configure_logging(name, level=settings.log_level, as_json=settings.log_json)
        config_stamp = files.stamp(settings.config)
        service, config = _build(name, settings)
        if settings.metrics_port is not None:
            token = settings.metrics_token
            metrics.serve(
                settings.metrics_host, settings.metrics_port, None if token is None else token.get_secret_value()
            )
        tracing.start(name)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_CONFIG
    except ValidationError as error:
        for one in error.errors(include_url=False, include_input=False):
            sys.stderr.write(f"BREAKWATER_{'_'.join(map(str, one['loc'])).upper()}: {one['msg']}\n")
        return os.EX_CONFIG
    # Everything built so far stays, and nearly everything later is freed by reference counting. Python's default
    # cycle collection took a quarter of the time of a `request` with 50 streams.
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    gc.enable()
    try:
        work = [partial(hangups.follow, service, settings, config), _collect_garbage]
        if settings.follow_config:
            work.append(partial(hangups.watch, settings.config, config_stamp))
        uvloop.run(run(service, settings.alive_file, *work))
    finally:
        tracing.stop()
    return 0


def _build(name: str, settings: Settings) -> tuple[Service, Config]:
    """Builds a service with its config, or with the last good one if the file is wrong now.

    Raises:
        ConfigError: there is no last good config, or it can't be used either.
    """
    module = cast(ServiceModule, importlib.import_module(f"breakwater.services.{name}.app"))
    last_good = settings.last_good_config
    try:
        config = load_config(settings.config)
        service = module.build(settings, config)
    except ConfigError as refused:
        if last_good is None or not last_good.is_file():
            raise
        try:
            config = load_config(last_good)
            service = module.build(settings, config)
        except ConfigError as error:
            raise ConfigError(f"{refused}\nThe last good config can't be used either:\n{error}") from error
        _warn_of_config(refused, f"version {config.version} stays effective, from {last_good}")
        metrics.show_config(config.version, refused=True)
    else:
        _config_loaded(config, last_good)
    return service, config


def _config_loaded(config: Config, last_good: Path | None) -> None:
    """Reports the effective config in metrics, and saves it for a start with a broken file."""
    metrics.show_config(config.version)
    if last_good is None:
        return
    try:
        files.write_private(last_good, config.text)
    except OSError as error:
        effect = "a service that restarts while its config file is invalid gets an older config, or none"
        structlog.get_logger().error(
            "last_good_config_not_saved", file=str(last_good), error=error.strerror, effect=effect
        )


def _warn_of_config(error: ConfigError, effect: str) -> None:
    structlog.get_logger().warning("config_not_taken_over", error=str(error), effect=effect)


class Hangups:
    """Reloads the config on SIGHUP. Created before the config is first read, so that no signal is missed."""

    def __init__(self) -> None:
        self._received = asyncio.Event()
        signal.signal(signal.SIGHUP, self._receive)

    async def follow(self, service: Service, settings: Settings, config: Config) -> None:
        """Reloads the service's config file on each SIGHUP, until cancelled."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._received.set)
        while True:
            await self._received.wait()
            self._received.clear()
            config = await _reload(service, settings, config)

    async def watch(self, file: Path, stamp: tuple[int, int, int] | None) -> None:
        """Reloads the config, as SIGHUP does, whenever its file has another stamp, until cancelled."""
        previous_stamp = stamp
        while True:
            await asyncio.sleep(background.aligned_delay(CONFIG_CHECK_EVERY_S))
            current_stamp = files.stamp(file)
            # Only if two checks found the file unchanged, because half of a file may be valid.
            if current_stamp is not None and current_stamp == previous_stamp != stamp:
                stamp = current_stamp
                self._received.set()
            previous_stamp = current_stamp

    def _receive(self, _number: int, _frame: object) -> None:
        self._received.set()


async def _reload(service: Service, settings: Settings, config: Config) -> Config:
    """The effective config: the file's, or the previous one if the file can't be used."""
    log, version = structlog.get_logger(), config.version
    try:
        changed = load_config(settings.config)
        if changed.version != version:
            require_reloadable(config, changed)
        # Also if it is the same: its secrets may have changed.
        await service.reload(changed)
    except ConfigError as error:
        _warn_of_config(error, f"version {version} stays effective")
        metrics.show_config(version, refused=True)
        return config
    except Exception:
        log.exception("config_not_taken_over", effect=f"version {version} stays effective")
        metrics.show_config(version, refused=True)
        return config
    _config_loaded(changed, settings.last_good_config)
    if changed.version != version:
        log.info("config_taken_over", version=changed.version, before=version)
    return changed


async def run(service: Service, alive_file: Path | None, *work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a service to its end, together with background work, and touches its alive file meanwhile."""
    tasks = [asyncio.create_task(start()) for start in work]
    if alive_file is not None:
        tasks.append(asyncio.create_task(_touch_alive(service, alive_file)))
    try:
        await service.run()
    finally:
        for task in tasks:
            task.cancel()


async def _collect_garbage() -> None:
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        gc.collect()


async def _touch_alive(service: Service, file: Path) -> None:
    """Touches a file for the container's health check, which has no port to ask."""
    started = False
    while True:
        if await service.is_alive():
            started = True
            try:
                file.touch()  # noqa: ASYNC240  on a file system in memory
            except OSError as error:
                structlog.get_logger().error("alive_file_failed", file=str(file), error=error.strerror)
                return
        await asyncio.sleep(background.aligned_delay(ALIVE_EVERY_S) if started else FIRST_ALIVE_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
