"""The config file as a whole: its sections, and what must hold between them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator

from breakwater.alerts.settings import Alerts
from breakwater.breakers.rules.breaker import ALL, BreakerKey
from breakwater.breakers.settings import BreakerRules
from breakwater.calls.providers.registry import LOCAL_KINDS, AnyProvider, ProviderEntry
from breakwater.calls.settings import RetryableKind, RetryBudgetRules
from breakwater.calls.targets import is_within
from breakwater.config.agents import Agent, AgentDefaults, ModelSettings, agent_with_defaults
from breakwater.config.deployments import (
    Deployment,
    connection_settings,
    deployment_problems,
    expand,
    key_name_problems,
    shared_breaker_problems,
    shared_limit_problems,
)
from breakwater.config.shadows import TriedLimits
from breakwater.dialects.rules.params import connection_objection
from breakwater.identity.contract import MAX_TAGS, CostTag
from breakwater.identity.settings import ConsoleSettings, IdentitySettings, NatsProgram, TokenSettings
from breakwater.jobs.contract.job import CallApi, Job
from breakwater.kernel.formats import hint, listing
from breakwater.kernel.nats.settings import Limits
from breakwater.kernel.security.secret_refs import EnvName
from breakwater.kernel.security.settings import Encryption
from breakwater.kernel.telemetry.settings import Tracing
from breakwater.kernel.types import Message, ModelId, Name, Off
from breakwater.limits.contract import LimitSettings
from breakwater.limits.rules.budget import LimitTable, limit_problems
from breakwater.limits.rules.limit import Limit, limit_of, limits_of
from breakwater.limits.settings import OTHERS, BudgetSettings
from breakwater.records.settings import ClickHouse
from breakwater.redaction.settings import RedactionRules

NO_WILDCARD = "names have no wildcards; write each name out"


class Config(Message):
    """The config file."""

    providers: dict[Name, ProviderEntry]
    models: dict[ModelId, ModelSettings] = Field(default_factory=dict)
    defaults: AgentDefaults = AgentDefaults()
    agents: dict[Name, Agent] = Field(min_length=1)
    budgets: BudgetSettings = BudgetSettings()
    shadow: TriedLimits = TriedLimits()
    cost_tags: tuple[CostTag, ...] = Field(
        default=(),
        json_schema_extra={"maxItems": MAX_TAGS, "uniqueItems": True},
        description=(
            "Keys of jobs' `metadata` that are stored with each call, redacted, so that costs can be grouped by them."
        ),
    )
    alerts: Alerts = Alerts()
    retry_budget: Annotated[RetryBudgetRules | None, Off] = Field(
        default=RetryBudgetRules(), description="Limit on the retries of a model over the whole fleet, or `off`."
    )
    redaction: RedactionRules = RedactionRules()
    clickhouse: ClickHouse = ClickHouse()
    tracing: Tracing = Tracing()
    console: ConsoleSettings = ConsoleSettings()
    identity: IdentitySettings = IdentitySettings()
    environment: dict[Literal["worker", "alerter", "request"], tuple[EnvName, ...]] = Field(
        default_factory=dict,
        description=(
            "Further environment variables that `breakwater up` passes to a service, for your "
            "Python callables and commands of secrets."
        ),
    )
    limits: Limits = Limits()
    encryption: Encryption = Encryption()
    programs: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,40}$")], NatsProgram] = Field(
        default_factory=dict,
        description=(
            "NATS users for programs that must not use each other's agents; `client` may use "
            "all. Takes effect when NATS restarts."
        ),
    )
    _text: str = PrivateAttr(default="")

    @classmethod
    def of(cls, document: dict[str, Any], text: str) -> Self:
        """Validates a parsed document, and keeps its text. Raises ValidationError."""
        config = cls.model_validate(document)
        config._text = text
        return config

    @property
    def text(self) -> str:
        """The text of the config file, for a child process that parses it again."""
        return self._text

    @property
    def version(self) -> str:
        """A digest of all settings, defaults included. Comments and the order of settings do not change it."""
        settings = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:12]

    @field_validator("cost_tags")
    @classmethod
    def _few_and_each_once(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if len(keys) > MAX_TAGS:
            raise ValueError(f"has {len(keys)} keys; the maximum is {MAX_TAGS}")
        if len(set(keys)) < len(keys):
            raise ValueError("names a key twice")
        return keys

    @model_validator(mode="before")
    @classmethod
    def _inherit_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        document = cast(dict[str, Any], data)
        defaults = document.get("defaults", {})
        agents = document.get("agents")
        if not isinstance(defaults, dict) or not isinstance(agents, dict):
            return document
        providers = document.get("providers")
        provider_settings = cast(dict[str, Any], providers).items() if isinstance(providers, dict) else ()
        kinds = {
            name: cast(dict[str, Any], provider).get("kind")
            for name, provider in provider_settings
            if isinstance(provider, dict)
        }
        local = {name for name, kind in kinds.items() if kind in LOCAL_KINDS}
        merged: dict[str, Any] = {}
        for name, agent in cast(dict[str, Any], agents).items():
            if isinstance(agent, dict):
                settings = agent_with_defaults(cast(dict[str, Any], agent), cast(dict[str, Any], defaults))
                if "model" not in agent and settings.get("provider") in local:
                    # A local program has no models to choose from: its model has the provider's name.
                    settings |= {"model": settings["provider"], "fallback_models": agent.get("fallback_models", ())}
                merged[name] = settings
            else:
                merged[name] = agent
        return {**document, "agents": merged}

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        problems = list(self._reference_problems())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _reference_problems(self) -> Iterable[str]:
        for name, agent in self.agents.items():
            if name == ALL:
                yield (f"agents.{name}: {ALL!r} means all agents in the names of shared breakers; choose another name")
            if agent.provider is not None and agent.provider not in self.providers:
                wrong = f"{agent.provider!r} is not configured{hint(agent.provider, self.providers)}"
                yield f"agents.{name}.provider: {wrong}"
                continue
            if agent.model is None:
                yield f"agents.{name}.model: is missing; name the model to call (or set defaults.model)"
            for model in agent.chain:
                provider = self.provider_name(agent, model)
                if provider is None:
                    yield (
                        f"agents.{name}.provider: is missing for model {model!r}; "
                        f"name one of {listing(self.providers)} here or under models.{model}.provider"
                    )
                elif provider not in self.providers and provider != self._provider_of_model(model):
                    yield f"agents.{name}.provider: {provider!r} is not configured{hint(provider, self.providers)}"
                if not any(is_within(place.region, agent.residency) for place in self.deployments(agent, model)):
                    yield (
                        f"agents.{name}.residency: {model!r} has no deployment in {agent.residency!r}; set the "
                        f"`region` of one under models.{model}.deployments"
                    )
            yield from _wildcard_problems(f"agents.{name}", agent)
            objection = connection_objection(agent.params)
            is_local = all(self.is_local(self.provider_name(agent, model)) for model in agent.chain)
            if objection is not None and not is_local:
                yield f"agents.{name}.params.{objection.path}: {objection.message}"
        yield from self._shared_breaker_problems()
        yield from self._retry_problems()
        base = LimitTable(self._limits(()))
        yield from limit_problems(self.budgets.limits, self.cost_tags, self.limited_names, base)
        yield from self.shadow.problems()
        yield from limit_problems(self.shadow.limits, self.cost_tags, self.limited_names, LimitTable(), "shadow.limits")
        for name in self.models:
            if "*" in name:
                yield f"models.{name}: {NO_WILDCARD}"
        senders: dict[str, NatsProgram | TokenSettings] = {
            f"programs.{name}": program for name, program in self.programs.items()
        }
        if self.identity.jwt is not None:
            senders["identity.jwt"] = self.identity.jwt
        for place, sender in senders.items():
            for tenant in sender.tenants:
                if "*" in tenant:
                    yield f"{place}.tenants: {tenant!r}: {NO_WILDCARD}; without tenants, any is allowed"
            for agent in sender.agents:
                if agent not in self.agents:
                    yield f"{place}.agents: {agent!r} is not configured{hint(agent, self.agents)}"
        yield from self._residency_problems()
        yield from key_name_problems(self.listed_deployments)
        yield from shared_limit_problems(self.listed_deployments)
        unlisted = (model for model in self.models if model not in self._listed)
        alone = (place for model in unlisted for place in self.deployments(AgentDefaults(), model))
        yield from shared_breaker_problems(self.listed_deployments, alone)
        for model, settings in self.models.items():
            yield from deployment_problems(f"models.{model}.deployments", self._listed.get(model, ()), self.providers)
            if settings.provider is not None and settings.provider not in self.providers:
                yield (
                    f"models.{model}.provider: {settings.provider!r} is not configured"
                    f"{hint(settings.provider, self.providers)}"
                )

    def _residency_problems(self) -> Iterable[str]:
        """Yields a problem for each agent of a program that has no model where the program's calls must stay."""
        for name, program in self.programs.items():
            for agent_name in program.agents:
                agent = self.agents.get(agent_name)
                if agent is None or program.residency is None:
                    continue
                places = (place for model in agent.chain for place in self.deployments(agent, model))
                if not any(is_within(place.region, program.residency) for place in places):
                    yield (
                        f"programs.{name}.residency: no model of agent {agent_name!r} has a deployment in "
                        f"{program.residency!r}; set the `region` of one, or leave the agent out"
                    )

    def _retry_problems(self) -> Iterable[str]:
        """Yields a problem for each unknown error class. Python callables may raise classes of their own."""
        inherited = self.defaults.retry.on
        models = {f"agents.{name}": (*agent.chain, *agent.allowed_models) for name, agent in self.agents.items()}
        for place, agent in (("defaults", self.defaults), *zip(models, self.agents.values(), strict=True)):
            named = self.serving(agent, models.get(place, ())) or set(self.providers)
            if any(name in self.providers and self.providers[name].kind == "python" for name in named):
                continue
            for number, wrong in enumerate(agent.retry.on):
                reported = place == "defaults" or wrong not in inherited
                if not reported or not isinstance(wrong, str) or wrong in get_args(RetryableKind):
                    continue
                # Few configs name a class, and reading all providers' errors takes patterns that are slow to compile.
                from breakwater.calls.rules.classify import RETRYABLE_CLASSES
                from breakwater.calls.rules.retry import is_known

                if not is_known(wrong):
                    close = hint(wrong, RETRYABLE_CLASSES)
                    yield f"{place}.retry.on.{number}: {wrong!r} is not a known error class{close}"

    def _shared_breaker_problems(self) -> Iterable[str]:
        """Yields a problem for each agent that shares a breaker, or its shadow, under different rules.

        Outcomes are judged by the rules of their agent, and one breaker cannot keep windows of two lengths.
        """
        by_path = {
            "breaker": {name: agent.breaker for name, agent in self.agents.items()},
            "shadow.breaker": {name: agent.shadow and agent.shadow.breaker for name, agent in self.agents.items()},
        }
        for path, rules_by_agent in by_path.items():
            first_owners: dict[BreakerKey, tuple[str, BreakerRules]] = {}
            for name, rules in rules_by_agent.items():
                agent = self.agents[name]
                if rules is None or rules.scope == "agent_model":
                    continue
                rules = rules.model_copy(update={"preset": None})
                models = dict.fromkeys((*agent.chain, *agent.allowed_models))
                for deployment in (place for model in models for place in self.deployments(agent, model)):
                    key = BreakerKey.of(rules.scope, name, deployment.unit, deployment.provider)
                    first_agent, first_rules = first_owners.setdefault(key, (name, rules))
                    if first_rules != rules:
                        yield (
                            f"agents.{name}.{path}: agent {first_agent!r} shares the breaker of {key.model} but has "
                            "different rules; give both the same rules, for example under `defaults`"
                        )
                        break

    def provider_name(self, agent: AgentDefaults, model: str) -> str | None:
        """Returns the provider of an agent's model, of several the first; None if the config does not determine it.

        In this order: the provider set for the model or its first deployment, the one that its id begins with
        (`provider/model`), the agent's, or the only one in the config.
        """
        if (provider := self._provider_of_model(model)) is not None:
            return provider
        first, _, _ = model.partition("/")
        if first in self.providers:
            return first
        if agent.provider is not None:
            return agent.provider
        return next(iter(self.providers)) if len(self.providers) == 1 else None

    def _provider_of_model(self, model: str) -> str | None:
        if (listed := self._listed.get(model)) is not None:
            return listed[0].provider
        settings = self.models.get(model)
        return None if settings is None else settings.provider

    @cached_property
    def _listed(self) -> Mapping[str, tuple[Deployment, ...]]:
        """The deployments of the models that list some, one for each key."""
        return {
            model: expand(model, settings.name or model, settings.deployments)
            for model, settings in self.models.items()
            if settings.deployments
        }

    @property
    def listed_deployments(self) -> tuple[Deployment, ...]:
        """All deployments that models list, in the config's order."""
        return tuple(deployment for listed in self._listed.values() for deployment in listed)

    def deployments(self, agent: AgentDefaults, model: str) -> tuple[Deployment, ...]:
        """Returns the deployments of an agent's model: those that it lists, or the one of its provider."""
        if (listed := self._listed.get(model)) is not None:
            return listed
        provider = self.provider_name(agent, model) or ""
        return (Deployment(model, provider, self.name_at_provider(provider, model)),)

    @property
    def connections(self) -> dict[str, AnyProvider]:
        """The providers to open, by name: those of the config, and one for each key that deployments name."""
        of_deployments = {
            deployment.connection: connection_settings(self.providers[deployment.provider], deployment.key)
            for listed in self._listed.values()
            for deployment in listed
        }
        return {**self.providers, **of_deployments}

    @property
    def private_agents(self) -> tuple[str, ...]:
        """The agents whose texts must not be stored unencrypted."""
        return tuple(name for name, agent in self.agents.items() if not agent.keeps_error_texts)

    @property
    def known_models(self) -> frozenset[str]:
        """All models that the config names."""
        named = (model for agent in self.agents.values() for model in (*agent.chain, *agent.allowed_models))
        return frozenset(self.models).union(named) - {"*"}

    @property
    def known_units(self) -> frozenset[str]:
        """All models and deployments that the config names."""
        return self.known_models.union(self._by_id)

    @property
    def limited_names(self) -> Mapping[str, Collection[str]]:
        """The names that limits may be on, of the kinds whose names the config knows."""
        names: dict[str, Collection[str]] = {
            "agent": self.agents,
            "provider": self.providers,
            "deployment": self._by_id,
        }
        if not any("*" in agent.allowed_models for agent in self.agents.values()):
            names["model"] = self.known_models
        return names

    @property
    def limit_table(self) -> LimitTable:
        """All limits."""
        tenants = tuple(name for name in self.budgets.tenants if name != OTHERS)
        return LimitTable(self._limits(self.budgets.limits), tuple(self.agents), tenants)

    @cached_property
    def shadow_limits(self) -> LimitTable:
        """The limits that are tried and refuse nothing."""
        tried = enumerate(self.shadow.limits)
        return LimitTable(tuple(limit_of(f"shadow.limits.{number}", settings) for number, settings in tried))

    def _limits(self, further: Sequence[LimitSettings]) -> tuple[Limit, ...]:
        models = {name: model.rate_limit for name, model in self.models.items()}
        deployments = {
            deployment.id: (f"models.{deployment.model}.deployments", deployment.settings.limits)
            for deployment in self._by_id.values()
            if deployment.settings is not None
        }
        return limits_of(self.budgets.total, self.budgets.tenants, self.agents, models, further, deployments)

    def strict_params(self, agent: Agent, job: Job, limits: LimitTable) -> str | None:
        """Returns the reason to pass only params that cost nothing but tokens; None if all params may pass.

        Only explicitly set limits are a reason, not those of the default guard.

        Args:
            agent: the job's agent.
            job: the job.
            limits: the current limits.
        """
        if agent.allowed_models:
            return "for an agent with allowed_models"
        if agent.max_cost_usd is not None or (limits.any_hard and limits.may_refuse(self._names(agent, job))):
            return "under a hard limit"
        guard = agent.guard
        agent_caps_task = (
            guard is not None and guard.max_cost_usd is not None and "max_cost_usd" in guard.model_fields_set
        )
        job_caps_task = job.guard is not None and job.guard.get("max_cost_usd") is not None
        return "under a limit of the task" if agent_caps_task or job_caps_task else None

    def _names(self, agent: Agent, job: Job) -> dict[str, Collection[str]]:
        """Returns the names that a job's calls can count under, as far as they are known before the calls."""
        chain = agent.chain_for(job)
        deployments = [deployment for model in chain for deployment in self.deployments(agent, model)]
        return {
            "global": ("",),
            "agent": (job.agent,),
            "tenant": () if job.tenant is None else (job.tenant,),
            "model": chain,
            "provider": {deployment.provider for deployment in deployments if deployment.provider},
            "deployment": [deployment.id for deployment in deployments if deployment.settings is not None],
        }

    def name_at_provider(self, provider: str, model: str) -> str:
        """Returns a model's name at a provider: the configured name, or its id without the provider's prefix."""
        settings = self.models.get(model)
        if settings is not None and settings.name is not None:
            return settings.name
        return model.removeprefix(f"{provider}/")

    def dimensions(self, model: str) -> int | None:
        """Returns the declared length of a model's embeddings."""
        settings = self.models.get(model)
        return None if settings is None else settings.dimensions

    def max_inputs(self, agent: AgentDefaults, models: Iterable[str]) -> int | None:
        """Returns the most inputs that all of an agent's models embed in one call; None if none has a limit."""
        limits = (self._max_inputs_of(place) for model in models for place in self.deployments(agent, model))
        return min((limit for limit in limits if limit is not None), default=None)

    def _max_inputs_of(self, place: Deployment) -> int | None:
        settings = self.models.get(place.model)
        if settings is not None and settings.max_inputs is not None:
            return settings.max_inputs
        provider = self.providers.get(place.provider)
        return None if provider is None else provider.max_inputs(place.name)

    def embeds_like(self, agent: Agent, model: str) -> list[str]:
        """Returns the fallback models of an agent with the same declared dimensions as a model."""
        length = self.dimensions(model)
        return [
            fallback for fallback in agent.fallback_models if length is not None and self.dimensions(fallback) == length
        ]

    def deployment_of(self, agent: AgentDefaults, unit: str) -> Deployment:
        """Returns the deployment that a breaker is of: one that a model lists, or that of a model without a list."""
        return self._by_id.get(unit) or self.deployments(agent, unit)[0]

    @cached_property
    def _by_id(self) -> Mapping[str, Deployment]:
        """The listed deployments by their ids. Of several models at one place, the first one counts."""
        listed = (deployment for deployments in self._listed.values() for deployment in deployments)
        by_id: dict[str, Deployment] = {}
        for deployment in listed:
            by_id.setdefault(deployment.id, deployment)
        return by_id

    def serving(self, agent: AgentDefaults, models: Iterable[str]) -> set[str]:
        """Returns the providers of some models of an agent, without unknown ones."""
        named = {deployment.provider for model in models for deployment in self.deployments(agent, model)}
        return named - {""}

    def speaks(self, provider: str | None, api: CallApi, model: str, name: str | None = None) -> bool:
        """Returns True if a provider takes requests of an API unchanged for a model; `name` is that of a deployment."""
        settings = None if provider is None else self.providers.get(provider)
        if provider is None or settings is None:
            return False
        return api in settings.apis_of(name or self.name_at_provider(provider, model))

    def is_local(self, provider: str | None) -> bool:
        """Returns True for a child program or a callable, which needs no model and may take any JSON as input."""
        return provider in self.providers and self.providers[provider].local


