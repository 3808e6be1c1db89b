from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.limits.rules.guard import JobOutcome, Task, Trip, after_job, before_call
from breakwater.limits.settings import GuardRules
from breakwater.limits.store.tasks import (
    IN_USE_MS,
    KEEP_DONE_MS,
    KEEP_MS,
    MAX_KEPT,
    TRIPPED,
    Tasks,
    TaskTurn,
    TripRecord,
)
from tests.servers import RunningServer

KEY = TaskKey("acme", "nightly run")
OTHER = TaskKey("acme", "another run")
A, B = "a3f1b2c4", "0badc0de"
FINE = JobOutcome(tokens=120, cost=3_000, failed=False, called=True, error_hash=None, confidence=None)
FAILED = JobOutcome(tokens=20, cost=500, failed=True, called=True, error_hash=A, confidence=None)
LOOPS = Trip("max_iterations", "10 iterations (limit: 10)")
BURNS = Trip("max_cost", "$10.02 spent (limit: $10.00)")


async def enter(
    redis: Redis,
    execution_id: str,
    key: TaskKey = KEY,
    *,
    hold: int = 0,
    cap: int | None = None,
    only_first: bool = False,
) -> TaskTurn:
    [answer] = await redis.run([Tasks.enter_command(key, execution_id, hold=hold, cap=cap, only_first=only_first)])
    return Tasks.read_turn(answer)


async def shrink(redis: Redis, execution_id: str, spent: int) -> None:
    await redis.run([Tasks.shrink_command(KEY, execution_id, spent=spent)])


async def holds(redis: Redis) -> dict[str, int]:
    """What each job holds; their sum stands beside them."""
    fields = cast(dict[str, str], await redis.client.hgetall(KEY.redis_key))
    held = {name.removeprefix("h:"): int(value) for name, value in fields.items() if name.startswith("h:")}
    assert sum(held.values()) == int(fields.get("held_cost", 0))
    return held


async def stop(tasks: Tasks, key: TaskKey = KEY, trip: Trip = LOOPS) -> TripRecord:
    return await tasks.trip(key, trip, agent="an agent", execution_id="job 11")


async def clock_ms(redis: Redis) -> int:
    seconds, microseconds = await redis.client.time()
    return seconds * 1000 + microseconds // 1000


# Counting


async def test_a_task_that_nobody_knows_is_empty_and_reading_it_leaves_nothing(redis: Redis) -> None:
    assert await Tasks(redis).load(KEY) == (Task(), None)
    assert await redis.client.dbsize() == 0


async def test_each_job_is_one_iteration_however_often_it_asks(redis: Redis) -> None:
    numbers = [(await enter(redis, job)).number for job in ("a", "a", "b", "a", "c", "b")]
    assert numbers == [1, 1, 2, 1, 3, 2]
    assert (await Tasks(redis).load(KEY))[0] == Task(iterations=3)


async def test_jobs_that_enter_at_once_each_have_a_number_of_their_own(redis: Redis) -> None:
    entered = await asyncio.gather(*(enter(redis, f"e{number % 50}") for number in range(100)))
    assert sorted(one.number for one in entered) == sorted([*range(1, 51), *range(1, 51)])
    assert {one.number for one in entered[:50]} == set(range(1, 51))
    assert [one.number for one in entered[:50]] == [one.number for one in entered[50:]]


async def test_a_job_is_counted_once_however_often_it_is_recorded(redis: Redis) -> None:
    tasks = Tasks(redis)
    await enter(redis, "a")
    recorded = await asyncio.gather(*(tasks.record(KEY, "a", FAILED) for _ in range(10)))
    expected = Task(1, 20, 500, consecutive_failures=1, total_failures=1, errors={A: 1})
    assert recorded == [expected] * 10
    assert await tasks.record(KEY, "a", FINE) == expected
    assert (await enter(redis, "a")) == TaskTurn(1, expected, None)
    assert await tasks.record(KEY, "a", FINE) == expected


