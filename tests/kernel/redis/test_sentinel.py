"""A primary that Sentinels replace: who is asked, what a client notes of it, and what a doctor reads."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from time import monotonic

import pytest
import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError

from breakwater.kernel.redis.connection import KEPT_SINCE, Redis, Script, ScriptCommand, StateUnavailableError
from breakwater.kernel.redis.sentinel import ANSWER_S, Sentinels
from breakwater.kernel.security.secret_refs import mask_url
from tests.helpers import until
from tests.sentinel import PASSWORD, SENTINEL_PASSWORD, watched_servers
from tests.tables import each_row

_ADD = Script.of("return redis.call('INCRBY', KEYS[1], ARGV[1])")


async def add(redis: Redis) -> int:
    [answer] = await redis.run([ScriptCommand(_ADD, ["counter"], [1])])
    return answer


async def refused_by_sentinels(url: str) -> None:
    wrong = Redis(url)
    with pytest.raises(StateUnavailableError, match=r"a Sentinel refuses sentinel_password$"):
        await add(wrong)
    await wrong.close()


async def test_the_next_primary_is_found_and_the_data_begin_anew(tmp_path: Path) -> None:
    async with watched_servers(tmp_path, down_after_ms=500) as watched:
        redis = Redis(watched.url)
        try:
            assert redis.sentinels is not None
            assert [await add(redis), await add(redis)] == [1, 2]
            since = await redis.client.get(KEPT_SINCE)
            first = await watched.primary()
            facts = await redis.sentinels.facts()
            assert (facts.primary, facts.replicas, facts.sentinels) == (f"127.0.0.1:{first}", 1, 3)
            assert facts.problem is None
            async with aioredis.Redis(port=first, password=PASSWORD) as client:
                await client.execute_command("ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-info")
            blind = Redis(watched.url.replace(f":{PASSWORD}@", "blind:pw@"))
            with pytest.raises(StateUnavailableError, match="may not ask for INFO"):
                await add(blind)
            await blind.close()
            # The replica must have what was written.
            async with aioredis.Redis(port=first, password=PASSWORD) as client:
                await client.wait(1, 1_000)
            watched.servers[first].kill()

            async def is_back() -> bool:
                try:
                    return await add(redis) > 2
                except StateUnavailableError:
                    return False

            await until(is_back, "the replica is the primary", timeout_s=30)
            assert await watched.primary() != first
            assert int(await redis.client.get(KEPT_SINCE)) > int(since)
            # A second client meets the same server: nothing begins again.
            since = await redis.client.get(KEPT_SINCE)
            again = Redis(watched.url)
            await add(again)
            await again.close()
            assert await redis.client.get(KEPT_SINCE) == since
            await refused_by_sentinels(watched.url.replace(SENTINEL_PASSWORD, "another"))
        finally:
            await redis.close()


async def test_a_sentinel_that_is_silent_is_waited_for_once() -> None:
    """As that on the machine that was lost with the primary is: the next one must be asked soon."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent:
        sentinels = Sentinels(f"redis+sentinel://:pw@127.0.0.1:{silent.getsockname()[1]}/mymaster/0", {})
        begun = monotonic()
        async with asyncio.timeout(10 * ANSWER_S):
            with pytest.raises(RedisConnectionError, match=r"^no Sentinel answers that names a primary of mymaster"):
                await sentinels.primary()
        assert monotonic() - begun < 5 * ANSWER_S
        await sentinels.close()


@each_row(
    "url, problem",
    [
        ("redis+sentinel://s1:1,s2:2", "name the primary"),
        ("redis+sentinel://s1:1/mymaster/0/1", "name the primary"),
        ("redis+sentinel://s1:1,/mymaster/0", "has no host"),
        ("redis+sentinel://s1:1/mymaster/0?password=x", "unknown: password"),
        ("redis+sentinel://s1:1/mymaster/0?hunter2", "^after `.` belong only"),
    ],
)
def test_a_url_that_names_no_primary_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Sentinels(url, {})


def test_a_url_of_sentinels_is_shown_without_its_passwords() -> None:
    url = "redis+sentinel://user:pw@s1:1,s2:2/mymaster/0?sentinel_username=u&sentinel_password=x"
    shown = "redis+sentinel://user:***@s1:1,s2:2/mymaster/0?sentinel_username=u&sentinel_password=***"
    assert mask_url(url) == shown
    assert Sentinels(url, {}).server_url == "redis://user:pw@primary/0"
