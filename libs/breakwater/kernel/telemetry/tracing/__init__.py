"""Traces: spans that follow a job from its caller to the model, sent by OTLP. Off unless an endpoint is set.

Call `start` once in a process, then `begin` for everything that takes time, and `end` on the span that it returns.
There is no implicit current span: the caller passes the parent, as a W3C traceparent, also over NATS.

Everything on a span leaves the plane: names, counts and classes, but never a key. Spans contain prompts and answers
only if the config says so, redacted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog

from breakwater.kernel.telemetry.tracing import spans
from breakwater.kernel.telemetry.tracing.spans import (
    Attribute,
    Span,
    SpanAttributes,
    SpanRole,
    begin,
    is_traceparent,
    new_traceparent,
    recorded_trace_id,
    sampled_trace_id,
    trace_id_of,
)

__all__ = [
    "Attribute",
    "Span",
    "SpanAttributes",
    "SpanRole",
    "begin",
    "is_traceparent",
    "new_traceparent",
    "recorded_trace_id",
    "sampled_trace_id",
    "start",
    "stop",
    "trace_id_of",
]


def start(service: str) -> None:
    """Switches tracing on if the environment names an OTLP endpoint. Called once, by the entry point.

    Args:
        service: the process's name; `service.name` is `breakwater-<service>`, unless OTEL_SERVICE_NAME is set.

    Raises:
        ConfigError: one of the OTEL_* variables can't be used.
    """
    if spans.recorder is not None or not _is_wanted(os.environ):
        return
    from breakwater.kernel.telemetry.tracing.otlp import OtlpRecorder  # OpenTelemetry's SDK takes a while to import

    spans.recorder = OtlpRecorder(service)
    structlog.get_logger().info("tracing_on")


def stop() -> None:
    """Sends the remaining spans, for about a second at most, and switches tracing off."""
    recorder = spans.recorder
    spans.recorder = None
    if recorder is not None:
        recorder.stop()


def _is_wanted(environment: Mapping[str, str]) -> bool:
    """Returns True if OpenTelemetry's variables ask for traces. By its specification, empty ones are not set."""
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not any(environment.get(name) for name in endpoints):
        return False
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return environment.get("OTEL_TRACES_EXPORTER", "").strip() in {"", "otlp"}
