"""The models of a config as each agent calls them: provider, price and limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import structlog

from breakwater.calls.providers.settings import HttpSettings
from breakwater.calls.targets import SubstituteModel, Target
from breakwater.config.document import Config
from breakwater.config.pricing import pricing_of
from breakwater.dialects.rules.provider_words import is_placeholder, is_same_model
from breakwater.prices.price_list import Pricing, listed_name
from breakwater.prices.rules.price import TokenRules, rules_for

MAX_KNOWN = 4096
MAX_LOGGED = 100
"""The most substitutes that are logged, as a provider may name a new model in each answer."""


class Targets:
    """The models of a config as its agents call them, each computed once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # Programs may name models that the config does not: the caches have an end.
        self.of: Callable[[str, str], Target] = lru_cache(MAX_KNOWN)(self._target)
        """Returns the target of an agent's name and a model's id."""
        self._pricing = lru_cache(MAX_KNOWN)(self._pricing_of)
        self._substitute = lru_cache(MAX_KNOWN)(self._find_substitute)
        self._logged: set[tuple[str, str]] = set()

    def _target(self, agent_name: str, model: str) -> Target:
        config = self._config
        agent = config.agents[agent_name]
        provider = config.provider_name(agent, model) or ""
        return Target(
            model=model,
            provider=provider,
            name=config.name_at_provider(provider, model),
            deployment=config.deployment(agent, model),
            token_rules=token_rules(config, provider, model),
            pricing=self._pricing(provider, model),
        )

    def substitute(self, target: Target, answered: str) -> SubstituteModel | None:
        """Returns the model that an answer names, if it is not the requested one."""
        if answered == target.name or is_same_model(answered, (target.name, target.model)):
            return None
        serving = self._config.providers.get(target.provider)
        # A deployment of Azure's has a name of its own; and what costs nothing runs on a server of one's own.
        free = target.pricing is not None and target.pricing.worst_case(10**6, 10**6) == 0
        if free or serving is None or serving.kind == "azure":
            return None
        substitute = self._substitute(target.provider, answered)
        return None if substitute.pricing is None and is_placeholder(answered) else substitute

    def log_substitute(self, target: Target, answered: str) -> None:
        """Logs once that another model answers than the requested one. `answered` is safe to log."""
        place = target.deployment, answered
        if place not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(place)
            structlog.get_logger().warning("another_model_answers", model=target.model, answered=answered)

    def _find_substitute(self, provider: str, answered: str) -> SubstituteModel:
        config = self._config
        named = {config.name_at_provider(provider, model): model for model in sorted(config.models)}
        ids = dict.fromkeys((named.get(answered, answered), f"{provider}/{answered}", answered))
        for model in ids:
            if (pricing := pricing_of(config, provider, model)) is not None:
                return SubstituteModel(model if model in config.models else listed_name(pricing), pricing)
        return SubstituteModel(next((model for model in ids if model in config.known_models), None), None)

    def _pricing_of(self, provider: str, model: str) -> Pricing | None:
        pricing = pricing_of(self._config, provider, model)
        if pricing is None and not self._config.is_local(provider):
            structlog.get_logger().warning("model_without_price", model=model, what_to_do=f"set models.{model}.price")
        return pricing


def token_rules(config: Config, provider: str, model: str) -> TokenRules:
    """Returns the rules that estimate the tokens of a call, by its provider, and by the model's name there."""
    serving = config.providers.get(provider)
    settings = config.models.get(model)
    name = config.name_at_provider(provider, model)
    return rules_for(
        "" if serving is None else serving.api_kind(name),
        serving.base_url if isinstance(serving, HttpSettings) else "",
        (name, model),
        None if settings is None else settings.image_tokens,
    )
