"""Calls to async callables, in the worker's own process."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any

from pydantic import JsonValue, ValidationError
from pydantic_core import from_json

from breakwater.calls.providers.base import Answer, Call, CallError, silence
from breakwater.calls.providers.local import (
    ErrorTexts,
    Pieces,
    ReportedSpend,
    failure_of_code,
    first_problem,
    request_of,
)
from breakwater.calls.rules.classify import ProgramFailure, TransportFailure
from breakwater.kernel.errors import BreakwaterError, ConfigError
from breakwater.kernel.process.callables import load_callable
from breakwater.kernel.surrogates import read_whole
from breakwater.redaction.settings import DEFAULT_REDACTION, RedactionRules

GRACE_S = 0.05
"""Time that a cancelled callable may take to end before it is abandoned."""

AgentCallable = Callable[[dict[str, JsonValue]], Coroutine[Any, Any, Any] | AsyncIterator[Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """The return value of a callable that reports its usage with its result.

    Attributes:
        result: any JSON.
        usage: `input_tokens`, `output_tokens`, `cached_tokens` (of the input), `reasoning_tokens` (of the output).
            Absent figures are unknown.
        cost_usd: the cost in USD, such as "0.0123", which is rounded to nano-dollars.
    """

    result: Any
    usage: Mapping[str, int] | None = None
    cost_usd: str | Decimal | None = None


class NonRetryableError(BreakwaterError):
    """Raised by a callable when no retry could help, as the request is invalid or unsupported.

    Args:
        message: the reason.
        status: an HTTP status: 4xx, or 501 for an unsupported request.

    Raises:
        ValueError: it is any other status.
    """

    def __init__(self, message: str, *, status: int = 422) -> None:
        if not 400 <= status < 500 and status != 501:
            raise ValueError(
                f"a refusal needs a status of 4xx or 501, not {status}; raise any other exception for a retry"
            )
        super().__init__(message)
        self.status = status


def load_agent(name: str) -> AgentCallable:
    """Imports a callable, `package.module:function`. Raises ConfigError: it can't be imported, or is not async."""
    function = load_callable(name)
    kind: type[Any] = type(function)
    call_method = getattr(kind, "__call__", None)  # noqa: B004  looked at, not called
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if not any(is_kind(candidate) for is_kind in kinds for candidate in (function, call_method)):
        raise ConfigError(f"the callable {name!r} is not async; write it with `async def`")
    return function


class PythonProvider:
    """Awaits a callable for each attempt."""

    def __init__(
        self,
        name: str,
        function: AgentCallable,
        redaction: RedactionRules = DEFAULT_REDACTION,
        *,
        cost_per_call: int | None,
    ) -> None:
        self._name = name
        self._function = function
        self._cost_per_call = cost_per_call
        self._error_texts = ErrorTexts(redaction)
        self._running: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"PythonProvider({self._name!r})"

    async def perform(self, call: Call) -> Answer:
        """Calls the callable once. Raises CallError."""
        # It runs in a task of its own, which can be abandoned if it ignores its cancellation. And if it cancels itself,
        # that does not cancel the worker's task.
        pieces = Pieces()
        in_time = True
        task = asyncio.create_task(self._run(request_of(call), pieces))
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            if call.streaming is not None:
                in_time = await pieces.pass_on(call, call.streaming, task)
            else:
                in_time = task in (await asyncio.wait({task}, timeout=call.timeout_s))[0]
        finally:
            await self._end({task})
        if not in_time:
            raise CallError(TransportFailure("timeout", "TimeoutError", silence(call)), maybe_billed=True)
        if task.cancelled():
            raise _failure("CancelledError", "the callable cancelled itself")
        error = task.exception()
        if isinstance(error, CallError):
            raise error
        if isinstance(error, NonRetryableError):
            raise CallError(
                failure_of_code(error.status, self._error_texts.text(str(error))), maybe_billed=True
            ) from error
        if error is not None:
            name = type(error).__name__
            raise _failure(name, self._error_texts.text(str(error)) or name) from error
        return self._answer(task.result())

    async def refresh_credential(self, used: int | None) -> bool:  # noqa: ARG002
        """Returns False, as a callable has no credential that is known here."""
        return False

    async def close(self) -> None:
        """Cancels all running calls."""
        await self._end(set(self._running))

    async def _run(self, request: dict[str, JsonValue], pieces: Pieces) -> Any:
        try:
            running = self._function(request)
            if not isinstance(running, AsyncIterator):
                return await running
            return await _join_texts(running, pieces)
        except SystemExit as error:
            # asyncio would end the worker.
            raise RuntimeError(f"the callable tried to exit with {error.code!r}") from error

    async def _end(self, tasks: set[asyncio.Task[Any]]) -> None:
        unfinished = {task for task in tasks if not task.done()}
        if not unfinished:
            return
        for task in unfinished:
            task.cancel()
        _, ignoring = await asyncio.wait(unfinished, timeout=GRACE_S)
        if ignoring:
            import structlog  # as in child.py

            structlog.get_logger().warning("callable_ignores_cancelling", callable=self._name, running=len(ignoring))

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would log the exception of an abandoned task otherwise

    def _answer(self, returned: Any) -> Answer:
        reply = returned if isinstance(returned, Reply) else Reply(returned)
        try:
            spent = ReportedSpend.model_validate({"usage": reply.usage, "cost_usd": reply.cost_usd})
        except ValidationError as error:
            raise _failure("BackendFailureError", f"reported an invalid amount: {first_problem(error)}") from error
        return spent.answer(_json(reply.result, self._error_texts), self._cost_per_call)


async def _join_texts(running: AsyncIterator[Any], pieces: Pieces) -> Reply:
    """Reads all texts that a generator yields, and returns them joined, with its final report."""
    reply: Reply | None = None
    async for piece in running:
        if reply is not None or not isinstance(piece, str | Reply):
            raise _failure("BackendFailureError", "yielded something other than texts and a final Reply")
        if isinstance(piece, str):
            pieces.put(piece)
        else:
            reply = piece
    pieces.end()
    reply = reply or Reply(None)
    return replace(reply, result="".join(pieces.texts)) if reply.result is None else reply


def _json(result: Any, error_texts: ErrorTexts) -> JsonValue:
    """Returns a copy that the callable can't change any more. Tuples become lists."""
    try:
        document = json.dumps([result], allow_nan=False).encode()
        return read_whole(partial(from_json, allow_inf_nan=False), document)[0]
    except (TypeError, ValueError, RecursionError) as error:
        raise _failure(
            "BackendFailureError", f"returned something that is not JSON: {error_texts.text(str(error))}"
        ) from error


def _failure(class_name: str, message: str) -> CallError:
    return CallError(ProgramFailure(class_name, message, None, "server"), maybe_billed=True)
