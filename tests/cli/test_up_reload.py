"""The config file of a running `breakwater up` is edited."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_up import Up, up
from tests.helpers import wait_until

__all__ = ["up"]

CONFIG: dict[str, Any] = {
    "providers": {"sim": {"base_url": "http://127.0.0.1:9/v1", "api_key": {"env": "FIRST_KEY"}}},
    "agents": {"writer": {"model": "sim/a"}},
}


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
def test_what_is_saved_is_in_force_and_what_is_broken_is_not(up: Callable[..., Up], tmp_path: Path) -> None:
    edited = Edited(tmp_path / "breakwater.yaml")
    stack = up("--simulate", config=edited.path)
    stack.ready()
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
    edited.save()
    assert wait_until(lambda: last(stack, "config_valid_again"), "the repair")["version"] == event["version"]
    command = (sys.executable, "-m", "breakwater.cli", "agents", "add", "intern", "--model", "sim/a")
    given = ("--config", str(edited.path), "--data", str(stack.data))
    ran = subprocess.run([*command, *given], capture_output=True, text=True, check=True)
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
    assert stack.stop() == 143


def _answered(stack: Up, agent: str) -> dict[str, Any] | None:
    try:
        return run(stack, agent)
    except OSError:  # not listening yet
        return None
