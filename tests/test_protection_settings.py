"""What may be said of breakers, guards and rate limits, and what is said of mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from breakwater.calls.rules.classify import NOT_SENT, RETRYABLE_CLASSES
from breakwater.config import Config, parse_config
from breakwater.kernel.errors import ConfigError
from tests.tables import each_row


def config(agent: dict[str, Any], defaults: dict[str, Any] | None = None, name: str = "a") -> Config:
    document = {
        "providers": {"p": {"base_url": "http://127.0.0.1:9/v1"}},
        "defaults": {"model": "p/m", **(defaults or {})},
        "agents": {name: agent},
    }
    return parse_config(yaml.safe_dump(document))


@each_row(
    ("defaults", "own", "expected"),
    [
        ({}, {"preset": "refactor"}, (2, 3)),
        ({}, {"preset": "refactor", "same_error": 9}, (2, 9)),
        ({"preset": "refactor"}, {}, (2, 3)),
        ({"preset": "refactor"}, {"consecutive_failures": 7}, (7, 3)),
        ({"consecutive_failures": 7, "same_error": 8}, {"preset": "refactor"}, (2, 3)),
        ({"preset": "feature"}, {"preset": "migration-safety"}, (1, 2)),
    ],
)
def test_a_preset_is_the_rules_it_stands_for_and_the_nearer_setting_wins(
    defaults: dict[str, Any], own: dict[str, Any], expected: tuple[int, int]
) -> None:
    agent = config(
        {"breaker": own, "shadow": {"breaker": own}}, {"breaker": defaults, "shadow": {"breaker": defaults}}
    ).agents["a"]
    assert agent.shadow is not None
    for rules in (agent.breaker, agent.shadow.breaker):
        assert rules is not None
        assert (rules.consecutive_failures, rules.same_error) == expected


def test_what_protects_is_on_where_nothing_is_set_and_off_where_that_is_said() -> None:
    agent = config({}).agents["a"]
    assert agent.breaker is not None
    assert agent.guard is not None
    assert (agent.guard.max_iterations, agent.guard.max_tokens, agent.guard.max_cost_usd) == (10, 200_000, 10 * 10**9)
    off = config({"breaker": "off", "guard": "off", "rate_limit": "off"}).agents["a"]
    assert (off.breaker, off.guard, off.rate_limit) == (None, None, None)
    one_off = config({"guard": {"max_tokens": "off"}}).agents["a"].guard
    assert one_off is not None
    assert (one_off.max_tokens, one_off.max_iterations) == (None, 10)


@each_row(
    ("agent", "said"),
    [
        ({"breaker": {"preset": "refactr"}}, "agents.a.breaker.preset"),
        ({"breaker": {"consecutive_failures": "off", "same_error": "off"}}, "breaker: off"),
        ({"breaker": {"failure_rate": 50}}, "agents.a.breaker.failure_rate"),
        ({"breaker": {"scope": "world"}}, "agents.a.breaker.scope"),
        ({"shadow": {"breaker": {"probe": {}}}}, "agents.a.shadow.breaker: probe is not for a shadow"),
        ({"guard": {"max_iteration": 3}}, "did you mean 'max_iterations'"),
        ({"guard": {"confidence": {"falling": False}}}, "confidence: off"),
        ({"rate_limit": {}}, "rate_limit: off"),
        ({"rate_limit": {"requests_per_minute": 0}}, "agents.a.rate_limit.requests_per_minute"),
        ({"rate_limit": {"requests": 50}}, "need `per: hour` or `per: day`"),
        ({"rate_limit": {"per": "hour"}}, "per needs requests or tokens"),
        ({"rate_limit": {"requests": 50, "per": "minute"}}, "agents.a.rate_limit.per"),
    ],
)
def test_a_mistake_is_named_with_its_place_or_its_remedy(agent: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(agent)
    assert said in str(error.value)


@each_row(
    ("limit", "said"),
    [
        ({"scope": "plane", "tokens": 9, "per": "day"}, "shadow.limits.1: only limits of usd per day"),
        ({"scope": "plane", "usd": 9, "per": "minute"}, "shadow.limits.1: only limits of usd per day"),
        ({"scope": "agent:b", "usd": 9, "per": "day"}, "shadow.limits.1.scope: no agent 'b' is configured"),
        ({"scope": "agent:a", "usd": 9, "per": "day"}, "shadow.limits.1: shadow.limits.0 limits the same scope"),
    ],
)
def test_a_limit_that_can_not_be_tried_is_named(limit: dict[str, Any], said: str) -> None:
    document = {
        "providers": {"p": {"base_url": "http://127.0.0.1:9/v1"}},
        "agents": {"a": {"model": "p/m", "budget": {"daily_usd": 1}}},
        "shadow": {"limits": [{"scope": "agent:a", "usd": 5, "per": "day"}, limit]},
    }
    with pytest.raises(ConfigError) as error:
        parse_config(yaml.safe_dump(document))
    assert said in str(error.value)


def test_agents_that_share_a_breaker_have_the_same_rules() -> None:
    def agents(scope: str, *, of_shadows: bool = False, **other: Any) -> str:
        document: dict[str, Any] = {
            "providers": {"p": {"base_url": "http://127.0.0.1:9/v1"}},
            "agents": {
                "a": {"model": "p/m", "breaker": {"scope": scope, "preset": "feature"}},
                "b": {"model": "p/n", "breaker": {"scope": scope, **other}},
            },
        }
        if of_shadows:
            document["agents"] = {
                name: {"model": agent["model"], "shadow": {"breaker": agent["breaker"]}}
                for name, agent in document["agents"].items()
            }
        return yaml.safe_dump(document)

    parse_config(agents("provider", consecutive_failures=3, same_error=5))
    parse_config(agents("model", within_s=5))  # of another model
    with pytest.raises(
        ConfigError, match=r"agents\.b\.breaker: agent 'a' shares the breaker of p/\* but has different rules"
    ):
        parse_config(agents("provider", within_s=5))
    with pytest.raises(ConfigError, match=r"agents\.b\.shadow\.breaker: agent 'a' shares the breaker of p/\*"):
        parse_config(agents("provider", of_shadows=True, within_s=5))


def test_no_agent_is_named_as_all_of_them_are() -> None:
    with pytest.raises(ConfigError, match="means all agents"):
        config({}, name="*")


@each_row(
    ("agent", "said"),
    [
        ({"breaker": None}, "agents.a.breaker: is empty"),
        ({"guard": None}, "agents.a.guard: is empty"),
        ({"guard": {"max_cost_usd": 0}}, "agents.a.guard.max_cost_usd: must be more than 0"),
        (
            {"breaker": {"cooldown_growth": 2, "cooldown_s": 60, "max_cooldown_s": 10}},
            "max_cooldown_s must not be less",
        ),
    ],
)
def test_what_would_protect_nothing_or_work_otherwise_than_it_reads_is_refused(
    agent: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config(agent)
    assert said in str(error.value)


@each_row(
    "on",
    [
        ["PaymentRequiredError"],
        ["PaymentRequired"],
        ["NotFoundError"],
        ["NotFound"],
        ["client", 404],
        ["BackendFailureError"],
    ],
)
def test_a_class_that_calls_end_with_may_be_retried(on: list[Any]) -> None:
    assert config({"retry": {"on": on}}).agents["a"].retry.on == tuple(on)


@each_row(
    ("agent", "defaults", "said"),
    [
        (
            {"retry": {"on": [404, "NotFoundEror"]}},
            {},
            "agents.a.retry.on.1: 'NotFoundEror' is not a known error class",
        ),
        ({"retry": {"on": ["NotFoundEror"]}}, {}, "; did you mean 'NotFoundError'? (line 5)"),
        ({"retry": {"on": ["Zzz"]}}, {}, "; known: ActionNotSupportedError, "),
        ({}, {"retry": {"on": ["NotFoundEror"]}}, "1 mistake\n  defaults.retry.on.0: 'NotFoundEror'"),
    ],
)
def test_a_name_in_retry_on_that_is_no_known_class_is_a_config_error(
    agent: dict[str, Any], defaults: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config(agent, defaults)
    assert said in str(error.value)


def test_a_callable_may_raise_any_class_and_it_may_be_retried() -> None:
    document: dict[str, Any] = {
        "providers": {"p": {"base_url": "http://127.0.0.1:9/v1"}, "own": {"kind": "python", "callable": "json:dumps"}},
        "defaults": {"retry": {"on": ["ReportNotReady"]}},
        "agents": {"a": {"model": "p/m"}, "b": {"provider": "own", "retry": {"on": ["NotReady"]}}},
    }
    assert parse_config(yaml.safe_dump(document)).agents["b"].retry.on == ("NotReady",)
    document["agents"]["a"]["retry"] = {"on": ["NotReady"]}
    with pytest.raises(ConfigError, match=r"agents\.a\.retry\.on\.0"):
        parse_config(yaml.safe_dump(document))


def test_the_classes_that_may_be_retried_are_all_that_providers_fail_with() -> None:
    sources = [*Path("libs/breakwater/providers").glob("*.py"), Path("libs/breakwater/calls/rules/classify.py")]
    named = {name for path in sources for name in re.findall(r'"([A-Z]\w*Error)"', path.read_text())}
    # aiohttp's, which are given other names, and what is recovered from in another way.
    others = {"CancelledError", "ClientPayloadError", "ClientResponseError"}
    others |= {"ClientConnectorCertificateError", "ClientConnectorDNSError"}
    others |= {"ContextOverflowError", "InvalidOutputError", "OrphanToolCallsError", "ProviderError"}
    others.add(NOT_SENT)  # it would be refused again
    assert named - others <= RETRYABLE_CLASSES


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"guard.max_iteration": 20}, "agents.a.overridable: 'guard.max_iteration' is no rule that a job can bring"),
        ({"guard.max_iterations": 0}, "agents.a.overridable: max_iterations: should be greater than or equal to 1"),
        ([], "agents.a.overridable: should be a valid dictionary"),
    ],
)
def test_a_bound_of_what_jobs_may_override_is_checked_with_the_config(bounds: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config({"overridable": bounds})
    assert said in str(error.value)


def test_bounds_of_defaults_hold_for_each_agent_that_sets_none_of_its_own() -> None:
    agent = config({"overridable": {"guard.max_tokens": "off"}}, {"overridable": {"guard.max_iterations": 20}})
    assert agent.agents["a"].overridable == {"guard.max_iterations": 20, "guard.max_tokens": "off"}


def test_a_preset_of_a_guard_wins_over_what_defaults_set() -> None:
    guard = config({"guard": {"preset": "refactor"}}, {"guard": {"consecutive_failures": 9}}).agents["a"].guard
    assert guard is not None
    assert (guard.consecutive_failures, guard.same_error, guard.max_iterations) == (2, 3, 10)


def test_a_wildcard_where_names_are_written_is_refused_instead_of_matching_nothing(subtests: pytest.Subtests) -> None:
    rows: dict[str, dict[str, Any]] = {
        "agents.a.allowed_models": {"agents": {"a": {"model": "p/m", "allowed_models": ["p/*"]}}},
        "agents.a.fallback_models": {"agents": {"a": {"model": "p/m", "fallback_models": ["p/m*"]}}},
        "agents.a.model": {"agents": {"a": {"model": "p/*"}}},
        "agents.a.allowed_params": {"agents": {"a": {"model": "p/m", "allowed_params": ["web_*"]}}},
        "models.p/*": {"models": {"p/*": {}}},
        "programs.app.tenants": {"programs": {"app": {"agents": ["a"], "tenants": ["acme-*"]}}},
        "programs.app.agents": {"programs": {"app": {"agents": ["*"]}}},
        "redaction.fields": {"redaction": {"fields": ["*_token"]}},
    }
    minimal = {"providers": {"p": {"base_url": "http://127.0.0.1:9/v1"}}, "agents": {"a": {"model": "p/m"}}}
    for place, part in rows.items():
        with subtests.test(place), pytest.raises(ConfigError) as error:
            parse_config(yaml.safe_dump(minimal | part))
        assert place in str(error.value)
    any_model = {"agents": {"a": {"model": "p/m", "allowed_models": ["*"]}}}
    assert parse_config(yaml.safe_dump(minimal | any_model)).agents["a"].allowed_models == ("*",)
