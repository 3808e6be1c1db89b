"""Traces: what reaches a collector, what it costs where there is none, and what never leaves."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes, http_attributes

from breakwater import tracing
from breakwater.contracts.execution import Attempt, ErrorInfo, Result
from breakwater.errors import ConfigError
from tests.otlp import Collector, collecting, tracing_to

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOW = datetime(2026, 11, 21, 10, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture(autouse=True)
def no_settings_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
async def collector() -> AsyncGenerator[Collector]:
    async with collecting() as collector:
        yield collector


# What is sent


async def test_a_span_arrives_as_it_was_begun_and_ended(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tracing_to(collector, monkeypatch):
        span = tracing.begin("chat m", parent=PARENT, kind="client", attributes={"a": "x", "n": 1}, start=NOW)
        span.end(attributes={"f": 0.5, "b": True})
    received = await collector.named("chat m")
    assert span.traceparent == received.traceparent
    assert received.traceparent.split("-")[1] == PARENT.split("-")[1]
    assert received.parent == PARENT.split("-")[2]
    assert received.attributes == {"a": "x", "n": 1, "f": 0.5, "b": True}
    assert received.wire.kind == WireSpan.SPAN_KIND_CLIENT
    assert received.wire.start_time_unix_nano == 1_795_255_200_123_456_000
    assert received.wire.end_time_unix_nano == pytest.approx(time.time_ns(), abs=30 * 10**9)
    assert received.wire.status.code == Status.STATUS_CODE_UNSET
    assert received.resource["service.name"] == "breakwater-tester"
    assert received.resource["service.version"]


async def test_spans_follow_each_other_by_what_they_pass_on(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tracing_to(collector, monkeypatch):
        root = tracing.begin("root", parent=None, kind="server")
        run = tracing.begin("run", parent=root.traceparent, kind="consumer")
        call = tracing.begin("call", parent=run.traceparent, kind="client")
        for span in (call, run, root):
            span.end()
    first, second, third = [await collector.named(name) for name in ("root", "run", "call")]
    assert first.parent == ""
    assert second.parent == first.wire.span_id.hex()
    assert third.parent == second.wire.span_id.hex()
    assert first.wire.trace_id == second.wire.trace_id == third.wire.trace_id
    kinds = [WireSpan.SPAN_KIND_SERVER, WireSpan.SPAN_KIND_CONSUMER, WireSpan.SPAN_KIND_CLIENT]
    assert [span.wire.kind for span in (first, second, third)] == kinds


async def test_a_failure_is_reported_by_its_class_alone(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tracing_to(collector, monkeypatch):
        tracing.begin("failed", parent=None).end(error="RateLimitError")
    received = await collector.named("failed")
    assert received.wire.status.code == Status.STATUS_CODE_ERROR
    assert received.wire.status.message == ""
    assert received.attributes == {"error.type": "RateLimitError"}
    assert len(received.wire.events) == 0


NO_PARENTS = [
    "",
    "nonsense",
    PARENT.upper(),
    PARENT + "-more",
    PARENT + "\n",
    PARENT.replace("00-0af", "ff-0af"),
    f"00-{'0' * 32}-b7ad6b7169203331-01",
    f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
]


async def test_what_is_no_parent_begins_a_trace_of_its_own(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracing.is_traceparent(PARENT)
    assert tracing.sampled_trace_id(PARENT) == PARENT.split("-")[1]
    assert tracing.sampled_trace_id(PARENT[:-2] + "00") is None
    async with tracing_to(collector, monkeypatch):
        for number, parent in enumerate(NO_PARENTS):
            assert not tracing.is_traceparent(parent), parent
            assert tracing.sampled_trace_id(parent) is None
            tracing.begin(f"root {number}", parent=parent).end()
    received = [await collector.named(f"root {number}") for number in range(len(NO_PARENTS))]
    assert {span.parent for span in received} == {""}
    assert len({span.wire.trace_id for span in received}) == len(NO_PARENTS)


async def test_who_is_not_sampled_passes_that_on(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tracing_to(collector, monkeypatch):
        span = tracing.begin("not sampled", parent=PARENT[:-2] + "00")
        assert span.traceparent is not None
        assert span.traceparent.startswith(PARENT[:36])
        assert span.traceparent.endswith("-00")
        assert span.traceparent[36:52] != PARENT[36:52]
        span.end(error="NotTold")
        tracing.begin("sampled", parent=PARENT).end()
    await collector.named("sampled")
    assert [span.name for span in collector.spans] == ["sampled"]


async def test_a_span_of_another_task_is_no_parent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace

    async with tracing_to(collector, monkeypatch):
        outside = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(1))
        with trace.use_span(trace.NonRecordingSpan(outside)):
            tracing.begin("own", parent=None).end()
    assert (await collector.named("own")).parent == ""


# What is set


async def test_the_standard_variables_hold(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"}
    async with tracing_to(collector, monkeypatch, **given):
        tracing.begin("named", parent=None).end()
    resource = (await collector.named("named")).resource
    assert (resource["service.name"], resource["deployment.environment.name"]) == ("mine", "test")
    collector.spans.clear()
    async with tracing_to(collector, monkeypatch, OTEL_TRACES_SAMPLER="always_off"):
        tracing.begin("never", parent=None).end()
    assert collector.spans == []


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "True"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9"},
    ],
)
def test_where_it_is_off_the_parent_is_passed_on(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracing.start("tester")
    span = tracing.begin("x", parent=PARENT, kind="server", attributes={"a": 1}, start=NOW)
    span.end(error="Error", attributes={"b": 2})
    assert type(span) is tracing.Span
    assert not hasattr(span, "__dict__")
    assert span.traceparent == PARENT
    assert tracing.begin("x", parent=None).traceparent is None


def test_where_it_is_off_nothing_is_imported_for_it() -> None:
    # Packages of others import parts of the SDK's metrics where it is installed.
    code = """