async def test_no_two_times_of_a_task_are_the_same_and_a_job_that_is_counted_again_has_none(redis: Redis) -> None:
    tasks = Tasks(redis)
    asked = [(await enter(redis, f"e{number}")).task.read_ms for number in range(20)]
    counted = [(await tasks.record(KEY, f"e{number}", FAILED)).read_ms for number in range(20)]
    tripped = await tasks.trip(KEY, LOOPS, agent="w", execution_id="e3")
    asked_last = (await enter(redis, "e21")).task.read_ms
    times = [*asked, *counted, tripped.at_ms, asked_last]
    assert times == sorted({*times})
    assert abs(times[-1] - time.time() * 1000) < 5_000
    assert (await tasks.record(KEY, "e1", FAILED)).read_ms == 0
    assert (await tasks.load(KEY))[0].read_ms == 0


async def test_the_first_job_of_its_own_task_is_known_for_as_long_as_children_may_come(redis: Redis) -> None:
    tasks = Tasks(redis)
    for job, kept_ms in (("a", KEEP_DONE_MS), (KEY.task_key, KEEP_MS)):
        await tasks.record(KEY, job, FINE)
        left_ms = await redis.client.pttl(f"{KEY.redis_key}:x:{job}")
        assert kept_ms - 60_000 < left_ms <= kept_ms


async def test_a_job_that_never_entered_is_recorded_as_an_iteration_too(redis: Redis) -> None:
    tasks = Tasks(redis)
    assert await tasks.record(KEY, "a", FINE) == Task(iterations=1, tokens=120, cost=3_000)
    assert (await enter(redis, "b")).number == 2
    assert (await tasks.record(KEY, "b", FINE)).iterations == 2
    assert (await enter(redis, "a")).number == 1


async def test_a_success_clears_the_failures_in_a_row_and_nothing_else(redis: Redis) -> None:
    tasks = Tasks(redis)
    for job, error in (("a", A), ("b", B), ("c", A)):
        task = await tasks.record(KEY, job, replace(FAILED, error_hash=error))
    assert task == Task(3, 60, 1_500, consecutive_failures=3, total_failures=3, errors={A: 2, B: 1})
    task = await tasks.record(KEY, "d", FINE)
    assert task == Task(4, 180, 4_500, consecutive_failures=0, total_failures=3, errors={A: 2, B: 1})


async def test_the_error_of_a_job_that_did_not_fail_is_not_counted(redis: Redis) -> None:
    assert (await Tasks(redis).record(KEY, "a", replace(FINE, error_hash=A))).errors == {}


async def test_money_beyond_what_floats_count_is_exact(redis: Redis) -> None:
    tasks = Tasks(redis)
    dear = replace(FINE, cost=2**53 - 1, tokens=2**40)
    await tasks.record(KEY, "a", dear)
    await tasks.record(KEY, "b", dear)
    task = await tasks.record(KEY, "c", dear)
    assert (task.cost, task.tokens) == (3 * (2**53 - 1), 3 * 2**40)


async def test_of_many_errors_the_rarest_that_stayed_away_longest_go(redis: Redis) -> None:
    tasks = Tasks(redis)
    errors = [f"{number:08x}" for number in range(MAX_KEPT + 20)]
    task = Task()
    for place, error in enumerate([errors[0], errors[0], *errors[1:], errors[0]]):
        task = await tasks.record(KEY, str(place), replace(FAILED, error_hash=error))
    assert task.total_failures == MAX_KEPT + 22
    assert task.errors == {errors[0]: 3} | dict.fromkeys(errors[-MAX_KEPT + 1 :], 1)


