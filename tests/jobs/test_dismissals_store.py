"""Dismissed dead letters: read again only when DLQ has changed."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from breakwater.jobs.store.dismissals import LIST_AGE_S, Dismissals
from breakwater.kernel.nats.lookup import Facts
from breakwater.kernel.nats.subjects import Stream


class Dlq:
    """DLQ as far as it is asked for."""

    def __init__(self) -> None:
        self.notes = {"bw.dismissed.error.writer.3": 1, "bw.dismissed.error.writer.x": 1}
        self.first = 1
        self.last = 10
        self.asked: Counter[str] = Counter()

    async def facts(self, stream: Stream) -> Facts:
        self.asked["facts"] += 1
        return Facts(f"of {stream}", datetime.now(UTC), self.first, self.last, 0, -1)

    async def counts(self, stream: Stream, subject_filter: str) -> dict[str, int]:
        assert (stream, subject_filter) == (Stream.DLQ, "bw.dismissed.>")
        self.asked["counts"] += 1
        return dict(self.notes)


async def test_a_list_that_is_refreshed_reads_no_dismissals_again_until_dlq_has_changed() -> None:
    dlq: Any = Dlq()
    now = 0.0
    dismissals = Dismissals(dlq, lambda: now)
    for _ in range(20):
        assert await dismissals.by_number(max_age_s=LIST_AGE_S) == {3: "bw.dlq.error.writer"}
    assert dlq.asked == {"facts": 20, "counts": 1}
    for _ in range(20):
        now += 1
        dlq.last += 1
        await dismissals.by_number(max_age_s=LIST_AGE_S)
    assert dlq.asked["counts"] == 5, "every five seconds while it changes"
    dlq.last += 1
    dlq.notes["bw.dismissed.timeout.reader.9"] = 1
    assert await dismissals.by_number() == {3: "bw.dlq.error.writer", 9: "bw.dlq.timeout.reader"}, "an action is exact"
    dlq.first = 4
    assert set(await dismissals.by_number()) == {9}, "the other dead letter has expired"
    assert dlq.asked["counts"] == 6
    dlq.last, dlq.notes = 1, {}
    assert await dismissals.by_number(max_age_s=LIST_AGE_S) == {}, "it is another stream"


async def test_a_dismissal_by_this_process_is_known_at_once() -> None:
    dlq: Any = Dlq()
    dismissals = Dismissals(dlq, lambda: 0.0)
    assert set(await dismissals.by_number(max_age_s=LIST_AGE_S)) == {3}
    await dismissals.add(5, "bw.dlq.error.writer")
    assert set(await dismissals.by_number(max_age_s=LIST_AGE_S)) == {3, 5}
    assert dlq.asked["counts"] == 1
