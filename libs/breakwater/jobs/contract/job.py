"""The job: an agent's task with its input, and how it is to be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, JsonValue, PrivateAttr, StringConstraints, field_validator, model_validator

from breakwater.identity.contract import Priority
from breakwater.kernel.nats.subjects import is_reply_subject
from breakwater.kernel.types import NO_CONTROLS, Identifier, Message, ModelId

MAX_DEPENDENCIES = 100
MAX_FALLBACK_MODELS = 16

TotalTimeout = Annotated[float, Field(gt=0, le=86_400)]

RulesPart = Literal["breaker", "guard", "retry"]

OwnRules = Annotated[
    dict[str, JsonValue] | None,
    Field(
        description="Rules of the job's own, over those of its agent: the same settings as in the config, and a "
        "`preset`. Only as strict as the agent's or stricter, but for what its `overridable` allows.",
        examples=[{"consecutive_failures": 1}],
    ),
]

RequestApi = Literal["responses", "messages", "embeddings"]
CallApi = Literal["chat", RequestApi]

SENT_BY_PLANE = ("model", "stream", "stream_options")
"""The fields of an API's body that the plane sets itself."""

HeaderValue = Annotated[str, StringConstraints(max_length=4096, pattern=NO_CONTROLS)]

Derived = TypeVar("Derived")