async def test_confidences_are_kept_in_order_the_newest_last(redis: Redis) -> None:
    tasks = Tasks(redis)
    said = [0.1 + 0.2, 1e-9, 1.0, 0.0, *(number / 200 for number in range(MAX_KEPT))]
    for place, confidence in enumerate(said):
        task = await tasks.record(KEY, str(place), replace(FINE, confidence=confidence))
        assert task.confidences == tuple(said[: place + 1][-MAX_KEPT:])
    assert (await tasks.record(KEY, "silent", FINE)).confidences == tuple(said[-MAX_KEPT:])


async def test_a_task_is_forgotten_a_week_after_it_was_touched_last(redis: Redis) -> None:
    tasks, client = Tasks(redis), redis.client
    await enter(redis, "a")
    for key in (KEY.redis_key, f"{KEY.redis_key}:x:a"):
        assert KEEP_MS - 60_000 < await client.pttl(key) <= KEEP_MS
    touches = [lambda: enter(redis, "a"), lambda: tasks.record(KEY, "a", FINE), lambda: tasks.record(KEY, "a", FINE)]
    for touch in (*touches, lambda: stop(tasks), lambda: enter(redis, "a")):
        await client.pexpire(KEY.redis_key, 5_000)
        await touch()
        assert await client.pttl(KEY.redis_key) > KEEP_MS - 60_000
    assert KEEP_DONE_MS - 60_000 < await client.pttl(f"{KEY.redis_key}:x:a") <= KEEP_DONE_MS
    await stop(tasks, OTHER)
    assert await client.pttl(OTHER.redis_key) > KEEP_MS - 60_000


# Tripping


async def test_the_first_trip_stands_and_has_redis_time(redis: Redis) -> None:
    tasks = Tasks(redis)
    before = await clock_ms(redis)
    first = await stop(tasks)
    assert before <= first.at_ms <= await clock_ms(redis)
    assert first == TripRecord(LOOPS, "an agent", "job 11", first.at_ms, published=False)
    assert await tasks.trip(KEY, BURNS, agent="b", execution_id="job 12") == first
    assert await tasks.load(KEY) == (Task(), first)


async def test_of_many_trips_at_once_one_stands_for_all(redis: Redis) -> None:
    tasks = Tasks(redis)
    trips = [tasks.trip(KEY, BURNS, agent="a", execution_id=f"e{number}") for number in range(20)]
    assert len(set(await asyncio.gather(*trips))) == 1


async def test_a_tripped_task_lets_no_job_in_and_counts_none(redis: Redis) -> None:
    tasks = Tasks(redis)
    await enter(redis, "a")
    tripped = await stop(tasks)
    assert await enter(redis, "a") == await enter(redis, "b") == TaskTurn(0, Task(iterations=1), tripped)


async def test_what_was_under_way_when_a_task_tripped_is_counted_all_the_same(redis: Redis) -> None:
    tasks = Tasks(redis)
    await enter(redis, "a")
    tripped = await stop(tasks)
    assert await tasks.record(KEY, "a", FINE) == Task(iterations=1, tokens=120, cost=3_000)
    assert (await tasks.load(KEY))[1] == tripped


async def test_a_trip_is_reported_once_it_was(redis: Redis) -> None:
    tasks = Tasks(redis)
    tripped = await stop(tasks)
    await tasks.mark_published(KEY)
    await tasks.mark_published(KEY)
    assert (await enter(redis, "a")).tripped == await stop(tasks) == replace(tripped, published=True)


async def test_telling_of_a_task_that_is_not_tripped_leaves_nothing(redis: Redis) -> None:
    await Tasks(redis).mark_published(KEY)
    assert await redis.client.dbsize() == 0


async def test_a_trip_is_put_back_after_redis_was_emptied_but_takes_no_others_place(redis: Redis) -> None:
    tasks = Tasks(redis)
    lost = TripRecord(BURNS, "an agent", "job 3", at_ms=1_800_000_000_123, published=True)
    await tasks.restore(KEY, lost)
    assert await tasks.load(KEY) == (Task(), lost)
    assert (await enter(redis, "a")).number == 0
    assert await tasks.stopped_tasks() == [(KEY, lost)]
    stands = await stop(tasks, OTHER)
    await tasks.restore(OTHER, lost)
    assert (await tasks.load(OTHER))[1] == stands


