"""Traces: spans that follow a job from its caller to the model, sent by OTLP. Off until an endpoint is named.

`start` once in a process, then `begin` wherever something takes time, and `end` on what it gave. There is no implicit
current span: the caller passes the parent, as a W3C traceparent that also crosses NATS.

What is put on a span leaves the plane: names, counts and classes, and never a key. Prompts and answers are put there
only where the config wants it, redacted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import structlog

from breakwater.kernel.telemetry.tracing import spans
from breakwater.kernel.telemetry.tracing.attributes import (
    SpanAttributes,
    attempt_attributes,
    execution_attributes,
    outcome_attributes,
    provider_attributes,
    request_attributes,
    result_attributes,
)
from breakwater.kernel.telemetry.tracing.spans import (
    Attribute,
    Span,
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
    "attempt_attributes",
    "begin",
    "execution_attributes",
    "is_traceparent",
    "new_traceparent",
    "outcome_attributes",
    "provider_attributes",
    "recorded_trace_id",
    "request_attributes",
    "result_attributes",
    "sampled_trace_id",
    "start",
    "stop",
    "trace_id_of",
]


def start(service: str) -> None:
    """Switches tracing on where the environment names an OTLP endpoint. Called once, by the entry point.

    Args:
        service: the process' name; `service.name` becomes `breakwater-<service>`, unless OTEL_SERVICE_NAME says else.

    Raises:
        ConfigError: one of the OTEL_* variables can't be used.
    """
    if spans.recorder is not None or not _wanted(os.environ):
        return
    from breakwater.kernel.telemetry.tracing.otlp import OtlpRecorder  # OpenTelemetry's SDK takes a while to import

    spans.recorder = OtlpRecorder(service)
    structlog.get_logger().info("tracing_on")


def stop() -> None:
    """Sends what is left, for about a second at most, and switches tracing off."""
    recorder = spans.recorder
    spans.recorder = None
    if recorder is not None:
        recorder.stop()


def _wanted(environment: Mapping[str, str]) -> bool:
    """True if OpenTelemetry's variables ask for traces; by its specification, an empty one counts as not set."""
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not any(environment.get(name) for name in endpoints):
        return False
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return environment.get("OTEL_TRACES_EXPORTER", "").strip() in {"", "otlp"}
