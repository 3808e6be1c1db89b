"""How the calls of each agent went lately, by model. One hash for each agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from breakwater.contracts.subjects import encode_token
from breakwater.state.connection import Redis, Script, ScriptCall, translated

KEEP_MS = 30 * 24 * 3_600_000

_NOTE = Script.named("health_note")


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that ended: its event's sequence, when that was stored (ms since the epoch), and whether it failed."""

    sequence: int
    at_ms: int
    failed: bool


@dataclass(frozen=True, slots=True)
class CallHealth:
    """How calls went: failures since the latest success, and when the latest of each ended (ms since the epoch).

    A success clears the time of the latest failure, as it does the count.
    """

    consecutive_failures: int = 0
    last_failure_ms: int | None = None
    last_success_ms: int | None = None

    @property
    def called(self) -> bool:
        """Whether any call ended."""
        return bool(self.last_failure_ms or self.last_success_ms)


class Healths:
    """The health of all agents, as far as it can be seen from their calls."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    @staticmethod
    def note_call(agent: str, by_model: Mapping[str, Sequence[EndedCall]]) -> ScriptCall:
        """Takes an agent's calls into account, each once."""
        together = [one for calls in by_model.values() for one in calls]
        arguments: list[str | int] = [KEEP_MS]
        for model, calls in (("", together), *by_model.items()):
            counted = _that_matter(sorted(calls, key=lambda one: one.sequence))
            arguments += [model, len(counted)]
            arguments += [part for one in counted for part in (one.sequence, one.at_ms, int(one.failed))]
        return ScriptCall(_NOTE, [_key(agent)], arguments)

    async def note(self, calls: Sequence[ScriptCall]) -> None:
        """Records the calls of several agents in one round trip. Raises StateUnavailable; may be repeated."""
        if calls:
            await self._redis.run(calls)

    async def forget(self, agents: Sequence[str]) -> None:
        """Deletes everything, as for a new log, whose sequences begin at 1 again. Raises StateUnavailable."""
        async with translated():
            await self._redis.client.delete(*(_key(agent) for agent in agents))

    async def of(self, agents: Sequence[str]) -> list[dict[str, CallHealth]]:
        """How the calls of agents went, by model; the key `""` stands for all of an agent's models together.

        Raises:
            StateUnavailable: Redis does not answer.
        """
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            for agent in agents:
                pipe.hgetall(_key(agent))
            return [_by_model(fields) for fields in cast(list[dict[str, str]], await pipe.execute())]


def _key(agent: str) -> str:
    return f"bw:health:{{{encode_token(agent)}}}"


def _that_matter(calls: Sequence[EndedCall]) -> Sequence[EndedCall]:
    """From the latest success on: the rest leaves no trace."""
    return calls[max((place for place, one in enumerate(calls) if not one.failed), default=0) :]


def _by_model(fields: Mapping[str, str]) -> dict[str, CallHealth]:
    def number(kind: str, model: str) -> int | None:
        value = fields.get(f"{kind}:{model}")
        return None if value is None else int(value)

    models = [field.removeprefix("in_a_row:") for field in fields if field.startswith("in_a_row:")]
    found: dict[str, CallHealth] = {}
    for model in models:
        in_a_row = number("in_a_row", model) or 0
        found[model] = CallHealth(in_a_row, number("failure", model) if in_a_row else None, number("success", model))
    return found
