from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.breakers.settings import PRESETS, BreakerRules
from breakwater.calls.settings import RetryPolicy
from breakwater.config.job_rules import ALLOWED, Allowed, JobRules, bound_problem, job_rules
from breakwater.jobs.contract.job import RulesPart
from breakwater.kernel.validation import FieldError
from breakwater.limits.settings import GuardRules
from tests.tables import each_row

AGENT: dict[RulesPart, Any] = {
    "breaker": BreakerRules(
        errors=10, failure_rate=0.5, cooldown_growth=2, cooldown_jitter=0.2, max_cooldown_s=600, cooldown_s=60
    ),
    "guard": GuardRules.model_validate({"confidence": {"floor": 0.3}}),
    "retry": RetryPolicy.model_validate({"on": [404, "client"], "per_kind": {"rate_limit": {"max": 5}}}),
}
NONE: dict[RulesPart, Any] = {"breaker": None, "guard": None, "retry": RetryPolicy()}


def with_own(part: RulesPart, rules: Any) -> dict[RulesPart, Any]:
    return {**AGENT, part: rules}


def of(path: str, value: Any, bounds: dict[str, Any] | None = None, own: dict[RulesPart, Any] = AGENT) -> Any:
    return for_caller(path, value, bounds, own, with_figures=True)


def for_caller(
    path: str,
    value: Any,
    bounds: dict[str, Any] | None = None,
    own: dict[RulesPart, Any] = AGENT,
    *,
    with_figures: bool = False,
) -> Any:
    part, name = path.split(".")
    settings: Any = {part: {name: value}}
    return job_rules(settings, own, bounds or {}, with_figures=with_figures)


ROWS = [
    # The rule, what is as strict as the agent's or stricter, and what is looser.
    ("breaker.scope", ["agent_model"], ["model", "provider"]),
    ("breaker.count", ["jobs", "attempts"], ["calls"]),
    ("breaker.errors", [10, 1], [11, "off", None]),
    ("breaker.within_s", [60, 600], [59]),
    ("breaker.consecutive_failures", [3, 1], [4, "off"]),
    ("breaker.same_error", [5, 1], [6, "off"]),
    ("breaker.failure_rate", [0.5, 0.1], [0.51, "off"]),
    ("breaker.minimum_calls", [10, 1], [11]),
    ("breaker.cooldown_s", [60, 600], [59]),
    ("breaker.cooldown_growth", [2, 3], [1]),
    ("breaker.max_cooldown_s", [600, 900], [599]),
    ("breaker.cooldown_jitter", [0.2, 1], [0.1]),
    ("breaker.probe", [{"every_s": 60}], []),
    ("guard.max_iterations", [10, 1], [11, "off"]),
    ("guard.max_tokens", [200_000, 1], [200_001, "off"]),
    ("guard.max_cost_usd", [10, "0.01"], ["10.01", "off"]),
    ("guard.consecutive_failures", [3, 1], [4, "off"]),
    ("guard.same_error", [5, 1], [6, "off"]),
    ("guard.confidence", [{"floor": 0.3}], [{"floor": 0.9}, "off"]),
    ("guard.rate_limit", [{"requests": 50, "per": "hour"}, "off"], []),
    ("retry.max_attempts", [3, 1], [4]),
    ("retry.backoff", ["exponential"], ["constant"]),
    ("retry.base_s", [0.5, 5], [0.4]),
    ("retry.max_delay_s", [5, 60], [4]),
    ("retry.on", [[404, "client"], [404], []], [["NotFoundError"], [404, 402]]),
    ("retry.per_kind", [{"rate_limit": {"max": 5}}], [{"rate_limit": {"max": 0}}, {}]),
]


@each_row(("path", "stricter", "looser"), ROWS)
def test_a_job_may_be_as_strict_as_its_agent_or_stricter_in_each_rule(
    path: str, stricter: list[Any], looser: list[Any]
) -> None:
    for value in stricter:
        assert isinstance(of(path, value), JobRules), value
    for value in looser:
        problem = of(path, value)
        assert isinstance(problem, FieldError), value
        assert problem.path == path