# Resetting


async def test_a_reset_forgets_everything_and_says_what_it_was_also_if_asked_again(redis: Redis) -> None:
    tasks = Tasks(redis)
    await tasks.record(KEY, "a", replace(FAILED, confidence=0.5))
    tripped = await stop(tasks)
    was = (Task(1, 20, 500, 1, 1, {A: 1}, (0.5,)), tripped)
    assert await tasks.reset(KEY) == was
    assert await tasks.load(KEY) == (Task(), None)
    assert await tasks.stopped_tasks() == []
    assert await tasks.reset(KEY) == was
    assert 0 < await redis.client.pttl(f"{KEY.redis_key}:was") <= 60_000
    assert await tasks.reset(OTHER) == (Task(), None)


async def test_a_task_that_was_reset_counts_from_one_and_may_trip_again(redis: Redis) -> None:
    tasks = Tasks(redis)
    for number in range(11):
        await enter(redis, f"e{number}")
    first = await stop(tasks)
    await tasks.reset(KEY)
    assert [(await enter(redis, job)).number for job in ("new", "newer", "new", "e10")] == [1, 2, 1, 0]
    again = await stop(tasks, trip=BURNS)
    assert (again.trip, first.trip) == (BURNS, LOOPS)
    assert await tasks.stopped_tasks() == [(KEY, again)]
    assert (await tasks.reset(KEY))[1] == again


async def test_a_job_under_way_across_a_reset_counts_for_nothing_after_it(redis: Redis) -> None:
    tasks = Tasks(redis)
    for job in ("a", "b", "c"):
        await enter(redis, job)
    await tasks.record(KEY, "c", FAILED)
    await tasks.reset(KEY)
    assert await tasks.record(KEY, "c", FAILED) == Task()
    assert await tasks.record(KEY, "a", FAILED) == Task()
    assert (await enter(redis, "b")).number == 0
    assert (await tasks.record(KEY, "b", FAILED)) == Task()
    assert (await enter(redis, "new")).number == 1
    assert await tasks.record(KEY, "a", FAILED) == Task(iterations=1)
    assert await tasks.record(KEY, "new", FINE) == Task(iterations=1, tokens=120, cost=3_000)


# Holds


async def test_of_two_hundred_jobs_at_once_as_many_hold_as_the_cap_has_room_for(redis: Redis) -> None:
    asked = await asyncio.gather(*(enter(redis, f"e{number}", hold=5, cap=104) for number in range(200)))
    assert sum(not one.over_cap for one in asked) == 20
    assert set((await holds(redis)).values()) == {5}
    assert {one.other_holds for one in asked if one.over_cap} == {100}
    # A job that has no room is an iteration all the same: it waits.
    assert sorted(one.number for one in asked) == list(range(1, 201))


async def test_a_job_has_one_hold_however_often_it_asks_and_for_whatever(redis: Redis) -> None:
    for hold in (40, 40, 60, 10, 100, 0):
        entered = await enter(redis, "a", hold=hold, cap=100)
        assert (entered.other_holds, entered.over_cap) == (0, False)
        assert await holds(redis) == ({"a": hold} if hold else {})
    await enter(redis, "a", hold=70, cap=100)
    refused = await enter(redis, "b", hold=31, cap=100)
    assert (refused.other_holds, refused.over_cap) == (70, True)
    # One that gets no room for more keeps what it had.
    assert (await enter(redis, "a", hold=101, cap=100)).over_cap
    assert await holds(redis) == {"a": 70}
    # What is held is held also for those who have no cap, or another one.
    assert not (await enter(redis, "b", hold=1_000)).over_cap
    assert (await enter(redis, "a", hold=1, cap=1_000)).over_cap
    assert not (await enter(redis, "a", hold=1, cap=1_001)).over_cap


