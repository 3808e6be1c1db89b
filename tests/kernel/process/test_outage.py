"""Waiting for servers that do not answer: repeated until they do, logged once, reported to whoever measures it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import structlog

from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, RowsRejectedError
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.process import outage
from breakwater.kernel.process.outage import Outages, StoppedWaitingError
from breakwater.kernel.redis.connection import StateUnavailableError


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(outage, "LAST_DELAY_S", 0.001)


def failing(*errors: Exception) -> Callable[[], Awaitable[str]]:
    """Work that raises one error after the other, and then gives an answer."""
    left = list(errors)

    async def work() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return work


@pytest.mark.parametrize(
    "error", [BusUnavailableError("x"), StateUnavailableError("x"), AnalyticsUnavailableError("x")]
)
async def test_work_is_repeated_while_a_server_is_unavailable_and_each_outage_is_logged_once(
    error: UnavailableError,
) -> None:
    outages = Outages()
    with structlog.testing.capture_logs() as logs:
        assert await outages.retry_while_unavailable(failing(error, error, error)) == "answer"
        assert await outages.retry_while_unavailable(failing()) == "answer"
    assert [(line["event"], line["what"]) for line in logs] == [
        ("unavailable", error.server),
        ("available_again", error.server),
    ]
    assert logs[1]["failed_tries"] == 3


async def test_any_other_error_is_an_answer_and_ends_the_outage() -> None:
    reported: list[tuple[str, bool]] = []
    outages = Outages(lambda server, unavailable: reported.append((server, unavailable)))
    with pytest.raises(RowsRejectedError):
        await outages.retry_while_unavailable(failing(AnalyticsUnavailableError("x"), RowsRejectedError("x")))
    assert reported == [("clickhouse", True), ("clickhouse", False)]


async def test_what_the_caller_names_is_passed_on() -> None:
    work = failing(StateUnavailableError("x"), AnalyticsUnavailableError("x"))
    with pytest.raises(AnalyticsUnavailableError):
        await Outages().retry_while_unavailable(work, unless=AnalyticsUnavailableError)


async def test_one_that_fails_on_two_servers_reports_both_outages_and_their_ends() -> None:
    reported: list[tuple[str, bool]] = []
    outages = Outages(lambda server, unavailable: reported.append((server, unavailable)))
    await outages.retry_while_unavailable(failing(StateUnavailableError("x"), BusUnavailableError("x")))
    assert reported[:2] == [("redis", True), ("nats", True)]
    assert sorted(reported[2:]) == [("nats", False), ("redis", False)]


async def test_the_outage_lasts_until_nobody_fails_because_of_it() -> None:
    outages = Outages()
    goes_on = asyncio.Event()

    async def fails_for_a_while() -> None:
        if not goes_on.is_set():
            raise BusUnavailableError("x")

    with structlog.testing.capture_logs() as logs:
        other = asyncio.create_task(outages.retry_while_unavailable(fails_for_a_while))
        await asyncio.sleep(0)
        await outages.retry_while_unavailable(failing(BusUnavailableError("x")))
        assert [line["event"] for line in logs] == ["unavailable"]
        goes_on.set()
        await other
    assert [line["event"] for line in logs] == ["unavailable", "available_again"]


async def test_stopping_ends_the_waiting_and_not_the_first_try() -> None:
    outages = Outages()
    outages.stop()
    assert await outages.retry_while_unavailable(failing()) == "answer"
    with pytest.raises(StoppedWaitingError):
        await outages.retry_while_unavailable(failing(BusUnavailableError("x")))


async def test_whether_an_outage_is_over_is_not_known_once_the_last_that_waited_is_cancelled() -> None:
    reported: list[tuple[str, bool]] = []
    outages = Outages(lambda server, unavailable: reported.append((server, unavailable)))

    async def never() -> None:
        raise BusUnavailableError("x")

    with structlog.testing.capture_logs() as logs:
        cancelled = asyncio.create_task(outages.retry_while_unavailable(never))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert reported[-1] == ("nats", False)
        await outages.retry_while_unavailable(failing())
        await outages.retry_while_unavailable(failing(BusUnavailableError("x")))
    assert [line["event"] for line in logs] == ["unavailable", "unavailable", "available_again"]
    assert logs[-1]["failed_tries"] == 1
