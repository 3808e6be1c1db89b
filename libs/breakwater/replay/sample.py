"""Reads a sample of the record that fits in memory, to be replayed many times: whole days, or a part of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import NamedTuple, cast

from breakwater.kernel.clickhouse.client import Analytics, statements
from breakwater.kernel.types import time_from_ms
from breakwater.limits.rules.budget import period
from breakwater.replay.records import read_changes, read_stretch, read_used, stretches
from breakwater.replay.rules.history import Policy, RecordedDays, RecordedJob
from breakwater.replay.rules.suggest import LEAST_DAYS

SQL = statements(__file__)

MOST_JOBS = 20_000
"""The number of jobs that are read, unless more days are needed."""


class DaySpan(NamedTuple):
    """A stretch of time, and how many jobs began in it."""

    since: datetime
    until: datetime
    jobs: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A part of the record.

    Attributes:
        days: the recorded days, each row of them without a gap.
        recorded_days: the number of days that have jobs.
        recorded_jobs: the number of jobs of all of them.
        has_whole_days: False if only a part of each day was read.
    """

    days: Sequence[RecordedDays]
    recorded_days: int
    recorded_jobs: int
    has_whole_days: bool

    @property
    def jobs(self) -> int:
        """The number of jobs that were read."""
        return sum(len(part.jobs) for part in self.days)


def sample_of(days: Sequence[DaySpan], most_jobs: int = MOST_JOBS) -> list[DaySpan]:
    """Chooses what to read of the days of a record: all of it at once if that is not too much.

    Otherwise days that are evenly spread; and of these, if the fewest that are needed have too many jobs, an equal part
    of each, which begins later from day to day.
    """
    if not days:
        return []
    jobs = sum(span.jobs for span in days)
    if jobs <= most_jobs:
        return [DaySpan(days[0].since, days[-1].until, jobs)]
    count = min(len(days), max(LEAST_DAYS, len(days) * most_jobs // jobs))
    chosen = [days[number * len(days) // count] for number in range(count)]
    share = most_jobs / sum(span.jobs for span in chosen)
    if share >= 1 or count > LEAST_DAYS:
        return chosen
    parts: list[DaySpan] = []
    for number, span in enumerate(chosen):
        length = span.until - span.since
        since = span.since + length * (1 - share) * (number / max(1, count - 1))
        parts.append(DaySpan(since, since + length * share, round(span.jobs * share)))
    return parts


async def read_sample(
    analytics: Analytics,
    policy: Policy,
    since: datetime,
    until: datetime,
    on_read: Callable[[float], None] = lambda _: None,
) -> Sample:
    """Reads a sample of the jobs that were started in a stretch of time.

    Args:
        analytics: the record.
        policy: the policy that they ran under.
        since: the beginning.
        until: the end.
        on_read: is called with the share that has been read, from 0 to 1.

    Raises:
        QueryError, AnalyticsUnavailableError: as `Analytics.query`.
    """
    result = await analytics.query(SQL["days"], {"since": since, "until": until, "zone": policy.zone.key})
    days: list[DaySpan] = []
    for day, count in cast(Sequence[tuple[date, int]], result.rows):
        noon = datetime(day.year, day.month, day.day, 12, tzinfo=policy.zone)
        calendar_day = period("daily", noon, policy.zone)
        days.append(
            DaySpan(
                max(since, time_from_ms(calendar_day.start_ms)), min(until, time_from_ms(calendar_day.end_ms)), count
            )
        )
    spans = sample_of(days)
    parts: list[RecordedDays] = []
    for number, span in enumerate(spans):
        jobs: list[RecordedJob] = []
        for stretch in await stretches(analytics, span.since, span.until):
            jobs += await read_stretch(analytics, stretch)
            on_read((number + (stretch.until - span.since) / (span.until - span.since)) / len(spans))
        changes = await read_changes(analytics, span.since, span.until)
        parts.append(RecordedDays(jobs, changes, await read_used(analytics, policy, changes, span.since)))
    has_whole_days = len(spans) == 1 or all(span in days for span in spans)
    return Sample(parts, len(days), sum(span.jobs for span in days), has_whole_days)
