"""The connection to Redis, scripts, and the one error of this room."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from typing import Any, cast

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from breakwater.errors import Unavailable

Argument = str | int

MAX_CONNECTIONS = 32
WAIT_FOR_CONNECTION_S = 10


class StateUnavailable(Unavailable):
    """Redis does not answer, or not in time. Every script may be called again: each is idempotent."""

    server = "redis"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the digest it is called by."""

    text: str
    sha: str

    @classmethod
    def named(cls, name: str) -> Script:
        """Reads `scripts/<name>.lua`."""
        return cls.of(files("breakwater.state").joinpath("scripts", f"{name}.lua").read_text(encoding="utf-8"))

    @classmethod
    def of(cls, text: str) -> Script:
        """A script by its text."""
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A script with its keys (all in one hash slot) and arguments."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]


class _Connection(aioredis.Connection):
    """Packs commands in C.

    redis-py has hiredis read for it; its asyncio side packs in Python, which for the hundred arguments of an admission
    takes longer than Redis does for its answer.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        # The name of a command may be two words: `SCRIPT LOAD`.
        command = (*str(args[0]).split(), *args[1:])
        return [hiredis.pack_command(cast(Any, command))]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [packed for command in commands for packed in self.pack_command(*command)]


class Redis:
    """A connection pool that runs scripts, alone or many in one round trip."""

    def __init__(self, url: str) -> None:
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            connection_class=_Connection,
            # More at once only queue up in Redis, which has one thread; here they queue without a connection each.
            max_connections=MAX_CONNECTIONS,
            timeout=WAIT_FOR_CONNECTION_S,
            decode_responses=True,
            socket_timeout=5,
            socket_connect_timeout=2,
            # Once, at once: a connection that the server closed while idle is no outage. More is the caller's decision.
            retry=Retry(NoBackoff(), 1),
            health_check_interval=30,
        )
        self.client: aioredis.Redis = aioredis.Redis.from_pool(pool)

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Runs scripts in one round trip, in order, each atomic by itself.

        Raises:
            StateUnavailable: nothing is known of what ran; call again.
        """
        async with translated():
            try:
                return await self._pipeline(calls)
            except NoScriptError:
                # A fresh or flushed server: it learns the scripts once.
                for script in {call.script.sha: call.script for call in calls}.values():
                    await self.client.script_load(script.text)
                return await self._pipeline(calls)

    async def _pipeline(self, calls: Sequence[ScriptCall]) -> list[Any]:
        if len(calls) == 1:
            call = calls[0]
            return [await cast(Any, self.client.evalsha(call.script.sha, len(call.keys), *call.keys, *call.arguments))]
        async with self.client.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.arguments)
            results = await pipe.execute(raise_on_error=False)
        # Any script may be the one the server does not know, and the ones before it have run: all are idempotent.
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    async def ping(self) -> None:
        """Raises StateUnavailable when Redis does not answer."""
        async with translated():
            await cast(Any, self.client.ping())

    async def close(self) -> None:
        """Closes all connections."""
        await self.client.aclose()


@asynccontextmanager
async def translated() -> AsyncGenerator[None]:
    """Turns every error of the client library into StateUnavailable."""
    try:
        yield
    except ResponseError as error:
        # What the server says of a command is a mistake of ours, and trying again would not mend it; but it may also
        # say that it can't serve just now.
        if not str(error).startswith(("LOADING", "BUSY", "MASTERDOWN", "READONLY", "OOM", "MISCONF", "TRYAGAIN")):
            raise
        raise StateUnavailable(f"Redis does not serve: {error}") from error
    except (RedisError, OSError, TimeoutError) as error:
        raise StateUnavailable(f"Redis did not answer: {str(error) or type(error).__name__}") from error
