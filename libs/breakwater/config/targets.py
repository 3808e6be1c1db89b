"""The models of a config as each agent calls them: provider, price and limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import structlog

from breakwater.calls.providers.settings import HttpSettings
from breakwater.calls.rules.choice import ChoicePolicy
from breakwater.calls.targets import SubstituteModel, Target
from breakwater.config.agents import ModelSettings
from breakwater.config.deployments import Deployment
from breakwater.config.document import Config
from breakwater.config.pricing import deployment_pricing, pricing_of
from breakwater.dialects.rules.provider_words import is_placeholder, is_same_model
from breakwater.jobs.contract.job import CallApi
from breakwater.prices.price_list import Pricing, discounts_cached, listed_name, listed_pricing
from breakwater.prices.rules.price import TokenRules, rules_for

MAX_KNOWN = 4096
MAX_LOGGED = 100
"""The most substitutes that are logged, as a provider may name a new model in each answer."""


class Targets:
    """The models of a config as its agents call them, each computed once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        # Programs may name models that the config does not: the caches have an end.
        self.all_of: Callable[[str, str], tuple[Target, ...]] = lru_cache(MAX_KNOWN)(self._targets)
        """Returns the deployments of an agent's name and a model's id; never none."""
        self.policy_of: Callable[[str, str], ChoicePolicy] = lru_cache(MAX_KNOWN)(self._policy)
        """Returns how one of them is chosen."""
        self._by_id = lru_cache(MAX_KNOWN)(self._listed_targets)
        self._pricings: dict[tuple[str, str], Pricing | None] = {}
        self._substitute = lru_cache(MAX_KNOWN)(self._find_substitute)
        self._names_of = lru_cache(MAX_KNOWN)(self._find_names)
        self._logged: set[tuple[str, str]] = set()

    def of(self, agent_name: str, model: str, listed: str | None = None) -> Target:
        """Returns the deployment that an attempt was on; if there is no such any more, the model's first one.

        Args:
            agent_name: the agent.
            model: the model's id.
            listed: the deployment's id, as the attempt records it.
        """
        return self._by_id(agent_name, model).get(listed) or self.all_of(agent_name, model)[0]

    def _targets(self, agent_name: str, model: str) -> tuple[Target, ...]:
        agent = self._config.agents[agent_name]
        deployments = self._config.deployments(agent, model)
        return tuple(self._target(deployment, has_others=len(deployments) > 1) for deployment in deployments)

    def _listed_targets(self, agent_name: str, model: str) -> dict[str | None, Target]:
        return {target.listed: target for target in self.all_of(agent_name, model)}

    def _target(self, deployment: Deployment, *, has_others: bool) -> Target:
        settings = deployment.settings
        provider = self._config.providers.get(deployment.provider)
        apis = frozenset[CallApi](() if provider is None else provider.apis_of(deployment.name))
        translates_chats = provider is not None and provider.translates_chats(deployment.name)
        return Target(
            model=deployment.model,
            provider=deployment.provider,
            name=deployment.name,
            deployment=deployment.id,
            listed=None if settings is None else deployment.id,
            key=deployment.key_name,
            connection=deployment.connection,
            has_others=has_others,
            weight=1.0 if settings is None else settings.weight,
            overflow=settings is not None and settings.role == "overflow",
            region=None if settings is None else settings.region,
            apis=apis,
            unchanged_apis=apis - {"chat"} if translates_chats else apis,
            token_rules=token_rules(self._config, deployment),
            pricing=self._pricing_of(deployment),
        )

    def _policy(self, agent_name: str, model: str) -> ChoicePolicy:
        settings = self._config.models.get(model, ModelSettings())
        sticky = settings.affinity == "session"
        if settings.affinity is None:
            prices = (target.pricing for target in self.all_of(agent_name, model))
            sticky = any(pricing is None or discounts_cached(pricing) for pricing in prices)
        return ChoicePolicy(settings.choose or "headroom", sticky=sticky)

    def substitute(self, target: Target, answered: str) -> SubstituteModel | None:
        """Returns the model that an answer names, if it is not the requested one."""
        if answered == target.name or is_same_model(answered, (target.name, target.model)):
            return None
        serving = self._config.providers.get(target.provider)
        # What costs nothing runs on a server of one's own.
        free = target.pricing is not None and target.pricing.worst_case(10**6, 10**6) == 0
        if free or serving is None:
            return None
        if target.listed is not None and is_same_model(answered, self._names_of(target.model)):
            return None
        if serving.kind == "azure" and not self._is_another_listed(target, answered):
            return None
        substitute = self._substitute(target.provider, answered)
        return None if substitute.pricing is None and is_placeholder(answered) else substitute

    def _find_names(self, model: str) -> tuple[str, ...]:
        """Returns the names that a model has at all of its deployments."""
        return tuple({place.name: None for place in self._config.listed_deployments if place.model == model})

    def _is_another_listed(self, target: Target, answered: str) -> bool:
        """Returns True if the price list tells an answer's model from the one that a model's id names.

        Azure's deployments have names of their own, so that nothing else shows what they are.
        """
        if target.listed is None:
            return False
        requested, answering = listed_pricing(target.model), listed_pricing(answered)
        return requested is not None and answering is not None and listed_name(requested) != listed_name(answering)

    def log_substitute(self, target: Target, answered: str) -> None:
        """Logs once that another model answers than the requested one. `answered` is safe to log."""
        place = target.deployment, answered
        if place not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(place)
            structlog.get_logger().warning(
                "another_model_answers", model=target.model, deployment=target.listed, answered=answered
            )

    def _find_substitute(self, provider: str, answered: str) -> SubstituteModel:
        config = self._config
        named = {config.name_at_provider(provider, model): model for model in sorted(config.models)}
        ids = dict.fromkeys((named.get(answered, answered), f"{provider}/{answered}", answered))
        for model in ids:
            if (pricing := pricing_of(config, provider, model)) is not None:
                return SubstituteModel(model if model in config.models else listed_name(pricing), pricing)
        return SubstituteModel(next((model for model in ids if model in config.known_models), None), None)

    def _pricing_of(self, deployment: Deployment) -> Pricing | None:
        place = deployment.model, deployment.id
        if place in self._pricings:
            return self._pricings[place]
        if len(self._pricings) >= MAX_KNOWN:
            self._pricings.clear()
        pricing = self._pricings[place] = deployment_pricing(self._config, deployment)
        if pricing is None and not self._config.is_local(deployment.provider):
            model = deployment.model
            structlog.get_logger().warning("model_without_price", model=model, what_to_do=f"set models.{model}.price")
        return pricing


def token_rules(config: Config, deployment: Deployment) -> TokenRules:
    """Returns the rules that estimate the tokens of a call, by its provider, and by the model's name there."""
    serving = config.providers.get(deployment.provider)
    settings = config.models.get(deployment.model)
    return rules_for(
        "" if serving is None else serving.api_kind(deployment.name),
        serving.base_url if isinstance(serving, HttpSettings) else "",
        (deployment.name, deployment.model),
        None if settings is None else settings.image_tokens,
    )
