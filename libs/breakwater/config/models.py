"""The settings of the config file."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, JsonValue, PrivateAttr, field_validator, model_validator

from breakwater.alerts.settings import Alerts
from breakwater.breakers.rules import ALL, BreakerKey
from breakwater.breakers.settings import BreakerRules, take_preset
from breakwater.calls.providers.registry import LOCAL_KINDS, ProviderEntry
from breakwater.calls.rules.classify import RETRYABLE_CLASSES
from breakwater.calls.rules.parameters import is_droppable
from breakwater.calls.rules.params import connection_objection, params_objection, unknown_objection, unknown_part
from breakwater.calls.rules.retry import is_known
from breakwater.calls.settings import CacheRules, OutputRules, RetryBudgetRules, RetryPolicy
from breakwater.dialects.rules import InvalidBodyError, chat_form
from breakwater.dialects.rules.embeddings import (
    MAX_BATCHES,
    PARAMS,
    fallback_objection,
    native_body,
    too_many,
    too_many_batches,
)
from breakwater.identity.settings import ConsoleSettings, NatsProgram
from breakwater.jobs.contract.job import CallApi, ChatMessage, Job, NativeRequest
from breakwater.jobs.rules.ownership import shown
from breakwater.kernel.nats.settings import Limits
from breakwater.kernel.security.secret_refs import EnvName
from breakwater.kernel.security.settings import Encryption
from breakwater.kernel.telemetry.settings import Tracing
from breakwater.kernel.types import Identifier, Message, ModelId, Name, Off, UsdAmount
from breakwater.kernel.validation import FieldError
from breakwater.limits.rules.budget import CapTable
from breakwater.limits.rules.job_rules import NO_JOB_RULES, JobRules, bound_problem, job_rules
from breakwater.limits.settings import MAX_TAGS, OTHERS, BudgetSettings, Caps, CostTag, GuardRules, RateLimit
from breakwater.prices.rules.price import term_of
from breakwater.prices.settings import MAX_OUTPUT_TOKENS, Price
from breakwater.records.settings import ClickHouse
from breakwater.redaction.rules.redact import id_objection
from breakwater.redaction.settings import RedactionRules

NO_WILDCARD = "names have no wildcards; write each name out"


class AgentDefaults(Message):
    """Settings that an agent may leave out. The values here are the built-in ones."""

    provider: Identifier | None = None
    model: ModelId | None = Field(default=None, description="`provider/model`, or any id with a provider set.")
    fallback_models: tuple[ModelId, ...] = ()
    allowed_models: tuple[ModelId, ...] = Field(
        default=(),
        description="Models that a job may request in addition to the agent's own, by name; `*` alone allows any.",
    )
    allowed_params: tuple[str, ...] = Field(
        default=(),
        description=(
            "Further params, and fields of requests, that jobs may send to models under a cap or with "
            "`allowed_models`. By default only what costs nothing but tokens is allowed, "
            "because budgets don't know other costs."
        ),
    )
    system_prompt: str | None = None
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="Default params; a job's params override them."
    )
    max_tokens: int = Field(
        default=4096, ge=1, le=MAX_OUTPUT_TOKENS, description="Output limit, unless the job or params set one."
    )
    retry: RetryPolicy = RetryPolicy()
    timeout_s: float = Field(default=30.0, gt=0, le=3600, description="Time limit of one attempt.")
    on_stream_break: Literal["fail", "continue"] = Field(
        default="fail",
        description=(
            "What happens if a stream fails after a part of the answer was sent. `continue`: the "
            "next attempt or fallback model gets that part and continues the same stream."
        ),
    )
    on_disconnect: Literal["finish", "cancel"] | None = Field(
        default=None,
        description=(
            "Finish or cancel a streamed chat completion when its client disconnects. By default "
            "it is cancelled, unless it has an idempotency key, with which the client can fetch "
            "the answer later."
        ),
    )
    keepalive_before_answer_s: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description=(
            "Begins the response to a streamed call after so long without any of its answer, and pings its client "
            "from then on, for clients and proxies that close silent connections. The status is then 200 before the "
            "outcome is known: a later error is an event of the stream."
        ),
    )
    stream_idle_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description=("Longest silence of a stream once its answer has begun. Until then `timeout_s` applies."),
    )
    usage_estimates: bool = Field(
        default=False,
        description="Gives clients of the HTTP API an estimated usage, marked `estimated`, if the model reports none.",
    )
    total_timeout_s: float = Field(default=300.0, gt=0, le=86_400, description="Time limit of a job, including waits.")
    on_context_overflow: Literal["next_model", "trim"] = Field(
        default="next_model", description="trim: drop the oldest turns and call the same model again immediately."
    )
    on_empty_answer: Literal["fail", "accept"] = Field(
        default="fail", description="accept: an answer without text and tool calls is a success."
    )
    on_unsupported_param: Literal["fail", "drop"] = Field(
        default="fail",
        description=(
            "drop: a param of the job's own that a model does not know is left out, and the same model called again "
            "immediately. Params of the agent always are."
        ),
    )
    on_error: Literal["fail", "message"] = Field(
        default="fail", description="message: the output of a failed job is a message for its parent agent."
    )
    output: Annotated[OutputRules | None, Off] = Field(
        default=None, description="The JSON schema that answers must satisfy, or `off`."
    )
    cache: Annotated[CacheRules | None, Off] = Field(default=None, description="Rules, or `off`.")
    concurrency: int = Field(
        default=16, ge=1, le=10_000, description="Jobs of this agent that run at the same time, across the fleet."
    )
    breaker: Annotated[BreakerRules | None, Off] = Field(default=BreakerRules(), description="Rules, or `off`.")
    refuse_when_open: bool = Field(
        default=False,
        description=("Refuse jobs over HTTP (503 `agent_unavailable`) while the breakers of all models are open."),
    )
    guard: Annotated[GuardRules | None, Off] = Field(
        default=GuardRules(), description="Caps on each task (a run of jobs, or a single job), or `off`."
    )
    overridable: dict[str, JsonValue] = Field(
        default_factory=dict,
        description=(
            "How far a job's own breaker, guard and retry rules may exceed the agent's, such as "
            "`{guard.max_iterations: 20}`; default: not at all."
        ),
    )
    rate_limit: Annotated[RateLimit | None, Off] = Field(default=None, description="Limits of the agent, or `off`.")
    budget: Caps = Caps()
    reserve: Literal["worst_case", "observed"] = Field(
        default="worst_case",
        description=(
            "Output tokens that budgets reserve for a call. `observed`: twice the longest recent "
            "answer of the model instead of `max_tokens`. It also limits the call; a truncated "
            "answer is requested again."
        ),
    )
    max_cost_usd: Annotated[UsdAmount | None, Off] = Field(
        default=None,
        description=("Maximum cost of one job over all its attempts. A call that could exceed it is not made."),
    )
    breaker_counts_auth_errors: bool = Field(
        default=False, description="Counts 401, 402 and 403 as failures of the model."
    )
    breaker_counts_rate_limits: bool = Field(
        default=False,
        description=(
            "Counts rate limits as failures of the model. If false, they count only after a full "
            "window of nothing but rate limits."
        ),
    )
    persist_prompts: bool = Field(
        default=True,
        description=(
            "Stores prompts with executions. If false, dead letters don't show them, and results and "
            "dead letters contain texts only encrypted."
        ),
    )
    persist_responses: bool = Field(
        default=True,
        description=(
            "Stores responses with executions. If false for responses or prompts, dead letters "
            "and results contain texts only encrypted, and only class, status and code of a "
            "provider's errors are kept."
        ),
    )

    @field_validator("breaker", "guard", mode="before")
    @classmethod
    def _not_off_by_mistake(cls, value: object) -> object:
        if value is None:
            # YAML reads a key whose lines are all commented out as null.
            raise ValueError("is empty; set values, write `off`, or remove it")
        return value

    @field_validator("overridable")
    @classmethod
    def _bounds_of_rules(cls, bounds: dict[str, JsonValue]) -> dict[str, JsonValue]:
        problems = [problem for path, value in bounds.items() if (problem := bound_problem(path, value)) is not None]
        if problems:
            raise ValueError("; ".join(problems))
        return bounds

    @field_validator("params")
    @classmethod
    def _params_that_can_be_sent(cls, params: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if (problem := params_objection(params)) is not None:
            raise ValueError(f"{problem.path} {problem.message}")
        return params


class Agent(AgentDefaults):
    """The settings of one agent."""

    @property
    def keeps_error_texts(self) -> bool:
        """True if providers' error texts, which may quote prompts and responses, may be stored unencrypted."""
        return self.persist_prompts and self.persist_responses

    @property
    def chain(self) -> tuple[ModelId, ...]:
        """The models to try, in order and without duplicates."""
        primary = (self.model,) if self.model is not None else ()
        return tuple(dict.fromkeys((*primary, *self.fallback_models)))

    def rules_for(self, job: Job, *, with_figures: bool = False) -> JobRules | FieldError:
        """Returns the job's own rules merged over the agent's, or the reason why the agent does not allow them.

        Args:
            job: the job.
            with_figures: True if the reason may name the agent's limits, which only operators may see.
        """
        if job.breaker is None and job.guard is None and job.retry is None and job.rate_limit is None:
            return NO_JOB_RULES
        return job_rules(
            job.own_rules,
            {"breaker": self.breaker, "guard": self.guard, "retry": self.retry},
            self.overridable,
            with_figures=with_figures,
        )

    def chain_for(self, job: Job) -> tuple[ModelId, ...]:
        """Returns the models to try for a job, in order and without duplicates: its own, or else the agent's."""
        if job.model is None and job.fallback_models is None:
            return self.chain
        first = job.model or self.model
        fallbacks = self.fallback_models if job.fallback_models is None else tuple(job.fallback_models)
        return tuple(dict.fromkeys(model for model in (first, *fallbacks) if model is not None))


