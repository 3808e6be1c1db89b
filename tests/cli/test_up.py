"""`breakwater up` as a person runs it: in a process of its own, with signals and crashes.

The stack of the browser's tests is one that starts on its data again, and is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from breakwater.kernel.telemetry.metrics import PLANE_GAUGES
from breakwater.local.commands.up import link_to_show
from breakwater.local.datadir import Endpoints
from tests.commands import run_command
from tests.helpers import runs, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "breakwater.yaml"


class Up:
    """A running `breakwater up --json`."""

    def __init__(self, data: Path, *arguments: str, config: Path = EXAMPLE, **environment: str) -> None:
        self.data = data
        self.log = data.parent / f"{data.name}-{time.monotonic_ns()}.out"
        command = [sys.executable, "-m", "breakwater.cli"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "up", "--config", str(config), "--data", str(data), "--json", *arguments],
                stdout=out,
                stderr=out,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def ready(self) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            events = self.events
            assert self.process.poll() is None, self.log.read_text()
            assert all("event" in event for event in events), self.log.read_text()
            return next((event for event in reversed(events) if event["event"] == "up"), None)

        return wait_until(found, "the event", timeout_s=240)

    def pid(self, name: str) -> int:
        return next(event["pid"] for event in reversed(self.events) if event.get("process") == name and event["pid"])

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = 120) -> int:
        self.process.send_signal(sig)
        return self.process.wait(timeout_s)

    def ask(self, prompt: str) -> dict[str, Any]:
        endpoints = json.loads((self.data / "endpoints.json").read_text())
        key = Path(endpoints["api_key_file"]).read_text()
        request = urllib.request.Request(
            endpoints["request_url"] + "/api/v1/jobs?wait_s=60",
            data=json.dumps({"agent": "support-triage", "prompt": prompt}).encode(),
            headers={"Authorization": f"Bearer {key}"},
        )
        while True:  # a program does as the response says: 503 with Retry-After while NATS comes back
            try:
                with urllib.request.urlopen(request, timeout=70) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(float(error.headers["Retry-After"]))


def taken(port: int) -> socket.socket | None:
    """The port, as soon as it is free."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


def plane_gauges(urls: dict[str, str]) -> set[str]:
    """The gauges of the plane that the services show anything of, each its own."""
    found: set[str] = set()
    for name, gauges in PLANE_GAUGES.items():
        with urllib.request.urlopen(urls[name], timeout=60) as answer:
            families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
        found |= {gauge.name for gauge in gauges if families[f"breakwater_{gauge.name}"].samples}
    return found


@pytest.fixture
def up(tmp_path: Path) -> Generator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*arguments: str, data: Path | None = None, **environment: Any) -> Up:
        started.append(Up(data or tmp_path / "data", *arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            leftovers = one.children()
            one.process.kill()
            for child in leftovers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        one.process.wait()


@pytest.mark.long(about_s=15)
def test_it_answers_survives_kills_and_stops_cleanly(up: Callable[..., Up]) -> None:
    first = up("--simulate")
    ready_event = first.ready()
    assert ready_event["first_api_key"].startswith("bw_")
    assert (first.data / "endpoints.json").stat().st_mode & 0o777 == 0o600
    assert ready_event["first_api_key"] not in (first.data / "api_keys.json").read_text()
    assert first.ask("before")["status"] == "succeeded"
    # Some is only known once the counters of the budgets are filled; and early in a day there is no forecast.
    shown = {gauge.name for gauges in PLANE_GAUGES.values() for gauge in gauges} - {"budget_forecast_usd"}
    wait_until(lambda: shown <= plane_gauges(ready_event["metrics"]))

    for name in ("worker", "nats", "clickhouse"):
        before = first.pid(name)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda name=name, before=before: first.pid(name) != before)
    assert first.ask("after the kills")["status"] == "succeeded"

    # A NATS that could not write for a moment takes nothing more until it is started again.
    before = first.pid("nats")
    resource.prlimit(before, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    assert first.ask("after the disk was full")["status"] == "succeeded"
    assert first.pid("nats") != before
    [event] = [event for event in first.events if event["event"] == "nats_can_write_again"]
    assert "write error" in event["message"]

    def is_all_stored() -> bool:
        sql = "SELECT count() AS n FROM executions FINAL"
        answer = run_command("query", "--data", str(first.data), "--json", sql)
        return json.loads(answer.stdout) == [{"n": 3}]

    wait_until(is_all_stored)
    code, text = refused(first.data, "--simulate")
    assert code == 1
    assert f"held by process {first.process.pid}" in text

    processes = first.children()
    assert len(processes) >= 10
    assert first.stop() == 143
    wait_until(lambda: not [process for process in processes if runs(process)])
    assert not (first.data / "endpoints.json").exists()


def refused(data: Path, *arguments: str, config: Path = EXAMPLE, **environment: str) -> tuple[int, str]:
    command = ("up", "--config", str(config), "--data", str(data), "--json", *arguments)
    ran = run_command(*command, environment=environment)
    return ran.returncode, ran.stdout + ran.stderr


def test_a_wrong_config_is_reported_before_anything_is_made(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(EXAMPLE.read_text().replace("max_attempts", "max_atempts", 1))
    code, text = refused(tmp_path / "data", config=wrong)
    assert code == 1
    assert "defaults.retry.max_atempts" in text
    assert "did you mean 'max_attempts'" in text
    assert "Traceback" not in text
    assert not (tmp_path / "data").exists()


def test_a_missing_config_names_what_to_do(tmp_path: Path) -> None:
    code, text = refused(tmp_path / "data", config=tmp_path / "none.yaml")
    assert code == 1
    assert "no such file" in text


def test_a_missing_secret_stops_the_stack_with_its_name(tmp_path: Path) -> None:
    environment = dict.fromkeys(("OPENAI_API_KEY",), "")
    code, text = refused(tmp_path / "data", **environment)
    assert code == 1
    assert "OPENAI_API_KEY" in text
    assert "Traceback" not in text


def test_a_data_directory_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, text = refused(tmp_path / "file", "--simulate")
    assert code == 1
    assert str(tmp_path / "file") in text
    assert "Traceback" not in text


def test_a_taken_port_that_was_asked_for_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = refused(tmp_path / "data", "--simulate", "--http-port", port)
    assert code == 1
    assert port in text
    assert "Traceback" not in text


@pytest.mark.parametrize("contents", [None, "see the vault", f"bw_{'0' * 12}_{'x' * 43}"])
async def test_a_stack_that_can_offer_no_sign_in_link_runs_without_one(tmp_path: Path, contents: str | None) -> None:
    key = tmp_path / "api-key"
    if contents is not None:
        key.write_text(contents)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    endpoints = Endpoints.model_construct(api_key_file=key, redis_url=f"redis://127.0.0.1:{port}/0")
    assert await link_to_show(endpoints) is None
