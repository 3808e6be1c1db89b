"""The health of agents, over their models and their latest calls."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.breakers.rules.health import NONE_SUCCEEDS, UNCALLED, CallHealth, Verdict, health_of_calls
from breakwater.calls.rules.classify import follows_request
from breakwater.jobs.contract.execution import Attempt
from breakwater.limits.rules.budget import NEVER_FITS


def speaks_against_health(attempt: Attempt) -> bool | None:
    """Returns True if a call speaks against its model's health; None if it says nothing about it.

    More failures count than for a breaker: a refused key or a call that no limit has room for opens no breaker, but
    makes every call fail.
    """
    if attempt.outcome == "success":
        return False
    if attempt.outcome == "short_circuited":
        return True if attempt.error and attempt.error.class_ in NEVER_FITS else None
    if attempt.outcome == "cancelled":
        return None
    if attempt.error is not None and (attempt.error.kind == "rate_limit" or follows_request(attempt.error)):
        return None  # the model was busy, or the request was at fault
    return True


def out_of_budget(attempt: Attempt) -> bool:
    """Returns True if an exhausted budget of the agent, or of all agents, refused a call.

    That speaks against the health of the agent, not of a model. The limits of a tenant, a task or a job say nothing
    about the agent's other jobs.
    """
    error = attempt.error
    spent = error is not None and error.class_ == "BudgetExceededError" and attempt.outcome == "short_circuited"
    return spent and (attempt.refused_by or "").startswith(("agent:", "global/"))


def health_of_agent(models: Mapping[str, Verdict], calls: CallHealth, *, affordable: bool = True) -> Verdict:
    """Returns the health of an agent over its models: `unhealthy` if none of them serves.

    It is `degraded` if its last call failed, or one of its models is unhealthy. A success on any model makes up for
    the last failure: a failed model that is no longer called must not mark a working agent for weeks.

    Args:
        models: the health on each model.
        calls: the latest calls to all models together.
        affordable: False if a hard limit is too small for any call.
    """
    if not affordable:
        return Verdict("unhealthy", "no call fits under a hard limit")
    models_verdict = combine(models)
    failed = "failed" if models_verdict.health != "healthy" else "failed or were refused"
    calls_verdict = health_of_calls(calls, failed)
    some_down = any(model.health == "unhealthy" for model in models.values())
    if calls.consecutive_failures >= NONE_SUCCEEDS or not (calls.consecutive_failures or some_down):
        return calls_verdict
    if models_verdict.health != "healthy":
        return models_verdict
    # The calls of a failing model and those of its successful fallback, together, are no worse than degraded.
    is_healthy = calls_verdict.health == "healthy"
    return calls_verdict if is_healthy else Verdict("degraded", calls_verdict.health_reason)


def combine(parts: Mapping[str, Verdict]) -> Verdict:
    """Returns the health of several agents or models: `unhealthy` if all are, `degraded` if any is not healthy."""
    for health in ("unhealthy", "degraded"):
        for name, part in parts.items():
            if part.health == health:
                is_down = all(verdict.health == "unhealthy" for verdict in parts.values())
                reason = part.health_reason if len(parts) == 1 else f"{name}: {part.health_reason}"
                return Verdict("unhealthy" if is_down else "degraded", reason)
    called = [verdict for verdict in parts.values() if verdict != UNCALLED]
    if not called:
        return UNCALLED
    return called[0] if len(parts) == 1 else Verdict("healthy", "healthy for all agents")
