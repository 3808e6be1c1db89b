"""Merges a job's own breaker, guard and retry rules with its agent's, within the agent's bounds.

A job may be stricter than its agent in each rule, and looser as far as the agent's `overridable` allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, cast

from pydantic import JsonValue, ValidationError

from breakwater.breakers.settings import BreakerRules, with_preset
from breakwater.calls.settings import RetryPolicy
from breakwater.jobs.contract.job import RulesPart
from breakwater.kernel.formats import money
from breakwater.kernel.validation import FieldError, explain, problems
from breakwater.limits.settings import GuardRules

Rules = BreakerRules | GuardRules | RetryPolicy
Allowed = Literal["at most", "at least", "among", "only"]

_ALLOWED: Mapping[Allowed, str] = {
    "at most": "breaker.count breaker.errors breaker.consecutive_failures breaker.same_error breaker.failure_rate "
    "breaker.minimum_calls guard.max_iterations guard.max_tokens guard.max_cost_usd guard.consecutive_failures "
    "guard.same_error retry.max_attempts",
    # Longer waits between calls are easier on a failing provider, and the job's timeout limits them.
    "at least": "breaker.within_s breaker.cooldown_s breaker.cooldown_growth breaker.max_cooldown_s "
    "breaker.cooldown_jitter retry.base_s retry.max_delay_s",
    "among": "retry.on",
    "only": "breaker.scope breaker.probe guard.confidence guard.rate_limit retry.backoff retry.per_kind",
}
ALLOWED: Mapping[str, Allowed] = {path: allowed for allowed, paths in _ALLOWED.items() for path in paths.split()}
"""The bound that an agent's rule sets for the same rule of a job. A rule that is off is no bound."""

_RANKS: Mapping[object, int] = {"attempts": 0, "jobs": 1}
"""The values of `breaker.count`, the stricter one first."""

_MODELS: Mapping[str, type[Rules]] = {"breaker": BreakerRules, "guard": GuardRules, "retry": RetryPolicy}

_OFF: Mapping[str, Mapping[str, Any]] = {
    "breaker": dict.fromkeys(("consecutive_failures", "same_error")),
    "guard": dict.fromkeys(set(GuardRules.model_fields) - {"preset"}),
}
"""The base of a job's rules if its agent has none."""

_BOUNDS_WITHOUT_RULES: Mapping[str, object] = {"breaker.scope": "agent_model"}
"""The only bounds if the agent has no such rules."""


@dataclass(frozen=True, slots=True)
class JobRules:
    """The rules of a job that replace its agent's; None where it brings none.

    Attributes:
        breaker: the rules of its task's own breaker, which applies in addition to the agent's.
        guard: the rules for the checks of its task.
        retry: the rules for its attempts.
    """

    breaker: BreakerRules | None = None
    guard: GuardRules | None = None
    retry: RetryPolicy | None = None


NO_JOB_RULES = JobRules()


def job_rules(
    job_settings: Mapping[RulesPart, Mapping[str, JsonValue]],
    agent_rules: Mapping[RulesPart, Rules | None],
    overridable: Mapping[str, JsonValue],
    *,
    with_figures: bool = False,
) -> JobRules | FieldError:
    """Returns the effective rules of a job, or the reason why it can't bring these.

    Args:
        job_settings: the settings that the job brings. Settings next to a preset override it.
        agent_rules: the rules of its agent; None for rules that are off.
        overridable: the agent's bounds for rules of jobs, such as `guard.max_iterations`.
        with_figures: True if the reason may name the bound, which only operators may see.
    """
    merged: dict[str, Any] = {}
    for part, settings in job_settings.items():
        rules = _merge(part, agent_rules[part], settings)
        if isinstance(rules, FieldError):
            return rules
        if (
            problem := _out_of_bounds(part, rules, agent_rules[part], overridable, with_figures=with_figures)
        ) is not None:
            return problem
        merged[part] = rules
    return JobRules(**merged)


def bound_problem(path: str, value: JsonValue) -> str | None:
    """Returns the problem of an entry of `overridable`; None if it is valid."""
    if path not in ALLOWED:
        close = get_close_matches(path, ALLOWED, n=1)
        return f"{path!r} is no rule that a job can bring; " + (
            f"did you mean {close[0]!r}?" if close else "write it as in `guard.max_iterations: 20`"
        )
    try:
        _parse_bound(path, value)
    except ValidationError as error:
        return explain(error, None, {_field(path): value})
    return None


def _merge(part: RulesPart, agent_rules: Rules | None, settings: Mapping[str, JsonValue]) -> Rules | FieldError:
    base = _OFF[part] if agent_rules is None else agent_rules.model_dump(exclude={"preset"})
    if part == "breaker":
        # A task's own breaker stops a job that keeps failing, however its tries are spread over calls.
        base = {**base, "count": "attempts"}
    model = _MODELS[part]
    if "preset" in model.model_fields:
        settings = with_preset(settings)
    try:
        return model.model_validate({**base, **settings})
    except ValidationError as error:
        problem = problems(error, model, dict(settings))[0]
        return FieldError(f"{part}.{problem.path}" if problem.path else part, problem.message)


def _out_of_bounds(
    part: RulesPart,
    rules: Rules,
    agent_rules: Rules | None,
    overridable: Mapping[str, JsonValue],
    *,
    with_figures: bool,
) -> FieldError | None:
    for path, allowed in ALLOWED.items():
        if not path.startswith(f"{part}."):
            continue
        name = _field(path)
        value = getattr(rules, name)
        limit = _BOUNDS_WITHOUT_RULES.get(path) if agent_rules is None else getattr(agent_rules, name)
        if _within(value, limit, allowed):
            continue
        if path in overridable:
            limit = _parse_bound(path, overridable[path])
            if _within(value, limit, allowed):
                continue
        if allowed == "only":
            return FieldError(path, "is for the agent to set")
        bound = f": {allowed} {_in_words(path, limit)}" if with_figures else "; leave it out, or set a stricter one"
        return FieldError(path, f"is looser than the agent allows{bound}")
    return None


def _within(value: Any, limit: Any, allowed: Allowed) -> bool:
    if limit is None or value == limit:
        return True
    match allowed:
        case "at most":
            return value is not None and _RANKS.get(value, value) <= _RANKS.get(limit, limit)
        case "at least":
            return value is not None and value >= limit
        case "among":
            return set(value) <= set(limit)
        case "only":
            return False


def _parse_bound(path: str, value: JsonValue) -> Any:
    """Parses an entry of `overridable` as a value of its rule. Raises ValidationError."""
    part, name = path.split(".")
    # With a constant back-off, a delay is valid by itself, whatever the other delay is.
    companions = {"backoff": "constant"} if part == "retry" else {}
    return getattr(_MODELS[part].model_validate({**companions, name: value}), name)


def _field(path: str) -> str:
    return path.partition(".")[2]


def _in_words(path: str, limit: Any) -> str:
    if path == "guard.max_cost_usd":
        return money(limit)
    if isinstance(limit, tuple):
        return ", ".join(map(str, cast(tuple[Any, ...], limit))) or "none"
    return f"{limit:g}" if isinstance(limit, float) else str(limit)
