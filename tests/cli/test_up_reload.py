"""The config file of a running `breakwater up` is edited, while its parts die."""

from __future__ import annotations

import base64
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.cli.test_up import Up, taken, up
from tests.commands import run_command
from tests.helpers import runs, wait_until
from tests.servers import RunningServer

__all__ = ["up"]

CONFIG: dict[str, Any] = {
    "providers": {"sim": {"base_url": "http://127.0.0.1:9/v1", "api_key": {"env": "FIRST_KEY"}}},
    "agents": {"writer": {"model": "sim/a"}},
    "alerts": {"channels": {"ops": {"webhook": {"url": "http://127.0.0.1:9/", "secret": {"env": "HOOK_SECRET"}}}}},
}
HOOK_SECRET = "whsec_" + base64.b64encode(b"only for the tests of the stack").decode()
ALERTER_READY = {"event": "ready", "process": "alerter", "pid": 0, "code": None}


class Edited:
    """A config file that is saved as an editor does: another file in its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document: dict[str, Any] = json.loads(json.dumps(CONFIG))
        self.save()

    def save(self, text: str | None = None) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(yaml.safe_dump(self.document) if text is None else text)
        new.replace(self.path)


def last(stack: Up, event: str) -> dict[str, Any] | None:
    return next((one for one in reversed(stack.events) if one["event"] == event), None)


def applied(stack: Up, *changes: str) -> dict[str, Any]:
    """Waits until a config with these changes is in force."""

    def found() -> dict[str, Any] | None:
        event = last(stack, "config_applied")
        return event if event is not None and set(changes) <= set(event["changes"]) else None

    return wait_until(found, f"{changes} to be applied")


def ask(stack: Up, path: str, body: dict[str, Any] | None = None) -> Any:
    endpoints = json.loads((stack.data / "endpoints.json").read_text())
    request = urllib.request.Request(
        f"{endpoints['request_url']}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {Path(endpoints['api_key_file']).read_text()}"},
    )
    with urllib.request.urlopen(request, timeout=70) as response:
        return json.loads(response.read())


def run(stack: Up, agent: str) -> dict[str, Any]:
    """The result of a job, once the agent is known."""

    def answered() -> dict[str, Any] | None:
        try:
            return ask(stack, "/api/v1/jobs?wait_s=60", {"agent": agent, "prompt": "x"})
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None

    return wait_until(answered, f"an answer of {agent}")


@pytest.mark.long
def test_on_servers_that_are_given_what_is_saved_is_in_force_and_a_second_ctrl_c_ends_the_stack(
    up: Callable[..., Up], tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer
) -> None:
    edited = Edited(tmp_path / "breakwater.yaml")
    servers = {"BREAKWATER_NATS_URL": own_nats_server.url, "BREAKWATER_REDIS_URL": own_redis_server.url}
    stack = up("--simulate", config=edited.path, HOOK_SECRET=HOOK_SECRET, **servers)
    ready_event = stack.ready()
    assert (ready_event["nats_url"], ready_event["redis_url"]) == (own_nats_server.url, own_redis_server.url)
    started = {event.get("process") for event in stack.events}
    assert "clickhouse" in started
    assert not started & {"nats", "redis"}
    first = run(stack, "writer")

    edited.document["agents"]["editor"] = {"model": "sim/b"}
    edited.document["models"] = {"sim/b": {"price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}}}
    edited.save()
    event = applied(stack, "agents.editor: added")
    job = run(stack, "editor")
    assert job["status"] == "succeeded", job["error"]
    assert job["config_version"] == event["version"] != first["config_version"] == event["before"]

    def told() -> Any:
        return ask(stack, "/api/v1/alerts?status=all&event=config_applied")["alerts"]

    [incident] = wait_until(told, "the incident")
    assert incident["status"] == "resolved"
    assert "agents.editor: added" in incident["text"]

    edited.save("agents: {writer: [\n")
    refused = wait_until(lambda: last(stack, "config_not_applied"), "the refusal")
    assert refused["version"] == event["version"]
    assert "is not YAML" in refused["error"]
    kill_the_alerter_and_take_its_port(stack, ready_event["metrics"]["alerter"])
    edited.save()
    assert wait_until(lambda: last(stack, "config_valid_again"), "the repair")["version"] == event["version"]
    of_stack = ("--config", str(edited.path), "--data", str(stack.data))
    ran = run_command("agents", "add", "intern", "--model", "sim/a", *of_stack)
    assert ran.returncode == 0, ran.stderr
    assert "which the running plane has applied" in ran.stdout
    assert "submit intern" in ran.stdout
    assert ask(stack, "/api/v1/jobs?wait_s=60", {"agent": "intern", "prompt": "x"})["status"] == "succeeded"
    event = last(stack, "config_applied")
    assert event is not None

    for name in ("worker", "request"):
        before = stack.pid(name)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda name=name, before=before: stack.pid(name) != before, f"another {name}")
    wait_until(lambda: last(stack, "ready"), "it to be ready")
    again = wait_until(lambda: _answered(stack, "editor"), "an answer after the kills")
    assert again["config_version"] == event["version"]
    end_by_a_second_ctrl_c(stack)


def kill_the_alerter_and_take_its_port(stack: Up, metrics_url: str) -> None:
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


def end_by_a_second_ctrl_c(stack: Up) -> None:
    """Ends a stack whose worker does not listen, and would hold the stop up."""
    processes = stack.children()
    os.kill(stack.pid("worker"), signal.SIGSTOP)
    stack.process.send_signal(signal.SIGINT)
    wait_until(lambda: [event for event in stack.events if event["event"] == "stopping"])
    assert stack.stop(signal.SIGINT) == 130
    # Whoever waits for the worker, for nine seconds, stops the servers after it.
    assert not [event for event in stack.events if event["event"] == "stopping" and event["process"] == "clickhouse"]
    wait_until(lambda: not [process for process in processes if runs(process)], timeout_s=5)


def _answered(stack: Up, agent: str) -> dict[str, Any] | None:
    try:
        return run(stack, agent)
    except OSError:  # not listening yet
        return None
