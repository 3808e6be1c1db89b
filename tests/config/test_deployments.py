"""Deployments in the config: which places and keys a model has, and clear words for what can't be."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.config import Config, breakers_of, parse_config
from breakwater.config.targets import Targets
from breakwater.kernel.errors import ConfigError
from breakwater.limits.rules.scopes import CallNames
from tests.tables import each_row

PRICE = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}
WEST = {"provider": "west", "name": "prod", "key": {"env": "KEY_W"}}
EAST = {"provider": "east", "name": "prod"}
PROVIDERS = {
    "west": {"kind": "azure", "base_url": "https://west.example", "api_key": {"env": "OWN"}},
    "east": {"kind": "azure", "base_url": "https://east.example"},
    "mirror": {"kind": "azure", "base_url": "https://east.example"},
    "openai": {"base_url": "https://api.example/v1"},
    "script": {"kind": "process", "command": ["cat"]},
}


def config(*deployments: dict[str, Any], agent: dict[str, Any] | None = None, **model: Any) -> Config:
    settings = {"price": PRICE, **({"deployments": list(deployments)} if deployments else {}), **model}
    document = {"providers": PROVIDERS, "models": {"m": settings}, "agents": {"a": {"model": "m", **(agent or {})}}}
    return parse_config(yaml.safe_dump(document))


def test_each_key_is_a_deployment_and_the_rest_follows_from_the_model() -> None:
    keys = [{"env": "KEY_A"}, {"file": "/run/secrets/key-b"}, {"command": ["vault", "read", "key"]}]
    loaded = config(
        {**WEST, "weight": 2, "region": "eu-west", "limits": {"requests_per_minute": 5}},
        {**EAST, "price": {"input_usd_per_mtok": 3, "output_usd_per_mtok": 3}},
        {"provider": "openai", "key": keys, "role": "overflow"},
    )
    targets = Targets(loaded).all_of("a", "m")
    assert [(one.provider, one.name, one.key, one.weight, one.overflow) for one in targets] == [
        ("west", "prod", "KEY_W", 2, False),
        ("east", "prod", None, 1, False),
        ("openai", "m", "KEY_A", 1, True),
        ("openai", "m", "key-b", 1, True),
        ("openai", "m", targets[4].key, 1, True),
    ]
    assert (targets[4].key or "").startswith("command-")
    assert targets[0].deployment == targets[0].listed == targets[0].unit == "west/prod#KEY_W"
    assert targets[1].deployment == "east/prod"
    # Each key opens its provider once more, with that key; without one, the provider's own is used.
    connections = loaded.connections
    assert [one.connection for one in targets[:3]] == ["west#KEY_W", "east", "openai#KEY_A"]
    assert str(connections["west#KEY_W"].api_key).count("KEY_W") == 1  # pyright: ignore[reportAttributeAccessIssue]
    assert connections["west"] == loaded.providers["west"]
    costs = [one.pricing and one.pricing.worst_case(1_000_000, 0) for one in targets[:2]]
    assert costs == [10**9, 3 * 10**9]
    assert {key.model for key in breakers_of(loaded)} == {one.unit for one in targets}
    rates = loaded.limit_table.rate_limits(CallNames("a", model="m", provider="west", deployment="west/prod#KEY_W"))
    assert [window.key for window in rates.windows] == ["deployment:west/prod#KEY_W"]


def test_a_model_without_deployments_is_one_as_it_always_was() -> None:
    loaded = config(provider="west", name="prod")
    [target] = Targets(loaded).all_of("a", "m")
    assert (target.deployment, target.listed, target.unit, target.connection) == ("west/prod", None, "m", "west")
    assert list(breakers_of(loaded)) == [BreakerKey("a", "m")]
    assert loaded.connections == loaded.providers


@each_row(
    ("deployments", "settings", "problem"),
    [
        ([], {"deployments": []}, "models.m: deployments is empty"),
        ([{**WEST, "key": []}], {}, "models.m.deployments.0.key: is empty"),
        ([{**WEST, "key": "sk-123"}], {}, "a secret does not belong in the config"),
        ([{**WEST, "provider": "wst"}], {}, "'wst' is not configured; did you mean 'west'?"),
        ([{**WEST, "provider": "wst", "key": [{"env": "A"}, {"env": "B"}]}], {}, "config: 1 mistake\n"),
        ([{"provider": "script"}], {}, "the one of 'script': its kind is 'process'; only providers with a URL"),
        ([WEST, EAST, WEST], {}, "'west/prod#KEY_W' is listed twice, as number 1 and 3"),
        ([{**WEST, "key": [{"env": "A"}, {"env": "A"}]}], {}, "'west/prod#A' is listed twice, as number 1 and 2"),
        (
            [{"provider": "west", "name": "prod"}, {**WEST, "key": [{"env": "B"}, {"env": "OWN"}]}],
            {},
            "'west/prod#OWN' and 'west/prod' are the same place under the same key",
        ),
        ([EAST, {"provider": "mirror", "name": "prod"}], {}, "'mirror/prod' and 'east/prod' are the same place"),
        (
            [{"provider": "openai", "name": name, "key": {"file": f"/{name}/key"}} for name in "ab"],
            {},
            "the key file /b/key has the name of /a/key (models.m), and names tell keys apart; rename one",
        ),
        ([WEST], {"provider": "west"}, "has a provider and deployments"),
        ([], {"choose": "weighted"}, "choose needs deployments to choose from"),
        ([{**WEST, "weight": 0}], {}, "models.m.deployments.0.weight"),
        ([{**WEST, "role": "spare"}], {}, "models.m.deployments.0.role"),
        ([{**WEST, "limit": {}}], {}, "models.m.deployments.0.limit: is not a known setting; did you mean 'limits'?"),
        ([{**WEST, "region": "eu-west"}], {"agent": {"residency": "us"}}, "'m' has no deployment in 'us'"),
        ([WEST], {"agent": {"residency": "eu"}}, "'m' has no deployment in 'eu'"),
    ],
)
def test_a_mistake_is_named(deployments: list[dict[str, Any]], settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        config(*deployments, **settings)
    assert problem in str(mistake.value)
    assert "1 mistake" in str(mistake.value)


def test_a_program_that_may_call_no_model_of_an_agent_is_a_mistake() -> None:
    models = {"m": {"price": PRICE, "deployments": [{**EAST, "region": "eu-west"}]}}
    document: dict[str, Any] = {"providers": PROVIDERS, "models": models, "agents": {"a": {"model": "m"}}}
    parse_config(yaml.safe_dump({**document, "programs": {"p": {"agents": ["a"], "residency": "eu"}}}))
    with pytest.raises(ConfigError, match=r"programs\.p\.residency: no model of agent 'a' has a deployment in 'us'"):
        parse_config(yaml.safe_dump({**document, "programs": {"p": {"agents": ["a"], "residency": "us"}}}))


@each_row(
    ("settings", "problem"),
    [
        ({"provider": "east"}, "models.west/prod: is at 'east/west/prod', and has the id of a deployment of models.m"),
        ({"name": "other"}, "models.west/prod: is at 'west/other', and has the id of a deployment of models.m"),
        ({}, None),
        ({"provider": "west", "name": "prod"}, None),
        ({"deployments": [EAST]}, None),
    ],
)
def test_a_model_of_the_id_of_a_deployment_is_that_place_or_refused(
    settings: dict[str, Any], problem: str | None
) -> None:
    listed = {"provider": "west", "name": "prod"}
    models = {"m": {"price": PRICE, "deployments": [listed]}, "west/prod": {"price": PRICE, **settings}}
    agents = {"a": {"model": "m", "fallback_models": ["west/prod"]}}
    text = yaml.safe_dump({"providers": PROVIDERS, "models": models, "agents": agents})
    if problem is None:
        parse_config(text)
        return
    with pytest.raises(ConfigError) as mistake:
        parse_config(text)
    assert problem in str(mistake.value)
    assert "1 mistake" in str(mistake.value)


def test_a_place_of_two_models_has_one_limit() -> None:
    limited = {**EAST, "limits": {"requests_per_minute": 5}}
    models = {"m": {"price": PRICE, "deployments": [EAST]}, "n": {"price": PRICE, "deployments": [limited]}}
    document = {"providers": PROVIDERS, "models": models, "agents": {"a": {"model": "m", "fallback_models": ["n"]}}}
    said = r"models\.n\.deployments: 'east/prod' has other limits than under models\.m, but the calls of both count"
    with pytest.raises(ConfigError, match=said):
        parse_config(yaml.safe_dump(document))
    models["m"]["deployments"] = [limited]
    parse_config(yaml.safe_dump(document))
