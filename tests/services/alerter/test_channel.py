"""How patiently an alert is sent, what an answer means, and the pace of a channel."""

import asyncio
from datetime import UTC, datetime
from itertools import pairwise

import aiohttp
import pytest

from breakwater.bus.topology import Plan, consumers
from breakwater.config import ConfigError
from services.alerter.app import CONSUMER_LIMIT
from services.alerter.channel import (
    FIVE_MINUTES,
    Pace,
    Schedule,
    SendError,
    check_answer,
    no_answer,
    require_http_url,
)

NOW = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("deliveries", "retry_after_s", "permanent", "expected"),
    [
        (1, None, False, 0.5),
        (2, None, False, 1.0),
        (3, None, False, 2.0),
        (7, None, False, 32.0),
        (8, None, False, 60.0),
        (11, None, False, 60.0),
        (12, None, False, None),
        (400, None, False, None),
        (1, 30.0, False, 30.0),
        (8, 30.0, False, 60.0),
        (1, 1e9, False, 3600.0),
        (12, 30.0, False, None),
        (1, None, True, 0.5),
        (2, None, True, 1.0),
        (3, None, True, None),
    ],
)
def test_a_failed_send_is_repeated_with_growing_waits_and_given_up_at_last(
    deliveries: int, retry_after_s: float | None, permanent: bool, expected: float | None
) -> None:
    failure = SendError("no", permanent=permanent, retry_after_s=retry_after_s)
    assert FIVE_MINUTES.retry_in_s(failure, deliveries) == expected


def test_a_receiver_may_be_away_for_five_minutes() -> None:
    waits = [FIVE_MINUTES.retry_in_s(SendError("away"), deliveries) for deliveries in range(1, 13)]
    assert sum(wait for wait in waits if wait is not None) >= 300


def test_a_wait_does_not_overflow_after_many_restarts() -> None:
    assert Schedule(tries=10**9).retry_in_s(SendError("away"), 10**6) == 60.0


@pytest.mark.parametrize(
    ("status", "permanent"),
    [
        (301, True),
        (307, True),
        (400, True),
        (401, True),
        (403, True),
        (404, True),
        (408, False),
        (410, True),
        (425, False),
        (429, False),
        (500, False),
        (503, False),
    ],
)
def test_a_refusal_that_would_be_repeated_is_permanent(status: int, permanent: bool) -> None:
    with pytest.raises(SendError, match=str(status)) as caught:
        check_answer(status, {}, NOW)
    assert caught.value.permanent is permanent


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_any_2xx_is_a_delivery(status: int) -> None:
    check_answer(status, {}, NOW)


@pytest.mark.parametrize(
    ("value", "expected"), [("7", 7.0), ("Sat, 21 Nov 2026 10:00:30 GMT", 30.0), ("soon", None), ("", None)]
)
def test_retry_after_is_read_whatever_its_case(value: str, expected: float | None) -> None:
    with pytest.raises(SendError) as caught:
        check_answer(429, {"Retry-After": value}, NOW)
    assert caught.value.retry_after_s == expected


def test_an_error_text_holds_no_url() -> None:
    assert "secret" not in str(no_answer(aiohttp.InvalidURL("https://hooks.example/secret")))
    assert str(no_answer(TimeoutError())) == "no answer in time"


@pytest.mark.parametrize("url", ["ftp://host/secret", "secret", "https://", "https:///secret", "http://[::1/secret"])
def test_a_url_that_is_none_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"alerts\.slack\.webhook_url: must be a URL") as caught:
        require_http_url(url, "alerts.slack.webhook_url")
    assert "secret" not in str(caught.value)


async def test_turns_are_an_interval_apart_and_in_order() -> None:
    pace, loop = Pace(0.05), asyncio.get_running_loop()
    taken: list[tuple[int, float]] = []

    async def take(number: int) -> None:
        await pace.turn()
        taken.append((number, loop.time()))

    await asyncio.gather(*(take(number) for number in range(4)))
    assert [number for number, _ in taken] == [0, 1, 2, 3]
    gaps = [later - earlier for (_, earlier), (_, later) in pairwise(taken)]
    assert min(gaps) >= 0.045


async def test_a_pause_holds_even_a_turn_that_is_already_waited_for() -> None:
    pace, loop = Pace(0.02), asyncio.get_running_loop()
    await pace.turn()
    started = loop.time()
    waiting = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    pace.pause(0.2)
    await waiting
    assert loop.time() - started >= 0.19


def test_no_alert_waits_in_the_process_without_a_heartbeat() -> None:
    plan = Plan(agents={}, alert_channels=("slack", "webhook"))
    limits = {c.durable_name: c.max_ack_pending for _, c in consumers(plan) if "alerter-" in str(c.durable_name)}
    assert limits == {"alerter-slack": CONSUMER_LIMIT, "alerter-webhook": CONSUMER_LIMIT}
