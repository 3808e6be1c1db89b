"""`breakwater up` as a person runs it: in a process of its own, with signals, crashes and a config that is edited.

The stack of the browser's tests is one that starts on its data again, and is killed; one in
tests/local/test_supervisor.py ends at a second Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
from urllib.parse import urlsplit

import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from breakwater.kernel.telemetry.metrics import PLANE_GAUGES
from breakwater.local.commands.up import link_to_show
from breakwater.local.datadir import Endpoints
from tests.commands import run_command
from tests.docs.markdown import README
from tests.flow.secrets_of_services import AS_USER, NEEDED, SECRETS, add_secrets, secrets_of
from tests.helpers import runs, wait_until
from tests.servers import RunningServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "breakwater.yaml"
MOST_WAKEUPS_PER_S = 24
"""Of all services that do nothing: 17, and half again for a busy machine. Each costs 0.1 to 0.3 ms of CPU."""
ALERTER_READY = {"event": "ready", "process": "alerter", "pid": 0, "code": None}


class Up:
    """A running `breakwater up --json`, whose processes have no rights of root."""

    def __init__(self, data: Path, *arguments: str, config: Path = EXAMPLE, **environment: str) -> None:
        self.data = data
        self.log = data.parent / f"{data.name}-{time.monotonic_ns()}.out"
        command = [sys.executable, "-c", AS_USER, "-m", "breakwater.cli"]
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

    def memory_mb(self) -> float:
        """What all its processes take together; memory that several of them share counts once."""
        processes = (psutil.Process(self.process.pid), *self.children())
        return sum(process.memory_full_info().pss for process in processes) / 1e6

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = 120) -> int:
        self.process.send_signal(sig)
        return self.process.wait(timeout_s)

    def last(self, event: str) -> dict[str, Any] | None:
        return next((one for one in reversed(self.events) if one["event"] == event), None)

    def applied(self, *changes: str) -> dict[str, Any]:
        """Waits until a config with these changes is in force."""

        def found() -> dict[str, Any] | None:
            event = self.last("config_applied")
            return event if event is not None and set(changes) <= set(event["changes"]) else None

        return wait_until(found, f"{changes} to be applied")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer of the HTTP API."""
        endpoints = json.loads((self.data / "endpoints.json").read_text())
        request = urllib.request.Request(
            f"{endpoints['request_url']}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {Path(endpoints['api_key_file']).read_text()}"},
        )
        with urllib.request.urlopen(request, timeout=70) as response:
            return json.loads(response.read())

    def answer(self, agent: str, job_id: str) -> dict[str, Any]:
        """The result of a job, once the API and NATS are there and the agent is known; asked again, it is the same."""

        def answered() -> dict[str, Any] | None:
            try:
                return self.ask("/api/v1/jobs?wait_s=60", {"agent": agent, "job_id": job_id, "prompt": "x"})
            except urllib.error.HTTPError as error:
                if error.code not in {404, 503}:
                    raise
                # A program does as the response says: 503 with Retry-After while NATS comes back.
                time.sleep(float(error.headers["Retry-After"] or 0))
            except OSError:
                pass  # not listening yet, or killed while it answered
            return None

        result = wait_until(answered, f"an answer of {agent}")
        assert result["status"] == "succeeded", result["error"]
        return result


