"""The primary behind Sentinels: which server it is now, and how many others could take its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit, urlunsplit

from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from breakwater.kernel.server_urls import server_urls

ANSWER_S = 1.0
"""The longest time that one of several Sentinels is waited for."""
PORT = 26_379


@dataclass(frozen=True, slots=True)
class SentinelFacts:
    """The state of a primary and of those that watch it."""

    primary: str
    """Its address."""
    replicas: int
    """The replicas that are up."""
    sentinels: int
    """The Sentinels that answer."""
    all_sentinels: int
    """The Sentinels that are known to each other, or named in the URL."""
    problem: str | None
    """The reason why no replica could be promoted now, in a Sentinel's words."""


class Sentinels:
    """The Sentinels of a URL, such as `redis+sentinel://:password@s1:26379,s2:26379/mymaster/0`."""

    def __init__(self, url: str, tls: Mapping[str, Any]) -> None:
        """Connects to nothing yet.

        Args:
            url: `user:password@` is for the servers; `?sentinel_username=…&sentinel_password=…` for the Sentinels.
            tls: settings of redis-py for `rediss+sentinel://`, which is for the Sentinels, too.

        Raises:
            ValueError: it is no such URL.
        """
        hosts = [urlsplit(address) for address in server_urls(url)]
        scheme, netloc, path, query, _ = hosts[0]
        credentials, at, _ = netloc.rpartition("@")
        self.name, _, database = path.strip("/").partition("/")
        if not self.name or "/" in database:
            raise ValueError("name the primary and the database: redis+sentinel://host:26379,host:26379/mymaster/0")
        try:
            options = parse_qs(query, strict_parsing=bool(query))
        except ValueError:  # its text repeats a part, which may be a password
            raise ValueError("after `?` belong only sentinel_username=… and sentinel_password=…") from None
        if unknown := options.keys() - {"sentinel_username", "sentinel_password"}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        login = {name.removeprefix("sentinel_"): values[-1] for name, values in options.items()}
        self.server_url = urlunsplit(
            (scheme.partition("+")[0], f"{credentials}{at}primary", f"/{database or 0}", "", "")
        )
        """The URL of the primary, whose host is yet to be asked for."""
        settings = {
            "socket_timeout": ANSWER_S,
            "socket_connect_timeout": ANSWER_S,
            "decode_responses": True,
            # The next one is asked at once: by itself, redis-py asks a silent one for a quarter of a minute.
            "retry": Retry(NoBackoff(), 0),
        }
        self._sentinels = Sentinel(
            [(str(host.hostname), host.port or PORT) for host in hosts],
            sentinel_kwargs={**settings, **login, **({"ssl": True, **tls} if tls else {})},
        )

    async def primary(self) -> tuple[str, int]:
        """The address of the server that is the primary now.

        Raises:
            RedisError, OSError: no Sentinel answers, or they see it down.
        """
        try:
            host, port = cast(tuple[str, int], await self._sentinels.discover_master(self.name))
        except MasterNotFoundError as error:  # its text is pages of settings
            refusal = "; a Sentinel refuses sentinel_password" if "AuthenticationError" in str(error) else ""
            text = f"no Sentinel answers that names a primary of {self.name} which is up{refusal}"
            raise RedisConnectionError(text) from None
        return host, port

    async def facts(self) -> SentinelFacts:
        """Asks all Sentinels. Raises as `primary` does."""
        host, port = await self.primary()
        answering = replicas = 0
        sentinels = len(self._sentinels.sentinels)
        problem: str | None = None
        for sentinel in cast(list[Any], self._sentinels.sentinels):
            try:
                state = (await sentinel.sentinel_masters())[self.name]
                listed = await sentinel.sentinel_slaves(self.name)
            except (RedisError, OSError, KeyError):
                continue
            answering += 1
            sentinels = max(sentinels, int(state["num-other-sentinels"]) + 1)
            replicas = max(replicas, len(self._sentinels.filter_replicas(listed)))
            try:
                await sentinel.execute_command("SENTINEL", "CKQUORUM", self.name)
            except RedisError as error:
                problem = str(error)
        return SentinelFacts(f"{host}:{port}", replicas, answering, sentinels, problem)

    async def close(self) -> None:
        """Closes all connections."""
        await self._sentinels.aclose()
