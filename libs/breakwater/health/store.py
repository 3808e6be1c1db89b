"""Health of each agent: its latest calls, by model. One hash for each agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from breakwater.breakers.rules.health import LAST_CALLS, CallHealth
from breakwater.kernel.immutable import immutable
from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand, read_hashes

KEEP_MS = 30 * 24 * 3_600_000

_NOTE = Script.of("""
-- Takes an agent's calls into account: the failures since the latest success, the outcomes of the last calls (a 1 or
-- 0 for each, the latest at the end: 1 is a failure), and the latest end of each kind.
-- The figures of a model include the event log up to a sequence: an event that comes again changes nothing.
-- KEYS: health of the agent
-- ARGV from the 3rd, for each model ('' for all together): model, n, and n times: sequence, at_ms, failed (0 or 1)
local keep_ms, last_calls, i = ARGV[1], tonumber(ARGV[2]), 3
while i <= #ARGV do
  local model, n = ARGV[i], tonumber(ARGV[i + 1])
  local known = redis.call('HMGET', KEYS[1], 'through:' .. model, 'in_a_row:' .. model, 'last:' .. model)
  local through, in_a_row, last = tonumber(known[1] or '0'), tonumber(known[2] or '0'), known[3] or ''
  local changed = {}
  for k = i + 2, i + 2 + 3 * (n - 1), 3 do
    local sequence, at_ms, failed = tonumber(ARGV[k]), ARGV[k + 1], ARGV[k + 2]
    if sequence > through then
      through, last = sequence, last .. failed
      if failed == '1' then
        in_a_row = in_a_row + 1
        changed['failure:' .. model] = at_ms
      else
        in_a_row = 0
        changed['success:' .. model] = at_ms
      end
    end
  end
  if next(changed) then
    for field, value in pairs(changed) do
      redis.call('HSET', KEYS[1], field, value)
    end
    last = string.sub(last, -last_calls)
    redis.call('HSET', KEYS[1], 'through:' .. model, through, 'in_a_row:' .. model, in_a_row, 'last:' .. model, last)
  end
  i = i + 2 + 3 * n
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
return 1
""")


@immutable()
class EndedCall:
    """A call that ended: its event's sequence, when that was stored (ms since the epoch), and whether it failed."""

    sequence: int
    at_ms: int
    failed: bool


class Healths:
    """The health of all agents, as far as it can be seen from their calls."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    @staticmethod
    def note_command(agent: str, by_model: Mapping[str, Sequence[EndedCall]]) -> ScriptCommand:
        """Takes an agent's calls into account, each once; those under `""` count for no model."""
        together = [call for calls in by_model.values() for call in calls]
        arguments: list[str | int] = [KEEP_MS, LAST_CALLS]
        for model, calls in ({"": together} | {model: calls for model, calls in by_model.items() if model}).items():
            in_order = sorted(calls, key=lambda call: call.sequence)
            # Only calls since the latest success, and the last ones, change the counts.
            success = max((place for place, call in enumerate(in_order) if not call.failed), default=0)
            counted = in_order[max(0, min(success, len(in_order) - LAST_CALLS)) :]
            arguments += [model, len(counted)]
            arguments += [part for call in counted for part in (call.sequence, call.at_ms, int(call.failed))]
        return ScriptCommand(_NOTE, [_key(agent)], arguments)

    async def note(self, commands: Sequence[ScriptCommand]) -> None:
        """Records the calls of several agents in one round trip. Raises StateUnavailableError; may be repeated."""
        if commands:
            await self._redis.run(commands)

    async def forget(self, agents: Sequence[str]) -> None:
        """Deletes everything, as for a new log, whose sequences begin at 1 again. Raises StateUnavailableError."""
        await self._redis.client.delete(*(_key(agent) for agent in agents))

    async def of(self, agents: Sequence[str]) -> list[dict[str, CallHealth]]:
        """The health of agents, by model; the key `""` is all of an agent's models together.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        return [
            _by_model(fields) for fields in await read_hashes(self._redis.client, [_key(agent) for agent in agents])
        ]


def _key(agent: str) -> str:
    return f"bw:health:{encode_token(agent)}"


def _by_model(fields: Mapping[str, str]) -> dict[str, CallHealth]:
    def number(kind: str, model: str) -> int | None:
        value = fields.get(f"{kind}:{model}")
        return None if value is None else int(value)

    models = [field.removeprefix("in_a_row:") for field in fields if field.startswith("in_a_row:")]
    by_model: dict[str, CallHealth] = {}
    for model in models:
        in_a_row = number("in_a_row", model) or 0
        failure = number("failure", model) if in_a_row else None
        last = fields.get(f"last:{model}", "")
        by_model[model] = CallHealth(in_a_row, failure, number("success", model), len(last), last.count("1"))
    return by_model
