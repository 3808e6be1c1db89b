"""The double of Slack refuses what Slack refuses: else tests against it would prove nothing."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from tests.services.alerter.slack_double import CHANNEL, HOOK, TOKEN, SlackDouble

SECTION = {"type": "section", "text": {"type": "mrkdwn", "text": "hello"}}


@pytest.fixture
async def double() -> AsyncGenerator[SlackDouble]:
    one = await SlackDouble(interval_s=0).start()
    yield one
    await one.stop()


async def asked(double: SlackDouble, method: str, token: str = TOKEN, **body: Any) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as session,
        session.post(f"{double.api_url}{method}", json=body) as answer,
    ):
        return await answer.json()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"channel": CHANNEL}, "no_text"),
        ({"channel": CHANNEL, "text": ""}, "no_text"),
        ({"text": "hello"}, "channel_not_found"),
        ({"channel": "C0", "text": "hello"}, "channel_not_found"),
        ({"channel": CHANNEL, "text": "x" * 40_001}, "msg_too_long"),
        ({"channel": CHANNEL, "blocks": [SECTION] * 51}, "invalid_blocks"),
        ({"channel": CHANNEL, "blocks": [{"type": "section"}]}, "invalid_blocks"),
        ({"channel": CHANNEL, "blocks": [SECTION | {"text": {"type": "mrkdwn", "text": ""}}]}, "invalid_blocks"),
        (
            {"channel": CHANNEL, "blocks": [SECTION | {"text": {"type": "mrkdwn", "text": "x" * 3001}}]},
            "invalid_blocks",
        ),
        ({"channel": CHANNEL, "text": "hello", "thread_ts": "1763719200.000009"}, "thread_not_found"),
        ({"channel": CHANNEL, "text": "hello", "thread_ts": "yesterday"}, "invalid_ts_format"),
    ],
)
async def test_a_post_that_breaks_the_contract_is_refused(
    double: SlackDouble, body: dict[str, Any], error: str
) -> None:
    assert await asked(double, "chat.postMessage", **body) == {"ok": False, "error": error}
    assert double.channel_view() == []


async def test_only_own_messages_that_are_there_are_updated(double: SlackDouble) -> None:
    ts = (await asked(double, "chat.postMessage", channel=CHANNEL, text="one"))["ts"]
    assert (await asked(double, "chat.update", channel=CHANNEL, text="two", ts=ts))["ok"]
    assert double.channel_view() == ["two (edited)"]
    missing = await asked(double, "chat.update", channel=CHANNEL, text="two", ts="1763719200.000009")
    assert missing["error"] == "message_not_found"
    double.posts[0].by = "hook"
    assert (await asked(double, "chat.update", channel=CHANNEL, text="three", ts=ts))["error"] == "cant_update_message"


async def test_another_token_another_method_and_unescaped_text_are_found_out(double: SlackDouble) -> None:
    assert (await asked(double, "chat.postMessage", token="xoxb-2", channel=CHANNEL, text="a"))[
        "error"
    ] == "invalid_auth"
    assert (await asked(double, "chat.delete", channel=CHANNEL, ts="1"))["error"] == "unknown_method"
    assert double.violations == []
    await asked(double, "chat.postMessage", channel=CHANNEL, text="<!channel> & co", colour="red")
    assert double.violations == ["unknown field colour of chat.postMessage", "not escaped: '<!channel> & co'"]


async def test_a_hook_answers_in_plain_words(double: SlackDouble) -> None:
    async def hooked(url: str, data: bytes) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession(headers={"content-type": "application/json"}) as session,
            session.post(url, data=data) as answer,
        ):
            return answer.status, await answer.text()

    assert await hooked(double.hook_url, b'{"text": "hello"}') == (200, "ok")
    assert await hooked(double.hook_url, b"{") == (400, "invalid_payload")
    assert await hooked(double.hook_url, b"{}") == (400, "no_text")
    assert await hooked(double.hook_url.replace(HOOK, "/services/T1/B1/x"), b'{"text": "a"}') == (404, "no_service")
    double.interval_s = 60
    assert await hooked(double.hook_url, b'{"text": "again"}') == (429, "rate_limited")
    assert double.channel_view() == ["hello"]


async def test_it_runs_by_itself() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.services.alerter.slack_double", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await asyncio.wait_for(process.stdout.readline(), 30))
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}/api/chat.postMessage", json={}) as answer,
        ):
            assert await answer.json() == {"ok": False, "error": "not_authed"}
    finally:
        process.terminate()
        await process.wait()
