"""The interface of all providers: what a call takes and returns, how failures are reported, and the settings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from types import TracebackType
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from breakwater.calls.rules.classify import CallFailure, NotSent
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.contract.job import CallApi
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.security.secret_refs import Secret
from breakwater.kernel.types import Message, UsdAmount
from breakwater.prices.rules.usage import Usage
from breakwater.redaction.rules.redact import DEFAULT_REDACTION, RedactionRules

STALL_S = 1.0
"""A limit that is noticed so late is noticed after a stall, of this process or of its machine."""

READ_S = 1.0
"""Time for which an answer that came during a stall is then read."""


class AnswerTimeout:
    """A limit of time as `asyncio.timeout` sets it; but an answer that came during a stall is no late one.

    After a stall the time is over before anything is read, though the answer may have come long ago: it would be
    paid for, and asked for again.
    """

    def __init__(self, limit_s: float) -> None:
        """Takes the seconds from its entry on."""
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.ends_at = 0.0

    async def __aenter__(self) -> AnswerTimeout:
        await self._timeout.__aenter__()
        self.reschedule(self._loop.time() + self._limit_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Raises TimeoutError where the time was over."""
        self._stop()
        return await self._timeout.__aexit__(kind, error, traceback)

    def reschedule(self, when: float) -> None:
        """Sets another end, by the loop's clock."""
        self._stop()
        self.ends_at = when
        self._timeout.reschedule(None)
        self._timer = self._loop.call_at(when, self._over, when)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _over(self, when: float) -> None:
        now = self._loop.time()
        self._timeout.reschedule(now + READ_S if now - when > STALL_S else now)


@dataclass(frozen=True, slots=True)
class Streaming:
    """A wish for the answer while it is produced. A provider that can't do so answers whole.

    Attributes:
        take: is given chunks as soon as they have come, in OpenAI's form, all that have come at the same time together.
        idle_timeout_s: how long nothing may come once the answer has begun. Until then the call's timeout holds.
        total_timeout_s: how long the whole may take.
        answer: what has come.
    """

    take: Callable[[Sequence[Chunk]], Awaitable[None]]
    idle_timeout_s: float
    total_timeout_s: float
    answer: Assembly = field(default_factory=Assembly)

    async def put(self, chunks: Sequence[Chunk]) -> None:
        """Passes on what has come, as a client is sent it."""
        await self.take([self.answer.add(chunk) for chunk in chunks])


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt to make.

    Attributes:
        attempt_id: `<execution>:<number>`; providers that know idempotency keys are given it.
        model: the model's name as the provider knows it.
        messages: the conversation in OpenAI's chat format; empty for a job with `input`.
        params: what goes to the provider with model and messages.
        timeout_s: after which the call must have been given up.
        traceparent: W3C trace context of the attempt.
        agent: who calls.
        execution_id: of the job.
        tenant: of the job.
        task_id: of the job.
        input: of a job for a process or python agent.
        output_schema: the JSON schema that the answer must satisfy, for providers that can be held to one.
        strict_output: whether the provider should be held to it strictly.
        streaming: where the answer goes while it is produced, where that is wanted.
        left_out: parameters that the model does not know: what the provider adds itself is not added, and the output
            limit has its other name.
        api: the API of `native`.
        native: the request as its client wrote it, for a provider that speaks its API; None for a chat.
        headers: of the client that go with `native`.
        repaired: `messages` are not those of `native`: some were left out or added.
    """

    attempt_id: str
    model: str
    messages: Sequence[Mapping[str, JsonValue]]
    params: Mapping[str, JsonValue]
    timeout_s: float
    traceparent: str | None = None
    agent: str = ""
    execution_id: str = ""
    tenant: str | None = None
    task_id: str | None = None
    input: JsonValue = None
    output_schema: Mapping[str, JsonValue] | None = None
    strict_output: bool = False
    streaming: Streaming | None = None
    left_out: Collection[str] = ()
    api: CallApi = "chat"
    native: Mapping[str, JsonValue] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    repaired: bool = False


def silence(call: Call) -> str:
    """Words for a call on which nothing came in time."""
    if call.streaming is None or not call.streaming.answer.length:
        return f"no answer within {call.timeout_s:g} s"
    idle_s = call.streaming.idle_timeout_s
    return f"the answer stalled for {idle_s:g} s, or the job's time limit was reached in the middle of it"


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer.

    Attributes:
        output: its text, or the whole assistant message where it calls tools, or any JSON of a process or callable.
        usage: tokens as the provider reports them.
        cost: nano-dollars, where the provider reports them itself.
        response: what an HTTP API sent, whole.
        finish_reason: why the model stopped, where that is known.
        choices: all of them, where the call gave several.
    """

    output: JsonValue
    usage: Usage
    cost: int | None = None
    response: dict[str, JsonValue] | None = None
    finish_reason: str | None = None
    choices: tuple[Choice, ...] = ()


