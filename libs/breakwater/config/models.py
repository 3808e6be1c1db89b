"""What the config file may hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from breakwater.config.errors import ConfigError, hint, listing
from breakwater.contracts.events import AlertEvent
from breakwater.contracts.job import Job
from breakwater.contracts.types import Identifier, Message, ModelId
from breakwater.contracts.validation import Problem
from breakwater.policy.breaker import BreakerRules
from breakwater.policy.budget import Caps
from breakwater.policy.price import MAX_OUTPUT_TOKENS, OUTPUT_LIMITS, Price
from breakwater.policy.redact import RedactionRules
from breakwater.policy.retry import RetryPolicy


class SecretRef(Message):
    """Where a secret is found. The config itself never holds one."""

    env: str | None = Field(default=None, min_length=1, description="Name of an environment variable.")
    file: Path | None = Field(default=None, description="A file that holds only the secret.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError("give exactly one of env and file")
        return self

    def read(self) -> str:
        """The secret itself.

        Raises:
            ConfigError: the variable is not set, or the file can't be read or is empty.
        """
        if self.env is not None:
            value = os.environ.get(self.env, "")
            if not value:
                raise ConfigError(f"the environment variable {self.env} is not set; it must hold a secret")
            return value
        assert self.file is not None
        try:
            value = self.file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"the secret file {self.file} can't be read: {error.strerror}") from error
        if not value:
            raise ConfigError(f"the secret file {self.file} is empty")
        return value


def _secret_ref(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("a secret does not belong in the config; write {env: NAME} or {file: PATH}")  # noqa: TRY004  pydantic reports ValueError
    return value


Secret = Annotated[SecretRef, BeforeValidator(_secret_ref)]


def _off(value: object) -> object:
    # YAML 1.1 reads a bare `off` as false; both spellings mean the same to the person who wrote them.
    return None if value is False or value == "off" else value


class Provider(Message):
    """An endpoint that performs attempts."""

    kind: Literal["openai"] = Field(default="openai", description="Any OpenAI-compatible HTTP endpoint.")
    base_url: str = Field(pattern=r"^https?://[^\s]+$", description="Up to and including /v1.")
    api_key: Secret | None = None
    headers: dict[str, str] = Field(default_factory=dict, description="Sent with every call; no secrets.")


class ModelSettings(Message):
    """What is known of a model; prices here win over the built-in list."""

    provider: Identifier | None = Field(
        default=None, description="Which provider serves it; the agent's own by default."
    )
    price: Price | None = None


class AgentDefaults(Message):
    """Settings that an agent may leave out. The values here are the built-in ones."""

    provider: Identifier | None = None
    model: ModelId | None = None
    fallback_models: tuple[ModelId, ...] = ()
    allowed_models: tuple[ModelId, ...] = Field(
        default=(), description="What a job may ask for beside the agent's own models; `*` allows any."
    )
    system_prompt: str | None = None
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Under the job's own params.")
    max_tokens: int = Field(
        default=4096, ge=1, le=MAX_OUTPUT_TOKENS, description="Output limit where neither job nor params set one."
    )
    retry: RetryPolicy = RetryPolicy()
    timeout_s: float = Field(default=30.0, gt=0, le=3600, description="For one attempt.")
    total_timeout_s: float = Field(default=300.0, gt=0, le=86_400, description="For a job, waits included.")
    concurrency: int = Field(
        default=16, ge=1, le=10_000, description="Jobs of this agent at once, over the whole fleet."
    )
    breaker: Annotated[BreakerRules | None, BeforeValidator(_off)] = Field(
        default=BreakerRules(), description="Rules, or `off`."
    )
    budget: Caps = Caps()
    breaker_counts_auth_errors: bool = Field(
        default=False, description="Whether 401, 402 and 403 count as failures of the model."
    )
    persist_prompts: bool = True
    persist_responses: bool = True

    @field_validator("params")
    @classmethod
    def _params_that_can_be_sent(cls, params: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if (problem := params_objection(params)) is not None:
            raise ValueError(f"{problem.path} {problem.message}")
        return params


class Agent(AgentDefaults):
    """One agent: a name that programs call, and how its calls are made."""

    @property
    def chain(self) -> tuple[ModelId, ...]:
        """The models to try, in order, each once."""
        own = (self.model,) if self.model is not None else ()
        return tuple(dict.fromkeys((*own, *self.fallback_models)))


class Budgets(Message):
    """Caps over all agents, and the calendar of every budget."""

    timezone: str = Field(default="UTC", description="Where days and months begin, as in `Europe/Berlin`.")
    total: Caps = Field(default=Caps(), alias="global")

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"{name!r} is not a time zone; write it like 'Europe/Berlin' or 'UTC'") from error
        return name

    @property
    def zone(self) -> ZoneInfo:
        """The calendar's time zone."""
        return ZoneInfo(self.timezone)


class SlackChannel(Message):
    """Slack, by incoming webhook."""

    webhook_url: Secret


class WebhookChannel(Message):
    """Any HTTP receiver; requests are signed as Standard Webhooks says."""

    url: str = Field(pattern=r"^https?://[^\s]+$")
    secret: Secret = Field(description="The signing secret, `whsec_…`.")
    timeout_s: float = Field(default=10.0, gt=0, le=60)


