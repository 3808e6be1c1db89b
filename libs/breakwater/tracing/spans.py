"""Spans: begun and ended at next to no cost where tracing is off, and what is said on them.

Attributes have the names of OpenTelemetry's conventions for GenAI where there is one, `breakwater.*` otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Literal, Protocol

from breakwater.contracts.execution import Attempt, Cause, Execution
from breakwater.contracts.types import NANO_PER_USD

Attribute = str | int | float | bool | tuple[str, ...]
Kind = Literal["server", "client", "internal", "producer", "consumer"]

Attributes = Mapping[str, Attribute]
LazyAttributes = Attributes | Callable[[], Attributes]
"""Attributes, or what makes them; that is only called where the span is recorded."""

NOTHING: Attributes = {}
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Span:
    """A span that has begun. This class is not recorded: tracing is off."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent
        """What to pass on to whatever happens within this span; the parent's own where nothing is recorded."""

    def end(self, *, error: str | None = None, attributes: LazyAttributes = NOTHING) -> None:
        """Ends it.

        Args:
            error: the class of what went wrong, such as `RateLimitError`; None where nothing did.
            attributes: what is known only now.
        """


class Recorder(Protocol):
    """Whatever makes spans that are recorded."""

    def begin(self, name: str, parent: str | None, kind: Kind, attributes: Attributes, start: datetime | None) -> Span:
        """As the function `begin`."""
        ...

    def stop(self) -> None:
        """Sends what is left, for a bounded time."""
        ...


# One for the process, as for logging: spans are begun in places that know nothing else of each other.
recorder: Recorder | None = None
"""Set by `tracing.start`."""


def begin(
    name: str,
    *,
    parent: str | None,
    kind: Kind = "internal",
    attributes: LazyAttributes = NOTHING,
    start: datetime | None = None,
) -> Span:
    """Begins a span.

    Args:
        name: of few possible values: `chat gpt-4o`, never an id.
        parent: the W3C traceparent it belongs to; None, or one that is not valid, begins a trace.
        kind: as OpenTelemetry has it.
        attributes: what is known already; a sampler sees only these.
        start: when it began; now where None.
    """
    if recorder is None:
        return Span(parent)
    return recorder.begin(name, parent, kind, attributes() if callable(attributes) else attributes, start)


def is_traceparent(text: str) -> bool:
    """Whether a text is a W3C trace context that may be passed on."""
    return _TRACEPARENT.fullmatch(text) is not None


def sampled_trace_id(traceparent: str | None) -> str | None:
    """The trace id of a W3C trace context that is valid, and sampled; None for others."""
    if traceparent is None or not is_traceparent(traceparent):
        return None
    _, trace_id, _, flags = traceparent.split("-")
    return trace_id if int(flags, 16) & 1 else None


_Attributes = dict[str, Attribute]


def genai_attributes(
    *,
    agent: str,
    operation: str = "chat",
    provider: str | None = None,
    request_model: str | None = None,
    response_model: str | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> _Attributes:
    """Attributes of the GenAI semantic conventions. What is None is left out: unknown is not 0.

    Args:
        agent: its configured name.
        operation: `chat` for a call, `invoke_agent` for a job.
        provider: its name in the config.
        request_model: the model that was asked for.
        response_model: the model that answered.
        input_tokens: those of the request, cached ones among them.
        output_tokens: those of the answer, reasoning among them.
        cached_tokens: input tokens that were read from the provider's cache.
        reasoning_tokens: output tokens that were spent on reasoning.
    """
    return _known(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.agent.name": agent,
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": request_model,
            "gen_ai.response.model": response_model,
            "gen_ai.usage.input_tokens": input_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": reasoning_tokens,
        }
    )


def attempt_attributes(
    *, agent: str, provider: str, model: str, execution_id: str, number: int, cause: Cause
) -> _Attributes:
    """What is known of an attempt when it begins."""
    return {
        **genai_attributes(agent=agent, provider=provider, request_model=model),
        "breakwater.execution_id": execution_id,
        "breakwater.attempt": number,
        "breakwater.cause": cause,
    }


def outcome_attributes(attempt: Attempt) -> _Attributes:
    """What is known of an attempt when it has ended, beside what was known before."""
    return _known(
        {
            "gen_ai.usage.input_tokens": attempt.input_tokens,
            "gen_ai.usage.output_tokens": attempt.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": attempt.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": attempt.reasoning_tokens,
            "gen_ai.response.finish_reasons": None if attempt.finish_reason is None else (attempt.finish_reason,),
            "http.response.status_code": None if attempt.error is None else attempt.error.status_code,
            "breakwater.outcome": attempt.outcome,
            "breakwater.error_kind": None if attempt.error is None else attempt.error.kind,
            "breakwater.cost_usd": _usd(attempt.cost),
            "breakwater.cost_basis": attempt.cost_basis,
        }
    )


def execution_attributes(*, agent: str, execution_id: str) -> _Attributes:
    """What is known of a job when its run begins."""
    return {
        **genai_attributes(agent=agent, operation="invoke_agent"),
        "breakwater.execution_id": execution_id,
    }


def result_attributes(record: Execution) -> _Attributes:
    """What is known of a job when it is decided, beside what was known before."""
    return _known(
        {
            "gen_ai.request.model": record.requested_model,
            "gen_ai.response.model": record.chosen_model,
            "gen_ai.usage.input_tokens": record.input_tokens,
            "gen_ai.usage.output_tokens": record.output_tokens,
            "breakwater.status": record.status,
            "breakwater.reason": record.reason,
            "breakwater.attempts": record.attempts_count,
            "breakwater.cost_usd": _usd(record.total_cost),
            "breakwater.wasted_cost_usd": _usd(record.wasted_cost),
            "breakwater.cost_basis": record.cost_basis,
            "breakwater.cache_hit": record.cache_hit,
            "breakwater.parent_execution_id": record.parent_execution_id,
        }
    )


def _known(attributes: dict[str, Attribute | None]) -> _Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


def _usd(nano: int | None) -> float | None:
    # A number, as text can't be summed where traces are looked at; exact sums, to the nano-dollar, are elsewhere.
    return None if nano is None else nano / NANO_PER_USD
