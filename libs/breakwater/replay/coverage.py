"""The part of a stretch of time that the record has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from breakwater.kernel.clickhouse.client import Analytics, statements
from breakwater.kernel.formats import moment, quantity
from breakwater.kernel.types import time_from_ms
from breakwater.records.migrations import retention
from breakwater.records.schema import ATTEMPTS, EXECUTIONS

SQL = statements(__file__)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The part of a stretch of time that the record has.

    Attributes:
        since: the time from which on jobs can be replayed.
        gaps: what the record lacks of the stretch, in words.
    """

    since: datetime
    gaps: tuple[str, ...]


async def coverage(analytics: Analytics, since: datetime, until: datetime, now: datetime) -> Coverage:
    """Returns what the record has of a stretch of time. Raises as `Analytics.query`."""
    days_kept = await retention(analytics)
    # Without its calls, a job can't be replayed.
    days = [kept for table in (EXECUTIONS, ATTEMPTS) if (kept := days_kept.get(table.name)) is not None]
    gaps: list[str] = []
    begin = since
    if days and since < (kept_since := now - timedelta(days=min(days))):
        begin = min(kept_since, until)
        text = f"jobs from before {moment(kept_since)} are left out, as the plane keeps calls for"
        gaps.append(f"{text} {quantity(min(days), 'day')}")
    result = await analytics.query(SQL["bounds"], {"since": begin, "until": until})
    [(jobs, recorded, first_ms, last_ms)] = cast(Sequence[tuple[int, int, int, int]], result.rows)
    if not recorded:
        gaps.append("nothing is recorded at any time")
    elif not jobs:
        bounds = f"from {moment(time_from_ms(first_ms))} to {moment(time_from_ms(last_ms))}"
        gaps.append(f"nothing is recorded of this time; the record has jobs {bounds}")
    return Coverage(begin, tuple(gaps))
