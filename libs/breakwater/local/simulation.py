"""The simulated provider in place of every real one, so that a config can be tried without a key and without a bill."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientError, ClientSession, ClientTimeout

from breakwater.config import ModelSettings, load_config
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.process.files import write_private
from breakwater.kernel.types import usd_from_nano
from breakwater.local.datadir import DataDir
from breakwater.local.ports import LOOPBACK, free_port, http_ready
from breakwater.local.process import ProcessSpec

AMOUNTS = (
    "input_usd_per_mtok",
    "output_usd_per_mtok",
    "cached_input_usd_per_mtok",
    "cache_write_usd_per_mtok",
    "cache_write_1h_usd_per_mtok",
)
FALLBACK_PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "4"}
SCRIPT = "simulation.json"
LATENCY_MS = {"p50": 120, "p95": 400}


@dataclass(frozen=True, slots=True)
class Simulation:
    """The provider's process, and the config whose providers all are this one.

    Attributes:
        process: to start before the services.
        config_file: the config for the services: the user's own with other providers.
        control_url: of the provider's ledger.
        edited_file: the user's own config.
    """

    process: ProcessSpec
    config_file: Path
    control_url: str
    edited_file: Path
    data: DataDir
    port: int

    async def follow(self, config_file: Path) -> Path:
        """Simulates another config, with the provider that runs, and returns the one for the services.

        Raises:
            ConfigError: the user's config can't be used, or the provider does not take its script.
        """
        file = self.data.path / SCRIPT
        before = file.read_bytes()
        changed = write_simulation(self.data, config_file, port=self.port)
        if (script := file.read_bytes()) == before:
            # Sending it again would replace a script that was sent meanwhile, and number the answers from 1 again.
            return changed.config_file
        try:
            async with (
                ClientSession(timeout=ClientTimeout(5)) as session,
                session.post(f"{self.control_url}/_sim/script", data=script) as answer,
            ):
                answer.raise_for_status()
        except (ClientError, TimeoutError) as error:
            write_private(file, before.decode())
            raise ConfigError(f"the simulated provider refuses the models of {config_file}: {error}") from error
        return changed.config_file


def write_simulation(data: DataDir, config_file: Path, port: int | None = None) -> Simulation:
    """Writes script and config of a simulation into the data directory: every model answers, at its price.

    Args:
        data: the data directory.
        config_file: the user's config; prices are taken from it.
        port: of the provider; by default a free one.
    """
    port = port or free_port()
    script_file = data.path / SCRIPT
    script, document = simulate(config_file, f"http://{LOOPBACK}:{port}/v1")
    write_private(script_file, json.dumps(script))
    effective = data.path / "breakwater.simulated.yaml"
    write_private(effective, yaml.safe_dump(document, sort_keys=False))
    process = provider_process(data, port, script_file)
    return Simulation(process, effective, f"http://{LOOPBACK}:{port}", config_file.absolute(), data, port)


def simulate(config_file: Path, base_url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the script of a simulated provider at `base_url`, and the config whose providers all are that one."""
    config = load_config(config_file)
    prices: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for agent in config.agents.values():
        allowed = config.known_models if "*" in agent.allowed_models else agent.allowed_models
        for model in (*agent.chain, *allowed):
            provider = config.provider_name(agent, model)
            if config.is_local(provider):
                continue
            names[model] = model if provider is None else config.name_at_provider(provider, model)
            settings = config.models.get(model)
            price = None if settings is None else settings.price
            amounts = {name: getattr(price, name, None) for name in AMOUNTS}
            known_prices = {name: usd_from_nano(nano) for name, nano in amounts.items() if nano is not None}
            prices[model] = known_prices or FALLBACK_PRICE
    prices = dict(sorted(prices.items()))
    script = {"models": {model: _behaviour(price, config.models.get(model)) for model, price in prices.items()}}
    document = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    # Programs and callables stay what they are: they need no key, and send no bill of their own.
    named = document["providers"]
    document["providers"] = {
        name: named[name] if settings.local else {"base_url": base_url, **_api_settings(named[name])}
        for name, settings in config.providers.items()
    }
    # The plane must calculate with the prices that the simulated provider charges.
    models = document.setdefault("models", {})
    for model, price in prices.items():
        # All providers are one here, so a model whose name ends another's id, too, is called by its whole id.
        same_name = [other_model for other_model in prices if f"/{other_model}".endswith(f"/{names[model]}")]
        name = {} if same_name == [model] else {"name": model}
        models[model] = {**(models.get(model) or {}), "price": price, **name}
    return script, document


def _behaviour(price: dict[str, str], settings: ModelSettings | None) -> dict[str, Any]:
    """Returns the script of a model: its prices, and the length of its embeddings."""
    hosted = {} if settings is None else {tool: usd_from_nano(nano) for tool, nano in settings.tool_prices.items()}
    length = {} if settings is None or settings.dimensions is None else {"dimensions": settings.dimensions}
    return {"price": {**price, **({"hosted_usd": hosted} if hosted else {})}, "latency_ms": LATENCY_MS, **length}


def _api_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the API that a provider speaks. One with URLs of its own speaks OpenAI's instead."""
    spoken = settings.get("kind", "openai") in ("openai", "anthropic")
    return {name: settings[name] for name in ("kind", "api") if spoken and name in settings}


def provider_process(data: DataDir, port: int, script_file: Path) -> ProcessSpec:
    """Returns the simulated provider as a process of a stack."""
    module = "breakwater.local.provider"
    return ProcessSpec(
        name="simulated-provider",
        argv=(sys.executable, "-m", module, "--port", str(port), "--script", str(script_file)),
        log_file=data.logs / "simulated-provider.log",
        ready=http_ready(LOOPBACK, port, "/_sim/health"),
    )
