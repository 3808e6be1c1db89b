"""What is shown of breakers, on a terminal as on a page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from breakwater.breakers.contract import BreakerState, BreakerStatus
from breakwater.breakers.views import COLUMNS, ORDER, open_until
from breakwater.kernel.columns import clock
from breakwater.kernel.types import format_time
from tests.api_documents import breaker
from tests.columns import texts, tones
from tests.tables import each_row

NOW = datetime.now(UTC)
SINCE = NOW - timedelta(minutes=3)
LATER = NOW + timedelta(seconds=65)
IN_65_S = f"{clock(LATER, NOW)}, 1 min 05 s"


@each_row(
    ("state", "until", "held_until", "probe_until", "text"),
    [
        ("closed", None, None, None, ""),
        (None, None, None, None, ""),
        ("isolated", None, None, None, "until reset"),
        ("half_open", None, None, LATER, "a call tries it"),
        ("half_open", None, None, None, "waits for a call to try it"),
        ("open", NOW, None, None, "waits for a call to try it"),
        ("open", LATER, None, None, IN_65_S),
        ("open", LATER, LATER + timedelta(hours=1), None, IN_65_S),
        ("closed", None, LATER, None, f"held until {IN_65_S}"),
        (None, None, LATER, None, f"held until {IN_65_S}"),
        ("closed", None, NOW, None, ""),
    ],
)
def test_when_a_call_may_pass_again_is_said_in_words(
    state: BreakerState | None,
    until: datetime | None,
    held_until: datetime | None,
    probe_until: datetime | None,
    text: str,
) -> None:
    assert open_until(state, until, NOW, held_until, probe_until) == text


def test_an_open_breaker_shows_why_since_when_and_what_it_counted() -> None:
    counts = {"consecutive_failures": 3, "total_failures": 1_200}
    times = {"since": format_time(SINCE), "open_until": format_time(NOW - timedelta(hours=1))}
    opened = BreakerStatus.model_validate(breaker(state="open", reason="3 jobs in a row failed", **times, **counts))
    assert texts(COLUMNS, opened) == {
        "agent": "writer",
        "model": "gpt-4.1",
        "state": "open",
        "reason": "3 jobs in a row failed",
        "health": "unhealthy",
        "health reason": "breaker open",
        "open until": "waits for a call to try it",
        "since": clock(SINCE),
        "counted failures": "3",
        "in total": "1,200",
    }
    assert tones(COLUMNS, opened) == {"state": "bad", "health": "bad"}


def test_the_reason_is_that_of_the_state_or_of_the_health_and_names_the_caller_that_it_is_about() -> None:
    for fields, reason in (
        ({"reason": "it fails"}, "it fails"),
        ({"health_reason": "no calls yet"}, "no calls yet"),
        ({"reason": "it fails", "open_for": "key app"}, "it fails; refuses only key app"),
    ):
        assert texts(COLUMNS, BreakerStatus.model_validate(breaker(**fields)))["reason"] == reason


def test_the_most_restrictive_state_comes_first() -> None:
    assert sorted(ORDER, key=lambda state: ORDER[state]) == ["isolated", "open", "half_open", "closed"]
    [state] = [column for column in COLUMNS if column.title == "state"]
    statuses = [BreakerStatus.model_validate(breaker(state=name)) for name in ("closed", "open", "isolated")]
    assert state.order is not None
    assert [status.state for status in sorted(statuses, key=state.order)] == ["isolated", "open", "closed"]
