"""Which params of a job reach a model where a cap has to hold, or models are chosen from a list."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
import yaml

from breakwater.config import Config, parse_config
from breakwater.config.job_validation import validate_job
from breakwater.jobs.contract.job import Job
from breakwater.kernel.errors import ConfigError
from breakwater.prices.rules.price import max_output_of
from tests.tables import each_row

CAP = {"daily_usd": 1, "enforcement": "hard"}
PROVIDERS = {
    "open": {"base_url": "http://127.0.0.1:1/v1"},
    "azure": {"kind": "azure", "base_url": "http://127.0.0.1:1"},
    "claude": {"kind": "anthropic"},
    "program": {"kind": "process", "command": ["true"]},
}
FUNCTION = {"name": "look_up", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}

ATTACKS: list[tuple[str, dict[str, Any]]] = [
    ("models", {"models": ["openai/gpt-5-pro"]}),
    ("route", {"route": "fallback"}),
    ("fallbacks", {"fallbacks": ["gpt-5-pro"]}),
    ("provider", {"provider": {"order": ["dearest"]}}),
    ("transforms", {"transforms": ["middle-out"]}),
    ("enable_search", {"enable_search": True}),
    ("data_sources", {"data_sources": [{"type": "azure_search"}]}),
    ("connectors", {"connectors": [{"id": "web-search"}]}),
    ("options", {"options": {"num_predict": 10**6}}),
    ("max_output_tokens", {"max_output_tokens": 10**6}),
    ("Models", {"Models": ["a"]}),
    ("tools.0.type", {"tools": [{"type": "browser_search"}]}),
    ("tools.1.type", {"tools": [TOOL, {"type": "openrouter:web_search"}]}),
    ("tools.0.type", {"tools": [{"google_search": {}}]}),
    ("tools.0.type", {"tools": [{"type": ["function", "web_search"]}]}),
    ("tools.0.google_search", {"tools": [{**TOOL, "google_search": {}}]}),
]
FREE: list[dict[str, Any]] = [
    {"temperature": 0.1, "top_p": 0.9, "seed": 1, "stop": ["x"], "n": 2, "logit_bias": {}, "user": "u"},
    {"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}], "tool_choice": "auto", "parallel_tool_calls": False},
    {"response_format": {"type": "json_object"}, "reasoning_effort": "low", "metadata": {"a": "b"}, "store": False},
    {"max_completion_tokens": 5, "modalities": ["text"], "audio": None, "thinking": {"type": "disabled"}},
]


def config(**settings: Any) -> Config:
    return parsed(json.dumps(settings))


@lru_cache
def parsed(settings: str) -> Config:
    of_agent: dict[str, Any] = json.loads(settings)
    more = {"budgets": of_agent.pop("budgets")} if "budgets" in of_agent else {}
    price = {"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2}}
    agents = {
        **{name: {"model": f"{name}/m", **of_agent} for name in ("open", "azure", "claude")},
        "mixed": {"model": "claude/m", "fallback_models": ["open/m"], **of_agent},
        "program": {"provider": "program", **of_agent},
    }
    models = {f"{name}/m": price for name in ("open", "azure", "claude")}
    return parse_config(yaml.safe_dump({"providers": PROVIDERS, "models": models, "agents": agents, **more}))


def refused(config: Config, agent: str, params: dict[str, Any], **job: Any) -> str | None:
    problem = validate_job(config, config.limit_table, Job(agent=agent, prompt="x", params=params, **job))
    return None if problem is None else f"{problem.path}: {problem.message}"


STRICT: dict[str, dict[str, Any]] = {
    "an agent's limit": {"budget": CAP},
    "a limit of all": {"budgets": {"global": CAP}},
    "a limit of each tenant": {"budgets": {"tenants": {"*": CAP}}},
    "a limit of a job": {"max_cost_usd": "0.5"},
    "a list of models": {"allowed_models": ["open/m"]},
}


@each_row("why", STRICT)
@each_row(("place", "params"), ATTACKS)
def test_under_a_cap_or_a_list_of_models_only_params_pass_that_cost_tokens_alone(
    why: str, place: str, params: dict[str, Any]
) -> None:
    strict = config(**STRICT[why])
    for agent in ("open", "azure", "mixed"):
        said = refused(strict, agent, params, tenant="acme") or ""
        assert said.startswith(f"params.{place}: "), (agent, said)
        assert f"agents.{agent}.allowed_params" in said
    assert refused(strict, "program", params, tenant="acme") is None
    assert refused(config(), "open", params) is None, "where nothing has to hold"
    allowed = config(**STRICT[why], allowed_params=[place.partition(".")[0]])
    assert refused(allowed, "open", params, tenant="acme") is None


@each_row("params", FREE)
def test_what_costs_tokens_alone_passes_under_a_cap(params: dict[str, Any]) -> None:
    for agent in ("open", "azure", "claude", "mixed"):
        assert refused(config(budget=CAP), agent, params) is None, agent


def test_each_kind_of_provider_has_params_of_its_own() -> None:
    strict = config(budget=CAP)
    servers = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "enable_thinking": False, "guided_json": {}}
    assert refused(strict, "open", servers) is None
    assert (refused(strict, "azure", {"min_p": 0.1}) or "").startswith("params.min_p: ")
    own = {"system": "Be brief.", "stop_sequences": ["x"], "top_k": 1, "output_config": {"effort": "low"}}
    tools = [{"name": "a", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}, TOOL]
    assert refused(strict, "claude", {**own, "tools": tools}) is None
    for name in ("container", "context_management", "betas", "fallbacks"):
        assert (refused(strict, "claude", {name: {}}) or "").startswith(f"params.{name}: ")
    assert (refused(strict, "claude", {"tools": [{"type": "advisor_1"}]}) or "").startswith("params.tools.0.type: ")


@each_row(
    ("scope", "refused_jobs"),
    [
        ("plane", {"open", "acme", "mixed"}),
        ("agent:open", {"open", "acme"}),
        ("tenant:*", {"acme"}),
        ("tenant:other", set()),
        ("model:claude/m", {"mixed"}),
        ("provider:claude", {"mixed"}),
        ("model:claude/m within tenant:*", set()),
        ("key:bot", {"open", "acme", "mixed"}),
        ("user:*", {"open", "acme", "mixed"}),
        ("key:bot within model:claude/m", {"mixed"}),
        ("user:* within tenant:*", {"acme"}),
    ],
)
def test_a_limit_makes_params_strict_for_those_jobs_alone_that_it_may_count(scope: str, refused_jobs: set[str]) -> None:
    limited = config(budgets={"limits": [{"scope": scope, "usd": 1, "per": "week"}]})
    jobs = {"open": {"agent": "open"}, "acme": {"agent": "open", "tenant": "acme"}, "mixed": {"agent": "mixed"}}
    params = {"enable_search": True}
    assert {name for name, job in jobs.items() if refused(limited, params=params, **job)} == refused_jobs


def test_a_tenant_without_a_cap_and_a_soft_cap_are_no_hard_cap() -> None:
    params = {"enable_search": True}
    tenants = config(budgets={"tenants": {"acme": CAP}})
    assert refused(tenants, "open", params, tenant="acme") is not None
    assert refused(tenants, "open", params, tenant="other") is None
    assert refused(tenants, "open", params) is None
    assert refused(config(budget={"daily_usd": 1}), "open", params) is None


@each_row("name", ["api_base", "base_url", "api_key", "extra_body", "extra_headers", "extra_query"])
def test_where_a_request_goes_and_as_whom_is_no_param_anywhere(name: str) -> None:
    said = f"params.{name}: is for the config of the provider to set"
    for agent in ("open", "azure", "claude", "mixed"):
        assert refused(config(allowed_params=[name], allowed_models=["open/m"]), agent, {name: "http://x"}) == said
        assert refused(config(), agent, {name: {}}) == said
    assert refused(config(), "program", {name: "http://x"}) is None
    with pytest.raises(ConfigError, match=f"params.{name}: is for the config"):
        config(params={name: "http://x"})


def test_an_agent_may_have_other_params_than_its_jobs() -> None:
    assert refused(config(budget=CAP, params={"provider": {"order": ["a"]}}), "open", {"temperature": 1}) is None


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_answers_that_are_made_and_not_given_count_in_the_worst_case(name: str) -> None:
    assert max_output_of({"max_tokens": 10, name: 5}, 1) == 50
    assert refused(config(budget=CAP), "open", {name: 5}) is None
    assert (refused(config(), "open", {name: 1000}) or "").startswith(f"params.{name}: must be")
