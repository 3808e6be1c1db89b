"""The fleet's ceiling on retries of a model, so that an outage is not multiplied by those who retry.

Counts are kept in slices of the window, in one hash for each model: at most 42 small fields, however much is called.
A first try counts for at least 95 % of the window and never for longer, a retry for at least the whole window and at
most 5 % longer. So the ceiling errs to one side only: it never grants a retry that an exact window would refuse.
"""

from __future__ import annotations

from breakwater.contracts.subjects import encode_token
from breakwater.policy.retry import RetryBudgetRules
from breakwater.state.connection import Redis, Script, ScriptCall

SLICES = 20
"""How many make up a window. Each is a whole number of milliseconds, as the window is one of seconds."""

REMEMBER_MS = 60_000
"""How long an answer is kept for whoever asks again because it was lost."""

_PER_MILLION = 1_000_000

_FIRST_TRY = Script.named("retry_budget_first_try")
_ASK = Script.named("retry_budget_ask")


class RetryBudgets:
    """The retries of the fleet, by model."""

    def __init__(self, redis: Redis, rules: RetryBudgetRules | None) -> None:
        """Takes the rules of all models; None for no ceiling."""
        self._redis = redis
        self._rules = rules
        self._slice_ms = 0 if rules is None else rules.window_s * 1000 // SLICES

    def first_try_call(self, model: str, count: int = 1) -> ScriptCall | None:
        """Counts a first try on a model, or with -1 takes it back; None where there is no ceiling. It answers nothing.

        Made again, it counts again: that allows `ratio` of a retry more, and a key for each job would cost more than
        it is worth.
        """
        rules = self._rules
        if rules is None:
            return None
        return ScriptCall(_FIRST_TRY, [_counts(model, rules)], [self._slice_ms, SLICES, count])

    async def may_retry(self, model: str, attempt_id: str) -> bool:
        """Asks for a retry, which counts if it is granted. The same attempt gets the same answer for a minute.

        Raises:
            StateUnavailable: it may be counted; ask again for the same attempt.
        """
        rules = self._rules
        if rules is None:
            return True
        counts = _counts(model, rules)
        arguments = [self._slice_ms, SLICES, rules.floor, round(rules.ratio * _PER_MILLION), REMEMBER_MS]
        [granted] = await self._redis.run([ScriptCall(_ASK, [counts, f"{counts}:{attempt_id}"], arguments)])
        return bool(granted)


def _counts(model: str, rules: RetryBudgetRules) -> str:
    # Slices of another length, from before a change of the config, must not be mixed with these.
    return f"bw:retries:{{{encode_token(model)}}}:{rules.window_s}"