import sys
import services.__main__, services.request.app, services.sink.app
from breakwater import tracing
tracing.start("tester")
tracing.begin("x", parent=None).end()
tracing.stop()
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_BSP_MAX_QUEUE_SIZE", "-1")]
)
def test_a_variable_that_cannot_be_used_is_a_mistake_of_the_config(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="OTEL_"):
        tracing.start("tester")
    assert type(tracing.begin("x", parent=None)) is tracing.Span


# The end, and outages

PROGRAM = """
import sys
from breakwater import tracing
tracing.start("program")
for number in range(int(sys.argv[1])):
    tracing.begin(f"last {number}", parent=None).end()
tracing.stop()
"""


async def run_program(collector: Collector, spans: int) -> tuple[int, str, float]:
    begun = time.monotonic()
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        str(spans),
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "60000"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await program.communicate()
    assert program.returncode is not None
    return program.returncode, said.decode(), time.monotonic() - begun


async def test_what_is_left_is_sent_when_the_process_ends(collector: Collector) -> None:
    code, said, _ = await run_program(collector, 1000)
    assert code == 0, said
    assert len(collector.spans) == 1000


async def test_a_collector_that_hangs_holds_up_no_end(collector: Collector) -> None:
    collector.hangs = True
    code, said, took_s = await run_program(collector, 1)
    assert code == 0, said
    assert collector.requests == 1
    assert "spans_lost" in said
    assert took_s < 60


async def test_an_outage_is_reported_once_and_so_is_its_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sent(name: str) -> None:
        before = collector.requests
        tracing.begin(name, parent=None).end()
        while collector.requests == before:
            await asyncio.sleep(0.01)

    collector.status = 400
    with structlog.testing.capture_logs() as logs:
        async with asyncio.timeout(60), tracing_to(collector, monkeypatch):
            await sent("lost 1")
            await sent("lost 2")
            collector.status = 200
            await sent("there")
    reported = [line for line in logs if line["event"] in {"unavailable", "available_again", "tracing", "spans_lost"}]
    assert [line["event"] for line in reported] == ["unavailable", "available_again"]
    assert reported[0]["what"] == "otlp"
    assert "400" in reported[0]["error"]
    assert [span.name for span in collector.spans] == ["there"]