def test_the_rate_limit_of_an_agents_tasks_is_for_the_agent_to_set() -> None:
    own = with_own("guard", GuardRules.model_validate({"rate_limit": {"requests_per_minute": 5}}))
    assert isinstance(of("guard.rate_limit", {"requests_per_minute": 5}, own=own), JobRules)
    for value in ({"requests_per_minute": 4}, {"requests": 50, "per": "hour"}, "off"):
        assert of("guard.rate_limit", value, own=own) == FieldError("guard.rate_limit", "is for the agent to set")
    of_a_day = of("guard.rate_limit", {"requests": 50, "per": "day"})
    assert "must be per minute or per hour" in of_a_day.message


def test_each_rule_of_an_agent_has_its_row() -> None:
    models: dict[str, Any] = {"breaker": BreakerRules, "guard": GuardRules, "retry": RetryPolicy}
    fields = {f"{part}.{name}" for part, model in models.items() for name in model.model_fields if name != "preset"}
    assert fields == set(ALLOWED) == {path for path, _, _ in ROWS}


def test_a_jobs_own_breaker_counts_attempts_unless_the_job_says_otherwise() -> None:
    assert of("breaker.errors", 9).breaker.count == "attempts"
    assert of("breaker.count", "jobs").breaker.count == "jobs"
    own = with_own("breaker", BreakerRules(count="attempts"))
    looser = "is looser than the agent allows: at most attempts"
    assert of("breaker.count", "jobs", own=own) == FieldError("breaker.count", looser)
    assert of("breaker.count", "jobs", {"breaker.count": "jobs"}, own).breaker.count == "jobs"


@each_row(
    ("path", "value", "said"),
    [
        ("guard.max_iterations", 11, "is looser than the agent allows: at most 10"),
        ("guard.max_cost_usd", "off", "is looser than the agent allows: at most $10.00"),
        ("breaker.cooldown_s", 5, "is looser than the agent allows: at least 60"),
        ("retry.on", [500], "is looser than the agent allows: among 404, client"),
        ("retry.backoff", "constant", "is for the agent to set"),
        ("guard.max_iterations", 0, "should be greater than or equal to 1"),
        ("guard.max_iteration", 3, "is not a field here; did you mean 'max_iterations'?"),
        ("retry.preset", "refactor", "is not a field here"),
    ],
)
def test_a_refusal_names_the_setting_and_what_is_allowed(path: str, value: Any, said: str) -> None:
    assert of(path, value) == FieldError(path, said)


def test_a_job_may_be_looser_as_far_as_its_agent_says() -> None:
    bounds = {"guard.max_iterations": 20, "retry.on": [404, 409], "breaker.same_error": "off"}
    for path, value in (("guard.max_iterations", 20), ("retry.on", [409]), ("breaker.same_error", "off")):
        assert isinstance(of(path, value, bounds), JobRules)
    assert of("guard.max_iterations", 21, bounds) == FieldError(
        "guard.max_iterations", "is looser than the agent allows: at most 20"
    )
    # Not stricter by mistake: what the agent has itself is always allowed.
    assert isinstance(of("guard.max_iterations", 10, {"guard.max_iterations": 5}), JobRules)


def test_what_an_agent_has_off_is_no_bound_and_only_what_the_job_sets_is_on() -> None:
    rules = job_rules({"breaker": {"consecutive_failures": 8, "cooldown_s": 1}, "guard": {"max_tokens": 7}}, NONE, {})
    assert isinstance(rules, JobRules)
    assert rules.breaker is not None
    assert (rules.breaker.consecutive_failures, rules.breaker.same_error) == (8, None)
    assert rules.guard is not None
    assert rules.guard.model_dump() == dict.fromkeys(GuardRules.model_fields) | {"max_tokens": 7}
    assert isinstance(of("breaker.scope", "provider", own=NONE), FieldError)


