"""A service that is started again while its config file is wrong works under the last good one, and says so."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Generator
from pathlib import Path
from urllib.request import urlopen

import pytest

from breakwater.config import parse_config
from breakwater.local.ports import free_port
from tests.helpers import ServiceProcess, start_service, until

GOOD = "providers: {local: {base_url: http://127.0.0.1:1/v1}}\nagents: {writer: {model: gpt-4.1}}\n"
BETTER = GOOD + "limits: {drain_s: 3}\n"
BROKEN = GOOD + "limits: {drain_s: [\n"
MISTAKEN = GOOD + "limits: {drain: 3}\n"
WITHOUT_ITS_SECRET = GOOD + "alerts: {channels: {ops: {slack: {webhook_url: {env: NOT_SET_HERE}}}}}\n"


class Started:
    """One service, whose config file is edited; it needs no server to come up."""

    def __init__(self, directory: Path) -> None:
        self.file, self.last_good = directory / "breakwater.yaml", directory / "state" / "last-good.yaml"
        self.last_good.parent.mkdir()
        self._log = directory / "log"
        self._metrics_port = free_port()
        self.process: ServiceProcess | None = None

    def start(self, service: str, config: str | None, **extra: str) -> None:
        if config is not None:
            self.file.write_text(config)
        self._log.write_text("")
        environment = {
            "BREAKWATER_CONFIG": str(self.file),
            "BREAKWATER_LAST_GOOD_CONFIG": str(self.last_good),
            "BREAKWATER_NATS_URL": "nats://127.0.0.1:9",
            "BREAKWATER_REDIS_URL": "redis://127.0.0.1:9/0",
            "BREAKWATER_CLICKHOUSE_URL": "http://127.0.0.1:9/none",
            "BREAKWATER_CONSOLE_PORT": str(free_port()),
            "BREAKWATER_METRICS_PORT": str(self._metrics_port),
            "BREAKWATER_LOG_JSON": "true",
            **extra,
        }
        self.process = start_service(service, environment, self._log)

    def works_under(self, config: str, *, refused: bool) -> bool:
        """Whether it shows that it does, and that its file is refused or not. Fails where it has ended."""
        assert self.process is not None
        assert self.process.poll() is None, self.log
        try:
            with urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics") as answer:
                shown = answer.read().decode()
        except OSError:
            return False
        version = f'breakwater_config_info{{version="{parse_config(config).version}"}} 1.0'
        return version in shown and f"breakwater_config_refused {float(refused)}" in shown

    @property
    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> int | None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        return None


@pytest.fixture
def started(tmp_path: Path) -> Generator[Started]:
    service = Started(tmp_path)
    yield service
    service.end()


@pytest.mark.parametrize(
    ("service", "config", "what"),
    [
        ("console", BROKEN, "breakwater.yaml, line 4, column 1: is not YAML"),
        ("console", MISTAKEN, "limits.drain: is not a known setting; did you mean 'drain_s'? (line 3)"),
        ("alerter", WITHOUT_ITS_SECRET, "NOT_SET_HERE"),
    ],
)
async def test_a_service_that_is_started_again_goes_on_under_the_last_good_config(
    started: Started, service: str, config: str, what: str
) -> None:
    started.start(service, GOOD)
    await until(lambda: started.works_under(GOOD, refused=False), "the service to start")
    started.end()
    started.start(service, config)
    await until(lambda: started.works_under(GOOD, refused=True), "it to start again")
    [line] = [line for line in started.log.splitlines() if "config_not_taken_over" in line]
    assert what in line
    assert f"version {parse_config(GOOD).version} stays effective, from {started.last_good}" in line
    assert started.last_good.read_text() == GOOD
    assert stat.S_IMODE(started.last_good.stat().st_mode) == 0o600


async def test_a_service_that_has_never_had_a_good_config_does_not_start(started: Started) -> None:
    started.start("console", BROKEN)
    assert started.process is not None
    await until(lambda: started.process is not None and started.process.poll() is not None, "it to end")
    assert started.process.poll() == os.EX_CONFIG
    assert "breakwater.yaml, line 4, column 1: is not YAML" in started.log
    assert not started.last_good.exists()


async def test_where_the_last_good_config_is_no_use_either_both_are_named(started: Started) -> None:
    started.last_good.write_text(MISTAKEN)
    started.start("console", BROKEN)
    assert started.process is not None
    await until(lambda: started.process is not None and started.process.poll() is not None, "it to end")
    assert started.process.poll() == os.EX_CONFIG
    assert "breakwater.yaml, line 4, column 1: is not YAML" in started.log
    assert f"{started.last_good}: 1 mistake" in started.log


async def test_what_is_taken_over_while_it_runs_is_the_last_good_one(started: Started) -> None:
    started.start("console", GOOD)
    await until(lambda: started.works_under(GOOD, refused=False), "the service to start")
    assert started.process is not None
    for config, holds, refused in ((BROKEN, GOOD, True), (BETTER, BETTER, False), (BROKEN, BETTER, True)):
        started.file.write_text(config)
        os.kill(started.process.pid, signal.SIGHUP)
        await until(lambda holds=holds, refused=refused: started.works_under(holds, refused=refused), "a reload")
        await until(lambda holds=holds: started.last_good.read_text() == holds, "its copy")
    started.end()
    started.start("console", BROKEN)
    await until(lambda: started.works_under(BETTER, refused=True), "it to start again")


async def test_a_service_that_follows_its_file_takes_over_what_a_config_map_has(started: Started) -> None:
    # As Kubernetes changes a mounted ConfigMap: the file is a link through a folder's link, which is replaced.
    folder = started.file.parent / "mounted"
    for name, config in (("first", GOOD), ("second", BETTER)):
        (folder / name).mkdir(parents=True)
        (folder / name / "breakwater.yaml").write_text(config)
    (folder / "..data").symlink_to("first")
    started.file = folder / "breakwater.yaml"
    started.file.symlink_to("..data/breakwater.yaml")
    started.start("console", None, BREAKWATER_FOLLOW_CONFIG="true")
    await until(lambda: started.works_under(GOOD, refused=False), "the service to start")
    (folder / "..new").symlink_to("second")
    (folder / "..new").replace(folder / "..data")
    await until(lambda: started.works_under(BETTER, refused=False), "it to follow")
    assert started.last_good.read_text() == BETTER


async def test_a_copy_that_cannot_be_written_stops_nothing(started: Started) -> None:
    started.last_good.parent.rmdir()
    started.start("console", GOOD)
    await until(lambda: started.works_under(GOOD, refused=False), "the service to start")
    assert "last_good_config_not_saved" in started.log
