"""Beginning and ending spans, at next to no cost where tracing is off."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Literal, Protocol

Attribute = str | int | float | bool
Kind = Literal["server", "client", "internal", "producer", "consumer"]

_NOTHING: Mapping[str, Attribute] = {}
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Span:
    """A span that has begun. This class is not recorded: tracing is off."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent
        """What to pass on to whatever happens within this span; the parent's own where nothing is recorded."""

    def end(self, *, error: str | None = None, attributes: Mapping[str, Attribute] = _NOTHING) -> None:
        """Ends it.

        Args:
            error: the class of what went wrong, such as `RateLimitError`; None where nothing did.
            attributes: what is known only now.
        """


class Recorder(Protocol):
    """Whatever makes spans that are recorded."""

    def begin(
        self, name: str, parent: str | None, kind: Kind, attributes: Mapping[str, Attribute], start: datetime | None
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
    kind: Kind = "internal",
    attributes: Mapping[str, Attribute] = _NOTHING,
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
    return recorder.begin(name, parent, kind, attributes, start)


def is_traceparent(text: str) -> bool:
    """Whether a text is a W3C trace context that may be passed on."""
    return _TRACEPARENT.fullmatch(text) is not None