async def test_a_job_that_ends_counts_with_its_cost_instead_of_its_hold(redis: Redis) -> None:
    tasks = Tasks(redis)
    for job in ("a", "b"):
        await enter(redis, job, hold=50, cap=100)
    for _ in range(2):
        assert (await tasks.record(KEY, "a", replace(FINE, cost=20))).cost == 20
        assert await holds(redis) == {"b": 50}
    # A worker that died before it published the record asks once more: its job is counted, and holds nothing.
    assert (await enter(redis, "a", hold=30, cap=100)).number == 1
    assert await holds(redis) == {"b": 50}
    assert (await enter(redis, "c", hold=31, cap=100)).over_cap
    assert not (await enter(redis, "c", hold=30, cap=100)).over_cap


async def test_a_hold_shrinks_to_what_was_spent_and_never_grows_by_it(redis: Redis) -> None:
    await shrink(redis, "a", 5)
    assert await redis.client.dbsize() == 0
    await enter(redis, "a", hold=50)
    await enter(redis, "b", hold=7)
    for spent, held in ((60, 50), (50, 50), (20, 20), (20, 20), (30, 20)):
        await shrink(redis, "a", spent)
        assert await holds(redis) == {"a": held, "b": 7}
    await shrink(redis, "a", 0)
    assert await holds(redis) == {"b": 7}


async def test_a_stopped_task_holds_nothing_more_and_frees_what_it_held(redis: Redis) -> None:
    tasks = Tasks(redis)
    for job in ("a", "b"):
        await enter(redis, job, hold=50)
    await stop(tasks)
    await enter(redis, "a", hold=80)
    await enter(redis, "c", hold=80)
    assert await holds(redis) == {"a": 50, "b": 50}
    await shrink(redis, "a", 3)
    await tasks.record(KEY, "b", FINE)
    assert await holds(redis) == {"a": 3}


async def test_a_job_of_a_life_that_is_over_touches_no_hold_of_the_next(redis: Redis) -> None:
    tasks = Tasks(redis)
    for job in ("old", "older"):
        await enter(redis, job, hold=50)
    await tasks.reset(KEY)
    assert await holds(redis) == {}
    await enter(redis, "old", hold=50)
    assert await holds(redis) == {}
    await enter(redis, "new", hold=60, cap=100)
    for job in ("old", "older"):
        asked = await enter(redis, job, hold=10, cap=100)
        assert (asked.number, asked.other_holds, asked.over_cap) == (0, 60, False)
        await shrink(redis, job, 1)
        await tasks.record(KEY, job, FINE)
    assert await holds(redis) == {"new": 60}
    assert (await tasks.load(KEY))[0] == Task(iterations=1)


async def test_holds_beyond_what_floats_count_are_exact(redis: Redis) -> None:
    most = 2**53 - 1
    for job in ("a", "b", "c"):
        await enter(redis, job, hold=most)
    assert await holds(redis) == dict.fromkeys("abc", most)
    for job in ("a", "b"):
        await Tasks(redis).record(KEY, job, replace(FINE, cost=most))
    assert await holds(redis) == {"c": most}