def test_a_flag_wins_over_the_preset_and_the_preset_over_the_agent() -> None:
    loose = with_own("breaker", BreakerRules(consecutive_failures=9, same_error=9))
    for settings, expected in (
        ({"preset": "migration-safety"}, (1, 2)),
        ({"preset": "migration-safety", "consecutive_failures": 3}, (3, 2)),
        ({"consecutive_failures": 3}, (3, 9)),
    ):
        rules = job_rules({"breaker": settings}, loose, {})
        assert isinstance(rules, JobRules)
        assert rules.breaker is not None
        assert (rules.breaker.consecutive_failures, rules.breaker.same_error) == expected
    # What comes out is what the bounds hold for.
    assert of("breaker.preset", "tdd-red-green") == FieldError(
        "breaker.consecutive_failures", "is looser than the agent allows: at most 3"
    )


def test_debug_review_and_docs_are_presets_with_the_defaults_and_guards_take_presets_too() -> None:
    for preset in ("debug", "review", "docs"):
        assert dict(PRESETS[preset]) == {"consecutive_failures": 3, "same_error": 5}
    for preset, settings in PRESETS.items():
        for rules in (BreakerRules.model_validate({"preset": preset}), GuardRules.model_validate({"preset": preset})):
            assert (rules.consecutive_failures, rules.same_error) == tuple(settings.values())
    assert GuardRules.model_validate({"preset": "refactor", "same_error": 9}).consecutive_failures == 2


def test_only_operators_are_told_the_bound_of_a_rule(subtests: pytest.Subtests) -> None:
    unlike_any_other: dict[RulesPart, Any] = {
        "breaker": BreakerRules(
            errors=717,
            consecutive_failures=717,
            same_error=717,
            failure_rate=0.717,
            minimum_calls=717,
            within_s=717,
            cooldown_s=717,
            cooldown_growth=7.17,
            max_cooldown_s=717,
            cooldown_jitter=0.717,
        ),
        "guard": GuardRules.model_validate(
            {
                "max_iterations": 717,
                "max_tokens": 717,
                "max_cost_usd": "7.17",
                "consecutive_failures": 717,
                "same_error": 717,
            }
        ),
        "retry": RetryPolicy.model_validate({"max_attempts": 71, "base_s": 717, "max_delay_s": 717, "on": [417]}),
    }
    looser = {"at most": 999, "at least": 1, "among": [409], "only": None}
    more = {"breaker.failure_rate": 0.99, "retry.max_attempts": 99, "breaker.cooldown_jitter": 0.1}
    for path, allowed in ALLOWED.items():
        if allowed == "only" or path == "breaker.count":
            continue
        with subtests.test(path):
            own = unlike_any_other
            problem = for_caller(path, more.get(path, looser[allowed]), own=own)
            assert isinstance(problem, FieldError)
            assert not re.search(r"\d", problem.message), problem
            if path not in {"retry.max_delay_s", "breaker.max_cooldown_s"}:  # below base_s, or cooldown_s
                assert re.search(r"7\.?1|41", of(path, more.get(path, looser[allowed]), own=own).message)
    assert get_args(Allowed) == tuple(looser)


@each_row(
    ("path", "value", "said"),
    [
        ("guard.max_iterations", 20, None),
        ("guard.max_iterations", "off", None),
        ("retry.max_delay_s", 0.1, None),
        ("guard.max_iteration", 20, "'guard.max_iteration' is no rule that a job can bring; did you mean "),
        ("timeout_s", 20, "write it as in"),
        ("guard.max_iterations", 0, "max_iterations: should be greater than or equal to 1"),
    ],
)
def test_a_bound_is_checked_as_the_rule_is(path: str, value: Any, said: str | None) -> None:
    problem = bound_problem(path, value)
    assert problem is None if said is None else said in (problem or "")


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_what_is_allowed_is_never_looser_than_the_agent(own: int, asked: int) -> None:
    rules = of("guard.consecutive_failures", asked, own=with_own("guard", GuardRules(consecutive_failures=own)))
    assert isinstance(rules, JobRules) == (asked <= own)
