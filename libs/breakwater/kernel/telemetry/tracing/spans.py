"""Spans: begun and ended at next to no cost where tracing is off."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Literal, Protocol

Attribute = str | int | float | bool | tuple[str, ...]
SpanRole = Literal["server", "client", "internal"]

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
        """Trace context for work within this span; the parent's own if nothing is recorded."""

    def end(self, *, error: str | None = None, attributes: LazyAttributes = NOTHING) -> None:
        """Ends it.

        Args:
            error: the class of what went wrong, such as `RateLimitError`; None where nothing did.
            attributes: what is known only now.
        """


class Recorder(Protocol):
    """Whatever makes spans that are recorded."""

    def begin(
        self, name: str, parent: str | None, kind: SpanRole, attributes: Attributes, start: datetime | None
    ) -> Span:
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
    kind: SpanRole = "internal",
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
    """True if a text is a valid W3C trace context."""
    return _TRACEPARENT.fullmatch(text) is not None


def new_traceparent() -> str:
    """A W3C trace context that is recorded nowhere, for a call to pass on. Who is called may begin to trace there."""
    random = os.urandom(24).hex()
    return f"00-{random[:32]}-{random[32:]}-01"


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace id of a W3C trace context that is valid; None for others."""
    return traceparent.split("-")[1] if traceparent is not None and is_traceparent(traceparent) else None


def sampled_trace_id(traceparent: str | None) -> str | None:
    """The same of one that is sampled; None for others."""
    trace_id = trace_id_of(traceparent)
    return trace_id if traceparent is not None and trace_id and int(traceparent[-2:], 16) & 1 else None


def recorded_trace_id(traceparent: str | None) -> str | None:
    """The trace id of a W3C trace context whose spans this process sends; None where it sends none."""
    return None if recorder is None else sampled_trace_id(traceparent)