def breaker_of(config: Config, name: str, deployment: Deployment) -> BreakerKey | None:
    """Returns the key of the breaker of an agent's calls to a deployment.

    None if the agent has no breaker, or the model no provider.
    """
    rules = config.agents[name].breaker
    if rules is None or not deployment.provider:
        return None
    return BreakerKey.of(rules.scope, name, deployment.unit, deployment.provider)


def units_of(config: Config, name: str) -> dict[str, Deployment]:
    """Returns the deployments of an agent's chain, in its order, by what their breakers and their health are of."""
    agent = config.agents[name]
    return {place.unit: place for model in agent.chain for place in config.deployments(agent, model)}


def breakers_of(config: Config, *, of_allowed: bool = False) -> dict[BreakerKey, BreakerRules]:
    """Returns the breakers of the agents' models with their rules. A shared breaker has its first agent's rules.

    Args:
        config: the config.
        of_allowed: True to add the breakers of the models that jobs may request, if the config names them.
    """
    breakers: dict[BreakerKey, BreakerRules] = {}
    for name, agent in config.agents.items():
        models = set[str]()
        if of_allowed:
            models = config.known_models if "*" in agent.allowed_models else set(agent.allowed_models)
        named = dict.fromkeys((*agent.chain, *sorted(models)))
        for deployment in (place for model in named for place in config.deployments(agent, model)):
            key = breaker_of(config, name, deployment)
            if key is not None and agent.breaker is not None:
                breakers.setdefault(key, agent.breaker)
    return breakers


def shadows_of(config: Config) -> list[BreakerKey]:
    """Returns the shadows of the breakers of the agents' models, in the order of the config."""
    return list(
        dict.fromkeys(
            BreakerKey.of(agent.shadow.breaker.scope, name, place.unit, place.provider)
            for name, agent in config.agents.items()
            if agent.shadow is not None
            for place in units_of(config, name).values()
        )
    )


def _wildcard_problems(place: str, agent: Agent) -> Iterable[str]:
    """Yields a problem for each name with a wildcard, which would match nothing."""
    models = {"model": agent.chain[:1], "fallback_models": agent.fallback_models}
    for field, names in (*models.items(), ("allowed_params", agent.allowed_params)):
        for name in names:
            if "*" in name:
                yield f"{place}.{field}: {name!r}: {NO_WILDCARD}"
    for name in agent.allowed_models:
        if "*" in name and name != "*":
            yield f"{place}.allowed_models: {name!r}: {NO_WILDCARD}; '*' alone allows any model"
