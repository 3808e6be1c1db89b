"""A primary that Sentinels replace: who is asked, what a client notes of it, and what a doctor reads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest
import redis.asyncio as aioredis

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


@asynccontextmanager
async def proxied(primary: Callable[[], int]) -> AsyncGenerator[str]:
    """A proxy that keeps its clients' connections when another server becomes the primary; its URL."""
    copying: list[asyncio.Task[None]] = []

    async def copy(answers: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := await answers.read(65_536):
            client.write(data)

    async def serve(requests: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        server: asyncio.StreamWriter | None = None
        port = 0
        while data := await requests.read(65_536):
            if server is None or port != primary():
                port = primary()
                answers, server = await asyncio.open_connection("127.0.0.1", port)
                server.write(f"AUTH {PASSWORD}\r\n".encode())
                assert await answers.readline() == b"+OK\r\n"
                copying.append(asyncio.create_task(copy(answers, client)))
            server.write(data)
        client.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    for task in copying:
        task.cancel()


async def test_the_next_primary_is_found_and_the_data_begin_anew(tmp_path: Path) -> None:
    # On a busy machine a primary may be silent for seconds: it is replaced when the test says so, and not before.
    ports = [0]
    async with watched_servers(tmp_path, down_after_ms=60_000) as watched, proxied(lambda: ports[-1]) as url:
        redis, behind_proxy = Redis(watched.url), Redis(url)
        try:
            assert [await add(redis), await add(redis)] == [1, 2]
            since = await redis.client.get(KEPT_SINCE)
            first = await watched.primary()
            ports.append(first)
            assert await add(behind_proxy) == 3
            run = await behind_proxy.run_id()
            facts = await redis.sentinel_facts()
            assert facts is not None
            assert (facts.primary, facts.replicas, facts.sentinels) == (f"127.0.0.1:{first}", 1, 3)
            assert facts.problem is None
            async with aioredis.Redis(port=first, password=PASSWORD) as client:
                await client.execute_command("ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-info")
            blind = Redis(watched.url.replace(f":{PASSWORD}@", "blind:pw@"))
            with pytest.raises(StateUnavailableError, match="may not ask for INFO"):
                await add(blind)
            await blind.close()
            # The replica must have what was written: a server waits for what its client has written last.
            async with aioredis.Redis(port=first, password=PASSWORD, single_connection_client=True) as client:
                await client.set("last", 1)
                assert await client.wait(1, 60_000) == 1
            watched.servers[first].kill()
            await watched.fail_over()

            async def is_promoted() -> bool:
                return first not in await watched.primaries()

            await until(is_promoted, "all Sentinels say that the replica is the primary", timeout_s=30)
            ports.append(await watched.primary())
            assert await add(behind_proxy) == 4
            assert await behind_proxy.client.get(KEPT_SINCE) == since, "who has kept its connection has not noticed"
            assert await behind_proxy.run_id() != run
            assert await add(behind_proxy) == 5
            assert int(await behind_proxy.client.get(KEPT_SINCE)) > int(since)
            assert await add(redis) == 6
            # A second client meets the same server: nothing begins again.
            since = await redis.client.get(KEPT_SINCE)
            again = Redis(watched.url)
            await add(again)
            await again.close()
            assert await redis.client.get(KEPT_SINCE) == since
            await refused_by_sentinels(watched.url.replace(SENTINEL_PASSWORD, "another"))
        finally:
            await redis.close()
            await behind_proxy.close()


async def test_a_sentinel_that_is_silent_is_waited_for_once() -> None:
    """As that on the machine that was lost with the primary is: the next one must be asked soon."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent:
        redis = Redis(f"redis+sentinel://:pw@127.0.0.1:{silent.getsockname()[1]}/mymaster/0")
        begun = monotonic()
        async with asyncio.timeout(10 * ANSWER_S):
            with pytest.raises(StateUnavailableError, match="no Sentinel answers that names a primary of mymaster"):
                await redis.sentinel_facts()
        assert monotonic() - begun < 5 * ANSWER_S
        await redis.close()


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