class Edited:
    """A config file, the example's with secrets, that is saved as an editor does: another file in its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
        add_secrets(self.document, path.with_name("spy.py"))
        # Simulated providers need no key, so that nobody would be given this one.
        self.document["environment"]["worker"].append("TEST_PROVIDER_KEY")
        self.save()

    def save(self, text: str | None = None) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(yaml.safe_dump(self.document) if text is None else text)
        new.replace(self.path)


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


@pytest.mark.long(about_s=25)
def test_it_answers_keeps_secrets_apart_follows_its_config_survives_kills_and_stops_when_asked(
    up: Callable[..., Up], tmp_path: Path, own_redis_server: RunningServer
) -> None:
    """One stack, on a Redis that is given, through all that happens to it; to start another takes 6 s of CPU."""
    edited = Edited(tmp_path / "breakwater.yaml")
    stack = up("--simulate", config=edited.path, BREAKWATER_REDIS_URL=own_redis_server.url, **SECRETS)
    ready_event = stack.ready()
    assert ready_event["redis_url"] == own_redis_server.url
    started = {event.get("process") for event in stack.events}
    assert {"clickhouse", "nats"} <= started
    assert "redis" not in started
    assert ready_event["first_api_key"].startswith("bw_")
    assert (stack.data / "endpoints.json").stat().st_mode & 0o777 == 0o600
    assert ready_event["first_api_key"] not in (stack.data / "api_keys.json").read_text()
    first = stack.answer("support-triage", "before")
    look_for_secrets(stack)
    # Some is only known once the counters of the budgets are filled; and early in a day there is no forecast.
    shown = {gauge.name for gauges in PLANE_GAUGES.values() for gauge in gauges} - {"budget_forecast_usd"}
    wait_until(lambda: shown <= plane_gauges(ready_event["metrics"]))
    if sys.platform == "linux":
        wait_until(lambda: wakeups_per_s(stack) <= MOST_WAKEUPS_PER_S, "the services to rest while nothing happens")

    version = follow_edits(stack, edited, before=first["config_version"])
    kill_the_alerter_and_take_its_port(stack, edited, ready_event["metrics"]["alerter"])
    of_stack = ("--config", str(edited.path), "--data", str(stack.data))
    ran = run_command("agents", "add", "intern", "--model", "gpt-4o-mini", *of_stack)
    assert ran.returncode == 0, ran.stderr
    assert "which the running plane has applied" in ran.stdout
    assert "submit intern" in ran.stdout
    event = stack.last("config_applied")
    assert event is not None
    assert event["before"] == version
    stack.answer("intern", "added")
    if os.geteuid() == 0:  # the services hide their memory from all others
        (most,) = re.findall(r"(\d+) MB of memory", README.read_text())
        assert stack.memory_mb() <= float(most), "README.md says so"

    for name in ("worker", "request", "nats", "clickhouse"):
        killed = stack.pid(name)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda name=name, killed=killed: stack.pid(name) != killed, f"another {name}")
    assert stack.answer("editor", "after-the-kills")["config_version"] == event["version"]
    fill_the_disk_of_nats(stack)

    def is_all_stored() -> bool:
        sql = "SELECT count() AS n FROM executions FINAL"
        answer = run_command("query", "--data", str(stack.data), "--json", sql)
        return answer.returncode == 0 and json.loads(answer.stdout) == [{"n": 6}]

    wait_until(is_all_stored, "all jobs to be stored, once each")
    code, text = refused(stack.data, "--simulate")
    assert code == 1
    assert f"held by process {stack.process.pid}" in text
    assert len(stack.children()) >= 10
    stop_when_asked(stack)


def wakeups_per_s(stack: Up, within_s: float = 2.0) -> float:
    """Returns how often the threads of all services wake up."""

    def wakeups() -> int:
        services = [process.pid for process in stack.children() if process.name().startswith("bw-")]
        files = [file for pid in services for file in Path(f"/proc/{pid}/task").glob("*/status")]
        return sum(int(re.findall(r"(?m)^voluntary_ctxt_switches:\s+(\d+)", file.read_text())[0]) for file in files)

    before = wakeups()
    time.sleep(within_s)
    return (wakeups() - before) / within_s


def look_for_secrets(stack: Up) -> None:
    """A program reads no secret of the services, and no service holds those of another."""
    seen = stack.answer("spy", "look")["output"]
    assert seen["found"] == {}
    assert seen["memory"] == "refused"
    assert seen["read"] > 1  # it can look at what is not hidden: itself, and the servers
    if os.geteuid() != 0:
        return  # who may look into memory
    services = [process for process in stack.children() if process.name().startswith("bw-")]
    assert {process.name(): secrets_of(process.pid) for process in services} == {
        f"bw-{name}": NEEDED.get(name, set())
        for name in ("worker", "breaker", "budget", "alerter", "sink", "request", "console")
    }


def follow_edits(stack: Up, edited: Edited, before: str) -> str:
    """Adds an agent to the config, and breaks the file. Returns the version that is in force."""
    edited.document["agents"]["editor"] = {"model": "new-model"}
    edited.document["models"]["new-model"] = {"price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}}
    edited.save()
    event = stack.applied("agents.editor: added")
    job = stack.answer("editor", "edited")
    assert job["config_version"] == event["version"] != before == event["before"]

    def told() -> Any:
        return stack.ask("/api/v1/alerts?status=all&event=config_applied")["alerts"]

    [incident] = wait_until(told, "the incident")
    assert incident["status"] == "resolved"
    assert "agents.editor: added" in incident["text"]
    edited.save("agents: {writer: [\n")
    refusal = wait_until(lambda: stack.last("config_not_applied"), "the refusal")
    assert refusal["version"] == event["version"]
    assert "is not YAML" in refusal["error"]
    return event["version"]


def kill_the_alerter_and_take_its_port(stack: Up, edited: Edited, metrics_url: str) -> None:
    """Kills the alerter while the config file is broken and another program has the port of its metrics."""
    before = stack.pid("alerter")
    os.kill(before, signal.SIGKILL)
    with wait_until(lambda: taken(urlsplit(metrics_url).port or 0), "the port"):
        wait_until(lambda: stack.pid("alerter") != before and stack.events[-1] | {"pid": 0} == ALERTER_READY)

        def tested() -> dict[str, Any] | None:
            # The alerter may still be starting.
            ran = run_command("alerts", "test", "ops", "--data", str(stack.data), "--json")
            return json.loads(ran.stdout) if ran.returncode == 1 else None

        answer = wait_until(tested, "the test of the channel")
        assert (answer["channel"], answer["delivered"]) == ("ops", False)
        assert "alerts.allow_networks" in answer["error"]
    version = wait_until(lambda: stack.last("config_not_applied"), "the refusal")["version"]
    edited.save()
    assert wait_until(lambda: stack.last("config_valid_again"), "the repair")["version"] == version


def fill_the_disk_of_nats(stack: Up) -> None:
    """A NATS that could not write for a moment takes nothing more until it is started again."""
    before = stack.pid("nats")
    resource.prlimit(before, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    stack.answer("support-triage", "after-the-disk-was-full")
    assert stack.pid("nats") != before
    [event] = [event for event in stack.events if event["event"] == "nats_can_write_again"]
    assert "write error" in event["message"]


def stop_when_asked(stack: Up) -> None:
    """Stops a stack, which leaves no process and no endpoints behind."""
    processes = stack.children()
    assert stack.stop() == 143
    # The tracker of its resources ends once it has read the end of a pipe from it.
    wait_until(lambda: not [process for process in processes if runs(process)], "the end of all its processes")
    assert not (stack.data / "endpoints.json").exists()


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