async def test_a_setting_that_the_sdk_does_not_understand_is_reported(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with tracing_to(collector, monkeypatch, OTEL_EXPORTER_OTLP_TIMEOUT="soon"):
            tracing.begin("sent all the same", parent=None).end()
    assert [line["error"] for line in logs if line["event"] == "tracing"] == [
        "Invalid timeout value 'soon', using default of 10 seconds"
    ]
    await collector.named("sent all the same")


def test_a_service_that_is_asked_to_speak_grpc_says_so_and_ends(tmp_path: Path) -> None:
    config = tmp_path / "breakwater.yaml"
    config.write_text('providers: {p: {base_url: "http://127.0.0.1:9/v1"}}\nagents: {a: {model: m}}\n')
    environment = {
        "BREAKWATER_CONFIG": str(config),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "services", "request"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == os.EX_CONFIG
    assert "OTEL_EXPORTER_OTLP_PROTOCOL" in ran.stderr
    assert "Traceback" not in ran.stderr


# What is said


def attempt_that_failed() -> Attempt:
    return Attempt(
        attempt_id="job:2",
        execution_id="job",
        agent="writer",
        tenant="a tenant",
        number=2,
        model="m",
        provider="p",
        started_at=NOW,
        completed_at=NOW,
        duration_ms=0,
        input_tokens=10,
        output_tokens=0,
        cost=1_500_000,
        cost_basis="billed",
        finish_reason="length",
        outcome="error",
        error=ErrorInfo(kind="rate_limit", class_="RateLimitError", message="sk-secret", status_code=429),
        cause="retry",
    )


def test_names_are_those_of_the_semantic_conventions() -> None:
    known = {
        value
        for module in (gen_ai_attributes, http_attributes, error_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    said = {
        **tracing.genai_attributes(
            agent="a",
            provider="p",
            request_model="m",
            response_model="m",
            input_tokens=1,
            output_tokens=1,
            cached_tokens=1,
            reasoning_tokens=1,
        ),
        **tracing.attempt_attributes(agent="a", provider="p", model="m", execution_id="e", number=1, cause="first"),
        **tracing.outcome_attributes(attempt_that_failed()),
        **tracing.execution_attributes(agent="a", execution_id="e"),
    }
    assert {name for name in said if not name.startswith("breakwater.")} <= known
    assert len(said) == 18


def test_an_attempt_is_reported_with_what_is_known_of_it() -> None:
    assert tracing.outcome_attributes(attempt_that_failed()) == {
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "http.response.status_code": 429,
        "breakwater.outcome": "error",
        "breakwater.error_kind": "rate_limit",
        "breakwater.cost_usd": 0.0015,
        "breakwater.cost_basis": "billed",
    }
    unknown = attempt_that_failed().model_copy(update={"cost": None, "input_tokens": None, "error": None})
    said = tracing.outcome_attributes(unknown)
    assert not said.keys() & {"breakwater.cost_usd", "gen_ai.usage.input_tokens", "http.response.status_code"}


def test_nothing_that_was_asked_or_answered_is_said() -> None:
    failed = attempt_that_failed()
    result = Result(
        job_id="job",
        execution_id="job",
        agent="writer",
        tenant="a tenant",
        status="succeeded",
        output="the answer sk-secret",
        messages=[{"role": "user", "content": "the prompt"}],
        metadata={"note": "private"},
        error=failed.error,
        attempts=(failed,),
        queued_at=NOW,
        dispatched_at=NOW,
        completed_at=NOW,
        duration_ms=0,
    )
    said = repr(tracing.result_attributes(result)) + repr(tracing.outcome_attributes(failed))
    for private in ("sk-secret", "the answer", "the prompt", "private", "a tenant"):
        assert private not in said
    assert tracing.result_attributes(result)["breakwater.status"] == "succeeded"