class Spending(RuleBasedStateMachine):
    """Jobs of one task that call, wait, end and are repeated at will, against a model in Python."""

    redis: Redis
    runner: asyncio.Runner
    CAP = 100
    JOBS = st.sampled_from("abcdef")
    NANO = st.integers(0, 60)

    def __init__(self) -> None:
        super().__init__()
        self.cost = 0
        self.spent: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.entered: set[str] = set()
        self.done: set[str] = set()
        self.life = 0
        self.run(self.redis.client.flushall())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def name(self, job: str, *, old: bool) -> str:
        return f"{job}{self.life - 1 if old else self.life}"

    @rule(job=JOBS, worst_case=NANO, share=st.integers(0, 4), twice=st.booleans())
    def call(self, job: str, worst_case: int, share: int, twice: bool) -> None:
        name = self.name(job, old=False)
        if name in self.done:
            return
        hold = self.spent.get(name, 0) + worst_case
        others = sum(self.held.values()) - self.held.get(name, 0)
        fits = self.cost + others + hold <= self.CAP
        for _ in range(1 + twice):
            entered = self.run(enter(self.redis, name, hold=hold, cap=self.CAP))
            assert (entered.over_cap, entered.other_holds, entered.task.cost) == (not fits, others, self.cost)
        self.entered.add(name)
        if fits:
            self.held[name] = hold
            self.spent[name] = self.spent.get(name, 0) + worst_case * share // 4

    @rule(job=JOBS, hold=NANO)
    def be_found_by_a_child(self, job: str, hold: int) -> None:
        """A child that read long ago what its parent holds; the parent itself keeps to the cap."""
        name = self.name(job, old=False)
        first = name not in self.entered | self.done
        if first and self.cost + sum(self.held.values()) + hold > self.CAP:
            return
        self.run(enter(self.redis, name, hold=hold, only_first=True))
        if first:
            self.entered.add(name)
            self.held[name], self.spent[name] = hold, hold

    @rule(job=JOBS)
    def wait(self, job: str) -> None:
        name = self.name(job, old=False)
        self.run(shrink(self.redis, name, self.spent.get(name, 0)))
        if name in self.held:
            self.held[name] = self.spent[name]

    @rule(job=JOBS, twice=st.booleans())
    def end(self, job: str, twice: bool) -> None:
        name = self.name(job, old=False)
        if name not in self.done:
            self.cost += self.spent.get(name, 0)
        for _ in range(1 + twice):
            outcome = replace(FINE, cost=self.spent.get(name, 0))
            assert self.run(Tasks(self.redis).record(KEY, name, outcome)).cost == self.cost
        self.held.pop(name, None)
        self.done.add(name)

    @rule(job=JOBS, hold=NANO)
    def come_late(self, job: str, hold: int) -> None:
        """A job of the life before goes on, if it had entered that one."""
        name = self.name(job, old=True)
        if name in self.spent or name in self.done:
            assert self.run(enter(self.redis, name, hold=hold, cap=self.CAP)).number == 0
            self.run(shrink(self.redis, name, 0))
            self.run(Tasks(self.redis).record(KEY, name, replace(FINE, cost=hold)))

    @rule()
    def reset(self) -> None:
        self.run(Tasks(self.redis).reset(KEY))
        self.cost, self.held = 0, {}
        self.life += 1

    @invariant()
    def nothing_passes_the_cap(self) -> None:
        assert self.run(holds(self.redis)) == {name: held for name, held in self.held.items() if held}
        assert self.run(Tasks(self.redis).load(KEY))[0].cost == self.cost
        assert self.cost + sum(self.held.values()) <= self.CAP


def test_a_cap_is_kept_whatever_happens_in_whatever_order(redis_server: RunningServer) -> None:
    with asyncio.Runner() as runner:
        Spending.runner = runner
        Spending.redis = Redis(redis_server.url)
        run_state_machine_as_test(
            Spending,
            settings=settings(stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]),
        )
        runner.run(Spending.redis.close())


# The list


async def test_tripped_tasks_are_listed_in_the_order_they_tripped_and_those_gone_are_dropped(redis: Redis) -> None:
    tasks = Tasks(redis)
    keys = [TaskKey(None, "later"), TaskKey("b", "first"), TaskKey("b", "gone"), TaskKey("c", "let go")]
    stopped = [TripRecord(LOOPS, "a", "e", 1_800_000_000_000 + at, published=True) for at in (3, 1, 2, 0)]
    for key, tripped in zip(keys, stopped, strict=True):
        await tasks.restore(key, tripped)
    await redis.client.delete(keys[2].redis_key)
    await tasks.reset(keys[3])
    assert await redis.client.zcard(TRIPPED) == 3
    assert await tasks.stopped_tasks() == [(keys[1], stopped[1]), (keys[0], stopped[0])]
    assert await redis.client.zcard(TRIPPED) == 2


