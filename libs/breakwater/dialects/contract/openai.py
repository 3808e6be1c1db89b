"""OpenAI's chat completions, as the HTTP API takes and gives them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from breakwater.identity.contract import Priority
from breakwater.jobs.contract.job import MAX_DEPENDENCIES, MAX_FALLBACK_MODELS, ChatMessage, OwnRules, TotalTimeout
from breakwater.kernel.types import NO_CONTROLS, Event, Identifier, Message, ModelId, Timestamp


class CallOptions(Message):
    """Fields of a `Job` that OpenAI's requests lack: `breakwater` in the body, or headers."""

    model_config = ConfigDict(strict=True)

    tenant: Identifier | None = None
    task_id: Identifier | None = None
    session_id: Identifier | None = None
    parent_execution_id: Identifier | None = None
    plan_id: Identifier | None = None
    depends_on: Annotated[list[Identifier], Field(max_length=MAX_DEPENDENCIES)] = Field(
        default_factory=list[Identifier]
    )
    fallback_models: list[ModelId] | None = Field(default=None, max_length=MAX_FALLBACK_MODELS)
    total_timeout_s: TotalTimeout | None = None
    breaker: OwnRules = None
    guard: OwnRules = None
    retry: OwnRules = None
    rate_limit: dict[str, JsonValue] | None = None
    priority: Priority | None = None
    dry_run: bool = False
    skip_cache: bool = False
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class StreamOptions(Message):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(default=None, description="True to send the usage in the last chunk.")


class ChatCompletionRequest(Message):
    """OpenAI's request. All fields that are not named here become the job's `params`, except those that are null."""

    # `"stream": "no"` is a mistake, and no answer to it would be what is meant.
    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=400, pattern=NO_CONTROLS)] = Field(
        description="An agent, `agent/model`, or any model if the API key is bound to an agent.",
        examples=["content-writer", "content-writer/gpt-4.1-mini"],
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool | None = Field(default=None, description="True to stream the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    breakwater: CallOptions | None = Field(
        default=None, description="Breakwater's own options; in the SDK: `extra_body`."
    )


class ChatCompletion(Event):
    """OpenAI's `chat.completion`."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[dict[str, JsonValue]]
    usage: dict[str, JsonValue] | None = Field(default=None, description="Absent if unknown.")


class ResponsesRequest(Message):
    """OpenAI's request. Fields that are not named here go to a provider of Responses as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=400, pattern=NO_CONTROLS)] = Field(
        description="An agent, `agent/model`, or any model if the API key is bound to an agent.",
        examples=["content-writer", "content-writer/gpt-4.1-mini"],
    )
    input: JsonValue = Field(default=None, description="A text, or a list of items.", examples=["Write a haiku."])
    stream: bool | None = Field(default=None, description="True to stream the answer as server-sent events.")
    stream_options: dict[str, JsonValue] | None = Field(default=None, description="Not sent to providers.")
    background: bool | None = None
    store: bool | None = Field(default=None, description="False to keep nothing beyond what the job needs.")
    previous_response_id: str | None = None
    conversation: JsonValue = Field(default=None, description="Refused: conversations are not kept.")
    breakwater: CallOptions | None = Field(
        default=None, description="Breakwater's own options; in the SDK: `extra_body`."
    )


class ResponseObject(Event):
    """OpenAI's `response`."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(description="`resp_` and the job's id.")
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]
    model: str
    output: list[dict[str, JsonValue]]
    usage: dict[str, JsonValue] | None = Field(description="Null if unknown.")


class EmbeddingsRequest(Message):
    """OpenAI's request. Fields that are not named here go to the provider as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=400, pattern=NO_CONTROLS)] = Field(
        description="An agent, `agent/model`, or any model if the API key is bound to an agent.",
        examples=["search-index", "search-index/text-embedding-3-small"],
    )
    input: JsonValue = Field(
        description="A text, a list of texts, a list of token ids, or a list of lists of token ids.",
        examples=["How do I return a parcel?"],
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Length of the vectors, if the model can shorten it."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="`base64`: of 32-bit numbers, as OpenAI's clients ask for. Default: `float`."
    )
    user: str | None = None
    stream: Literal[False] | None = Field(default=None, description="Embeddings come whole.")
    stream_options: None = None
    breakwater: CallOptions | None = Field(
        default=None, description="Breakwater's own options; in the SDK: `extra_body`."
    )


class EmbeddingsList(Event):
    """OpenAI's list of embeddings."""

    model_config = ConfigDict(extra="allow")

    object: Literal["list"] = "list"
    data: list[dict[str, JsonValue]] = Field(
        description="In the order of the inputs: `index`, and `embedding` with numbers, or with base64."
    )
    model: str
    usage: dict[str, JsonValue] | None = Field(default=None, description="Absent if unknown.")


class ModelName(Event):
    """A value of `model`, with the fields of OpenAI's models and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When this process read the config, in seconds since the epoch.")
    owned_by: Literal["breakwater"] = "breakwater"
    type: Literal["model"] = "model"
    display_name: str
    created_at: Timestamp = Field(description="Same as `created`.")


class ModelNames(Event):
    """The values of `model` that the API key may use: all of them, whatever page Anthropic's SDK asks for."""

    object: Literal["list"] = "list"
    data: tuple[ModelName, ...]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class OpenAIErrorDetails(Event):
    """An error in OpenAI's words."""

    message: str
    type: str = Field(description="`invalid_request_error`, `insufficient_quota`, `rate_limit_error`, `server_error`.")
    param: str | None = Field(description="Field at fault, such as `messages[0].role`.")
    code: str = Field(description="Stable, for programs: `model_not_found`, `insufficient_quota`, …")


class OpenAIErrorBody(Event):
    """The body of every response under `/v1` with a status of 400 or above."""

    error: OpenAIErrorDetails
