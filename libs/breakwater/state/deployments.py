"""What the fleet knows of a deployment, that is a model at a provider: until when it is held, and its retries.

A hold is a key that expires. The ceiling on retries is there so that an outage is not multiplied by those who retry:
counts are kept in slices of the window, in one hash for each deployment: at most 42 small fields, however much is
called, and one for each caller and slice with retries. A first try counts for at least 95 % of the window and never for
longer, a retry for at least the whole window and at most 5 % longer. So the ceiling errs to one side only: it never
grants a retry that an exact window would refuse. But whoever has made fewer than half of them finds up to half as many
again where others have used up all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import lru_cache

from breakwater.contracts.subjects import encode_token
from breakwater.policy.retry import RetryBudgetRules
from breakwater.state.connection import Redis, Script, ScriptCall, translated

SLICES = 20
"""How many make up a window. Each is a whole number of milliseconds, as the window is one of seconds."""

REMEMBER_MS = 60_000
"""How long an answer is kept for whoever asks again because it was lost."""

_PER_MILLION = 1_000_000

_ADMIT = Script.named("deployment_admit")
_ASK_RETRY = Script.named("deployment_ask_retry")
_HOLD = Script.named("deployment_hold")


class Deployments:
    """The deployments that the fleet calls, each by its name: `<provider>/<what the provider calls the model>`."""

    def __init__(self, redis: Redis, rules: RetryBudgetRules | None) -> None:
        """Takes the rules of all retry budgets; None for no ceiling."""
        self._redis = redis
        self._rules = rules
        self._slice_ms = 0 if rules is None else rules.window_s * 1000 // SLICES

    def admit_call(self, name: str, *, first_try: bool) -> ScriptCall:
        """Asks whether a call may be made; the answer is the ms until the hold ends, or 0 where there is none.

        Made again, it counts a first try again: that allows `ratio` of a retry more, and a key for each job would cost
        more than it is worth.
        """
        return self._admit(name, 1) if first_try and self._rules is not None else ScriptCall(_ADMIT, [_hold(name)], [])

    def take_back_call(self, name: str) -> ScriptCall | None:
        """Takes a first try back that was not made; None where none was counted."""
        return None if self._rules is None else self._admit(name, -1)

    def _admit(self, name: str, count: int) -> ScriptCall:
        assert self._rules is not None
        return ScriptCall(_ADMIT, [_hold(name), _counts(name, self._rules)], [self._slice_ms, SLICES, count])

    @staticmethod
    def hold_call(name: str, hold_s: float) -> ScriptCall:
        """Holds a deployment for so long from now on, unless it is held for longer already. It answers nothing."""
        return ScriptCall(_HOLD, [_hold(name)], [math.ceil(hold_s * 1000)])

    async def held_until(self, names: Iterable[str]) -> dict[str, int]:
        """Until when those are held that are, in ms since the epoch by this clock. Raises StateUnavailable."""
        unique = list(dict.fromkeys(names))
        left = await self._redis.run([self.admit_call(name, first_try=False) for name in unique])
        now_ms = time.time_ns() // 1_000_000
        return {name: now_ms + left_ms for name, left_ms in zip(unique, left, strict=True) if left_ms}

    async def release(self, name: str) -> None:
        """Ends a hold. Raises StateUnavailable."""
        async with translated():
            await self._redis.client.delete(_hold(name))

    async def may_retry(self, name: str, attempt_id: str, caller: str = "") -> bool:
        """Asks for a retry, which counts if it is granted. The same attempt gets the same answer for a minute.

        Args:
            name: the deployment.
            attempt_id: the attempt that has failed.
            caller: whose, so that others can't use up all (`policy.breaker.caller_of`); empty where it is not known.

        Raises:
            StateUnavailable: it may be counted; ask again for the same attempt.
        """
        rules = self._rules
        if rules is None:
            return True
        counts = _counts(name, rules)
        arguments = [self._slice_ms, SLICES, rules.floor, round(rules.ratio * _PER_MILLION), REMEMBER_MS, caller]
        [granted] = await self._redis.run([ScriptCall(_ASK_RETRY, [counts, f"{counts}:{attempt_id}"], arguments)])
        return bool(granted)


@lru_cache(maxsize=4096)
def _hold(name: str) -> str:
    return f"bw:hold:{{{encode_token(name)}}}"


def _counts(name: str, rules: RetryBudgetRules) -> str:
    # Slices of another length, from before a change of the config, must not be mixed with these.
    return f"bw:retries:{{{encode_token(name)}}}:{rules.window_s}"
