"""The behaviour script: what the simulated provider answers, how fast, at what price, and how it fails.

Written in YAML or JSON, or built in Python. Every mistake is named with its path.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Self

import orjson
import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    ValidationError,
    model_validator,
)

NANO_PER_USD = 1_000_000_000
TOKENS_PER_MTOK = 1_000_000


def nano_per_mtok(usd: object) -> int:
    """Reads a price in USD per million tokens as integer nano-dollars per million tokens.

    Args:
        usd: `"0.15"`, or a number as YAML reads an unquoted one (taken in its shortest decimal form).

    Raises:
        ValueError: it is no amount, is negative, or is finer than a nano-dollar (nine decimal places).
    """
    try:
        nano = Fraction(Decimal(str(usd))) * NANO_PER_USD
    except (InvalidOperation, ValueError, OverflowError) as error:
        raise ValueError(f"{usd!r} is not a price; write USD per million tokens, like '0.15'") from error
    if nano.denominator != 1 or nano < 0:
        raise ValueError(f"{usd!r} must not be negative nor have more than nine decimal places")
    return int(nano)


def usd_per_mtok(nano: int) -> str:
    """The inverse of `nano_per_mtok`: a dumped script can be read again."""
    return f"{Decimal(nano) / NANO_PER_USD:f}"


NanoPerMtok = Annotated[int, BeforeValidator(nano_per_mtok), PlainSerializer(usd_per_mtok)]
"""Written as USD per million tokens; integer nano-dollars per million tokens in Python."""


def price_nano(
    *,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int,
    input_nano_per_mtok: int,
    output_nano_per_mtok: int,
    cached_input_nano_per_mtok: int,
) -> int:
    """What one call costs in whole nano-dollars.

    The exact sum of the three parts is rounded half up, once: rounding each part would drift by up to a nano-dollar and
    a half a call. The plane's own price function follows the same rule, so the two agree to the nano-dollar.

    Args:
        input_tokens: all input tokens, the cached ones included.
        output_tokens: tokens of the answer.
        cached_tokens: the part of `input_tokens` that was read from the provider's cache.
        input_nano_per_mtok: nano-dollars per million fresh input tokens.
        output_nano_per_mtok: nano-dollars per million output tokens.
        cached_input_nano_per_mtok: nano-dollars per million cached input tokens.
    """
    exact = (
        (input_tokens - cached_tokens) * input_nano_per_mtok
        + cached_tokens * cached_input_nano_per_mtok
        + output_tokens * output_nano_per_mtok
    )
    return (exact + TOKENS_PER_MTOK // 2) // TOKENS_PER_MTOK


BrokenKind = Literal[
    "malformed_json", "empty_body", "truncated", "no_choices", "no_content", "error_in_200", "reset", "byte_order_mark"
]
StreamFault = Literal["cut", "stall", "malformed", "no_end", "error"]
Condition = Literal["orphan_tool_calls"]


class ScriptError(ValueError):
    """The script can't be used; the message names each mistake with its path."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _ordered(span: int | tuple[int, int]) -> int | tuple[int, int]:
    if isinstance(span, tuple) and span[0] > span[1]:
        raise ValueError(f"the range [{span[0]}, {span[1]}] is empty; write the smaller number first")
    return span


_Tokens = Annotated[int, Field(ge=0)]


class ScriptedPrice(_Part):
    """Written in USD per million tokens. Without a cached price, cached input costs what fresh input costs."""

    input_usd_per_mtok: NanoPerMtok
    output_usd_per_mtok: NanoPerMtok
    cached_input_usd_per_mtok: NanoPerMtok | None = None


class Latency(_Part):
    """A log-normal in milliseconds, given by its median and its 95th percentile."""

    p50: Annotated[float, Field(gt=0)]
    p95: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.p95 < self.p50:
            raise ValueError(f"p95 ({self.p95:g}) must not be below p50 ({self.p50:g})")
        return self


class UsageRule(_Part):
    """Tokens of an answer: a number, a range drawn from the seed, or (None) by the text's length.

    `report: false` leaves `usage` out of the answer; the call is billed all the same.
    """

    input_tokens: _Tokens | tuple[_Tokens, _Tokens] | None = None
    output_tokens: _Tokens | tuple[_Tokens, _Tokens] | None = None
    cached_tokens: _Tokens | tuple[_Tokens, _Tokens] = 0
    report: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        for span in (self.input_tokens, self.output_tokens, self.cached_tokens):
            if span is not None:
                _ordered(span)
        return self


class ToolCall(_Part):
    """A tool call the model asks for. `arguments` is sent as JSON text, as OpenAI does."""

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, JsonValue] = {}


class ErrorText(_Part):
    """The body of an error; what is left out comes from the status' default error."""

    type: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class Pace(_Part):
    """How an answer is streamed: so many tokens in a chunk, and a second; without the latter all at once."""

    tokens_per_chunk: Annotated[int, Field(ge=1)] = 1
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None


