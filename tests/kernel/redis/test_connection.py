"""Scripts that are asked for at the same time share a round trip, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from redis.exceptions import DataError, ResponseError

from breakwater.kernel.redis import connection
from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand, StateUnavailableError, unavailable
from breakwater.local.ports import free_port
from tests.helpers import until
from tests.servers import RunningServer

_ADD = Script.of("return redis.call('INCRBY', KEYS[1], ARGV[1])")
_TWICE = Script.of("return redis.call('INCRBY', KEYS[1], 2 * ARGV[1])")
_WRONG = Script.of("return redis.call('LPUSH', KEYS[1], ARGV[1])")


class RoundTrips(Redis):
    """Notes how many scripts each round trip had."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sizes: list[int] = []

    async def _pipeline(self, packed: Sequence[bytes]) -> list[Any]:
        self.sizes.append(len(packed))
        return await super()._pipeline(packed)


@pytest.fixture
async def redis(redis_server: RunningServer) -> AsyncGenerator[RoundTrips]:
    redis = RoundTrips(redis_server.url)
    await redis.client.flushall()
    for script in (_ADD, _TWICE, _WRONG):
        await redis.client.script_load(script.text)
    yield redis
    await redis.close()


def command(script: Script, amount: int = 1) -> ScriptCommand:
    return ScriptCommand(script, ["counter"], [amount])


async def test_what_several_ask_for_at_the_same_time_is_one_round_trip(redis: RoundTrips) -> None:
    asked = [redis.run([command(_ADD)]), redis.run([command(_ADD), command(_TWICE)]), redis.run([])]
    assert await asyncio.gather(*asked) == [[1], [2, 4], []]
    assert redis.sizes == [3]
    assert await redis.run([command(_ADD)]) == [5]
    assert redis.sizes == [3, 1]


async def test_what_is_asked_for_during_a_round_trip_shares_the_next_one(redis: RoundTrips) -> None:
    first = asyncio.create_task(redis.run([command(_ADD)]))
    await until(lambda: redis.sizes)
    later = [asyncio.create_task(redis.run([command(_ADD)])) for _ in range(3)]
    await asyncio.gather(first, *later)
    assert redis.sizes == [1, 3]


async def test_a_script_that_fails_is_the_error_of_the_one_who_asked_for_it(redis: RoundTrips) -> None:
    first, wrong, last = await asyncio.gather(
        redis.run([command(_ADD)]),
        redis.run([command(_ADD), command(_WRONG)]),
        redis.run([command(_ADD)]),
        return_exceptions=True,
    )
    assert (first, last) == ([1], [3])
    assert isinstance(wrong, ResponseError)
    with pytest.raises(ResponseError):
        await redis.run([command(_WRONG)])


@pytest.mark.parametrize("wrong", [None, True, object(), "\ud800"])
async def test_an_argument_that_is_none_is_the_error_of_the_one_who_gave_it(redis: RoundTrips, wrong: Any) -> None:
    first, failed, last = await asyncio.gather(
        redis.run([command(_ADD)]),
        redis.run([command(_ADD), command(_ADD, wrong)]),
        redis.run([command(_ADD)]),
        return_exceptions=True,
    )
    assert (first, last) == ([1], [2])
    assert isinstance(failed, TypeError | ValueError)
    with pytest.raises((TypeError, ValueError)):
        redis.run_with_next([command(_ADD, wrong)])
    with pytest.raises((TypeError, ValueError)):
        await redis.client.set("key", wrong)
    with pytest.raises(DataError):
        await redis.client.zadd("key", {})
    assert redis.sizes == [2]


async def test_a_server_that_can_not_write_is_an_outage(redis: RoundTrips) -> None:
    await redis.client.config_set("maxmemory", "1")
    try:
        with pytest.raises(StateUnavailableError, match="OOM"):
            await redis.run([command(_ADD)])
        with pytest.raises(StateUnavailableError, match="OOM"):
            await redis.client.set("key", 1)
    finally:
        await redis.client.config_set("maxmemory", "0")


def test_what_a_command_of_a_script_is_told_is_an_outage_in_the_words_of_redis_6() -> None:
    place = "Error running script (call to f_7043ae32): @user_script:35: @user_script: 35: "
    of_replica = unavailable(ResponseError(f"{place}-READONLY You can't write against a read only replica."))
    assert "READONLY" in str(of_replica)
    assert unavailable(ResponseError(f"{place}READONLY is no number")) is None
    assert unavailable(ResponseError(f"{place}WRONGTYPE Operation against a key")) is None


async def test_only_the_scripts_that_the_server_did_not_know_run_again(redis: RoundTrips) -> None:
    await redis.client.script_flush()
    await redis.client.script_load(_ADD.text)
    assert await redis.run([command(_TWICE), command(_ADD), command(_TWICE)]) == [3, 1, 5]
    assert redis.sizes == [3, 2]
    await redis.client.script_flush()
    assert await redis.run([command(_ADD)]) == [6]


async def test_a_connection_that_redis_closes_is_opened_again_at_once(redis: RoundTrips) -> None:
    assert await redis.run([command(_ADD)]) == [1]
    killed: Any = redis.client.client_kill_filter(_type="normal", skipme=True)
    assert await killed > 0
    assert await redis.run([command(_ADD), command(_ADD)]) == [2, 3]


async def test_one_who_is_cancelled_takes_nobody_along(redis: RoundTrips) -> None:
    cancelled, other = asyncio.create_task(redis.run([command(_ADD)])), asyncio.create_task(redis.run([command(_ADD)]))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await other)[0] in {1, 2}
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_all_who_ask_learn_that_redis_does_not_answer() -> None:
    redis = Redis(f"redis://127.0.0.1:{free_port()}/0")
    found = await asyncio.gather(*(redis.run([command(_ADD)]) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in found] == [StateUnavailableError] * 3
    await redis.close()


_LONG = Script.of("return {string.rep('é', ARGV[1]), redis.error_reply('WRONG in a list')}")
_SLOW = Script.of("for _ = 1, ARGV[1] do end return 'late'")


async def test_answers_that_come_in_many_pieces_are_read_whole(redis: RoundTrips) -> None:
    asked = [redis.run([command(_ADD), command(_LONG, size)]) for size in (1, 300_000, 2)]
    answers = await asyncio.gather(*asked)
    assert [(number, len(texts[0])) for number, texts in answers] == [(1, 1), (2, 300_000), (3, 2)]


async def test_an_answer_that_does_not_come_in_time_is_an_outage_and_nobody_elses(
    redis: RoundTrips, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await redis.run([command(_ADD)]) == [1]
    with monkeypatch.context() as patched:
        patched.setattr(connection, "ANSWER_S", 0.05)
        with pytest.raises(StateUnavailableError, match="no answer in time"):
            await redis.run([command(_SLOW, 10**8)])
    assert await asyncio.gather(*(redis.run([command(_ADD)]) for _ in range(3))) == [[2], [3], [4]]
