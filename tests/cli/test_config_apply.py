"""`breakwater config apply`: the servers are prepared, and people are notified, before any service reads the file."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import nats
import pytest
from pydantic import SecretStr

from breakwater.alerts.contract import Alert
from breakwater.config import parse_config
from breakwater.config.servers import apply_to_servers
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.process.settings import Settings
from breakwater.local.commands.setup import setup
from breakwater.replay.summary import summary_of_change
from tests.servers import RunningServer

TEXT = """
providers: {p: {base_url: "http://127.0.0.1:9", api_key: {env: NOT_SET_HERE}}}
agents: {writer: {model: m}}
"""
ADDED = TEXT.replace("writer: {model: m}", "writer: {model: m}, editor: {model: n, system_prompt: secret words}")


async def test_what_changes_is_prepared_and_announced(
    own_nats_server: RunningServer,
    own_redis_server: RunningServer,
    analytics: Analytics,
    clickhouse_server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = Settings(
        nats_url=SecretStr(own_nats_server.url),
        redis_url=SecretStr(own_redis_server.url),
        clickhouse_url=SecretStr(f"{clickhouse_server.url.rstrip('/')}/{analytics.database}"),
    )
    first, second = parse_config(TEXT), parse_config(ADDED)
    done, _ = await apply_to_servers(settings, first, "ops")
    assert (done.version, done.before, done.changes) == (first.version, None, ())
    done, before = await apply_to_servers(settings, second, "ops")
    assert before is not None
    assert before.text == TEXT
    assert (done.before, done.changes) == (first.version, ("agents.editor: added",))
    assert (await apply_to_servers(settings, second, "ops"))[0].server_changes == ()

    client = await nats.connect(own_nats_server.url)
    try:
        jetstream = client.jetstream()
        assert "bw.jobs.editor" in ((await jetstream.stream_info("JOBS")).config.subjects or ())
        assert (await jetstream.stream_info("ALERTS")).state.messages == 1
        message = await jetstream.get_last_msg("ALERTS", "bw.alerts.config_applied")
    finally:
        await client.close()
    alert = Alert.model_validate_json(message.data or b"")
    assert (alert.status, alert.resolved_by, alert.severity) == ("resolved", "ops", "info")
    assert alert.payload["changes"] == ["agents.editor: added"]
    assert "secret words" not in json.dumps(alert.model_dump(mode="json"))

    moved = parse_config(ADDED + "budgets: {timezone: Asia/Tokyo}\n")
    with pytest.raises(ConfigError, match="timezone"):
        await apply_to_servers(settings, moved, "ops")
    # All services were stopped, and start with it: `setup` runs before.
    monkeypatch.setenv("BREAKWATER_NATS_URL", own_nats_server.url)
    monkeypatch.setenv("BREAKWATER_REDIS_URL", own_redis_server.url)
    monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", settings.clickhouse_url.get_secret_value())
    (tmp_path / "moved.yaml").write_text(moved.text)
    await asyncio.to_thread(setup, tmp_path / "moved.yaml")
    assert capsys.readouterr().out == "everything is up to date; nothing was changed\n"
    done, _ = await apply_to_servers(settings, parse_config(moved.text.replace("model: n", "model: m")), "ops")
    assert done.before == moved.version


async def test_a_summary_takes_no_longer_than_it_may_and_says_nothing_without_a_record(
    analytics: Analytics, clickhouse_server: RunningServer
) -> None:
    url = f"{clickhouse_server.url.rstrip('/')}/{analytics.database}"
    first, second, same = (parse_config(text) for text in (TEXT, ADDED, f"{TEXT}# a comment\n"))
    assert await summary_of_change(url, first, same) == ()
    assert await summary_of_change(url, first, second, within_s=60) == ()
    begun = time.monotonic()
    [line] = await summary_of_change(url, first, second, within_s=0.05)
    assert time.monotonic() - begun < 5
    assert line.startswith("what it would have done is not known within 0.05 s")