class Alerts(Message):
    """Who is told what."""

    on_events: tuple[AlertEvent, ...] = ("breaker_open", "breaker_closed", "budget_soft_cap", "budget_hard_cap")
    slack: SlackChannel | None = None
    webhook: WebhookChannel | None = None

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the channels that are set up."""
        return tuple(name for name in ("slack", "webhook") if getattr(self, name) is not None)


class Limits(Message):
    """Sizes and times of the plane itself."""

    # Dead letters hold a job as base64, and the NATS servers take messages of up to 8 MB.
    max_body_bytes: int = Field(
        default=4_000_000, ge=1_000, le=5_000_000, description="The largest job that is accepted."
    )
    events_max_age_h: float = Field(
        default=72, gt=0, description="How long EVENTS keeps events, and a job_id is idempotent."
    )
    results_max_age_h: float = Field(default=24, gt=0)
    drain_s: float = Field(default=8.0, ge=0, le=600, description="How long a stopping worker lets its calls finish.")


class Config(Message):
    """The whole file."""

    providers: dict[Identifier, Provider]
    models: dict[ModelId, ModelSettings] = Field(default_factory=dict)
    defaults: AgentDefaults = AgentDefaults()
    agents: dict[Identifier, Agent] = Field(min_length=1)
    budgets: Budgets = Budgets()
    alerts: Alerts = Alerts()
    redaction: RedactionRules = RedactionRules()
    limits: Limits = Limits()

    @model_validator(mode="before")
    @classmethod
    def _inherit_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        document = cast(dict[str, Any], data)
        defaults, agents = document.get("defaults"), document.get("agents")
        if not isinstance(defaults, dict) or not isinstance(agents, dict):
            return document
        merged = {
            name: _merge(cast(dict[str, Any], defaults), cast(dict[str, Any], agent))
            if isinstance(agent, dict)
            else agent
            for name, agent in cast(dict[str, Any], agents).items()
        }
        return {**document, "agents": merged}

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        problems = list(self._reference_problems())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _reference_problems(self) -> Iterable[str]:
        for name, agent in self.agents.items():
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
        for model, settings in self.models.items():
            if settings.provider is not None and settings.provider not in self.providers:
                yield (
                    f"models.{model}.provider: {settings.provider!r} is not configured"
                    f"{hint(settings.provider, self.providers)}"
                )

    def provider_name(self, agent: Agent, model: str) -> str | None:
        """Which provider serves a model of an agent: the model's own, the agent's, or the only one there is."""
        settings = self.models.get(model)
        if settings is not None and settings.provider is not None:
            return settings.provider
        if agent.provider is not None:
            return agent.provider
        return next(iter(self.providers)) if len(self.providers) == 1 else None


RESERVED_PARAMS = {
    "model": "has a place of its own in a job",
    "messages": "have a place of their own in a job",
    "stream": "is not supported: an answer comes whole",
    "stream_options": "are not supported: an answer comes whole",
}


def params_objection(params: Mapping[str, JsonValue]) -> Problem | None:
    """Why params can't go to a provider as they are; None where they can.

    What a call is admitted, priced and limited by must be what is sent.
    """
    for name in params:
        if name in RESERVED_PARAMS:
            return Problem(name, RESERVED_PARAMS[name])
    for name, most in (*((limit, MAX_OUTPUT_TOKENS) for limit in OUTPUT_LIMITS), ("n", 128)):
        value = params.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            return Problem(name, f"must be a whole number from 1 to {most}")
    return None


def unreadable_secrets(config: Config) -> tuple[str, ...]:
    """The secrets that the config names and that can't be read here: where each is named, and what is wrong."""
    named = [(f"providers.{name}.api_key", provider.api_key) for name, provider in config.providers.items()]
    if config.alerts.slack is not None:
        named.append(("alerts.slack.webhook_url", config.alerts.slack.webhook_url))
    if config.alerts.webhook is not None:
        named.append(("alerts.webhook.secret", config.alerts.webhook.secret))
    problems: list[str] = []
    for path, secret in named:
        try:
            if secret is not None:
                secret.read()
        except ConfigError as error:
            problems.append(f"  {path}: {error}")
    return tuple(problems)


def objection(config: Config, job: Job) -> Problem | None:
    """Why a job that is valid by itself can't be run by its (configured) agent; None where it can."""
    agent = config.agents[job.agent]
    if job.input is not None:
        return Problem("input", f"agent {job.agent!r} is a chat agent and takes prompt or messages")
    if (problem := params_objection(job.params)) is not None:
        return Problem(f"params.{problem.path}", problem.message)
    allowed = {*agent.chain, *agent.allowed_models}
    if "*" not in allowed:
        named = [("model", job.model), *((f"fallback_models.{i}", m) for i, m in enumerate(job.fallback_models or ()))]
        for path, model in named:
            if model is not None and model not in allowed:
                known = listing(allowed)
                return Problem(path, f"{model!r} is not allowed for agent {job.agent!r}; allowed are {known}")
    return None


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with the agent's own settings over them, key by key; lists are replaced, not joined."""
    merged = dict(base)
    for key, value in own.items():
        known = merged.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[key] = _merge(cast(dict[str, Any], known), cast(dict[str, Any], value))
        else:
            merged[key] = value
    return merged
