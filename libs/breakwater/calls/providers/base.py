"""The interface of all providers: what a call takes and returns, how failures are reported, and the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from pydantic import JsonValue

from breakwater.calls.rules.classify import CallFailure, NotSent
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.contract.job import CallApi
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.immutable import immutable
from breakwater.prices.rules.usage import Usage

STALL_S = 1.0
"""The delay from which on a late timer means that this process or its machine has stalled."""

READ_S = 1.0
"""Time to read an answer that may have arrived during a stall."""


class AnswerTimeout:
    """A time limit like `asyncio.timeout`, except that an answer that arrives during a stall is not late.

    After a stall, the time is over before anything is read, although the answer may have arrived long ago. With an
    ordinary timeout, such an answer would be paid for, and requested again.
    """

    def __init__(self, limit_s: float) -> None:
        """Sets the limit in seconds, from the entry on."""
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
        """Raises TimeoutError if the time is over."""
        self._stop()
        return await self._timeout.__aexit__(kind, error, traceback)

    def reschedule(self, when: float) -> None:
        """Sets another end, on the loop's clock."""
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
    """A request to stream the answer. A provider that can't stream answers as a whole.

    Attributes:
        take: takes chunks in OpenAI's format as they arrive, those that arrive at the same time together.
        idle_timeout_s: the longest silence once the answer has begun. Until then, the call's timeout applies.
        total_timeout_s: the longest time for the whole answer.
        answer: the answer so far.
    """

    take: Callable[[Sequence[Chunk]], Awaitable[None]]
    idle_timeout_s: float
    total_timeout_s: float
    answer: Assembly = field(default_factory=Assembly)

    async def put(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks to the answer, and passes them on as clients get them."""
        await self.take([self.answer.add(chunk) for chunk in chunks])


@immutable()
class Call:
    """One attempt to make.

    Attributes:
        attempt_id: `<execution>:<number>`, also for providers with idempotency keys.
        model: the model's name at the provider.
        messages: the conversation in OpenAI's chat format; empty for a job with `input`.
        params: the params that the provider gets with the model and the messages.
        timeout_s: the time limit of the call, in seconds.
        traceparent: W3C trace context of the attempt.
        agent: the agent that calls.
        execution_id: the job's execution.
        job_id: the job's own id, which names its answer.
        tenant: the job's tenant.
        task_id: the job's task.
        input: the job's input, for a process or python agent.
        output_schema: the JSON schema that the answer must satisfy, for providers that can enforce one.
        strict_output: the provider should enforce the schema strictly.
        streaming: where the answer goes while it is streamed; None for a whole answer.
        left_out: params that the model does not know. The provider does not add them itself, and uses the other name
            of the output limit if one of its names is among them.
        api: the API of `native`.
        native: the request as its client wrote it, for a provider that speaks its API; None for a chat.
        headers: the client's headers that go with `native`.
        repaired: `messages` differ from those of `native`: some were removed or added.
        on_headers: is given the headers of any answer, by which a provider says what is left of its limits; None if
            nobody chooses by them.
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
    job_id: str = ""
    input: JsonValue = None
    output_schema: Mapping[str, JsonValue] | None = None
    strict_output: bool = False
    streaming: Streaming | None = None
    left_out: Collection[str] = ()
    api: CallApi = "chat"
    native: Mapping[str, JsonValue] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    repaired: bool = False
    on_headers: Callable[[Mapping[str, str]], None] | None = None


def silence(call: Call) -> str:
    """Describes a call that ended because nothing arrived in time."""
    if call.streaming is None or not call.streaming.answer.length:
        return f"no answer within {call.timeout_s:g} s"
    idle_s = call.streaming.idle_timeout_s
    return f"the answer stalled for {idle_s:g} s, or the job's time limit was reached in the middle of it"


UNKNOWN_USAGE = Usage(None, None)


@immutable(slots=False)
class Answer:
    """The model's answer, or the part of it that was published.

    Attributes:
        output: the text, the whole assistant message if it calls tools, or any JSON of a process or callable.
        usage: the tokens that the provider reports.
        cost: the cost in nano-dollars that the provider reports; None if it reports none.
        response: the whole response of an HTTP API.
        finish_reason: why the model stopped; None if unknown.
        choices: all choices, if the call gave several.
    """

    output: JsonValue
    usage: Usage = UNKNOWN_USAGE
    cost: int | None = None
    response: dict[str, JsonValue] | None = None
    finish_reason: str | None = None
    choices: tuple[Choice, ...] = ()


class CallError(BreakwaterError):
    """The call gave no usable answer.

    Attributes:
        failure: what happened, for `calls.rules.classify`.
        maybe_billed: the request may have reached a model, so the provider may bill for it.
        usage: the tokens that the provider reports in spite of the failure.
        cost: the cost that it reports, in nano-dollars.
        credential: the version of the key with which the call was made, for `Provider.refresh_credential`.
        finish_reason: why the model stopped; None if it did not run, or that is unknown.
        response: the response of a program in spite of the failure, whose `result` is an output.
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
    """Makes the calls of attempts."""

    async def perform(self, call: Call) -> Answer:
        """Makes the call once. Raises CallError, and nothing else."""
        ...

    async def refresh_credential(self, used: int | None) -> bool:
        """Reads the key's source again, once for all calls that failed with the same version of the key.

        Args:
            used: the version that was refused, from `CallError.credential`.

        Returns:
            True if a call can now be made with another key.
        """
        ...

    async def close(self) -> None:
        """Frees connections."""
        ...


MAX_ANSWER_BYTES = 4 * 1024 * 1024


class UnusableAnswerError(BreakwaterError):
    """A 2xx response has no usable answer. The message says what is missing."""


class AnswerTooLargeError(UnusableAnswerError):
    """A 2xx response has more than can be stored."""


class StreamReader(Protocol):
    """Reads the events of one stream. It does no I/O, and remembers only the stream."""

    ended: bool
    """True once the API has ended the stream."""

    @property
    def whole(self) -> bool:
        """Returns True if the whole answer has arrived."""
        ...

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """Returns the chunks of an event, in any shape. The event is None for `[DONE]`."""
        ...

    def answer(self) -> dict[str, Any]:
        """Returns the answer so far, as the API would have sent it without streaming."""
        ...


class Wire(Protocol):
    """An HTTP API, as pure functions of values. `HttpProvider` does the I/O."""

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Returns a reader of one stream. `answer` is assembled from its chunks."""
        ...

    def url(self, model: str, *, streamed: bool = False) -> str:
        """Returns the percent-encoded URL of a call for a model, whose answer may be streamed."""
        ...

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the headers that identify the caller."""
        ...

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the body of the request.

        Raises:
            CallError: the call needs something that the API does not have (see `refusal_of`).
        """
        ...

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:
        """Returns a whole answer in the form that records keep, which is that of a stream's reader.

        Raises:
            UnusableAnswerError: it can't be read.
        """
        ...

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Returns the tokens that an answer reports, as its provider sent it or in its readable form; else None."""
        ...

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns the choices of an answer, at least one.

        The output of each is its text, or the whole assistant message in OpenAI's format if that has more than a text,
        such as tool calls. It is None if the model wrote nothing.

        Raises:
            UnusableAnswerError: there are no choices.
        """
        ...


WiresOf = Callable[[str], Mapping[CallApi, Wire]]
"""Returns the APIs of a model, by its name at the provider."""


def refusal_of(text: str, param: str) -> CallError:
    """Returns the error of a request that the provider would refuse, and that is not made.

    Args:
        text: the reason.
        param: the field at fault.
    """
    return CallError(NotSent(text, param), maybe_billed=False)


def params_to_translate(
    call: Call, api: str, *, dropped: Collection[str], no_counterpart: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the params of a chat that have a meaning in another API than OpenAI's.

    Args:
        call: the chat.
        api: the other API's name, for the error.
        dropped: the params that the answer does without.
        no_counterpart: the params that the other API lacks, each with the value that has no effect.

    Raises:
        CallError: one of `no_counterpart` has an effect, so that leaving it out would change the answer.
    """
    params: dict[str, Any] = {
        name: value for name, value in call.params.items() if value is not None and name not in dropped
    }
    for name, no_effect in no_counterpart.items():
        if name in params and params.pop(name) != no_effect:
            raise refusal_of(f"the param {name!r} is not supported by {api}", name)
    return params
