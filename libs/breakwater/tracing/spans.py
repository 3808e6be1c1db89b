"""Beginning and ending spans, at next to no cost where tracing is off."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Literal, Protocol

import structlog

Attribute = str | int | float | bool
Kind = Literal["server", "client", "internal", "producer", "consumer"]

_NOTHING: Mapping[str, Attribute] = {}
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Span:
    """Something that has begun. This one is not recorded: tracing is off."""

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
_recorder: Recorder | None = None


def start(service: str) -> None:
    """Switches tracing on where the environment names an OTLP endpoint. Called once, by the entry point.

    Args:
        service: the process' name; `service.name` becomes `breakwater-<service>`, unless OTEL_SERVICE_NAME says else.

    Raises:
        ConfigError: one of the OTEL_* variables can't be used.
    """
    global _recorder
    if _recorder is not None or not _wanted(os.environ):
        return
    from breakwater.tracing.otlp import OtlpRecorder

    _recorder = OtlpRecorder(service)
    structlog.get_logger().info("tracing_on")


def stop() -> None:
    """Sends what is left, for about a second at most, and switches tracing off."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.stop()


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
    if _recorder is None:
        return Span(parent)
    return _recorder.begin(name, parent, kind, attributes, start)


def is_traceparent(text: str) -> bool:
    """Whether a text is a W3C trace context that may be passed on."""
    return _TRACEPARENT.fullmatch(text) is not None


def _wanted(environment: Mapping[str, str]) -> bool:
    """What the OpenTelemetry specification says of its variables; one that is empty counts as not set."""
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not any(environment.get(name) for name in endpoints):
        return False
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return environment.get("OTEL_TRACES_EXPORTER", "").strip() in {"", "otlp"}
