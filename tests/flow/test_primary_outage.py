"""An outage of the primary in the middle of the night, behind a fallback that answers: what Slack says, and when."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import Any

import pytest
import redis.asyncio

from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model
from tests.helpers import until
from tests.servers import RunningServer
from tests.services.alerter.slack_double import CHANNEL, TOKEN, SlackDouble
from tests.shown import Show

PRIMARY, FALLBACK = "sim/gpt-4o", "sim/gpt-4o-mini"
DEARER = {"input_usd_per_mtok": "0.315", "output_usd_per_mtok": "1.26"}
"""2.1 times the price of the primary."""

REVOKED = {"requests": [1, 19], "status": 401, "error": {"message": "Incorrect API key provided: sk-…1f2a"}}
DOWN = {"requests": [21, 23], "status": 500}
QUIET_S = 3
"""How long a recovery must last until those are told whose message can't be updated; ten minutes by default."""


@pytest.mark.chaos
async def test_an_outage_of_the_primary_is_two_messages_in_slack_whatever_restarts_meanwhile(
    start_plane: StartPlane, own_redis_server: RunningServer, show: Show
) -> None:
    bot, hook = await SlackDouble().start(), await SlackDouble().start()
    channels = {
        "bot": {"slack": {"bot_token": {"env": "SLACK_TOKEN"}, "channel": CHANNEL, "api_url": bot.api_url}},
        "hook": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}},
    }
    writer = {
        "model": PRIMARY,
        "fallback_models": [FALLBACK],
        "retry": {"max_attempts": 1},
        "breaker": {"consecutive_failures": 3, "cooldown_s": 1},
    }
    numbers = count(1)
    began = time.monotonic()
    said: list[tuple[str, str, str]] = []

    async def run(plane: Plane) -> dict[str, Any]:
        number = next(numbers)
        await plane.publish({"agent": "content-writer", "job_id": f"job-{number}", "prompt": "a haiku"})
        result = await plane.result(f"job-{number}")
        assert result["status"] == "succeeded", "the fallback is healthy"
        return result

    def note(channel: str, at: float, text: str) -> None:
        said.append((channel, f"{at - began:.1f}", text))

    try:
        async with start_plane(
            {PRIMARY: model(REVOKED, DOWN), FALLBACK: model()},
            {"content-writer": writer},
            services=("worker", "breaker", "alerter"),
            environment={"SLACK_TOKEN": TOKEN, "SLACK_HOOK": hook.hook_url, "BREAKWATER_PACE": "4"},
            more_models={FALLBACK: {"price": DEARER}},
            alerts={"channels": channels, "allow_networks": ["127.0.0.0/8"], "quiet_s": QUIET_S},
        ) as plane:
            await until(lambda: _filled(plane), what="the breakers to be filled")
            began = time.monotonic()
            result = await run(plane)
            assert result["requested_model_cost"] == "0.000042000"
            await until(lambda: hook.messages() and bot.messages(), "both channels to be told")
            [told] = hook.messages()
            note("hook", told.at, told.shown)
            note("bot", bot.messages()[0].at, bot.messages()[0].shown)
            assert told.shown.splitlines()[0] == (
                f"*[critical] sim refuses the key: all of content-writer's traffic is on {FALLBACK}, "
                "at 2.1 times the cost*"
            )
            for _ in range(9):
                await run(plane)
            # The alerter dies with what it knows, and Redis loses everything: it is the same incident.
            plane.kill("alerter")
            await _empty(own_redis_server.url)
            plane.start("alerter", "alerter-2")
            for _ in range(9):
                await run(plane)

            async def counted() -> bool:
                return any(alert["count"] >= 19 for alert in await plane.messages("ALERTS", "bw.alerts.>"))

            await until(counted, "all 19 jobs to be counted")
            assert len(hook.messages()) == len(bot.messages()) == 1

            assert (await run(plane))["chosen_model"] == PRIMARY  # the key is replaced
            answered_at = time.monotonic()
            note("", answered_at, "the primary answers again")
            await until(lambda: "[resolved]" in bot.messages()[0].shown, "the bot's message to be updated")
            note("bot, updated", bot.messages()[0].edited[-1], bot.messages()[0].shown)
            await until(lambda: len(hook.messages()) == 2, "the recovery to be told")
            recovery = hook.messages()[1]
            note("hook", recovery.at, recovery.shown)
            assert recovery.shown.startswith(f"*[resolved] {PRIMARY} answers again*")

            # An outage that the breaker counts is the breaker's incident, and no second one.
            down_at = time.monotonic()
            note("", down_at, "the primary answers 500")
            for _ in range(3):
                assert (await run(plane))["chosen_model"] == FALLBACK
            await until(lambda: len(hook.messages()) == 3, "the breaker's message")
            note("hook", hook.messages()[2].at, hook.messages()[2].shown)

            async def closed() -> bool:
                return (await run(plane))["chosen_model"] == PRIMARY

            await until(closed, "the breaker to admit a probe")
            note("", time.monotonic(), "the primary answers again")
            await until(lambda: len(hook.messages()) == 4, "the recovery to be told")
            note("hook", hook.messages()[3].at, hook.messages()[3].shown)
            alerts = await plane.messages("ALERTS", "bw.alerts.>")
    finally:
        await asyncio.gather(bot.stop(), hook.stop())
    show("An outage of the primary in the night", ["where", "after s", "what"], said)
    incidents = {alert["incident_id"]: (alert["first_event"], alert["status"], alert["count"]) for alert in alerts}
    assert list(incidents.values()) == [("deployment_failing", "resolved", 19), ("breaker_open", "resolved", 1)]
    assert (len(hook.messages()), len(bot.messages())) == (4, 2)
    assert hook.violations == bot.violations == []


async def _filled(plane: Plane) -> bool:
    return '"breakers_filled"' in plane.log("breaker")


async def _empty(redis_url: str) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    await client.flushall()
    await client.aclose()
