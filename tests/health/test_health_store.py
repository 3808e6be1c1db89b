from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakwater.breakers.rules.health import LAST_CALLS, CallHealth
from breakwater.health.store import KEEP_MS, EndedCall, Healths
from breakwater.kernel.redis.connection import Redis, ScriptCommand, StateUnavailableError

AGENT, MODEL, OTHER = "support/triage {1}", "openai/gpt-4.1:mini", "org/model"


def calls(*outcomes: bool, first: int = 1) -> list[EndedCall]:
    """One call after the other, each 10 ms later; True failed."""
    return [EndedCall(number, 1_000 + 10 * number, failed) for number, failed in enumerate(outcomes, first)]


async def note(redis: Redis, by_model: Mapping[str, Sequence[EndedCall]], agent: str = AGENT) -> None:
    healths = Healths(redis)
    await healths.note([healths.note_command(agent, by_model)])


async def lately(redis: Redis, agent: str = AGENT) -> dict[str, CallHealth]:
    [found] = await Healths(redis).of([agent])
    return found


async def test_an_agent_that_nobody_heard_of_has_no_calls(redis: Redis) -> None:
    assert await lately(redis) == {}
    assert await Healths(redis).of([]) == []
    await Healths(redis).note([])


async def test_failures_since_the_latest_success_are_counted_by_model_and_together(redis: Redis) -> None:
    first, second = (
        calls(True, False, True, True),
        [EndedCall(5, 1_050, failed=True), EndedCall(6, 1_060, failed=False)],
    )
    await note(redis, {MODEL: first, OTHER: second})
    assert await lately(redis) == {
        MODEL: CallHealth(2, 1_040, 1_020, 4, 3),
        OTHER: CallHealth(0, None, 1_060, 2, 1),
        "": CallHealth(0, None, 1_060, 6, 4),
    }
    await note(redis, {MODEL: calls(True, first=7)})
    found = await lately(redis)
    assert (found[MODEL], found[""]) == (
        CallHealth(3, 1_070, 1_020, 5, 4),
        CallHealth(1, 1_070, 1_060, 7, 5),
    )


async def test_a_refusal_by_a_budget_counts_for_the_agent_and_no_model(redis: Redis) -> None:
    await note(redis, {MODEL: calls(False), "": calls(True, first=2)})
    assert await lately(redis) == {MODEL: CallHealth(0, None, 1_010, 1, 0), "": CallHealth(1, 1_020, 1_010, 2, 1)}


async def test_what_never_happened_is_not_known(redis: Redis) -> None:
    await note(redis, {MODEL: calls(True), OTHER: calls(False, first=2)})
    assert await lately(redis) == {
        MODEL: CallHealth(1, 1_010, None, 1, 1),
        OTHER: CallHealth(0, None, 1_020, 1, 0),
        "": CallHealth(0, None, 1_020, 2, 1),
    }


async def test_what_is_reported_again_changes_nothing(redis: Redis) -> None:
    reported = {MODEL: calls(True, False, True, True)}
    for _ in range(3):
        await note(redis, reported)
    await note(redis, {MODEL: calls(False)})
    assert (await lately(redis))[MODEL] == CallHealth(2, 1_040, 1_020, 4, 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(outcomes=st.lists(st.tuples(st.booleans(), st.sampled_from([MODEL, OTHER])), max_size=60), data=st.data())
async def test_however_calls_are_batched_and_shuffled_within_a_batch_the_figures_are_right(
    redis: Redis, outcomes: list[tuple[bool, str]], data: st.DataObject
) -> None:
    await redis.client.flushall()
    ended = [(EndedCall(number, 10 * number, failed), model) for number, (failed, model) in enumerate(outcomes, 1)]
    rest = list(ended)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        batch, rest = rest[:size], rest[size:]
        random.Random(size).shuffle(batch)
        by_model: dict[str, list[EndedCall]] = {}
        for one, model in batch:
            by_model.setdefault(model, []).append(one)
        await note(redis, by_model)
    found = await lately(redis)
    for name in (MODEL, OTHER, ""):
        mine = [one for one, model in ended if name in {"", model}]
        successes = [one for one in mine if not one.failed]
        last = successes[-1].sequence if successes else 0
        expected = CallHealth(
            sum(one.sequence > last for one in mine),
            max((one.at_ms for one in mine if one.failed and one.sequence > last), default=None),
            successes[-1].at_ms if successes else None,
            len(mine[-LAST_CALLS:]),
            sum(one.failed for one in mine[-LAST_CALLS:]),
        )
        assert found.get(name, CallHealth()) == expected


async def test_of_a_long_batch_only_what_leaves_a_trace_is_sent() -> None:
    command = Healths.note_command(AGENT, {MODEL: calls(*[True, False] * 500, True)})
    assert isinstance(command, ScriptCommand)
    assert len(command.arguments) == 2 + 2 * (2 + 3 * LAST_CALLS)


async def test_agents_are_distinguished_and_forgotten_by_name_or_when_nothing_was_heard_for_long(redis: Redis) -> None:
    await note(redis, {MODEL: calls(True)}, "one")
    await note(redis, {MODEL: calls(False)}, "two")
    for key in await redis.client.keys("*"):
        assert 0 < await redis.client.pttl(key) <= KEEP_MS
    assert await Healths(redis).of(["two", "three", "one"]) == [
        dict.fromkeys(("", MODEL), CallHealth(0, None, 1_010, 1, 0)),
        {},
        dict.fromkeys(("", MODEL), CallHealth(1, 1_010, None, 1, 1)),
    ]
    await Healths(redis).forget(["one", "three"])
    assert [bool(found) for found in await Healths(redis).of(["one", "two"])] == [False, True]


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    for work in (lambda: note(away, {MODEL: calls(True)}), lambda: lately(away), lambda: Healths(away).forget(["a"])):
        with pytest.raises(StateUnavailableError, match="did not answer"):
            await work()
    await away.close()
