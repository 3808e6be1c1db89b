"""Spans by OpenTelemetry's SDK, sent as OTLP over HTTP. Imported only where tracing is on: it takes a while."""

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
"""For what is left at the end. A service has little time to stop, and spans are not worth being killed for."""

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
    """Records spans, and sends them in batches from a thread of its own."""

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
        """Begins a span that is recorded, unless the sampler decides otherwise."""
        started = None if start is None else (start - _EPOCH) // _MICROSECOND * 1000
        return _RecordedSpan(
            self._tracer.start_span(name, _context(parent), _KINDS[kind], attributes, start_time=started)
        )

    def stop(self) -> None:
        """Sends what is left, for a bounded time."""
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
    """Takes what the SDK would log at every retry, and logs an outage once when it begins and once when it ends."""

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
        """Gives them back to the SDK."""
        self._sdk.removeHandler(self)
        self._sdk.propagate = True

    def export_began(self) -> None:
        """From here, the lines of the exporter are about this export."""
        self._reasons = []

    def export_ended(self, *, well: bool) -> None:
        """Logs where this begins or ends an outage, with the first line that was taken."""
        reasons = self._reasons
        self._reasons = None
        if well:
            self._outage.worked()
        else:
            self._outage.failed(reasons[0] if reasons else "the collector did not accept the spans")

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a line: a reason of the export under way, or logged as ours."""
        if self._reasons is not None and record.name.startswith("opentelemetry.exporter"):
            self._reasons.append(record.getMessage())
        elif not self._outage.lasting:
            structlog.get_logger().warning("tracing", error=record.getMessage())


class _Exporter(OTLPSpanExporter):
    """Sends batches, and says once that it can't and once that it can again."""

    def __init__(self, service: str, complaints: _Complaints) -> None:
        super().__init__()
        self._service = service
        self._complaints = complaints

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends one batch; what can't be sent in time is lost."""
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
        """Ends it, now. Where it is not sampled, no attributes are made for it."""
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
