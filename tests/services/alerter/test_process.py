"""The alerter as it is run: a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Receiver, bus_of, config_of, opened


def write_config(path: Path, alerts: dict[str, Any]) -> Path:
    document = {
        "providers": {"local": {"base_url": "http://127.0.0.1:1/v1"}},
        "agents": {"writer": {"model": "gpt-4.1"}},
        "alerts": alerts,
    }
    path.write_text(json.dumps(document))
    return path


def start(config: Path, **surroundings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services", "alerter"],
        env=os.environ | {"BREAKWATER_CONFIG": str(config)} | surroundings,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_missing_secret_ends_the_process_as_a_wrong_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_HOOK", raising=False)
    process = start(
        write_config(
            tmp_path / "breakwater.yaml", {"channels": {"ops": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}}}}
        )
    )
    _, said = process.communicate(timeout=60)
    assert process.returncode == os.EX_CONFIG
    assert said == (
        "alerts.channels.ops.slack.webhook_url: the environment variable SLACK_HOOK is not set; it must hold a secret\n"
    )


async def test_the_process_delivers_and_ends_quietly_when_asked_to(
    own_nats_server: RunningServer, receiver: Receiver, tmp_path: Path
) -> None:
    channel = {"webhook": {"url": receiver.url, "secret": {"env": "HOOK_SECRET"}}}
    alerts = {"channels": {"ops": channel}, "allow_networks": ["127.0.0.0/8"]}
    await receiver.start()
    async with bus_of(own_nats_server.url, config_of(**alerts)) as bus:
        process = start(write_config(tmp_path / "breakwater.yaml", alerts), BREAKWATER_NATS_URL=own_nats_server.url)
        try:
            await bus.publish(opened())
            await until(lambda: receiver.seen, "the alert")
            await bus.finished("ALERTS", "alerter-channel-ops", 1)
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None, "the end")
        finally:
            process.kill()
            _, said = process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in said
    assert receiver.seen[0].verified()["type"] == "breaker_open"
