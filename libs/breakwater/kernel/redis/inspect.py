"""Facts about a Redis or Valkey server: if it keeps what is written to it, and its known vulnerabilities. Read-only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import NoPermissionError, ResponseError

from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.redis.vulnerabilities import RedisServer, known_vulnerabilities, read_version


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """The settings of a server that matter; None where its user may not read them."""

    version: str
    """With the server's name: `Valkey 9.1.2`, `Redis 7.4.6`."""
    vulnerabilities: tuple[str, ...]
    """The CVE ids that are known for a server of this name and version."""
    is_cluster: bool
    """The server runs as a node of a Redis Cluster, which would spread the keys of one admission over several nodes."""
    ping_ms: float
    clock_ahead_s: float
    """Lead of its clock over this machine's; negative when behind."""
    appendonly: bool | None
    """True if a restart loses at most a second of writes."""
    maxmemory_policy: str | None
    """Anything but `noeviction` may drop counters and breaker states when memory gets short."""


async def inspect(redis: Redis) -> RedisFacts:
    """Asks a server. Raises StateUnavailableError."""
    client = cast(Any, redis.client)
    await client.ping()
    begun = time.perf_counter()
    seconds, microseconds = await client.time()
    took_s = time.perf_counter() - begun
    # The answer was made about halfway through the round trip.
    ahead_s = seconds + microseconds / 1e6 - (time.time() - took_s / 2)
    info = await client.info("server")
    clustered = await client.info("cluster")
    settings = await _settings(client)
    # Valkey also names the version of Redis that it is compatible with.
    server: RedisServer = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{server}_version", "of unknown version"))
    appendonly = settings.get("appendonly")
    return RedisFacts(
        version=f"{server.capitalize()} {version}",
        vulnerabilities=known_vulnerabilities(server, read_version(version)),
        is_cluster=bool(clustered.get("cluster_enabled")),
        ping_ms=took_s * 1000,
        clock_ahead_s=ahead_s,
        appendonly=None if appendonly is None else appendonly == "yes",
        maxmemory_policy=settings.get("maxmemory-policy"),
    )


async def has_plane_data(redis: Redis) -> bool:
    """Returns True if a plane has stored anything. Raises StateUnavailableError."""
    async for _ in cast(Any, redis.client).scan_iter(match="bw:*", count=1_000):
        return True
    return False


async def _settings(client: Any) -> dict[str, str]:
    try:
        # One by one: before version 7 the command takes a single name.
        return {**await client.config_get("appendonly"), **await client.config_get("maxmemory-policy")}
    except (NoPermissionError, ResponseError):
        return {}  # managed servers hide CONFIG
