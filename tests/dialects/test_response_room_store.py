"""Room in RESPONSES: shares of owners, and what is under way."""

from __future__ import annotations

from breakwater.dialects.store.response_room import NoRoom, ResponseRoom
from breakwater.kernel.redis.connection import Redis

MIB = 1024**2


async def age(redis: Redis, by_slices: int) -> None:
    """Makes all that is counted older by slices of ten minutes."""
    for key in await redis.client.keys("bw:responses:stored*"):
        slices = await redis.client.hgetall(key)
        await redis.client.delete(key)
        await redis.client.hset(key, mapping={int(at) - by_slices: size for at, size in slices.items()})
    for execution_id, at in await redis.client.zrange("bw:responses:under-way", 0, -1, withscores=True):
        await redis.client.zadd("bw:responses:under-way", {execution_id: at - by_slices * 600_000})


async def test_an_owner_has_a_quarter_for_ten_minutes_and_others_have_theirs(redis: Redis) -> None:
    room = ResponseRoom(redis)
    room.count_soon("c", 1)  # a server that has yet to learn a script runs it after the others
    assert await room.take("a", 3 * MIB, 16 * MIB) is None
    assert await room.take("a", 2 * MIB, 16 * MIB) == NoRoom("share", None)
    assert await room.take("b", 2 * MIB, 16 * MIB) is None
    room.count_soon("b", 2 * MIB)
    assert await room.take("b", 1, 16 * MIB) == NoRoom("share", None)
    await age(redis, 2)
    assert await room.take("a", 2 * MIB, 16 * MIB) is None


async def test_while_a_response_is_under_way_no_more_is_stored_than_the_stream_takes(redis: Redis) -> None:
    room = ResponseRoom(redis)
    await room.begin("long")
    await room.begin("short")
    for owner in ("a", "b", "c"):
        # However slowly.
        assert await room.take(owner, 4 * MIB, 16 * MIB) is None
        await age(redis, 3)
        assert await room.take(owner, 1, 16 * MIB) == NoRoom("share", "long")
    assert await room.take("d", 1, 16 * MIB) == NoRoom("under_way", "long")
    await room.begin("long")
    await room.finish("short")
    assert await room.take("d", 1, 16 * MIB) == NoRoom("under_way", "long")
    room.finish_soon("long")
    await room.finish("short")
    assert await room.take("d", 1, 16 * MIB) is None


async def test_what_is_never_ended_is_forgotten_with_all_that_was_counted(redis: Redis) -> None:
    room = ResponseRoom(redis)
    room.begin_soon("lost")
    assert await room.take("a", 4 * MIB, 16 * MIB) is None
    await age(redis, 6 * 28)
    assert await room.take("a", 4 * MIB, 16 * MIB) is None
    assert await redis.client.zcard("bw:responses:under-way") == 0
    assert await redis.client.hlen("bw:responses:stored:a") == 1
    assert 0 < await redis.client.pttl("bw:responses:stored:a") <= 27 * 3_600_000
