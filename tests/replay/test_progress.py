"""The progress of a plan."""

from __future__ import annotations

from datetime import timedelta

from breakwater.replay.child import PlanProgress
from tests.records.samples import NOON


def test_progress_begins_with_the_first_job_however_late_the_record_begins() -> None:
    progress = PlanProgress(until=NOON + timedelta(hours=4))
    shares = [progress.share]
    for hours in (0, 1, 3, 4):
        progress.add(NOON + timedelta(hours=hours))
        shares.append(progress.share)
    assert shares == [0, 0, 0.25, 0.75, 1]
