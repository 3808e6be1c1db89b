"""The sections `defaults`, `agents` and `models`, whose settings belong to several rooms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, JsonValue, field_validator, model_validator

from breakwater.breakers.settings import BreakerRules, ShadowRules, take_preset
from breakwater.calls.settings import CacheRules, OutputRules, RetryPolicy
from breakwater.config.deployments import Choose, DeploymentSettings
from breakwater.config.job_rules import NO_JOB_RULES, JobRules, bound_problem, job_rules
from breakwater.dialects.rules.embeddings import MAX_BATCHES
from breakwater.dialects.rules.params import params_objection
from breakwater.identity.contract import Priority
from breakwater.jobs.contract.job import Job
from breakwater.kernel.types import Identifier, Message, ModelId, Name, Off, Region, UsdAmount
from breakwater.kernel.validation import FieldError
from breakwater.limits.settings import Caps, GuardRules, RateLimit
from breakwater.prices.settings import MAX_OUTPUT_TOKENS, Price


class AgentDefaults(Message):
    """Settings that an agent may leave out. The values here are the built-in ones."""

    provider: Identifier | None = None
    model: ModelId | None = Field(default=None, description="`provider/model`, or any id with a provider set.")
    fallback_models: tuple[ModelId, ...] = ()
    allowed_models: tuple[ModelId, ...] = Field(
        default=(),
        description="Models that a job may request in addition to the agent's own, by name; `*` alone allows any.",
    )
    residency: Region | None = Field(
        default=None,
        description="Calls go only to deployments with this `region`, or one within it: `eu-west-1` is within `eu`.",
    )
    allowed_params: tuple[str, ...] = Field(
        default=(),
        description=(
            "Further params, and fields of requests, that jobs may send to models under a limit or with "
            "`allowed_models`. By default only what costs nothing but tokens is allowed, "
            "because limits don't know other costs."
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
            "outcome is known: a later error is an event of the stream. Without it, that happens after 15 s, and only "
            "if the job waits for its turn."
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
    priority: Priority | None = Field(
        default=None,
        description=(
            "Priority of its jobs among those that wait, and the highest that a job may ask for; the lower one of the "
            "agent's and its key's. By default `normal`."
        ),
    )
    breaker: Annotated[BreakerRules | None, Off] = Field(default=BreakerRules(), description="Rules, or `off`.")
    shadow: Annotated[ShadowRules | None, Off] = Field(
        default=None,
        description="Rules to try, which refuse nothing: what they would have done is recorded.",
    )
    refuse_when_open: bool = Field(
        default=False,
        description=("Refuse jobs over HTTP (503 `agent_unavailable`) while the breakers of all models are open."),
    )
    guard: Annotated[GuardRules | None, Off] = Field(
        default=GuardRules(), description="Limits on each task (a run of jobs, or a single job), or `off`."
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
            "Output tokens that limits reserve for a call. `observed`: twice the longest recent "
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
        """Returns True if providers' error texts, which may quote prompts and responses, may be stored unencrypted."""
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


class ModelSettings(Message):
    """Settings of a model; prices here override the built-in list."""

    provider: Identifier | None = Field(
        default=None,
        description="Provider of the model; default: the one its id begins with, or the agent's.",
    )
    name: str | None = Field(default=None, min_length=1, description="Name at the provider; default: the model's id.")
    deployments: tuple[DeploymentSettings, ...] | None = Field(
        default=None,
        description="Where it is called, each with a breaker, holds and limits of its own; in place of `provider`. A "
        "failed call goes to another one first, and to the next model after them.",
    )
    choose: Choose | None = Field(
        default=None,
        description="Which of the deployments that may be called. headroom (default): by weight, and by what is left "
        "of the provider's limits; weighted: by weight; latency: the fastest; ordered: the first listed.",
    )
    affinity: Literal["session", "none"] | None = Field(
        default=None,
        description="session: the calls of a task or a conversation stay on one deployment, whose prompt cache has "
        "them. By default so, unless cached input has the price of any other.",
    )
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

    @model_validator(mode="after")
    def _places_are_clear(self) -> Self:
        if self.deployments == ():
            raise ValueError("deployments is empty; list one, or remove it to call the model's provider")
        if self.deployments and self.provider is not None:
            raise ValueError("has a provider and deployments; list the provider as one of its deployments")
        for name in ("choose", "affinity"):
            if self.deployments is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs deployments to choose from")
        return self


def agent_with_defaults(agent: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns an agent's settings in the file with the defaults that it leaves out.

    Presets are expanded first, so that a preset that an agent names wins over explicit settings of `defaults`.
    """
    return _merge(_with_preset(defaults), _with_preset(agent))


def _with_preset(settings: dict[str, Any]) -> dict[str, Any]:
    shadow = settings.get("shadow")
    with_shadow = (
        settings | {"shadow": _with_preset(cast(dict[str, Any], shadow))} if isinstance(shadow, dict) else settings
    )
    return with_shadow | {name: take_preset(settings[name]) for name in ("breaker", "guard") if name in settings}


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
