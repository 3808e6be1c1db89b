"""The behaviour script of the simulated provider: its answers, their speed and price, and its faults.

Written in JSON, or built in Python. Every mistake is named with its path.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.types import Message, UsdAmount

EFFECTS = ("status", "hang_s", "kind", "answer", "stream")
"""Effects of a fault: it has exactly one of these."""

BrokenKind = Literal[
    "malformed_json",
    "empty_body",
    "truncated",
    "no_choices",
    "no_content",
    "error_in_200",
    "failed",
    "reset",
    "byte_order_mark",
]
StreamFault = Literal["cut", "stall", "malformed", "no_end", "error"]
WITH_ERROR = ("error_in_200", "failed", "error")
"""Kinds and faults of streams that come with an error."""

Counted = Literal[
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "cache_write_1h_tokens",
    "reasoning_tokens",
]


class ScriptError(BreakwaterError, ValueError):
    """The script can't be used."""


def _check_order(span: int | tuple[int, int | None]) -> int | tuple[int, int | None]:
    if isinstance(span, tuple) and span[1] is not None and span[0] > span[1]:
        raise ValueError(f"the range {list(span)} is empty; write the smaller number first")
    return span


Tokens = Annotated[NonNegativeInt | tuple[NonNegativeInt, NonNegativeInt], AfterValidator(_check_order)]
"""A number of tokens, or a range that it is drawn from."""


class ScriptedPrice(Message):
    """A model's price in USD per million tokens. Without a cached price, cached input costs as much as fresh input.

    Without a price of their own, writes to the cache cost 1.25 times as much as fresh input, and twice as much for an
    hour. `hosted_usd` is the price of one call of each hosted tool, free by default.
    """

    input_usd_per_mtok: UsdAmount
    output_usd_per_mtok: UsdAmount
    cached_input_usd_per_mtok: UsdAmount | None = None
    cache_write_usd_per_mtok: UsdAmount | None = None
    cache_write_1h_usd_per_mtok: UsdAmount | None = None
    hosted_usd: dict[str, UsdAmount] = Field(default_factory=dict[str, UsdAmount])


class Latency(Message):
    """A log-normal in milliseconds, given by its median and its 95th percentile."""

    p50: PositiveFloat
    p95: PositiveFloat

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.p95 < self.p50:
            raise ValueError(f"p95 ({self.p95:g}) must not be below p50 ({self.p50:g})")
        return self


class UsageRule(Message):
    """Tokens of an answer; None goes by the length of the text.

    Cached tokens, and those that are written to a cache for five minutes or an hour, are a part of the input; reasoning
    is one of the output. `report: false` leaves `usage` out of the answer; the call is billed all the same.
    """

    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cached_tokens: Tokens = 0
    cache_write_tokens: Tokens = 0
    cache_write_1h_tokens: Tokens = 0
    reasoning_tokens: Tokens | None = None
    report: bool = True


class ScriptedText(Message):
    """A text, with the pages that it cites. `{prompt}` and `{n}` mean the same as in `answer`."""

    type: Literal["text"] = "text"
    text: str
    cites: tuple[str, ...] = ()


class ScriptedThinking(Message):
    """A thought that precedes the rest; a redacted one can be read by the model alone."""

    type: Literal["thinking"] = "thinking"
    text: str
    redacted: bool = False


class ScriptedRefusal(Message):
    """A refusal to answer."""

    type: Literal["refusal"] = "refusal"
    text: str


class ScriptedToolCall(Message):
    """A tool call that the model asks for. `input` is the text for a tool that takes no JSON."""

    type: Literal["tool_call"] = "tool_call"
    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    input: str | None = None


class ScriptedHostedCall(Message):
    """A call of a tool that the provider runs itself. Chat completions do not show it.

    Attributes:
        tool: `web_search`, or another for which `item` and `blocks` are given.
        query: of a search.
        item: of Responses, without id and status.
        blocks: of Messages, as they are.
    """

    type: Literal["hosted"] = "hosted"
    tool: Annotated[str, Field(min_length=1)] = "web_search"
    query: str = ""
    item: dict[str, JsonValue] | None = None
    blocks: tuple[dict[str, JsonValue], ...] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool != "web_search" and (self.item is None or self.blocks is None):
            raise ValueError("only web_search has an item and blocks of its own: another tool needs both")
        return self