class CallError(BreakwaterError):
    """The call gave no usable answer.

    Attributes:
        failure: what happened, for `calls.rules.classify`.
        maybe_billed: the request may have reached a model, so that the provider may bill for it.
        usage: what the provider reports to have used all the same.
        cost: what it reports to have cost, in nano-dollars.
        credential: which reading of the key the call was made with, for `Provider.refresh_credential`.
        finish_reason: why the model stopped, where it ran and that is known.
        response: what a program has answered all the same; its `result` is an output.
    """

    def __init__(
        self,
        failure: CallFailure,
        *,
        maybe_billed: bool,
        usage: Usage | None = None,
        cost: int | None = None,
        credential: int | None = None,
        finish_reason: str | None = None,
        response: dict[str, JsonValue] | None = None,
    ) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.maybe_billed = maybe_billed
        self.usage = usage
        self.cost = cost
        self.credential = credential
        self.finish_reason = finish_reason
        self.response = response


class Provider(Protocol):
    """Performs attempts."""

    async def perform(self, call: Call) -> Answer:
        """Makes the call once. Raises CallError, and nothing else."""
        ...

    async def refresh_credential(self, used: int | None) -> bool:
        """Reads the key's source again, once for all calls that failed with the same reading of it.

        Args:
            used: the reading that was refused, from `CallError.credential`.

        Returns:
            Whether a call with another key than that one can now be made.
        """
        ...

    async def close(self) -> None:
        """Frees connections."""
        ...


class ProviderSettings(Message):
    """Settings of a provider. Each kind has a `kind`, and knows how to open itself."""

    local: ClassVar[bool] = False
    """A program or a callable: it needs no model, and takes any JSON as input."""
    translates_chats: ClassVar[bool] = False
    """A chat is sent in the words of another API."""

    @property
    def apis(self) -> Collection[CallApi]:
        """The APIs whose requests it takes as they are."""
        return ("chat",)

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Makes the provider; nothing is connected yet.

        Args:
            redaction: what is hidden in its errors, in addition to its own secrets.

        Raises:
            ConfigError: a secret is missing, or what is named is not there.
        """
        raise NotImplementedError

    def dropped(self, params: Mapping[str, JsonValue]) -> Sequence[str]:  # noqa: ARG002  most drop nothing
        """Params that are left out of a call, as the provider has nothing like them."""
        return ()


def _as_written(value: object) -> object:
    # YAML reads a bare 2024-10-21 as a date.
    return value.isoformat() if isinstance(value, date) else value


ApiVersion = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$"), BeforeValidator(_as_written)]
"""A version such as 2024-10-21, with quotes or without."""

MAX_ANSWER_BYTES = 4 * 1024 * 1024

URL = r"^https?://[^\s]+$"
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def _without_user(url: object) -> object:
    # A config is shown and logged, and its URLs with it.
    if isinstance(url, str) and "@" in re.split(r"[/?#\\]", url.partition("://")[2], maxsplit=1)[0]:
        raise ValueError("must not contain user and password; set the secret separately")
    return url


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or re.search(r"[\r\n\0]", value):
            raise ValueError(f"{name!r} is not a valid HTTP header")
    return headers


HttpUrl = Annotated[str, Field(pattern=URL), BeforeValidator(_without_user)]
"""Address that requests are sent to."""


class HttpSettings(ProviderSettings):
    """An endpoint of a model provider."""

    base_url: HttpUrl
    api_key: Secret | None = None
    headers: Annotated[dict[str, str], AfterValidator(_sendable)] = Field(
        default_factory=dict, description="Sent with every call; no secrets."
    )


class LocalSettings(ProviderSettings):
    """Something that runs on the worker's own machine."""

    local: ClassVar[bool] = True

    cost_per_call_usd: UsdAmount | None = Field(
        default=None,
        description=(
            "Cost of a call that does not report its own, and its worst case for budgets. "
            "Without it the cost is unknown, and calls are refused under a hard budget."
        ),
    )


class UnusableAnswerError(BreakwaterError):
    """A 2xx that says nothing; its text says what is missing."""


class AnswerTooLargeError(UnusableAnswerError):
    """A 2xx that says more than can be stored."""


class StreamReader(Protocol):
    """Reads the events of one stream. Pure, but for what it remembers of the stream."""

    done: bool
    """The API has said that there is no more."""

    @property
    def whole(self) -> bool:
        """True if all of the answer has come."""
        ...

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """The chunks that an event means, of any shape; None for `[DONE]`."""
        ...

    def answer(self) -> dict[str, Any]:
        """The answer so far, as the API would have sent it whole."""
        ...


class Wire(Protocol):
    """An HTTP API, as pure functions of values; `HttpProvider` does the rest."""

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """A reader of one stream, which `body` has asked for. `answer`: its chunks so far."""
        ...

    def url(self, model: str) -> str:
        """Address of a call for a model, percent-encoded."""
        ...

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Headers that identify the caller."""
        ...

    def body(self, call: Call) -> Mapping[str, Any]:
        """The request.

        Raises:
            CallError: the call asks for what the API does not know (see `refused`).
        """
        ...

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """The tokens that an answer reports; None where it reports none."""
        ...

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """The choices of an answer, at least one.

        The output of each is its text, or the whole assistant message in OpenAI's format where that is more than a
        text, as when it calls tools; None where the model said nothing.

        Raises:
            UnusableAnswerError: there are none.
        """
        ...


def refused(text: str, param: str) -> CallError:
    """A request that the provider would not take; it is not made. `param`: the field at fault."""
    return CallError(NotSent(text, param), maybe_billed=False)