async def test_telling_lists_a_trip_whose_worker_died_before_it_did(redis: Redis) -> None:
    tasks = Tasks(redis)
    tripped = await stop(tasks)
    await redis.client.delete(TRIPPED)
    await tasks.mark_published(KEY)
    assert await tasks.stopped_tasks() == [(KEY, replace(tripped, published=True))]


# Names


NAMES = [
    TaskKey(None, "run"),
    TaskKey("acme", "run"),
    TaskKey("acme/run", "run"),
    TaskKey("acme", "run/run"),
    TaskKey("acme", "run:x:e"),
    TaskKey("{acme}", "}run{"),
    TaskKey("*", "ünï 走る %2F."),
    TaskKey("None", "run"),
]


async def test_tasks_of_other_tenants_or_names_are_others_however_odd_the_names(redis: Redis) -> None:
    tasks = Tasks(redis)
    for count, key in enumerate(NAMES, start=1):
        for number in range(count):
            await tasks.record(key, f"e}}:{{{number} was", FINE)
        await stop(tasks, key)
    assert [(await tasks.load(key))[0].iterations for key in NAMES] == list(range(1, len(NAMES) + 1))
    assert {key for key, _ in await tasks.stopped_tasks()} == set(NAMES)
    await tasks.reset(NAMES[0])
    assert [(await tasks.load(key))[1] is None for key in NAMES] == [True] + [False] * (len(NAMES) - 1)


def test_no_two_tasks_share_a_key() -> None:
    assert all(key.name.count("/") == 1 and ":" not in key.name for key in NAMES)
    assert TaskKey(None, "run").redis_key == "bw:task:/run"
    assert TaskKey("a.b", "c d").redis_key == "bw:task:a%2Eb/c%20d"


# With the rules


async def test_a_loop_of_jobs_runs_until_the_eleventh(redis: Redis) -> None:
    tasks, rules = Tasks(redis), GuardRules()
    passed = 0
    for number in range(20):
        entered = await enter(redis, f"e{number}")
        if entered.tripped is not None:
            continue
        if trip := before_call(entered.task, entered.number, rules, tokens=0, cost=0):
            await tasks.trip(KEY, trip, agent="a", execution_id=f"e{number}")
            continue
        passed += 1
        await tasks.record(KEY, f"e{number}", FINE)
    task, tripped = await tasks.load(KEY)
    assert passed == 10
    assert tripped is not None
    assert (tripped.trip, tripped.execution_id) == (LOOPS, "e10")
    assert task == Task(iterations=11, tokens=1_200, cost=30_000)


async def test_the_same_error_trips_across_successes_as_the_table_says(redis: Redis) -> None:
    tasks = Tasks(redis)
    trips: list[Trip | None] = []
    for number, error in enumerate([A, A, None, A, A, None, A]):
        outcome = FINE if error is None else FAILED
        trips.append(after_job(await tasks.record(KEY, f"e{number}", outcome), GuardRules()))
    assert trips == [*[None] * 6, Trip("same_error", "Same error repeated 5 times (threshold: 5)")]


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    tasks = Tasks(away)
    for call in (tasks.load(KEY), tasks.record(KEY, "a", FINE), stop(tasks), tasks.reset(KEY), tasks.stopped_tasks()):
        with pytest.raises(StateUnavailableError, match="did not answer"):
            await call
    await away.close()


REFUSED = JobOutcome(tokens=0, cost=0, failed=None, called=False, error_hash=None, confidence=None)