Part = Annotated[
    ScriptedText | ScriptedThinking | ScriptedRefusal | ScriptedToolCall | ScriptedHostedCall,
    Field(discriminator="type"),
]
"""A part of an answer, which each interface writes in its own form."""


class ErrorText(Message):
    """The body of an error; fields that are left out come from the default error of its status."""

    type: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class Pace(Message):
    """Speed of a stream: tokens in a chunk, and tokens a second; if `tokens_per_s` is None, all come immediately."""

    tokens_per_chunk: PositiveInt = 1
    tokens_per_s: PositiveFloat | None = None


class Fault(Message):
    """A way to fail, and its conditions. It applies if all of them hold, and always if it has none.

    Attributes:
        from_s: applies from this many seconds after the start on.
        to_s: applies before this many seconds after the start.
        rate: the share of requests it hits, drawn from the seed.
        requests: first and last request number of this model it hits, both included; a last of null means no end.
        when: a property of the request.
        key: hits only requests with this API key.
        status: answers with this HTTP status; with a 2xx, with the ordinary answer.
        hang_s: accepts the request and answers, normally, only after this long.
        kind: answers 200 with a broken or odd body, or (`reset`) closes the socket. With `failed`, a response says that
            it failed, a streamed one after half of its content; over other interfaces it is `error_in_200`.
        answer: answers normally, but with this text.
        stream: hits only requests for a stream, after `after_chunks` chunks of content. The connection breaks (`cut`);
            nothing comes for `stall_s`, 30 by default (`stall`); one event is no JSON (`malformed`); the body ends in
            order, but without what would follow (`no_end`); an error comes as an event, and is the last (`error`).
        after_chunks: null means after the last one; with `no_end`, that only the mark of the end is missing.
        retry_after_s: sent with `status` as `Retry-After`.
        headers: sent with `status`, too.
        error: the error body sent with `status`, `kind: error_in_200`, `kind: failed` or `stream: error`.
        reports: tokens that the answer reports instead of those that are billed.
        finish_reason: reported by the model; with `kind: no_content` or any answer.
        latency_ms: replaces the model's latency.
        billed: replaces the rule that only answers that report their usage are billed.
        billed_when_abandoned: a hang the client gave up on is billed as if it had been answered.
    """

    from_s: NonNegativeFloat | None = None
    to_s: PositiveFloat | None = None
    rate: Annotated[float, Field(ge=0, le=1)] | None = None
    requests: Annotated[tuple[PositiveInt, PositiveInt | None], AfterValidator(_check_order)] | None = None
    when: Literal["orphan_tool_calls"] | None = None
    key: str | None = None

    status: Annotated[int, Field(ge=200, le=599)] | None = None
    hang_s: PositiveFloat | None = None
    kind: BrokenKind | None = None
    answer: str | None = None
    stream: StreamFault | None = None

    after_chunks: NonNegativeInt | None = None
    stall_s: PositiveFloat | None = None
    retry_after_s: NonNegativeFloat | None = None
    headers: dict[str, str] = Field(default_factory=dict[str, str])
    error: ErrorText | None = None
    reports: dict[Counted, NonNegativeInt] = Field(default_factory=dict[Counted, int])
    finish_reason: str | None = None
    latency_ms: NonNegativeFloat | Latency | None = None
    billed: bool | None = None
    billed_when_abandoned: bool = False

    @property
    def refuses(self) -> bool:
        """Returns True if it answers with the status of an error."""
        return self.status is not None and self.status >= 300

    @property
    def name(self) -> str | None:
        """The name of the fault in the ledger."""
        named = {"hang_s": "hang", "kind": self.kind, "stream": f"stream_{self.stream}"}
        return next((named.get(effect, effect) for effect in EFFECTS if getattr(self, effect) is not None), None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        effects = [name for name in EFFECTS if getattr(self, name) is not None]
        if len(effects) != 1:
            raise ValueError(f"needs exactly one of {', '.join(EFFECTS)}; it has {' and '.join(effects) or 'none'}")
        if (self.retry_after_s is not None or self.headers) and not self.refuses:
            raise ValueError("retry_after_s or headers, sent with an error, needs status of 300 or more")
        if self.error is not None and not self.refuses and (self.kind or self.stream) not in WITH_ERROR:
            raise ValueError("error needs status of 300 or more, kind: error_in_200 or failed, or stream: error")
        if (self.after_chunks, self.stall_s) != (None, None) and self.stream is None:
            raise ValueError("after_chunks and stall_s are about a stream: they need stream")
        if self.billed_when_abandoned and self.hang_s is None:
            raise ValueError("billed_when_abandoned is about a hang: it needs hang_s")
        if self.to_s is not None and self.to_s <= (self.from_s or 0):
            raise ValueError(f"the window ends (to_s {self.to_s:g}) before it begins (from_s {self.from_s or 0:g})")
        return self


NO_FAULT = Fault.model_construct()
"""The fault of an ordinary answer."""


class PromptCache(Message):
    """A cache of the beginnings of conversations, one for each model and API key, as providers have.

    The messages that a request begins with as an earlier one did are read from it, once they have `min_tokens`.
    """

    min_tokens: NonNegativeInt = 1024
    ttl_s: PositiveFloat = 300.0


class ModelScript(Message):
    """Behaviour of one model.

    Attributes:
        price: of a billed call.
        latency_ms: time of every answer, errors included, or until a stream begins; a number or a log-normal.
        stream: the pace of streams.
        usage: the tokens of an answer.
        prompt_cache: how it caches prompts; None for a model that does not.
        answer: the text; `{prompt}` is the last user message, `{n}` the request number of this model.
        answer_json: the answer to a request for JSON, and to all requests where `answer` is not given.
        tool_calls: asked for when the request offers tools and demands no other, and its last message is not a tool's
            result.
        turns: the answers of a conversation, in order; the number of the assistant's messages in the request selects
            one. The other rules apply after the last one, and where a turn calls a tool that is not offered.
        dimensions: of its embeddings.
        headers: sent with each answer that is no error.
        faults: the first that applies wins.
    """

    price: ScriptedPrice
    latency_ms: NonNegativeFloat | Latency = 0.0
    stream: Pace = Pace()
    usage: UsageRule = UsageRule()
    prompt_cache: PromptCache | None = None
    answer: str | None = None
    answer_json: JsonValue | None = None
    tool_calls: tuple[ScriptedToolCall, ...] = ()
    turns: tuple[tuple[Part, ...], ...] = ()
    dimensions: PositiveInt = 1536
    headers: dict[str, str] = Field(default_factory=dict[str, str])
    faults: tuple[Fault, ...] = ()


class ProviderScript(Message):
    """The whole provider. With `api_keys`, any other `Authorization` is answered 401."""

    seed: int = 0
    api_keys: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    models: Annotated[dict[str, ModelScript], Field(min_length=1)]


def build_script(content: object) -> ProviderScript:
    """Checks a script: JSON text, plain values, or one that is checked already.

    Raises:
        ScriptError: the script has mistakes, each of which is named with its path.
    """
    read = ProviderScript.model_validate_json if isinstance(content, bytes) else ProviderScript.model_validate
    try:
        return read(content)  # pyright: ignore[reportArgumentType]  # bytes go to the reader of JSON
    except ValidationError as error:
        raise ScriptError("the provider script has errors:\n  " + "\n  ".join(mistakes(error))) from None


def mistakes(error: ValidationError) -> list[str]:
    """Returns each mistake with its path. The input is left out: it may be an API key."""
    return [f"{'.'.join(map(str, item['loc'])) or 'script'}: {item['msg']}" for item in error.errors()]
