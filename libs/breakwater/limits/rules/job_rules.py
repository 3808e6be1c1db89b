"""The breaker, guard and retry rules that a job brings, over those of its agent and within the agent's bounds.

A job may be stricter than its agent in each rule. It may be looser as far as the agent's `overridable` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, cast

from pydantic import JsonValue, ValidationError

from breakwater.breakers.rules import BreakerRules, with_preset
from breakwater.calls.rules.retry import RetryPolicy
from breakwater.jobs.contract.job import RulesPart
from breakwater.kernel.formats import money
from breakwater.kernel.validation import FieldError, explain, problems
from breakwater.limits.rules.guard import GuardRules

Rules = BreakerRules | GuardRules | RetryPolicy
Allowed = Literal["at most", "at least", "among", "only"]

_ALLOWED: Mapping[Allowed, str] = {
    "at most": "breaker.errors breaker.consecutive_failures breaker.same_error breaker.failure_rate "
    "breaker.minimum_calls guard.max_iterations guard.max_tokens guard.max_cost_usd guard.consecutive_failures "
    "guard.same_error retry.max_attempts",
    # A longer wait between calls asks less of a provider that fails; the job's own time ends its waits.
    "at least": "breaker.within_s breaker.cooldown_s breaker.cooldown_growth breaker.max_cooldown_s "
    "breaker.cooldown_jitter retry.base_s retry.max_delay_s",
    "among": "retry.on",
    "only": "breaker.scope guard.confidence guard.rate_limit retry.backoff retry.per_kind",
}
ALLOWED: Mapping[str, Allowed] = {path: allowed for allowed, paths in _ALLOWED.items() for path in paths.split()}
"""Bounds of each rule of a job, by its agent's. A rule that the agent has off is not a bound."""

_MODELS: Mapping[str, type[Rules]] = {"breaker": BreakerRules, "guard": GuardRules, "retry": RetryPolicy}

_OFF: Mapping[str, Mapping[str, Any]] = {
    "breaker": dict.fromkeys(("consecutive_failures", "same_error")),
    "guard": dict.fromkeys(set(GuardRules.model_fields) - {"preset"}),
}
"""Base of a job's rules where its agent has none."""

_BESIDE_NONE: Mapping[str, object] = {"breaker.scope": "agent_model"}
"""Bounds where the agent has no such rules; all else is free then."""


@dataclass(frozen=True, slots=True)
class JobRules:
    """Rules of a job instead of its agent's; None where it brings none.

    Attributes:
        breaker: of the breaker of its task, which holds in addition to the agent's own.
        guard: for the checks of its task.
        retry: for its attempts.
    """

    breaker: BreakerRules | None = None
    guard: GuardRules | None = None
    retry: RetryPolicy | None = None


NO_JOB_RULES = JobRules()


def job_rules(
    given: Mapping[RulesPart, Mapping[str, JsonValue]],
    own: Mapping[RulesPart, Rules | None],
    overridable: Mapping[str, JsonValue],
    *,
    with_figures: bool = False,
) -> JobRules | FieldError:
    """The rules that hold for a job, or why it can't bring these.

    Args:
        given: what it brings. A preset comes first, and settings next to it win.
        own: of its agent; None for those that are off.
        overridable: of the agent: rules, such as `guard.max_iterations`, and how far a job may go.
        with_figures: the reason names the bound, which is for operators.
    """
    found: dict[str, Any] = {}
    for part, settings in given.items():
        rules = _merged(part, own[part], settings)
        if isinstance(rules, FieldError):
            return rules
        if (problem := _out_of_bounds(part, rules, own[part], overridable, with_figures=with_figures)) is not None:
            return problem
        found[part] = rules
    return JobRules(**found)


def bound_problem(path: str, value: JsonValue) -> str | None:
    """The problem of an entry of `overridable`; None where it is right."""
    if path not in ALLOWED:
        close = get_close_matches(path, ALLOWED, n=1)
        return f"{path!r} is no rule that a job can bring; " + (
            f"did you mean {close[0]!r}?" if close else "write it as in `guard.max_iterations: 20`"
        )
    try:
        _bound(path, value)
    except ValidationError as error:
        return explain(error, None, {_field(path): value})
    return None


def _merged(part: RulesPart, own: Rules | None, settings: Mapping[str, JsonValue]) -> Rules | FieldError:
    base = _OFF[part] if own is None else own.model_dump(exclude={"preset"})
    model = _MODELS[part]
    if "preset" in model.model_fields:
        settings = with_preset(settings)
    try:
        return model.model_validate({**base, **settings})
    except ValidationError as error:
        wrong = problems(error, model, dict(settings))[0]
        return FieldError(f"{part}.{wrong.path}" if wrong.path else part, wrong.message)


def _out_of_bounds(
    part: RulesPart,
    rules: Rules,
    own: Rules | None,
    overridable: Mapping[str, JsonValue],
    *,
    with_figures: bool,
) -> FieldError | None:
    for path, allowed in ALLOWED.items():
        if not path.startswith(f"{part}."):
            continue
        name = _field(path)
        value = getattr(rules, name)
        limit = _BESIDE_NONE.get(path) if own is None else getattr(own, name)
        if _within(value, limit, allowed):
            continue
        if path in overridable:
            limit = _bound(path, overridable[path])
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
            return value is not None and value <= limit
        case "at least":
            return value is not None and value >= limit
        case "among":
            return set(value) <= set(limit)
        case "only":
            return False


def _bound(path: str, value: JsonValue) -> Any:
    """An entry of `overridable` as a value of its rule. Raises ValidationError."""
    part, name = path.split(".")
    # Delays of a constant back-off have no order that one of them alone would break.
    around = {"backoff": "constant"} if part == "retry" else {}
    return getattr(_MODELS[part].model_validate({**around, name: value}), name)


def _field(path: str) -> str:
    return path.partition(".")[2]


def _in_words(path: str, limit: Any) -> str:
    if path == "guard.max_cost_usd":
        return money(limit)
    if isinstance(limit, tuple):
        return ", ".join(map(str, cast(tuple[Any, ...], limit))) or "none"
    return f"{limit:g}" if isinstance(limit, float) else str(limit)
