"""The connection to Redis, scripts, and the one error of this room."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import Any, cast

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoScriptError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.immutable import immutable
from breakwater.kernel.redis.sentinel import SentinelFacts, Sentinels
from breakwater.kernel.security.tls import tls_settings

Argument = str | int

MAX_CONNECTIONS = 32
WAIT_FOR_CONNECTION_S = 10
ANSWER_S = 5
WITH_NEXT_S = 0.02
"""The longest time that scripts wait for the next round trip."""
KEPT_SINCE = "bw:kept-since"
"""The key of the time since which Redis has its data, in ms. Whoever needs it writes it where it is missing.

Another time than before means that writes which Redis had acknowledged may be lost: it was emptied, or a replica became
the primary, which had not received the last ones.
"""
_SERVER = "bw:server"
"""The key of the identity of the primary with which `KEPT_SINCE` began."""
_DRIVER = DriverInfo()
"""The client's name and version, for the server; redis-py would read the version from the disk for each connection."""


class StateUnavailableError(UnavailableError):
    """Redis does not answer, or not in time. Every script may be called again: each is idempotent."""

    server = "redis"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the digest it is called by."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        """A script by its text."""
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


_HELPERS = Path(__file__).with_name("helpers.lua").read_text(encoding="utf-8")
_NOTE_SERVER = Script.of(f"""{_HELPERS}
-- Begins the data anew if another server has become the primary. KEYS: server, since when Redis has its data
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[1])
  redis.call('SET', KEYS[2], now_ms())
end
return 1
""")


def scripts_of(module: str) -> dict[str, Script]:
    """Returns the Lua scripts of a store, by name, from the file next to its module.

    Each script begins with a line `--- <name>`.
    The helpers above the first of these lines belong to all of them, and those of `helpers.lua` to all stores.
    """
    text = Path(module).with_suffix(".lua").read_text(encoding="utf-8")
    helpers, *sections = re.split(r"(?m)^--- (\w+)\n", text)
    return {
        name: Script.of(_HELPERS + helpers + body) for name, body in zip(sections[::2], sections[1::2], strict=True)
    }


@immutable()
class ScriptCommand:
    """The command that runs a script with its keys and arguments."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Argument]

    def pack(self) -> bytes:
        """Returns the bytes to send. Raises TypeError, ValueError: a key or an argument is none."""
        words = ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)
        return hiredis.pack_command(words)  # pyright: ignore[reportArgumentType]  # takes any sequence


@immutable()
class _Command:
    """A command of Redis' own."""

    words: Sequence[Argument]

    def pack(self) -> bytes:
        """Returns the bytes to send. Raises TypeError, ValueError: a word is none."""
        return hiredis.pack_command(cast(Any, tuple(self.words)))


class _PacksInC(aioredis.Connection):
    """Packs commands in C.

    redis-py has hiredis read for it; its asyncio side packs in Python, which for the hundred arguments of an admission
    takes longer than Redis does for its answer.
    """

    primary_id: str | None = None
    """Changes when another server becomes the primary; None for one that no other can take the place of."""

    def pack_command(self, *args: Any) -> list[bytes]:
        # The name of a command may be two words: `SCRIPT LOAD`.
        command = (*str(args[0]).split(), *args[1:])
        return [hiredis.pack_command(cast(Any, command))]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [packed for command in commands for packed in self.pack_command(*command)]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ReadOnlyError:
            # It is a replica now; the next connection may be to the primary.
            await self.disconnect(nowait=True)
            raise


class _Client(aioredis.Redis):
    """Raises StateUnavailableError for the errors of the client library that mean an outage."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with _translated_errors():
            return await super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> _Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    """The same, for several commands."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        async with _translated_errors():
            return await super().execute(raise_on_error)


class _TlsConnection(_PacksInC, aioredis.SSLConnection):
    """The same, encrypted."""