MessageRole = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(Message):
    """One message in OpenAI's chat format. Its further fields belong to the provider and are passed on as they are."""

    model_config = ConfigDict(frozen=True, extra="allow", hide_input_in_errors=True)

    role: MessageRole
    content: str | list[dict[str, JsonValue]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None

    @property
    def says_something(self) -> bool:
        """Returns True if the message has any content for a model."""
        content = self.content.strip() if isinstance(self.content, str) else self.content
        return bool(content or self.tool_calls)


class NativeRequest(Message):
    """A request of another API than OpenAI's chat completions.

    A provider with the API gets the body unchanged, and any other provider its translation to a chat.
    """

    api: RequestApi = Field(description="OpenAI's Responses, Anthropic's Messages, or OpenAI's embeddings.")
    body: dict[str, JsonValue] = Field(
        description="The API's own JSON, without `model`, `stream` and `stream_options`: the job has places for those.",
        examples=[{"input": "Write a haiku about tides."}],
    )
    headers: dict[Annotated[str, StringConstraints(pattern=r"^anthropic-beta$")], HeaderValue] = Field(
        default_factory=dict, description="The header `anthropic-beta`, for a provider of the same API."
    )

    _derived: Any = PrivateAttr(default=None)

    def derive(self, make: Callable[[NativeRequest], Derived]) -> Derived:
        """Returns the value that `make` computes from the request, which is computed once."""
        if self._derived is None:
            self._derived = make(self)
        return self._derived

    @field_validator("body")
    @classmethod
    def _has_no_fields_of_the_plane(cls, body: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if reserved := [name for name in SENT_BY_PLANE if name in body]:
            raise ValueError(f"{reserved[0]!r} has a place of its own in a job, or is set by the plane")
        return body


class Job(Message):
    """A request to run an agent on a prompt, on messages, on any JSON input, or on a request of another API.

    `agent` alone is required, with exactly one of `prompt`, `messages`, `input` and `api_request`. `job_id` is the
    idempotency key: the same id of the same caller again is the same execution, answered from its record.
    """

    agent: Identifier = Field(description="Configured agent to run; over NATS it must match the subject.")
    job_id: Identifier | None = Field(
        default=None, description="Idempotency key; default: the Nats-Msg-Id header, or generated."
    )
    prompt: str | None = Field(default=None, min_length=1, description="A single user message.")
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = Field(
        default=None, description="A conversation in OpenAI's chat format, including tools and tool calls."
    )
    input: JsonValue = Field(default=None, description="Any JSON value, for process and python agents.")
    api_request: NativeRequest | None = Field(
        default=None, description="A request of the Responses, Messages or embeddings API, which needs no `params`."
    )
    params: dict[str, JsonValue] = Field(
        default_factory=dict, description="Passed to the provider: temperature, max_tokens, tools, response_format, …"
    )
    model: ModelId | None = Field(default=None, description="Overrides the agent's model, if the agent allows it.")
    fallback_models: list[ModelId] | None = Field(
        default=None,
        max_length=MAX_FALLBACK_MODELS,
        description="Overrides the agent's fallback models, if the agent allows them.",
    )
    tenant: Identifier | None = None
    task_id: Identifier | None = Field(
        default=None,
        description="Task of which this job is one iteration; default: the parent's task, or without a "
        "parent a new one.",
    )
    session_id: Identifier | None = Field(
        default=None,
        description="Session that this job belongs to. Jobs of a session are shown as one run; guards watch tasks, "
        "not sessions.",
    )
    parent_execution_id: Identifier | None = Field(default=None, description="Execution that this job is part of.")
    plan_id: Identifier | None = Field(default=None, description="Plan that this job is part of.")
    depends_on: tuple[Identifier, ...] = Field(
        default=(),
        max_length=MAX_DEPENDENCIES,
        description="Ids of jobs that must succeed before this one starts. If one fails, is cancelled or "
        "never arrives, this job is dead-lettered (`dependency_failed`) and makes no call.",
    )
    total_timeout_s: TotalTimeout | None = Field(
        default=None,
        description="Time limit over all attempts and waits, from the first dispatch; with `depends_on`, "
        "from the success of those jobs.",
    )
    breaker: OwnRules = None
    guard: OwnRules = None
    retry: OwnRules = None
    rate_limit: Annotated[
        dict[str, JsonValue] | None,
        Field(
            description="Rate limit of the calls of the job's task, as `rate_limit` in `guard`: "
            "`{requests: 50, per: hour}`."
        ),
    ] = None
    priority: Priority | None = Field(
        default=None,
        description="Its priority among the jobs that wait: `high`, `normal` or `low`, and at most what its agent and "
        "its key allow. By default it has that. A job that has waited for five minutes with `low` counts as `normal`.",
    )
    dry_run: bool = Field(
        default=False, description="Return the call that would be made and its worst-case cost, and make none."
    )
    skip_cache: bool = False
    stream: bool = Field(
        default=False,
        description="Also publish the answer in chunks as it is produced, on "
        "`bw.chunks.<agent>.<execution>` and to `reply_to`.",
    )
    keep_chunks: bool = Field(
        default=False,
        description="Also store the chunks of a streamed answer: if the worker dies or the provider's stream breaks, "
        "the answer is continued where it broke off, as with `on_stream_break: continue`. Needs `stream`.",
    )
    include_response: bool = Field(
        default=False, description="Return the provider's own response too, in the result's `response`."
    )
    reply_to: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s*>]+$")] | None = Field(
        default=None, description="NATS subject that also receives the result: an inbox, or a subject below bw.replies."
    )
    metadata: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Your own data, stored with the execution. `user` and `team` name whose call it is, at most 128 "
        "characters each, unless the API key or the request does.",
    )

    @field_validator("reply_to")
    @classmethod
    def _reply_outside_the_plane(cls, subject: str | None) -> str | None:
        if subject is not None and not is_reply_subject(subject):
            raise ValueError("must be an inbox (_INBOX.…) or a subject below bw.replies")
        return subject

    @field_validator("prompt")
    @classmethod
    def _prompt_says_something(cls, prompt: str | None) -> str | None:
        if prompt is not None and not prompt.strip():
            raise ValueError("is empty")
        return prompt

    @field_validator("messages")
    @classmethod
    def _messages_say_something(cls, messages: list[ChatMessage] | None) -> list[ChatMessage] | None:
        if messages is not None and not any(message.says_something for message in messages):
            raise ValueError("all of them are empty")
        return messages

    @model_validator(mode="after")
    def _depends_on_others(self) -> Self:
        if self.job_id is not None and self.job_id in self.depends_on:
            raise ValueError("depends_on: a job can't depend on itself")
        return self

    @model_validator(mode="after")
    def _keeps_what_is_streamed(self) -> Self:
        if self.keep_chunks and not self.stream:
            raise ValueError("keep_chunks: needs `stream`")
        return self

    @model_validator(mode="after")
    def _one_kind_of_input(self) -> Self:
        inputs = [name for name in ("prompt", "messages", "input", "api_request") if getattr(self, name) is not None]
        if len(inputs) != 1:
            present = " and ".join(inputs) if inputs else "none of them"
            raise ValueError(f"exactly one of prompt, messages, input and api_request is required; found {present}")
        if self.api_request is not None and self.params:
            raise ValueError("params: belong into the body of `api_request`")
        return self

    @property
    def api(self) -> CallApi:
        """The API of the job's request."""
        return "chat" if self.api_request is None else self.api_request.api

    @property
    def returns_response(self) -> bool:
        """Returns True if the result has the provider's own response, the only place for vectors."""
        return self.include_response or self.api == "embeddings"

    @property
    def own_rules(self) -> dict[RulesPart, dict[str, JsonValue]]:
        """The breaker, guard and retry rules that the job brings."""
        guard = self.guard
        if self.rate_limit is not None:
            guard = dict(guard or {})
            guard["rate_limit"] = self.rate_limit
        rules: dict[RulesPart, OwnRules] = {"breaker": self.breaker, "guard": guard, "retry": self.retry}
        return {part: settings for part, settings in rules.items() if settings is not None}

    def chat_messages(self) -> list[dict[str, JsonValue]]:
        """The conversation as plain JSON; a prompt becomes one user message. Empty for a job without both."""
        if self.messages is not None:
            return [message.model_dump(mode="json", exclude_unset=True) for message in self.messages]
        return [] if self.prompt is None else [{"role": "user", "content": self.prompt}]
