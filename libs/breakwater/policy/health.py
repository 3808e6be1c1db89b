"""How an agent fares, from its breakers and its latest calls."""

from __future__ import annotations

from collections.abc import Collection

from breakwater.contracts.events import BreakerState, Health
from breakwater.contracts.execution import Attempt, ErrorKind
from breakwater.policy.budget import NEVER_FITS

_SAYS_NOTHING: frozenset[ErrorKind] = frozenset({"logic", "context_overflow", "orphan_tool_calls", "rate_limit"})
"""What was sent or answered was wrong, and is mended or sent back, or the model was busy: it serves."""


NONE_SUCCEEDS = 10
"""So many failures in a row are no bad moment."""


def failed(attempt: Attempt) -> bool | None:
    """Whether a call speaks against its model's health; None where it says nothing of it.

    Wider than what a breaker counts: a refused key opens no breaker, and yet no call succeeds; nor does one that a cap
    never has room for.
    """
    if attempt.outcome == "success":
        return False
    if attempt.outcome == "short_circuited":
        return True if attempt.error and attempt.error.class_ in NEVER_FITS else None
    if attempt.outcome == "cancelled" or (attempt.error and attempt.error.kind in _SAYS_NOTHING):
        return None
    return True


def health_of_model(breaker: BreakerState | None, consecutive_failures: int) -> Health:
    """Of an agent on one model: `unhealthy` while its breaker lets no call pass, or one probe at most, or all fail."""
    if breaker not in {None, "closed"} or consecutive_failures >= NONE_SUCCEEDS:
        return "unhealthy"
    return "degraded" if consecutive_failures else "healthy"


def health_of_agent(models: Collection[Health], consecutive_failures: int) -> Health:
    """Of an agent over its models: `unhealthy` when none of them serves, `degraded` when anything is amiss."""
    if consecutive_failures >= NONE_SUCCEEDS or (models and all(health == "unhealthy" for health in models)):
        return "unhealthy"
    return "degraded" if consecutive_failures or "unhealthy" in models else "healthy"
