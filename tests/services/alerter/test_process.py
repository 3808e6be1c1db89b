"""The alerter as it is run: a process of its own."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import TIMEOUT_S, ServiceProcess, start_service, until
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


def start(config: Path, **surroundings: str) -> tuple[ServiceProcess, Path]:
    """Starts the process; returns it and the file of what it prints."""
    log = config.with_name("alerter.log")
    return start_service("alerter", {"BREAKWATER_CONFIG": str(config)} | surroundings, log), log


def test_a_missing_secret_ends_the_process_as_a_wrong_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_HOOK", raising=False)
    channels = {"ops": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}}}
    process, log = start(write_config(tmp_path / "breakwater.yaml", {"channels": channels}))
    assert process.wait(TIMEOUT_S) == os.EX_CONFIG
    assert log.read_text() == (
        "alerts.channels.ops.slack.webhook_url: the environment variable SLACK_HOOK is not set; it must hold a secret\n"
    )


async def test_the_process_delivers_and_ends_quietly_when_asked_to(
    own_nats_server: RunningServer, receiver: Receiver, tmp_path: Path
) -> None:
    channel = {"webhook": {"url": receiver.url, "secret": {"env": "HOOK_SECRET"}}}
    alerts = {"channels": {"ops": channel}, "allow_networks": ["127.0.0.0/8"]}
    await receiver.start()
    async with bus_of(own_nats_server.url, config_of(**alerts)) as bus:
        config = write_config(tmp_path / "breakwater.yaml", alerts)
        process, log = start(config, BREAKWATER_NATS_URL=own_nats_server.url)
        try:
            await bus.publish(opened())
            await until(lambda: receiver.seen, "the alert")
            await bus.finished("ALERTS", "alerter-channel-ops", 1)
            process.terminate()
            assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()
    assert receiver.seen[0].verified()["type"] == "breaker_open"
