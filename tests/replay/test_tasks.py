"""The tasks of a replay, against those that the scripts keep in the real Redis."""

from __future__ import annotations

from hypothesis import strategies as st

from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.rules.guard import JobOutcome, Trip
from breakwater.limits.store.tasks import Tasks
from breakwater.replay.rules.tasks import TaskState
from tests.replay.properties import Steps, check_beside_redis
from tests.servers import RunningServer

KEY = TaskKey("acme", "t")
JOBS = st.sampled_from(["a", "b", "c", "d"])
AMOUNTS = st.sampled_from([0, 10, 40, 90])
OUTCOMES = st.builds(
    JobOutcome,
    tokens=st.integers(0, 50),
    cost=AMOUNTS,
    failed=st.sampled_from([True, True, False, None]),
    called=st.booleans(),
    error_hash=st.sampled_from([None, "a3f1b2c4", "0badc0de"]),
    confidence=st.sampled_from([None, 0.5, 1.0]),
    is_step=st.sampled_from([True, True, True, False]),
)
STEPS = st.one_of(
    st.tuples(st.just("enter"), JOBS, AMOUNTS, st.sampled_from([None, 100])),
    st.tuples(st.just("give back"), JOBS, AMOUNTS),
    st.tuples(st.just("record"), JOBS, OUTCOMES),
    st.tuples(st.just("trip")),
    st.tuples(st.just("reset")),
)


def test_a_task_is_what_the_scripts_make_of_it(redis_server: RunningServer) -> None:
    check_beside_redis(redis_server.url, STEPS, _agree, times=5)


async def _agree(redis: Redis, steps: Steps) -> None:
    tasks = Tasks(redis)
    state = TaskState()
    for step in steps:
        match step:
            case "enter", job, cost, cap:
                [answer] = await redis.run([Tasks.enter_command(KEY, job, hold=cost, cap=cap)])
                turn = Tasks.read_turn(answer)
                others = state.held_by_others(job)
                assert (turn.number, turn.over_cap) == state.enter(job, cost, cap)
                assert turn.other_holds == others
            case "give back", job, spent:
                await redis.run([Tasks.shrink_command(KEY, job, spent=spent)])
                if state.holds.get(job, 0) > spent:
                    state.hold(job, spent)
            case "record", job, outcome:
                assert await tasks.record(KEY, job, outcome) == state.record(job, outcome)
            case ("trip",):
                await tasks.trip(KEY, Trip("max_iterations", "loops"), agent="w", execution_id="a")
                state.trip = state.trip or Trip("max_iterations", "loops")
            case _:
                await tasks.reset(KEY)
                state.reset()
        task, tripped = await tasks.load(KEY)
        assert task == state.task
        assert (tripped is None) == (state.trip is None)