def hint(mistyped: str, candidates: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` if a candidate is similar, else `; known: …` with all candidates."""
    names = list(candidates)
    close = difflib.get_close_matches(mistyped, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {listing(names)}" if names else ""


def listing(names: Iterable[str]) -> str:
    """Returns names in alphabetical order, separated by commas."""
    return ", ".join(sorted(names))


class ModelSettings(Message):
    """Settings of a model; prices here override the built-in list."""

    provider: Identifier | None = Field(
        default=None,
        description="Provider of the model; default: the one its id begins with, or the agent's.",
    )
    name: str | None = Field(default=None, min_length=1, description="Name at the provider; default: the model's id.")
    price: Price | None = None
    tool_prices: dict[Name, UsdAmount] = Field(
        default_factory=dict,
        description="USD per call of tools that the provider runs, such as `{web_search: 0.01}`. Without a price, the "
        "cost of a call that used such a tool is unknown.",
    )
    rate_limit: Annotated[RateLimit | None, Off] = Field(
        default=None, description="Limits of the model over all agents, or `off`."
    )
    image_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description=("Estimated tokens per image before a call; default: the maximum that its provider documents."),
    )
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description=(
            "Length of the model's embeddings. An embeddings job falls back only to models with the same "
            "`dimensions`, and vectors of another length are a failed attempt."
        ),
    )
    max_inputs: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description=(
            "Most inputs that the provider embeds in one call. A job with more makes several calls, one after the "
            f"other, at most {MAX_BATCHES}, and its response has all vectors in order."
        ),
    )


class Config(Message):
    """The config file."""

    providers: dict[Name, ProviderEntry]
    models: dict[ModelId, ModelSettings] = Field(default_factory=dict)
    defaults: AgentDefaults = AgentDefaults()
    agents: dict[Name, Agent] = Field(min_length=1)
    budgets: BudgetSettings = BudgetSettings()
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
                settings = _merge(
                    _with_preset(cast(dict[str, Any], defaults)), _with_preset(cast(dict[str, Any], agent))
                )
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
                elif provider not in self.providers:
                    yield f"agents.{name}.provider: {provider!r} is not configured{hint(provider, self.providers)}"
            yield from _wildcard_problems(f"agents.{name}", agent)
            objection = connection_objection(agent.params)
            is_local = all(self.is_local(self.provider_name(agent, model)) for model in agent.chain)
            if objection is not None and not is_local:
                yield f"agents.{name}.params.{objection.path}: {objection.message}"
        yield from self._shared_breaker_problems()
        yield from self._retry_problems()
        for name in self.models:
            if "*" in name:
                yield f"models.{name}: {NO_WILDCARD}"
        for name, program in self.programs.items():
            for tenant in program.tenants:
                if "*" in tenant:
                    yield f"programs.{name}.tenants: {tenant!r}: {NO_WILDCARD}; without tenants, any is allowed"
            for agent in program.agents:
                if agent not in self.agents:
                    yield f"programs.{name}.agents: {agent!r} is not configured{hint(agent, self.agents)}"
        for model, settings in self.models.items():
            if settings.provider is not None and settings.provider not in self.providers:
                yield (
                    f"models.{model}.provider: {settings.provider!r} is not configured"
                    f"{hint(settings.provider, self.providers)}"
                )

    def _retry_problems(self) -> Iterable[str]:
        """Yields a problem for each unknown error class. Python callables may raise classes of their own."""
        inherited = self.defaults.retry.on
        models = {f"agents.{name}": (*agent.chain, *agent.allowed_models) for name, agent in self.agents.items()}
        for place, agent in (("defaults", self.defaults), *zip(models, self.agents.values(), strict=True)):
            named = {self.provider_name(agent, model) for model in models.get(place, ())} or set(self.providers)
            if any(name in self.providers and self.providers[name].kind == "python" for name in named):
                continue
            for number, wrong in enumerate(agent.retry.on):
                reported = place == "defaults" or wrong not in inherited
                if reported and isinstance(wrong, str) and not is_known(wrong):
                    close = hint(wrong, RETRYABLE_CLASSES)
                    yield f"{place}.retry.on.{number}: {wrong!r} is not a known error class{close}"

    def _shared_breaker_problems(self) -> Iterable[str]:
        """Yields a problem for each agent that shares a breaker under different rules.

        Outcomes are judged by the rules of their agent, and one breaker cannot keep windows of two lengths.
        """
        first_owners: dict[BreakerKey, tuple[str, BreakerRules]] = {}
        for name, agent in self.agents.items():
            if agent.breaker is None or agent.breaker.scope == "agent_model":
                continue
            rules = agent.breaker.model_copy(update={"preset": None})
            for model in (*agent.chain, *agent.allowed_models):
                key = BreakerKey.of(rules.scope, name, model, self.provider_name(agent, model) or "")
                first_agent, first_rules = first_owners.setdefault(key, (name, rules))
                if first_rules != rules:
                    yield (
                        f"agents.{name}.breaker: agent {first_agent!r} shares the breaker of {key.model} but has "
                        "different rules; give both the same rules, for example under `defaults`"
                    )
                    break

    def provider_name(self, agent: AgentDefaults, model: str) -> str | None:
        """Returns the provider of an agent's model; None if the config does not determine it.

        In this order: the provider set for the model, the one that its id begins with (`provider/model`), the agent's,
        or the only one in the config.
        """
        settings = self.models.get(model)
        if settings is not None and settings.provider is not None:
            return settings.provider
        first, _, _ = model.partition("/")
        if first in self.providers:
            return first
        if agent.provider is not None:
            return agent.provider
        return next(iter(self.providers)) if len(self.providers) == 1 else None

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
    def caps(self) -> CapTable:
        """All caps."""
        agents = {name: agent.budget for name, agent in self.agents.items()}
        return CapTable(self.budgets.total, agents, self.budgets.tenants)

    def strict_params(self, agent: Agent, job: Job) -> str | None:
        """Returns the reason to pass only params that cost nothing but tokens; None if all params may pass.

        Only explicitly set caps are a reason, not those of the default guard.
        """
        if agent.allowed_models:
            return "for an agent with allowed_models"
        tenants = self.budgets.tenants
        tenant_caps = None if job.tenant is None else tenants.get(job.tenant) or tenants.get(OTHERS)
        hard = any(caps.is_hard for caps in (self.budgets.total, agent.budget, tenant_caps) if caps is not None)
        if hard or agent.max_cost_usd is not None:
            return "under a hard cap"
        guard = agent.guard
        agent_caps_task = (
            guard is not None and guard.max_cost_usd is not None and "max_cost_usd" in guard.model_fields_set
        )
        job_caps_task = job.guard is not None and job.guard.get("max_cost_usd") is not None
        return "under a cap of the task" if agent_caps_task or job_caps_task else None

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

    def max_inputs(self, models: Iterable[str]) -> int | None:
        """Returns the most inputs that all of these models embed in one call; None if none has a limit."""
        declared = (self.models[model].max_inputs for model in models if model in self.models)
        return min((limit for limit in declared if limit is not None), default=None)

    def embeds_like(self, agent: Agent, model: str) -> list[str]:
        """Returns the fallback models of an agent with the same declared dimensions as a model."""
        length = self.dimensions(model)
        return [
            fallback for fallback in agent.fallback_models if length is not None and self.dimensions(fallback) == length
        ]

    def deployment(self, agent: AgentDefaults, model: str) -> str:
        """Returns the name of a model's deployment, which shares rate limits: `<provider>/<name at the provider>`."""
        provider = self.provider_name(agent, model) or ""
        return f"{provider}/{self.name_at_provider(provider, model)}"

    def speaks(self, provider: str | None, api: CallApi) -> bool:
        """Returns True if a provider takes requests of an API unchanged."""
        settings = None if provider is None else self.providers.get(provider)
        return settings is not None and api in settings.apis

    def sends_as_written(self, provider: str | None, api: CallApi) -> bool:
        """Returns True if requests of an API are sent to a provider unchanged, not translated into its own format."""
        translates_chats = provider in self.providers and self.providers[provider].translates_chats
        return self.speaks(provider, api) and not (api == "chat" and translates_chats)

    def is_local(self, provider: str | None) -> bool:
        """Returns True for a child program or a callable, which needs no model and may take any JSON as input."""
        return provider in self.providers and self.providers[provider].local


def breaker_of(config: Config, name: str, model: str) -> BreakerKey | None:
    """Returns the key of the breaker of an agent's calls to a model.

    None if the agent has no breaker, or the model no provider.
    """
    agent = config.agents[name]
    provider = config.provider_name(agent, model)
    if agent.breaker is None or provider is None:
        return None
    return BreakerKey.of(agent.breaker.scope, name, model, provider)


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
        for model in dict.fromkeys((*agent.chain, *sorted(models))):
            key = breaker_of(config, name, model)
            if key is not None and agent.breaker is not None:
                breakers.setdefault(key, agent.breaker)
    return breakers


_IDS = ("job_id", "tenant", "task_id", "parent_execution_id", "plan_id")


def validate_job(
    config: Config, job: Job, *, with_figures: bool = False, scoped_ids: bool = False
) -> FieldError | None:
    """Returns the reason why its configured agent can't run a well-formed job; None if it can.

    Args:
        config: the config.
        job: the job.
        with_figures: True if the reason may name the config's bounds, which only operators may see.
        scoped_ids: True if the job's ids begin with the scope of its owner, which redaction must ignore.
    """
    agent = config.agents[job.agent]
    ids = [(path, name) for path in _IDS if (name := getattr(job, path)) is not None]
    models = [(f"fallback_models.{number}", model) for number, model in enumerate(job.fallback_models or ())]
    if job.model is not None:
        models.insert(0, ("model", job.model))
    for path, name in (*ids, *models, *(("depends_on", name) for name in job.depends_on)):
        chosen = shown(name) if scoped_ids else name
        if (objection := id_objection(config.redaction, chosen)) is not None:
            return FieldError(path, objection)
    if job.api == "embeddings" and (problem := _embeddings_objection(config, agent, job)) is not None:
        return problem
    if job.api_request is not None and (problem := _request_objection(config, agent, job, job.api_request)) is not None:
        return FieldError(f"api_request.body.{problem.path}", problem.message)
    if job.params and (problem := _params_objection(config, agent, job, job.params)) is not None:
        return FieldError(f"params.{problem.path}", problem.message)
    if job.messages is not None and (problem := _parts_objection(config, agent, job, job.messages)) is not None:
        return FieldError(f"messages.{problem.path}", problem.message)
    allowed = {*agent.chain, *agent.allowed_models} if models else set[str]()
    for path, model in models:
        if "*" not in allowed and model not in allowed:
            choices = listing(allowed)
            return FieldError(path, f"{model!r} is not allowed for agent {job.agent!r}; allowed: {choices}")
        provider = config.provider_name(agent, model)
        if provider not in config.providers:
            return FieldError(path, f"no provider is known for {model!r}; known: {listing(config.providers)}")
        if model not in allowed and config.is_local(provider):
            return FieldError(path, f"{model!r} is a process or callable, and must be allowed by name")
    if job.total_timeout_s is not None and job.total_timeout_s > agent.total_timeout_s:
        bound = f": at most {agent.total_timeout_s:g}" if with_figures else "; leave it out, or set a shorter one"
        return FieldError("total_timeout_s", f"is longer than agent {job.agent!r} allows{bound}")
    if isinstance(rules := agent.rules_for(job, with_figures=with_figures), FieldError):
        return rules
    if job.input is not None:
        chain = agent.chain_for(job)
        if any(not config.is_local(config.provider_name(agent, model)) for model in chain):
            return FieldError("input", f"agent {job.agent!r} is a chat agent and needs prompt or messages")
    return None


def _embeddings_objection(config: Config, agent: Agent, job: Job) -> FieldError | None:
    """Returns the reason why the models of a job can't embed, or can't replace one another; None if they can."""
    if job.stream:
        return FieldError("stream", "is not possible: embeddings come whole")
    chain = agent.chain_for(job)
    for model in chain:
        if not config.speaks(provider := config.provider_name(agent, model), "embeddings"):
            kind = "" if provider not in config.providers else f" of kind {config.providers[provider].kind!r}"
            message = (
                f"{model!r} has no embeddings, as its provider {provider!r} is{kind}; name an agent for embeddings"
            )
            return FieldError("model", message)
    problem = fallback_objection({model: config.dimensions(model) for model in chain})
    return None if problem is None else FieldError("model", f"agent {job.agent!r} can't embed: {problem}")


def _request_objection(config: Config, agent: Agent, job: Job, request: NativeRequest) -> FieldError | None:
    """Returns the reason why a job's native request can't be sent to the providers of its models; None if it can."""
    try:
        form = chat_form(request)
    except InvalidBodyError as error:
        return error.problem
    providers = [config.provider_name(agent, model) for model in agent.chain_for(job)]
    drops = agent.on_unsupported_param == "drop"
    losses = [loss for loss in form.losses if not (drops and is_droppable(loss.path))]
    if losses and not any(config.speaks(provider, request.api) for provider in providers):
        return losses[0]
    if (strictness := config.strict_params(agent, job)) is not None:
        for unpriced in form.unpriced:
            name = re.split(r"[.\[]", unpriced.path)[0]
            if name not in agent.allowed_params:
                remedy = f"list {name!r} in agents.{job.agent}.allowed_params to allow it"
                message = f"{unpriced.message}: {strictness}, only such fields are allowed; {remedy}"
                return FieldError(unpriced.path, message)
    if request.api == "embeddings":
        body = native_body(request.body, params=agent.params)
        declared = config.dimensions(agent.chain_for(job)[0])
        if (problem := too_many(body, declared)) is not None:
            return problem
        if (problem := too_many_batches(body, config.max_inputs(agent.chain_for(job)))) is not None:
            return problem
        unpriced_params = {name: value for name, value in form.params.items() if name not in PARAMS}
        return _params_objection(config, agent, job, unpriced_params)
    problem = _params_objection(config, agent, job, form.params)
    return None if problem is None else FieldError(form.in_body(problem.path), problem.message)


def _tier_objection(config: Config, chain: Iterable[str], params: Mapping[str, JsonValue]) -> FieldError | None:
    """Returns the reason why a job can't ask for its terms of service, which have no price; None if it can."""
    term = term_of(params)
    for model in chain if term is not None else ():
        settings = config.models.get(model)
        tiers = () if settings is None or settings.price is None else settings.price.service_tiers
        if term not in {name.strip().lower() for name in tiers}:
            message = f"{term!r} has no price: set models.{model}.price.service_tiers.{term} to allow it"
            return FieldError("service_tier", message)
    return None


def _params_objection(config: Config, agent: Agent, job: Job, params: Mapping[str, JsonValue]) -> FieldError | None:
    """Returns the reason why a job's params can't be sent to the providers of its models; None if they can."""
    if (problem := params_objection(params)) is not None:
        return problem
    if (problem := _tier_objection(config, agent.chain_for(job), params)) is not None:
        return problem
    providers = {config.provider_name(agent, model) for model in agent.chain_for(job)}
    kinds = {
        config.providers[name].kind for name in providers if name in config.providers and not config.is_local(name)
    }
    if kinds and (problem := connection_objection(params)) is not None:
        return problem
    if (strictness := config.strict_params(agent, job)) is None:
        return None
    for kind in sorted(kinds):
        if (problem := unknown_objection(params, kind, agent.allowed_params)) is not None:
            top_level_param = problem.path.partition(".")[0]
            remedy = f"list {top_level_param!r} in agents.{job.agent}.allowed_params to allow it"
            return FieldError(problem.path, f"{problem.message}: {strictness}, only such params are allowed; {remedy}")
    return None


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


def _parts_objection(config: Config, agent: Agent, job: Job, messages: Iterable[ChatMessage]) -> FieldError | None:
    """Returns the reason why parts of a job's messages, which may cost more than tokens, are not allowed."""
    if (strictness := config.strict_params(agent, job)) is None:
        return None
    if (problem := unknown_part(messages, agent.allowed_params)) is None:
        return None
    remedy = f"list 'messages' in agents.{job.agent}.allowed_params to allow it"
    return FieldError(problem.path, f"{problem.message}: {strictness}, only such parts are allowed; {remedy}")


def _with_preset(agent: dict[str, Any]) -> dict[str, Any]:
    """Expands presets, so that a preset that an agent names wins over explicit settings of `defaults`."""
    return agent | {name: take_preset(agent[name]) for name in ("breaker", "guard") if name in agent}


def _merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults with the agent's own settings over them, key by key; lists are replaced, not joined."""
    merged = dict(base)
    for key, value in overrides.items():
        inherited = merged.get(key)
        if isinstance(inherited, dict) and isinstance(value, dict):
            merged[key] = _merge(cast(dict[str, Any], inherited), cast(dict[str, Any], value))
        else:
            merged[key] = value
    return merged