class _AsksSentinels(_PacksInC):
    """Asks Sentinels for the address of the primary before it connects."""

    def __init__(self, *, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(**options)
        self._sentinels = sentinels

    async def _connect(self) -> None:
        self.host, self.port = await self._sentinels.primary()
        await super()._connect()


class _TlsAsksSentinels(_AsksSentinels, _TlsConnection):
    """The same, encrypted."""


async def _greet(connection: _PacksInC) -> None:
    """Begins a connection, and asks the server what it is: `redis_connect_func` of redis-py.

    Raises:
        RedisConnectionError: it is a replica, although a Sentinel says otherwise; or it does not tell.
    """
    is_by_sentinels: bool = isinstance(connection, _AsksSentinels)
    await connection.on_connect()
    await connection.send_command("INFO", "replication", check_health=False)
    try:
        text = str(await connection.read_response())
    except ResponseError as error:
        if is_by_sentinels:  # a failover would go unnoticed, and calls would pass hard limits after it
            raise RedisConnectionError(f"its user may not ask for INFO replication: {error}") from None
        return  # some managed servers hide it
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        facts[name] = value
    if is_by_sentinels and facts.get("role") != "master":
        raise RedisConnectionError("that server is a replica by now")
    # A server that never had replicas loses nothing by a restart, which changes its id, too.
    if is_by_sentinels or int(facts.get("connected_slaves", 0)) or facts.get("master_replid2", "0").strip("0"):
        connection.primary_id = facts.get("master_replid")


_MORE = object()
"""Stands for an answer of which more is to come."""


class _Pipe(asyncio.Protocol):
    """A connection that sends some commands, and the next ones when these are answered.

    redis-py opens it. Its own reading would wake a task for each packet, and begin four coroutines for each answer.
    """

    def __init__(self, opened: aioredis.Connection) -> None:
        """Takes over the transport of a connection that was opened and never used."""
        # It would close its transport when it is deleted.
        self._stream: Any = opened._writer  # pyright: ignore[reportPrivateUsage]
        opened._writer = opened._reader = None  # pyright: ignore[reportPrivateUsage]
        self._transport: asyncio.Transport = self._stream.transport
        # Errors of scripts are answers, and such as LOADING errors of the connection, as in redis-py.
        of_redis: Any = opened._parser  # pyright: ignore[reportPrivateUsage]
        self._parse_error: Callable[[str], Exception] = of_redis.parse_error
        self._reader = hiredis.Reader(
            replyError=self._read_error, protocolError=InvalidResponse, encoding="utf-8", notEnoughData=_MORE
        )
        self.has_error = False
        """True if there is an error among the latest answers."""
        self._answers: list[Any] = []
        self._expected = 0
        loop = asyncio.get_running_loop()
        self._complete = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._transport.set_protocol(self)

    @property
    def is_open(self) -> bool:
        """Returns True until either side closes it."""
        return not self._transport.is_closing()

    async def ask(self, packed: Sequence[bytes]) -> list[Any]:
        """Sends commands and returns their answers, errors of scripts among them.

        Raises:
            RedisError, OSError: it is closed, so no answer is taken for that to another command.
        """
        loop = asyncio.get_running_loop()
        self._answers = []
        self.has_error = False
        self._expected = len(packed)
        self._complete = loop.create_future()
        timer = loop.call_later(ANSWER_S, self._fail, TimeoutError("no answer in time"))
        self._transport.writelines(packed)
        try:
            return await self._complete
        except BaseException:
            self._transport.abort()
            raise
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Closes it at once: nothing more is sent."""
        self._transport.abort()

    async def close(self) -> None:
        """Closes it."""
        self._transport.close()
        await self._lost

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._reader.feed(data)
        answers = self._answers
        expected = self._expected
        read_next = self._reader.gets
        try:
            while len(answers) < expected and (answer := read_next()) is not _MORE:
                if self.has_error and isinstance(answer, RedisConnectionError):
                    raise answer
                answers.append(answer)
        except RedisError as error:
            self._fail(error)
        if len(answers) == expected and not self._complete.done():
            self._complete.set_result(answers)

    def _read_error(self, text: str) -> Exception:
        self.has_error = True
        return self._parse_error(text)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self._fail(RedisConnectionError(str(exc or "Redis closed the connection")))
        if not self._lost.done():
            self._lost.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._expected and not self._complete.done():
            self._complete.set_exception(error)


@immutable()
class _Request:
    """Commands of one caller, and where their answers go."""

    commands: Sequence[ScriptCommand | _Command]
    packed: Sequence[bytes]
    answers: asyncio.Future[list[Any]] | None
    """None if nobody waits for them."""

    def end(self, outcome: list[Any] | Exception) -> None:
        """Passes on the answers, or the error in place of them, unless nobody waits any more."""
        if self.answers is None or self.answers.done():
            return
        if isinstance(outcome, Exception):
            self.answers.set_exception(outcome)
        else:
            self.answers.set_result(outcome)


class Redis:
    """Runs scripts, many in one round trip; for all else there is a pool of connections."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet.

        Args:
            url: `redis://:password@host:6379/0`, `redis+sentinel://:password@host:26379,host:26379/mymaster/0`, or
                `rediss` in place of `redis` for TLS.

        Raises:
            ValueError: it is no such URL.
            ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
        """
        scheme, is_by_sentinels, _ = url.partition("://")[0].partition("+sentinel")
        tls: dict[str, Any] = {}
        if scheme == "rediss":
            settings = tls_settings()
            tls = {"ssl_ca_certs": settings.ca, "ssl_certfile": settings.cert, "ssl_keyfile": settings.key}
        self._sentinels = Sentinels(url, tls) if is_by_sentinels else None
        options: dict[str, Any] = {"connection_class": _TlsConnection if tls else _PacksInC}
        if self._sentinels is not None:
            options = {
                "connection_class": _TlsAsksSentinels if tls else _AsksSentinels,
                "sentinels": self._sentinels,
                "redis_connect_func": _greet,
            }
        server_url = url if self._sentinels is None else self._sentinels.server_url
        pool = aioredis.BlockingConnectionPool.from_url(
            # For `rediss`, redis-py would take a class of its own.
            server_url.replace("rediss:", "redis:", 1),
            **options,
            **tls,
            # More only queue up in Redis, which has one thread; here they queue without a connection each.
            max_connections=MAX_CONNECTIONS,
            timeout=WAIT_FOR_CONNECTION_S,
            decode_responses=True,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=2,
            # Once, immediately: a connection that the server closed while idle is no outage. More is up to the caller.
            retry=Retry(NoBackoff(), 1),
            health_check_interval=30,
            driver_info=_DRIVER,
        )
        self.client: aioredis.Redis = _Client.from_pool(pool)
        connect = cast(Callable[..., _PacksInC], pool.connection_class)
        self._connection = partial(connect, **{**pool.connection_kwargs, "redis_connect_func": _greet})
        self._pipe: _Pipe | None = None
        self._waiting: list[_Request] = []
        self._sending: asyncio.Task[None] | None = None
        self._sends_at: asyncio.TimerHandle | None = None
        self._run: str | None = None

    async def run(self, commands: Sequence[ScriptCommand | _Command]) -> list[Any]:
        """Runs scripts in one round trip, each atomic by itself: in order, but for those the server has yet to learn.

        Commands that come while a round trip is under way share the next one, and nothing else: an error of a script is
        raised to its own caller.

        Raises:
            StateUnavailableError: nothing is known of what ran; call again.
            TypeError, ValueError: a key or an argument is none; nothing was sent.
        """
        if not commands:
            return []
        answers = asyncio.get_running_loop().create_future()
        self._add(commands, answers)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await answers

    async def command(self, *words: Argument) -> Any:
        """Runs a command of Redis' own as `run` does, and returns its answer: redis-py takes several times the CPU.

        Raises as `run` does.
        """
        [answer] = await self.run([_Command(words)])
        return answer

    def run_with_next(self, commands: Sequence[ScriptCommand]) -> None:
        """Adds scripts to the next round trip, before all that is asked for later, or to one of their own soon.

        They may be lost: if Redis does not answer, they are not repeated. Their errors are not logged.
        """
        self._add(commands, None)
        if self._sends_at is None:
            self._sends_at = asyncio.get_running_loop().call_later(WITH_NEXT_S, self._send_waiting)

    def _send_waiting(self) -> None:
        self._sends_at = None
        if self._waiting and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send())

    def _add(self, commands: Sequence[ScriptCommand | _Command], answers: asyncio.Future[list[Any]] | None) -> None:
        """Packs commands, so that one that can't be packed is an error of its own caller alone."""
        self._waiting.append(_Request(commands, [command.pack() for command in commands], answers))

    async def _send(self) -> None:
        """Sends what waits, and then what has come meanwhile, until nothing waits any more."""
        while self._waiting:
            requests = self._waiting
            self._waiting = []
            try:
                answers, has_error = await self._answers(requests)
            except Exception as error:  # noqa: BLE001  raised to each caller
                meant = unavailable(error) or error
                meant.__cause__ = None if meant is error else error
                for request in requests:
                    request.end(meant)
                continue
            except BaseException:
                for request in requests:
                    if request.answers is not None:
                        request.answers.cancel()
                raise
            begin = 0
            for request in requests:
                own_answers = answers[begin : (begin := begin + len(request.commands))]
                failed = _error_in(own_answers) if has_error else None
                request.end(own_answers if failed is None else unavailable(failed) or failed)

    async def _answers(self, requests: Sequence[_Request]) -> tuple[list[Any], bool]:
        """The answers, errors of single scripts among them, and True if there may be any."""
        packed = [command for request in requests for command in request.packed]
        answers, has_error = await self._pipeline(packed)
        if not has_error:
            return answers, False
        unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            # A fresh or flushed server: it learns the scripts once. Those that it knew have run.
            commands = [command for request in requests for command in request.commands]
            scripts = [command.script for index in unknown if isinstance(command := commands[index], ScriptCommand)]
            for script in {script.sha: script for script in scripts}.values():
                await self.client.script_load(script.text)
            learned, _ = await self._pipeline([packed[index] for index in unknown])
            for index, answer in zip(unknown, learned, strict=True):
                answers[index] = answer
        return answers, True

    async def _pipeline(self, packed: Sequence[bytes]) -> tuple[list[Any], bool]:
        """Returns answers, and True if there is an error among them; tries a second time after a lost connection."""
        for is_last in (False, True):
            try:
                if self._pipe is None or not self._pipe.is_open:
                    self._pipe = await self._open_pipe()
                answers = await self._pipe.ask(packed)
            except (RedisConnectionError, OSError):
                if is_last:
                    raise
            else:
                if self._pipe.has_error and any(map(_is_read_only, answers)):
                    self._pipe.abort()
                return answers, self._pipe.has_error
        raise AssertionError("the last try returns or raises")

    async def _open_pipe(self) -> _Pipe:
        """Connects, and has noted which server it is before any script runs there."""
        opened = self._connection()
        await opened.connect()
        pipe = _Pipe(opened)
        if opened.primary_id is not None:
            words = ("EVAL", _NOTE_SERVER.text, 2, _SERVER, KEPT_SINCE, opened.primary_id)
            [answer] = await pipe.ask([_Command(words).pack()])
            if isinstance(answer, Exception):
                pipe.abort()
                raise answer
        return pipe

    async def ping(self) -> None:
        """Raises StateUnavailableError when Redis does not answer."""
        await cast(Any, self.client.ping())

    async def run_id(self) -> str:
        """The id of this run of the server, which changes with a restart; constant if it does not allow reading it.

        A proxy may keep connections when another server becomes the primary. So if the id is not that of before, the
        next script connects anew, and has noted which server it is.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        try:
            run = str((await cast(Any, self.client.info("server"))).get("run_id"))
        except ResponseError:
            return ""
        if self._run not in {None, run} and self._pipe is not None:
            self._pipe.abort()
        self._run = run
        return run

    async def sentinel_facts(self) -> SentinelFacts | None:
        """Asks all Sentinels; None for a server that is named by itself. Raises StateUnavailableError."""
        async with _translated_errors():
            return None if self._sentinels is None else await self._sentinels.facts()

    async def close(self) -> None:
        """Closes all connections."""
        if self._sends_at is not None:
            self._sends_at.cancel()
        if self._pipe is not None:
            await self._pipe.close()
        await self.client.aclose()
        if self._sentinels is not None:
            await self._sentinels.close()


def _is_read_only(answer: Any) -> bool:
    """Returns True for the refusal of a replica; Redis 6.2 has that of a script's command within its text."""
    return isinstance(answer, ReadOnlyError) or (isinstance(answer, ResponseError) and ": -READONLY" in str(answer))


def _error_in(answers: Sequence[Any]) -> Exception | None:
    return next((answer for answer in answers if isinstance(answer, Exception)), None)


async def read_hashes(client: aioredis.Redis, keys: Sequence[str]) -> list[dict[str, str]]:
    """Reads whole hashes in parts of about a thousand fields: Redis answers others in between.

    Raises:
        StateUnavailableError: Redis does not answer.
    """
    hashes: list[dict[str, str]] = [{} for _ in keys]
    cursors = dict.fromkeys(range(len(keys)), 0)
    while cursors:
        async with client.pipeline(transaction=False) as pipe:
            for index, cursor in cursors.items():
                pipe.hscan(keys[index], cursor, count=1_000)
            answers: list[tuple[int, dict[str, str]]] = await pipe.execute()
        for index, (_, fields) in zip(cursors, answers, strict=True):
            hashes[index] |= fields
        cursors = {index: cursor for index, (cursor, _) in zip(cursors, answers, strict=True) if cursor}
    return hashes


@asynccontextmanager
async def _translated_errors() -> AsyncGenerator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        if (translation := unavailable(error)) is None:
            raise
        raise translation from error


_PASSING = re.compile("(?:^|: -)(LOADING|BUSY|MASTERDOWN|CLUSTERDOWN|NOREPLICAS|READONLY|OOM|MISCONF|TRYAGAIN)(?!\\S)")
"""The codes of a server that can't serve just now; Redis 6.2 has that of a script's command within its text."""

_REMEDIES: Mapping[str, str] = {
    "MISCONF": (
        "Redis can't write to its disk, and refuses all writes: free disk space on its server, or correct the rights "
        "of its directory. It then serves again by itself: within a second with `appendonly yes`, otherwise after the "
        "next snapshot that succeeds (`redis-cli BGSAVE`). Its log names the file."
    ),
    "OOM": "Redis has no memory left: raise its `maxmemory`, or find other data in it.",
    "READONLY": (
        "That server is a replica: set BREAKWATER_REDIS_URL to the primary or to its Sentinels, or promote it."
    ),
}
"""The advice on a code that does not pass by itself."""


def unavailable(error: Exception) -> StateUnavailableError | None:
    """The outage that an error means; None for a mistake of ours, which no second try would mend."""
    if isinstance(error, RedisConnectionError | RedisTimeoutError | InvalidResponse | OSError):
        return StateUnavailableError(f"Redis did not answer: {str(error) or type(error).__name__}")
    # redis-py takes a code that it knows out of the text.
    text = f"{getattr(error, 'status_code', None) or ''} {error}".strip()
    code = _PASSING.search(text) if isinstance(error, ResponseError) else None
    if code is None:
        return None
    refusal = StateUnavailableError(f"Redis does not serve: {text}")
    refusal.remedy = _REMEDIES.get(code[1])
    return refusal
