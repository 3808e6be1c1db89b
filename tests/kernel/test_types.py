"""Times as texts, and messages that are made without checks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.types import format_time, unchecked

NOW = datetime(2026, 11, 21, 10, tzinfo=UTC)
ZONES = st.builds(timezone, st.builds(timedelta, minutes=st.integers(-14 * 60, 14 * 60)))


@given(st.datetimes(datetime(1971, 1, 1), timezones=ZONES))
def test_a_time_is_written_in_utc_with_milliseconds(moment: datetime) -> None:
    milliseconds = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    assert format_time(moment) == milliseconds.removesuffix("+00:00") + "Z"


def test_an_unchecked_message_is_that_of_its_constructor() -> None:
    values: dict[str, Any] = {
        "attempt_id": "e:1",
        "execution_id": "e",
        "job_id": "j",
        "agent": "writer",
        "number": 1,
        "model": "sim/m",
        "provider": "sim",
        "started_at": NOW,
        "completed_at": NOW,
        "duration_ms": 0,
        "cost": 1_500_000,
        "outcome": "success",
        "cause": "first",
    }
    made = unchecked(Attempt)(**values)
    assert made == Attempt(**values)
    assert made.json_bytes() == Attempt(**values).json_bytes()
    again = made.model_copy(update={"tried_again": True})
    assert again.tried_again
    assert again.json_bytes() == Attempt(**values, tried_again=True).json_bytes(), "that of the first is not its own"
    assert again.model_copy(deep=True).json_bytes() == again.json_bytes() != made.json_bytes()
