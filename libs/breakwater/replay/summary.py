"""The effects of a change of the config on the jobs of the last day: three lines, in a few seconds."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

from breakwater.config import Config
from breakwater.replay.policy import policy_of
from breakwater.replay.process import PlanTask, plan_in_process

WINDOW = timedelta(hours=24)
WITHIN_S = 5.0
"""The longest time in seconds that a summary may take."""

HEADING = "with the jobs of the last 24 h:"


async def summary_of_change(
    clickhouse_url: str, before: Config, after: Config, within_s: float = WITHIN_S
) -> tuple[str, ...]:
    """Tries a changed config on the jobs of the last 24 hours, in a process of its own.

    Args:
        clickhouse_url: the URL of the record.
        before: the config that the jobs ran under.
        after: the changed config.
        within_s: the longest time in seconds.

    Returns:
        Lines on refusals, spend, and breakers or durations; or a line that says why they are not known. Without any
        where nothing is recorded, or nothing has changed that decides what jobs do.
    """
    if policy_of(before) == policy_of(after):
        return ()
    now = datetime.now(UTC)
    task = PlanTask(clickhouse_url=clickhouse_url, config=after.text, before=before.text, since=now - WINDOW, until=now)
    try:
        async with asyncio.timeout(within_s), aclosing(plan_in_process(task)) as lines:
            async for line in lines:
                if line.error is not None:
                    return (f"what it would have done is not known: {line.error.message}",)
                if line.report is not None:
                    return line.report.summary if line.report.jobs else ()
    except TimeoutError:
        pass
    return (f"what it would have done is not known within {within_s:g} s; `breakwater plan` takes the time it needs",)
