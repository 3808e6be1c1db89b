"""Warnings of settings that are valid but probably mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from breakwater.alerts.settings import Alerts
from breakwater.config import Agent, Config
from breakwater.config.pricing import long_inputs_cost_more, pricing_of, unaffordable
from breakwater.dialects.rules.embeddings import fallback_objection
from breakwater.kernel.security.addresses import IpNetwork, refusal
from breakwater.limits.settings import Caps
from breakwater.prices.price_list import sells_embeddings


def warnings(config: Config) -> tuple[str, ...]:
    """Warns of settings that are valid but probably mistakes."""
    caps_of_agents = {f"agents.{name}.budget": agent.budget for name, agent in config.agents.items()}
    problems: list[str] = []
    for place, caps in {**caps_of_agents, **shared_caps(config)}.items():
        daily = caps.daily_usd
        monthly = caps.monthly_usd
        if caps.enforcement == "hard" and daily is None and monthly is None:
            problems.append(f"{place}: is hard but has no limit, so it refuses nothing; set daily_usd or monthly_usd")
        if daily is not None and monthly is not None and daily > monthly:
            problems.append(f"{place}: the daily limit exceeds the monthly one")
    problems += (warning for name in config.agents for warning in warnings_of_agent(config, name))
    for model, settings in config.models.items():
        if (above := long_inputs_cost_more(model, settings)) is not None:
            problems.append(
                f"models.{model}.price: has a single price, but the price list has others above {above:,} input "
                f"tokens; set price.tiers with above_tokens: {above}"
            )
    if len(set(config.encryption.keys)) < len(config.encryption.keys):
        problems.append("encryption.keys: the same key is listed twice")
    return (*problems, *_identity_problems(config), *_alert_problems(config.alerts))


def _identity_problems(config: Config) -> Iterable[str]:
    """Warns of tags that are not recorded, and of headers that anyone may set."""
    tokens, headers = config.identity.jwt, config.identity.headers
    for tag in () if tokens is None else tokens.tags:
        if tag not in config.cost_tags:
            yield f"identity.jwt.tags.{tag}: is not recorded, because cost_tags does not list it"
    for network in () if headers is None else headers.networks:
        if network.prefixlen == 0:
            yield f"identity.headers.networks: {network} is any address, so that any client may name any user"


def warnings_of_agent(config: Config, name: str) -> Iterable[str]:
    """Warns of problems with an agent's models, and of limits that admit no call."""
    unaffordable_reason = unaffordable(config, name)
    for problem in _model_problems(config, config.agents[name]):
        yield f"agents.{name}: {problem}"
    if unaffordable_reason is not None:
        yield f"agents.{name}: {unaffordable_reason}"


def _model_problems(config: Config, agent: Agent) -> Iterable[str]:
    local = [config.is_local(config.provider_name(agent, model)) for model in agent.chain]
    if any(local) and not all(local):
        yield (
            "has process or callable models and chat models in its chain; its jobs can't have "
            "`input`, which chat models don't support"
        )
    for model in agent.chain:
        prefix, _, name = model.partition("/")
        settings = config.models.get(model)
        if name and prefix not in config.providers and (settings is None or settings.provider is None):
            serving = config.provider_name(agent, model)
            yield (
                f"no provider is named {prefix!r}, so {serving!r} is called with the model name {model!r}; if that is "
                f"intended, set models.{model}.provider to {serving!r}"
            )
    dimensions = {model: config.dimensions(model) for model in agent.chain}
    has_embeddings = any(dimensions.values()) or any(
        sells_embeddings(pricing_of(config, config.provider_name(agent, model) or "", model)) for model in agent.chain
    )
    if has_embeddings and (problem := fallback_objection(dimensions)) is not None:
        yield f"its embeddings jobs are refused: {problem}"


def _alert_problems(alerts: Alerts) -> Iterable[str]:
    for name, channel in alerts.channels.items():
        # A channel also gets breaker_closed, which resolves incidents of breaker_open.
        never_sent = sorted({*(channel.events or ())} - {*alerts.on_events, "breaker_closed"})
        if never_sent:
            yield (
                f"alerts.channels.{name}.events: {', '.join(never_sent)} is never sent, because alerts.on_events "
                "does not list it"
            )
        if channel.webhook is None:
            continue
        reason = _refused_address(channel.webhook.url, alerts.allow_networks)
        if reason is not None:
            yield f"alerts.channels.{name}.webhook.url: is refused ({reason}); alerts.allow_networks may allow it"


def _refused_address(url: str, allowed: Sequence[IpNetwork]) -> str | None:
    """The reason for refusing the IP address in a URL; None if it is allowed or the URL has a host name."""
    try:
        address = ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return None
    return refusal(address, allowed)


def shared_caps(config: Config) -> dict[str, Caps]:
    """The limits for all agents and those of tenants that the file sets, by their path in it."""
    tenants = {f"budgets.tenants.{name}": caps for name, caps in config.budgets.tenants.items()}
    total = config.budgets.total
    return {**({"budgets.global": total} if total.model_fields_set else {}), **tenants}
