"""Spans by OpenTelemetry's SDK, sent as OTLP over HTTP. Imported only if tracing is on, because the import is slow."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import Span as SdkSpan

from breakwater import __version__
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.telemetry.tracing.spans import (
    NOTHING,
    Attributes,
    LazyAttributes,
    Span,
    SpanRole,
    is_traceparent,
)

FLUSH_S = 1.0
"""The time limit for the last spans: a service has little time to stop, and must not be killed for spans."""

PROTOCOL = "http/protobuf"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_KINDS: Mapping[SpanRole, SpanKind] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
# Without it the SDK would take a parent from the task that happens to run.
_NO_PARENT = Context()


class OtlpRecorder:
    """Records spans, and sends them in batches from its own thread."""

    def __init__(self, service: str) -> None:
        """Connects to nothing yet.

        Args:
            service: the process' name.

        Raises:
            ConfigError: one of the OTEL_* variables can't be used.
        """
        _check_protocol()
        self._complaints = _Complaints()
        self._complaints.listen()
        try:
            # Ended by `stop`, within its time, and not once more by the interpreter's own end.
            self._provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(_Exporter(service, self._complaints)))
        except (ValueError, RuntimeError, ImportError, OSError) as error:
            self._complaints.leave()
            raise ConfigError(f"invalid OTEL_* variables for tracing: {error}") from error
        self._tracer = self._provider.get_tracer("breakwater", __version__)

    def begin(
        self, name: str, parent: str | None, kind: SpanRole, attributes: Attributes, start: datetime | None
    ) -> Span:
        """Begins a span, which is recorded unless the sampler decides otherwise."""
        started = None if start is None else (start - _EPOCH) // _MICROSECOND * 1000
        return _RecordedSpan(
            self._tracer.start_span(name, _context(parent), _KINDS[kind], attributes, start_time=started)
        )

    def stop(self) -> None:
        """Sends the remaining spans, for a bounded time."""
        # The SDK would wait for as long as a collector that does not answer takes to time out.
        ending = threading.Thread(target=self._provider.shutdown, name="flush spans", daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            structlog.get_logger().warning(
                "spans_lost", error=f"the collector did not accept the last spans within {FLUSH_S} s"
            )
        self._complaints.leave()


class _Complaints(logging.Handler):
    """Replaces the SDK's log lines for every retry by one line when an outage begins and one when it ends."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._outage = Outage("otlp")
        self._reasons: list[str] | None = None  # of the export under way
        self._sdk = logging.getLogger("opentelemetry")

    def listen(self) -> None:
        """Takes over the SDK's log lines."""
        self._sdk.addHandler(self)
        self._sdk.propagate = False

    def leave(self) -> None:
        """Gives the log lines back to the SDK."""
        self._sdk.removeHandler(self)
        self._sdk.propagate = True

    def export_began(self) -> None:
        """Begins an export; from now on, the exporter's log lines are about it."""
        self._reasons = []

    def export_ended(self, *, well: bool) -> None:
        """Ends an export; logs the beginning or the end of an outage, with the first line that was collected."""
        reasons = self._reasons
        self._reasons = None
        if well:
            self._outage.note_success()
        else:
            self._outage.note_failure(reasons[0] if reasons else "the collector did not accept the spans")

    def emit(self, record: logging.LogRecord) -> None:
        """Collects a line as the reason of the current export's failure, or else logs it as ours."""
        if self._reasons is not None and record.name.startswith("opentelemetry.exporter"):
            self._reasons.append(record.getMessage())
        elif not self._outage.lasting:
            structlog.get_logger().warning("tracing", error=record.getMessage())


class _Exporter(OTLPSpanExporter):
    """Sends batches, and logs the beginning and the end of each outage."""

    def __init__(self, service: str, complaints: _Complaints) -> None:
        super().__init__()
        self._service = service
        self._complaints = complaints

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends one batch; spans that can't be sent in time are lost."""
        self._complaints.export_began()
        result = super().export(spans)
        # The thread that sends has no context of its own.
        with structlog.contextvars.bound_contextvars(service=self._service):
            self._complaints.export_ended(well=result is SpanExportResult.SUCCESS)
        return result


class _RecordedSpan(Span):
    """A span of the SDK."""

    __slots__ = ("_span",)

    def __init__(self, span: SdkSpan) -> None:
        context = span.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")
        self._span = span

    def end(self, *, error: str | None = None, attributes: LazyAttributes = NOTHING) -> None:
        """Ends the span now. Attributes are only computed if it is sampled."""
        if self._span.is_recording():
            self._span.set_attributes(attributes() if callable(attributes) else attributes)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def _context(parent: str | None) -> Context:
    if parent is None or not is_traceparent(parent):
        return _NO_PARENT
    _, trace_id, span_id, flags = parent.split("-")
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(remote), _NO_PARENT)


def _resource(service: str) -> Resource:
    named = OTELResourceDetector().detect().attributes
    ours = {SERVICE_NAME: f"breakwater-{service}", SERVICE_VERSION: __version__}
    return Resource.create({name: value for name, value in ours.items() if name not in named})


def _check_protocol() -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name):
            if protocol != PROTOCOL:
                raise ConfigError(
                    f"{name}: the protocol {protocol!r} is not supported; use {PROTOCOL}, which collectors support too"
                )
            return
