"""ClickHouse is compared with EVENTS: what it lacks is stored again, once, and what was settled is left alone."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from prometheus_client import CollectorRegistry

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.records.log_comparison import LogComparison, last_comparison
from breakwater.records.metrics import SinkMetrics
from breakwater.records.migrations import migrate
from breakwater.services.sink import comparison
from breakwater.services.sink.comparison import LogComparer
from tests.records import samples
from tests.services.sink.plane import Plane, of_attempt, of_execution

JOBS = 12
LACKING = "attempt_id IN ('j3:1', 'j4:1', 'j9:1')"
BEGAN = datetime.now(UTC) - timedelta(minutes=5)


class Looks:
    """A comparer whose looks are a minute apart."""

    def __init__(self, plane: Plane) -> None:
        self.registry = CollectorRegistry()
        self._plane, self._at = plane, datetime.now(UTC)
        metrics = SinkMetrics(self.registry)
        self._comparer = LogComparer(plane.analytics, lambda: plane.client, lambda: self._at, metrics)
        self._begun = False

    async def check(self, times: int = 1) -> LogComparison:
        if not self._begun:
            self._begun = True
            await self._comparer.begin()
        for _ in range(times):
            self._at += timedelta(seconds=comparison.CHECK_EVERY_S)
            await self._comparer.check()
        return await last_comparison(
            self._plane.analytics, (await Lookup(lambda: self._plane.client).facts(Stream.EVENTS)).identity
        )


def jobs(first: int = 1, last: int = JOBS) -> Iterator[tuple[str, bytes]]:
    """Two messages each."""
    for number in range(first, last + 1):
        job, at = f"j{number}", BEGAN + timedelta(seconds=number)
        tried = samples.attempt(job, 1, started_at=at, duration_ms=100)
        yield of_attempt(tried)
        yield of_execution(samples.execution(job, completed_at=tried.completed_at, attempts=(tried,)))


async def stored(plane: Plane) -> tuple[int, int]:
    """How many attempts and executions ClickHouse has."""
    found = await plane.rows("SELECT (SELECT count() FROM attempts FINAL), (SELECT count() FROM executions FINAL)")
    return found[0][0], found[0][1]


async def lose(plane: Plane, where: str = LACKING) -> None:
    """Takes attempts out of ClickHouse, of which the sink does not learn."""
    # Another test may have stopped them in the same database, and a deletion is one.
    await plane.analytics.execute(f"SYSTEM START MERGES {plane.analytics.database}.attempts")
    await plane.analytics.execute(f"ALTER TABLE attempts DELETE WHERE {where} SETTINGS mutations_sync = 2")


@pytest.fixture
async def filled(plane: Plane) -> Plane:
    """What was published is stored and acknowledged."""
    await plane.publish(jobs())
    async with plane.sink():
        await plane.until_done()
    assert await stored(plane) == (JOBS, JOBS)
    await plane.analytics.execute("TRUNCATE TABLE log_comparisons")
    return plane


@pytest.mark.parametrize(("span", "most"), [(comparison.SPAN, comparison.MOST), (5, 2)])
async def test_what_was_acknowledged_and_is_lacking_is_stored_again(
    filled: Plane, monkeypatch: pytest.MonkeyPatch, span: int, most: int
) -> None:
    monkeypatch.setattr(comparison, "SPAN", span)
    monkeypatch.setattr(comparison, "MOST", most)
    await lose(filled)
    checks = Looks(filled)
    found = await checks.check()
    assert await stored(filled) == (JOBS, JOBS)
    assert (found.settled, found.upto, found.lost) == (0, 2 * JOBS, 3)
    assert found.lost_at == found.at
    assert checks.registry.get_sample_value("breakwater_sink_lost_events_total") == 3
    again = await checks.check()
    assert (again.settled, again.lost, again.lost_at) == (2 * JOBS, 3, found.lost_at)
    costs = "SELECT sum(cost), uniqExact(event_sequence) FROM attempts FINAL"
    assert (await filled.rows(costs))[0] == (JOBS * Decimal("0.001000001"), JOBS)


async def test_what_is_lost_after_one_comparison_is_found_by_the_next(filled: Plane) -> None:
    checks = Looks(filled)
    assert (await checks.check()).lost == 0
    await lose(filled)
    assert (await checks.check()).lost == 3
    assert await stored(filled) == (JOBS, JOBS)


async def test_what_began_long_before_it_was_recorded_is_not_taken_for_lost(plane: Plane) -> None:
    """The attempt of a worker that died, say, on a machine that was switched off over night."""
    began = datetime.now(UTC) - timedelta(hours=9)
    await plane.publish([of_attempt(samples.attempt("j1", 1, started_at=began, duration_ms=100)), *jobs(2)])
    async with plane.sink():
        await plane.until_done()
    checks = Looks(plane)
    assert (await checks.check(2)).lost == 0


async def test_what_is_deleted_once_it_is_settled_stays_deleted(filled: Plane) -> None:
    checks = Looks(filled)
    await checks.check(2)
    await lose(filled)
    await filled.publish(jobs(JOBS + 1, JOBS + 1))
    async with filled.sink():
        await filled.until_done()
    found = await checks.check(3)
    assert (found.settled, found.lost) == (2 * JOBS + 2, 0)
    assert await stored(filled) == (JOBS - 2, JOBS + 1)


async def test_a_table_that_was_made_again_is_filled_from_what_events_has(filled: Plane) -> None:
    checks = Looks(filled)
    await checks.check(2)
    await filled.analytics.execute("DROP TABLE attempts")
    await migrate(filled.analytics)
    assert await stored(filled) == (0, JOBS)
    assert (await Looks(filled).check()).lost == JOBS
    assert await stored(filled) == (JOBS, JOBS)


async def test_what_fits_no_table_is_tried_no_more_and_is_one_dead_letter(plane: Plane) -> None:
    await plane.publish([(subjects.attempt("writer", "broken", 1), b"{}"), *jobs()])
    async with plane.sink():
        await plane.until_done()
    found = await Looks(plane).check(3)
    assert (found.settled, found.lost) == (2 * JOBS + 1, 0)
    assert len(await plane.dead_letters()) == 1


async def test_what_a_sink_held_that_has_died_is_stored_by_the_first_look_of_the_next(plane: Plane) -> None:
    await plane.publish(jobs())
    subscription = await plane.jetstream.pull_subscribe_bind("sink-events", "EVENTS")
    assert len(await subscription.fetch(5, timeout=60)) == 5
    assert (await Looks(plane).check()).lost == 0
    assert await stored(plane) == (3, 2)


async def test_of_two_sinks_the_first_to_look_compares_and_none_does_while_nothing_is_new(
    filled: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    async def none_missing(_: object, first: int, last: int, **__: object) -> tuple[int, ...]:
        asked.append((first, last))
        return ()

    monkeypatch.setattr(comparison, "missing_sequences", none_missing)
    one, other = Looks(filled), Looks(filled)
    for _ in range(4):
        await one.check()
        await other.check()
    first_of_each, settled_by_one = [(1, 2 * JOBS)] * 2, [(1, 2 * JOBS)]
    assert asked == first_of_each + settled_by_one
