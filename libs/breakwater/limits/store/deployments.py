"""Deployments, that is models at providers: the hold of each, and the ceiling on its retries.

A hold is a key that expires. While it lasts, no call is made, but for the probes of a long one: the provider may limit
one caller alone, and then the others must not wait for an hour.

The ceiling keeps retries from multiplying an outage. Tries are counted in slices of the window, in a small hash for
each: two fields, however much is called, and two for each caller with retries. A first try counts for at least 95 % of
the window and never for longer, a retry for at least the whole window and at most 5 % longer. So the ceiling errs to
one side only: it never grants a retry that an exact window would refuse. But a caller that has made fewer than half of
them finds up to half as many again where others have used up all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import lru_cache

from breakwater.calls.rules.holds import LONG_HOLD_S
from breakwater.calls.settings import RetryBudgetRules
from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.redis.connection import Redis, ScriptCommand, scripts_of

SLICES = 20
"""The slices of a window. The window has whole seconds, so each slice has whole milliseconds."""

REMEMBER_MS = 60_000
"""The time for which an answer is kept for a caller that has lost it and asks again."""

_PER_MILLION = 1_000_000

_LUA = scripts_of(__file__)


PROBE = -1
"""The answer that admits a call in spite of a hold: its end must be reported by `hold_command` or `settle_command`."""


class Deployments:
    """The deployments that the fleet calls, each by its name: `<provider>/<what the provider calls the model>`."""

    def __init__(self, redis: Redis, rules: RetryBudgetRules | None) -> None:
        """Takes the rules of all retry budgets; None for no ceiling."""
        self._redis = redis
        self._rules = rules
        self._slice_ms = 0 if rules is None else rules.window_s * 1000 // SLICES

    def admit_command(
        self,
        name: str,
        *,
        first_try: bool,
        caller: str = "",
        attempt_id: str = "",
        lease_ms: int | None = None,
        spares: bool = False,
    ) -> ScriptCommand:
        """Asks for an admission. The answer: 0 if the call is admitted, `PROBE`, or the ms until it may be asked again.

        Made again, it counts a first try again: that allows `ratio` of a retry more, and a key for each job would cost
        more than it is worth.

        Args:
            name: the deployment.
            first_try: counts it.
            caller: whose call it is (`breakers.rules.caller_of`); empty where that is not known.
            attempt_id: the holder of a probe.
            lease_ms: of a probe; None only looks, and takes none.
            spares: is not admitted if the deployment is to be spared.
        """
        keys, slices = self._keys(name, counts=first_try)
        arguments = [*slices, caller, attempt_id, "" if lease_ms is None else lease_ms, int(spares)]
        return ScriptCommand(_LUA["admit"], keys, arguments)

    def take_back_command(self, name: str, *, first_try: bool, attempt_id: str = "") -> ScriptCommand:
        """Takes back an admission, as the call was not made: a first try, if one was counted, and a probe."""
        keys, slices = self._keys(name, counts=first_try)
        return ScriptCommand(_LUA["take_back"], keys, [*slices, attempt_id])

    def _keys(self, name: str, *, counts: bool) -> tuple[list[str], list[int]]:
        if not counts or self._rules is None:
            return [_hold(name)], [0, 0]
        return [_hold(name), _counts(name, self._rules)], [self._slice_ms, SLICES]

    @staticmethod
    def hold_command(name: str, hold_s: float, caller: str = "", attempt_id: str = "") -> ScriptCommand:
        """Holds a deployment from now on, unless it is held for longer already. The script answers nothing.

        Args:
            name: the deployment.
            hold_s: seconds.
            caller: whose call had the rate limit; no probe of another one ends the hold for it.
            attempt_id: that call's attempt, perhaps a probe, which has ended.
        """
        arguments = [math.ceil(hold_s * 1000), round(LONG_HOLD_S * 1000), caller, attempt_id]
        return ScriptCommand(_LUA["hold"], [_hold(name)], arguments)

    @staticmethod
    def settle_command(name: str, attempt_id: str, *, succeeded: bool, spare_s: float = 0.0) -> ScriptCommand:
        """Ends a probe, also the hold if it has succeeded, and has a deployment spared. The script answers nothing."""
        return ScriptCommand(_LUA["settle"], [_hold(name)], [attempt_id, int(succeeded), math.ceil(spare_s * 1000)])

    async def held_until(self, names: Iterable[str]) -> dict[str, int]:
        """The end of each present hold, in ms since the epoch by this process's clock. Raises StateUnavailableError."""
        unique = list(dict.fromkeys(names))
        remaining_ms = await self._redis.run([ScriptCommand(_LUA["held"], [_hold(name)], []) for name in unique])
        now_ms = time.time_ns() // 1_000_000
        return {name: now_ms + left_ms for name, left_ms in zip(unique, remaining_ms, strict=True) if left_ms}

    async def release(self, name: str) -> bool:
        """Ends a hold, for all. Returns False if there was none. Raises StateUnavailableError."""
        return bool(await self._redis.client.delete(_hold(name)))

    async def may_retry(self, name: str, attempt_id: str, caller: str = "") -> bool:
        """Asks for a retry, which counts if it is granted. The same attempt gets the same answer for a minute.

        Args:
            name: the deployment.
            attempt_id: the attempt that has failed.
            caller: whose, so that others can't use up all (`breakers.rules.caller_of`); empty where it is not known.

        Raises:
            StateUnavailableError: it may be counted; ask again for the same attempt.
        """
        rules = self._rules
        if rules is None:
            return True
        counts = _counts(name, rules)
        arguments = [self._slice_ms, SLICES, rules.floor, round(rules.ratio * _PER_MILLION), REMEMBER_MS, caller]
        [granted] = await self._redis.run(
            [ScriptCommand(_LUA["ask_retry"], [counts, f"{counts}:answer:{attempt_id}"], arguments)]
        )
        return bool(granted)


@lru_cache(maxsize=4096)
def _hold(name: str) -> str:
    # Not `bw:hold`, which workers of an earlier version write as a string.
    return f"bw:held:{encode_token(name)}"


def _counts(name: str, rules: RetryBudgetRules) -> str:
    # Slices of another length, from before a change of the config, must not be mixed with these.
    return f"bw:retries:{encode_token(name)}:{rules.window_s}"
