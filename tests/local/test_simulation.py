"""What a simulated provider is given when the config is looked at again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from breakwater.kernel.errors import ConfigError
from breakwater.local.datadir import DataDir
from breakwater.local.provider.app import SimulatedProvider
from breakwater.local.provider.script import build_script
from breakwater.local.simulation import simulate, write_simulation

CONFIG = {
    "providers": {"openai": {"base_url": "http://127.0.0.1:9/v1"}},
    "models": {"one": {"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}}},
    "agents": {"writer": {"model": "one"}},
}


async def test_a_config_that_has_not_changed_leaves_the_provider_its_script(tmp_path: Path) -> None:
    data, file = DataDir(tmp_path / "data"), tmp_path / "breakwater.yaml"
    data.create()
    file.write_text(yaml.safe_dump(CONFIG))
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "1"}
    async with SimulatedProvider({"models": {"of-the-person": {"price": price}}}) as sim:
        simulation = write_simulation(data, file, port=sim.port)
        assert (await simulation.follow(file)).name == "breakwater.simulated.yaml"
        assert sim.models == ["of-the-person"]
        file.write_text(yaml.safe_dump(CONFIG).replace("one", "two"))
        await simulation.follow(file)
        assert sim.models == ["two"]
    # What the provider could not be given, it is given at the next look.
    file.write_text(yaml.safe_dump(CONFIG))
    for _ in range(2):
        with pytest.raises(ConfigError, match="refuses the models"):
            await simulation.follow(file)


def test_providers_speak_the_api_that_the_config_names(tmp_path: Path) -> None:
    config = {
        "providers": {
            "openai": {"base_url": "https://api.openai.com/v1", "headers": {"a": "b"}},
            "anthropic": {"kind": "anthropic", "api_key": {"env": "KEY"}},
            "azure": {"kind": "azure", "base_url": "https://x.openai.azure.com", "api_version": "2024-10-21"},
        },
        "models": {
            "claude": {
                "provider": "anthropic",
                "price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1, "cache_write_usd_per_mtok": 3},
                "tool_prices": {"web_search": 0.01},
                "dimensions": 8,
            }
        },
        "agents": {"writer": {"model": "claude", "provider": "openai"}},
    }
    file = tmp_path / "breakwater.yaml"
    file.write_text(yaml.safe_dump(config))
    script, document = simulate(file, "http://127.0.0.1:1/v1")
    url = {"base_url": "http://127.0.0.1:1/v1"}
    assert document["providers"] == {"openai": url, "anthropic": {**url, "kind": "anthropic"}, "azure": url}
    assert script["models"]["claude"]["price"]["cache_write_usd_per_mtok"] == "3.000000000"
    assert document["models"]["claude"]["price"]["cache_write_usd_per_mtok"] == "3.000000000"
    assert script["models"]["claude"]["price"]["hosted_usd"] == {"web_search": "0.010000000"}
    assert script["models"]["claude"]["dimensions"] == document["models"]["claude"]["dimensions"] == 8
    build_script(script)


def test_models_that_jobs_may_ask_for_are_simulated_and_keep_their_names(tmp_path: Path) -> None:
    config = {
        "providers": {"a": {"base_url": "http://127.0.0.1:9/v1"}, "b": {"base_url": "http://127.0.0.1:9/v1"}},
        "models": {"b/large": {"name": "deployment"}, "known": {"provider": "a"}},
        "agents": {
            "writer": {"model": "a/small", "allowed_models": ["a/same", "b/same", "b/large"]},
            "open": {"model": "a/small", "allowed_models": ["*"]},
        },
    }
    file = tmp_path / "breakwater.yaml"
    file.write_text(yaml.safe_dump(config))
    script, document = simulate(file, "http://127.0.0.1:1/v1")
    models = ["a/same", "a/small", "b/large", "b/same", "known"]
    assert list(script["models"]) == models
    names = {model: document["models"][model].get("name") for model in models}
    assert names == {"a/same": "a/same", "a/small": None, "b/large": "b/large", "b/same": "b/same", "known": None}