async def test_a_job_that_was_refused_without_a_call_is_neither_an_iteration_nor_a_success(redis: Redis) -> None:
    tasks, key = Tasks(redis), TaskKey(None, "outage")
    await tasks.record(key, "failed", FAILED)
    for number in range(3):
        await redis.run([Tasks.enter_command(key, f"refused{number}")])
        await tasks.record(key, f"refused{number}", REFUSED)
        await tasks.record(key, f"refused{number}", REFUSED)
    await tasks.record(key, "never entered", REFUSED)
    task, _ = await tasks.load(key)
    assert (task.iterations, task.consecutive_failures, task.total_failures) == (1, 1, 1)
    # Refused in the middle, after paid calls: it has used something, and says nothing of the task all the same.
    [answer] = await redis.run([Tasks.enter_command(key, "half")])
    assert Tasks.read_turn(answer).number == 2
    task = await tasks.record(key, "half", replace(REFUSED, tokens=50, cost=7, called=True))
    assert (task.iterations, task.consecutive_failures, task.tokens) == (2, 1, FAILED.tokens + 50)


async def test_a_task_takes_little_memory_whatever_its_names(redis: Redis) -> None:
    async def taken(pattern: str) -> int:
        found = [key async for key in redis.client.scan_iter(pattern)]
        return sum([await redis.client.memory_usage(key) or 0 for key in found])

    tasks = Tasks(redis)
    for name in ("nightly run", "é" * 128, "~" + "0" * 32):
        await redis.client.flushdb()
        key = TaskKey(name, name)
        assert (await enter(redis, name, key, hold=500, cap=10**9)).other_holds == 0
        assert (await enter(redis, "another", key, hold=1, cap=10**9)).other_holds == 500
        assert (await tasks.record(key, name, FINE)).iterations == 2
        assert (await tasks.record(key, name, FINE)).cost == 3_000, "counted once"
        assert (await enter(redis, "another", key, cap=10**9)).other_holds == 0
        # For seven days, and for an hour after its last job.
        assert await taken("bw:task:*}") < 300
        assert await taken("bw:task:*") < 700
        await stop(tasks, key)
        assert [one for one, _ in await tasks.stopped_tasks()] == [key]


async def test_of_too_many_tasks_of_one_caller_those_that_rest_are_forgotten_and_nobody_elses(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.limits.store.tasks.MAX_OF_CALLER", 3)
    monkeypatch.setattr("breakwater.limits.store.tasks.MAX_STOPPED_OF_CALLER", 1)
    tasks, client = Tasks(redis), redis.client

    async def begin(name: str, caller: str | None, *, rests: bool = True, stopped: bool = False) -> None:
        key = TaskKey("t", name)
        await enter(redis, f"job of {name}", key)
        if stopped:
            await tasks.trip(key, LOOPS, agent="a", execution_id="j")
        if rests:
            await cast(Any, client.pexpire(key.redis_key, KEEP_MS - IN_USE_MS - 1))
        tasks.note_begun(key.redis_key, caller)
        await tasks.delete_idle()

    async def known() -> set[str]:
        names = {str(key).removeprefix("bw:task:") for key in await client.keys("bw:task:*")}
        return {name.removeprefix("t/") for name in names if ":x:" not in name}

    await begin("others", "b")
    await begin("unknowns", None)
    await begin("used", "a", rests=False)
    await begin("stopped", "a", stopped=True)
    for number in range(10):
        await begin(str(number), "a")
    # One in use comes again at the end of the list, where it takes the place of another.
    assert await known() == {"others", "unknowns", "used", "stopped", "8", "9"}
    await begin("later", "a", stopped=True)
    for number in range(10, 20):
        await begin(str(number), "a")
    assert await known() == {"others", "unknowns", "used", "later", "18", "19"}
    listed = await cast(Any, client.zcard("bw:tasks:of:a")), await cast(Any, client.zcard("bw:tasks:stopped-of:a"))
    assert listed == (3, 1)
    assert 0 < await client.pttl("bw:tasks:of:a") <= KEEP_MS
