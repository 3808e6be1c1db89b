"""The configs that jobs have begun under, for a worker that has to end such a job and was started with a newer one.

They name secrets and hold none. A plane has one current config and jobs live for a day at most: a config is of no use
after a month.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from breakwater.kernel.redis.connection import Redis, read_hashes

KEEP_S = 30 * 86_400

_RETIRED = "bw:configs:retired"
_APPLIED = "bw:configs:applied"


class Configs:
    """Config files by their version, and the last version of each agent that is configured no more."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def save(self, configs: Mapping[str, str], *, agents: Iterable[str], retired: Mapping[str, str]) -> None:
        """Saves the texts of configs by their versions. Raises StateUnavailableError; may be repeated.

        Args:
            configs: each is kept for another month.
            agents: those that are configured now.
            retired: those that no longer are, with the last version that had them.
        """
        async with self._redis.client.pipeline(transaction=False) as pipe:
            for version, text in configs.items():
                pipe.set(_key(version), text, ex=KEEP_S)
            pipe.hdel(_RETIRED, *agents)
            if retired:
                pipe.hset(_RETIRED, items=[part for pair in retired.items() for part in pair])
            pipe.expire(_RETIRED, KEEP_S)
            await pipe.execute()

    async def load(self, version: str) -> str | None:
        """The text of a config; None for one that is not known any more. Raises StateUnavailableError."""
        return await cast(Any, self._redis.client.get(_key(version)))

    async def removed_agents(self) -> dict[str, str]:
        """The agents that are configured no more, with the last version that had them. Raises StateUnavailableError."""
        return (await read_hashes(self._redis.client, [_RETIRED]))[0]

    async def last_applied(self) -> str | None:
        """The text of the config that was applied last; None where none was. Raises StateUnavailableError."""
        return await cast(Any, self._redis.client.get(_APPLIED))

    async def mark_applied(self, text: str) -> None:
        """Notes which config was applied last. Raises StateUnavailableError."""
        await cast(Any, self._redis.client.set(_APPLIED, text))


def _key(version: str) -> str:
    return f"bw:configs:{version}"
