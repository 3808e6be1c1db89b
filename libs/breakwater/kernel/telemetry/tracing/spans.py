"""Spans, which cost next to nothing while tracing is off."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Literal, Protocol

Attribute = str | int | float | bool | tuple[str, ...]
SpanAttributes = dict[str, Attribute]
SpanRole = Literal["server", "client", "internal"]

Attributes = Mapping[str, Attribute]
LazyAttributes = Attributes | Callable[[], Attributes]
"""Attributes, or a function that computes them, which is only called if the span is recorded."""

NOTHING: Attributes = {}
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Span:
    """A span that has begun. Spans of this base class are not recorded, because tracing is off."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent
        """The trace context for work within this span; the parent's if nothing is recorded."""

    def end(self, *, error: str | None = None, attributes: LazyAttributes = NOTHING) -> None:
        """Ends the span.

        Args:
            error: the class of the error, such as `RateLimitError`; None for a success.
            attributes: the attributes that are known only now.
        """


class Recorder(Protocol):
    """A recorder of spans."""

    def begin(
        self, name: str, parent: str | None, kind: SpanRole, attributes: Attributes, start: datetime | None
    ) -> Span:
        """Begins a span, as the function `begin` does."""
        ...

    def stop(self) -> None:
        """Sends the remaining spans, for a bounded time."""
        ...


# One for the process, as for logging: spans are begun in places that know nothing else of each other.
recorder: Recorder | None = None
"""Set by `tracing.start`."""


def begin(
    name: str,
    *,
    parent: str | None,
    kind: SpanRole = "internal",
    attributes: LazyAttributes = NOTHING,
    start: datetime | None = None,
) -> Span:
    """Begins a span.

    Args:
        name: a name with few possible values: `chat gpt-4o`, never an id.
        parent: the W3C traceparent that it belongs to; None, or an invalid one, begins a trace.
        kind: OpenTelemetry's kind of span.
        attributes: the attributes that are known already; a sampler sees only these.
        start: the time at which it began; None for now.
    """
    if recorder is None:
        return Span(parent)
    return recorder.begin(name, parent, kind, attributes() if callable(attributes) else attributes, start)


def is_traceparent(text: str) -> bool:
    """Returns True if a text is a valid W3C trace context."""
    return _TRACEPARENT.fullmatch(text) is not None


def new_traceparent() -> str:
    """Returns a W3C trace context that is recorded nowhere, for a call to pass on. The callee may begin a trace."""
    random = os.urandom(24).hex()
    return f"00-{random[:32]}-{random[32:]}-01"


def trace_id_of(traceparent: str | None) -> str | None:
    """Returns the trace id of a valid W3C trace context; None for an invalid one."""
    return traceparent.split("-")[1] if traceparent is not None and is_traceparent(traceparent) else None


def sampled_trace_id(traceparent: str | None) -> str | None:
    """Returns the trace id of a sampled W3C trace context; None for others."""
    trace_id = trace_id_of(traceparent)
    return trace_id if traceparent is not None and trace_id and int(traceparent[-2:], 16) & 1 else None


def recorded_trace_id(traceparent: str | None) -> str | None:
    """Returns the trace id of a W3C trace context if this process sends its spans, else None."""
    return None if recorder is None else sampled_trace_id(traceparent)
