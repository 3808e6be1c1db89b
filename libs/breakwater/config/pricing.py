"""Prices of the models of a config: its own, or else those of the price list."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from breakwater.calls.providers.settings import LocalSettings
from breakwater.config.agents import ModelSettings
from breakwater.config.deployments import Deployment
from breakwater.config.document import Config
from breakwater.kernel.formats import moneys
from breakwater.limits.rules.scopes import CallNames, Dimensions
from breakwater.prices.price_list import CallPrice, ListedPricing, Pricing, listed_pricing, sells_embeddings
from breakwater.prices.rules.price import max_output_of, tariff_of


def pricing_of(config: Config, provider: str, model: str) -> Pricing | None:
    """Returns the prices of a model at a provider; None if neither the config nor the price list has the model."""
    return deployment_pricing(config, Deployment(model, provider, config.name_at_provider(provider, model)))


def deployment_pricing(config: Config, deployment: Deployment) -> Pricing | None:
    """Returns the prices of a deployment: its own, else the model's, else those of the price list; None without any."""
    settings = config.models.get(deployment.model)
    provider_settings = config.providers.get(deployment.provider)
    tools = {} if settings is None else settings.tool_prices
    price = None if deployment.settings is None else deployment.settings.price
    price = price or (None if settings is None else settings.price)
    configured = None if price is None else replace(tariff_of(price), tools=tools)
    if isinstance(provider_settings, LocalSettings):
        # Never from the list: a program may happen to have the name of a model in it.
        cost_per_call = provider_settings.cost_per_call_usd
        return configured if cost_per_call is None else CallPrice(cost_per_call, configured)
    if configured is not None:
        return configured
    seller = None if provider_settings is None else provider_settings.seller
    if deployment.settings is not None:
        listed = listed_pricing(deployment.model, deployment.name, deployment.provider, seller=seller)
    else:
        listed = _list_price(deployment.model, settings, seller)
    return None if listed is None else replace(listed, tools=tools)


def unaffordable(config: Config, agent_name: str) -> str | None:
    """Explains why an agent can never call: a hard limit is below the cost of its smallest call.

    Only its own limits and the global ones count, not those of tenants. None if any of its models may be called.
    """
    agent = config.agents[agent_name]
    table = config.limit_table
    caps = [
        (counter.hard_limit, counter.setting)
        for counter in table.counters(CallNames(agent_name), Dimensions(table.dimensions))
        if counter.hard_limit is not None and counter.unit == "usd"
    ]
    if agent.max_cost_usd is not None:
        caps.append((agent.max_cost_usd, f"agents.{agent_name}.max_cost_usd"))
    if not caps:
        return None
    cap, setting = min(caps)
    reasons: list[str] = []
    places = ((model, deployment) for model in agent.chain for deployment in config.deployments(agent, model))
    for model, deployment in places:
        pricing = deployment_pricing(config, deployment)
        max_output = 0 if sells_embeddings(pricing) else max_output_of(agent.params, agent.max_tokens)
        output_cost = None if pricing is None else pricing.worst_case(0, max_output)
        if output_cost is None:
            reasons.append(f"{model} has no price (set models.{model}.price)")
        elif output_cost > cap:
            cost_text, cap_text = moneys(output_cost, cap)
            reasons.append(
                f"the output of a call to {model} alone may cost {cost_text}, and {setting} is {cap_text} "
                "(raise it, or lower max_tokens)"
            )
        else:
            return None
    return f"no call is ever made under the hard limit: {'; '.join(reasons)}"


def long_inputs_cost_more(model: str, settings: ModelSettings) -> int | None:
    """Returns the input tokens above which the price list has other prices, though the config's price has no tiers."""
    listed = None if settings.price is None or settings.price.tiers else _list_price(model, settings)
    steps = () if listed is None else listed.tariff(datetime.now(UTC)).standard.steps.get("input", ())
    return next((above for above, _ in steps if above > 0), None)


def _list_price(model: str, settings: ModelSettings | None, seller: str | None = None) -> ListedPricing | None:
    if settings is None:
        return listed_pricing(model, seller=seller)
    return listed_pricing(model, settings.name, settings.provider, seller=seller)