class Fault(_Part):
    """One way to fail and when. All conditions given must hold; without any it always applies.

    Attributes:
        from_s: applies from this many seconds after the start on.
        to_s: and before this many.
        rate: the share of requests it hits, drawn from the seed.
        requests: first and last request number of this model it hits, both included; a last of null means no end.
        when: a property of the request.
        status: answers with this HTTP status; with a 2xx, with the ordinary answer.
        hang_s: accepts the request and answers, normally, only after this long.
        kind: answers 200 with a broken or odd body, or (`reset`) closes the socket.
        answer: answers normally, but with this text; `answer_json` with this JSON.
        stream: hits requests for a stream alone, after `after_chunks` chunks of content. The connection breaks (`cut`);
            nothing comes for `stall_s`, 30 by default (`stall`); one event is no JSON (`malformed`); the body ends in
            order, but without what would follow (`no_end`); an error comes as an event, and is the last (`error`).
        after_chunks: null means after the last one; with `no_end`, that only the mark of the end is missing.
        retry_after_s: sent with `status` as `Retry-After`.
        headers: sent with `status` besides.
        error: the error body sent with `status` or `error_in_200`.
        reports: tokens that the answer reports instead of those that are billed.
        finish_reason: why the model says that it stopped; with `kind: no_content` or any answer.
        latency_ms: replaces the model's latency.
        billed: replaces the rule that only a whole answer is billed, and an error as `billed_on_error` says.
        billed_when_abandoned: a hang the client gave up on is billed as if it had been answered.
    """

    from_s: Annotated[float, Field(ge=0)] | None = None
    to_s: Annotated[float, Field(gt=0)] | None = None
    rate: Annotated[float, Field(ge=0, le=1)] | None = None
    requests: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)] | None] | None = None
    when: Condition | None = None

    status: Annotated[int, Field(ge=200, le=599)] | None = None
    hang_s: Annotated[float, Field(gt=0)] | None = None
    kind: BrokenKind | None = None
    answer: str | None = None
    answer_json: JsonValue | None = None
    stream: StreamFault | None = None

    after_chunks: Annotated[int, Field(ge=0)] | None = None
    stall_s: Annotated[float, Field(gt=0)] | None = None
    retry_after_s: Annotated[float, Field(ge=0)] | None = None
    headers: dict[str, str] = {}
    error: ErrorText | None = None
    reports: dict[Literal["input_tokens", "output_tokens", "cached_tokens"], _Tokens] | None = None
    finish_reason: str | None = None
    latency_ms: Annotated[float, Field(ge=0)] | Latency | None = None
    billed: bool | None = None
    billed_when_abandoned: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        effects = ("status", "hang_s", "kind", "answer", "answer_json", "stream")
        given = [name for name in effects if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of {', '.join(effects)}; it has {' and '.join(given) or 'none'}")
        fails = self.status is not None and self.status >= 300
        if (self.retry_after_s is not None or self.headers) and not fails:
            raise ValueError("retry_after_s or headers, sent with an error, needs status of 300 or more")
        if self.error is not None and not fails and "error" not in (self.kind or self.stream or ""):
            raise ValueError("error needs status of 300 or more, kind: error_in_200, or stream: error")
        if (self.after_chunks, self.stall_s) != (None, None) and self.stream is None:
            raise ValueError("after_chunks and stall_s are about a stream: they need stream")
        if self.billed_when_abandoned and self.hang_s is None:
            raise ValueError("billed_when_abandoned is about a hang: it needs hang_s")
        if self.to_s is not None and self.to_s <= (self.from_s or 0):
            raise ValueError(f"the window ends (to_s {self.to_s:g}) before it begins (from_s {self.from_s or 0:g})")
        if self.requests is not None and self.requests[1] is not None and self.requests[1] < self.requests[0]:
            raise ValueError(f"the range {list(self.requests)} is empty; write the smaller number first")
        return self


class ModelScript(_Part):
    """How one model behaves.

    Attributes:
        price: what a billed call costs.
        latency_ms: how long every answer takes, errors included; a number or a log-normal. A stream begins then.
        stream: the pace of streams.
        usage: the tokens of an answer.
        answer: the text; `{prompt}` is the last user message, `{n}` the request number of this model.
        answer_json: the answer to a request for JSON, and to all requests where `answer` is not given.
        tool_calls: asked for when the request offers tools and its last message is not a tool's result.
        billed_on_error: an error or a broken answer is billed with the tokens the answer would have had.
        faults: the first that applies wins.
    """

    price: ScriptedPrice
    latency_ms: Annotated[float, Field(ge=0)] | Latency = 0.0
    stream: Pace = Pace()
    usage: UsageRule = UsageRule()
    answer: str | None = None
    answer_json: JsonValue | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    billed_on_error: bool = False
    faults: tuple[Fault, ...] = ()


class ProviderScript(_Part):
    """The whole provider. With `api_keys`, any other `Authorization` is answered 401."""

    seed: int = 0
    api_keys: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    models: Annotated[dict[str, ModelScript], Field(min_length=1)]


def build_script(content: object) -> ProviderScript:
    """Checks a script given as plain values; one that is checked already is returned as it is.

    Raises:
        ScriptError: names each mistake with its path.
    """
    try:
        return ProviderScript.model_validate(content)
    except ValidationError as error:
        # The input is left out: it may be an API key.
        lines = [f"{'.'.join(map(str, item['loc'])) or 'script'}: {item['msg']}" for item in error.errors()]
        raise ScriptError("the provider script has mistakes:\n  " + "\n  ".join(lines)) from None


def parse_script(text: str | bytes, *, is_json: bool = False) -> ProviderScript:
    """Reads a script from YAML, or from JSON.

    Raises:
        ScriptError: the text is no YAML or JSON, or the script has mistakes.
    """
    try:
        content: object = orjson.loads(text) if is_json else yaml.safe_load(text)
    except (orjson.JSONDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScriptError(f"the provider script is not readable as {'JSON' if is_json else 'YAML'}: {error}") from error
    return build_script(content)


def load_script(path: Path) -> ProviderScript:
    """Reads a script file; `.json` is JSON, anything else YAML.

    Raises:
        ScriptError: the file can't be read, or the script has mistakes; names the file.
    """
    try:
        return parse_script(path.read_bytes(), is_json=path.suffix == ".json")
    except OSError as error:
        raise ScriptError(f"can't read the provider script {path}: {error.strerror}") from error
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}") from error
