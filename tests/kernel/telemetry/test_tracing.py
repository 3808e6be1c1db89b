"""Traces: what reaches a collector, what it costs where there is none, and what never leaves."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.semconv._incubating.attributes import (
    error_attributes,
    gen_ai_attributes,
    http_attributes,
    server_attributes,
    url_attributes,
)
from pydantic import JsonValue

from breakwater.calls.span_attributes import (
    outcome_attributes,
    provider_attributes,
    request_attributes,
    result_attributes,
)
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Result
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.telemetry import tracing
from tests import semconv
from tests.helpers import start_service
from tests.otlp import Collector, collecting, tracing_to
from tests.tables import each_row

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
        run = tracing.begin("run", parent=root.traceparent, kind="internal")
        call = tracing.begin("call", parent=run.traceparent, kind="client")
        for span in (call, run, root):
            span.end()
    first, second, third = [await collector.named(name) for name in ("root", "run", "call")]
    assert first.parent == ""
    assert second.parent == first.wire.span_id.hex()
    assert third.parent == second.wire.span_id.hex()
    assert first.wire.trace_id == second.wire.trace_id == third.wire.trace_id
    kinds = [WireSpan.SPAN_KIND_SERVER, WireSpan.SPAN_KIND_INTERNAL, WireSpan.SPAN_KIND_CLIENT]
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
from breakwater.kernel.telemetry import tracing
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
    log = tmp_path / "log"
    assert start_service("request", environment, log).wait(60) == os.EX_CONFIG
    assert "OTEL_EXPORTER_OTLP_PROTOCOL" in log.read_text()
    assert "Traceback" not in log.read_text()


# What is said


def attempt_that_failed() -> Attempt:
    return Attempt(
        attempt_id="job:2",
        execution_id="job",
        job_id="job",
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


def test_the_names_of_the_conventions_are_those_of_their_package() -> None:
    named = {
        value
        for module in (gen_ai_attributes, http_attributes, error_attributes, url_attributes, server_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    ours = {name for attributes in semconv.ATTRIBUTES.values() for name in attributes}
    assert ours - named == semconv.NEWER_THAN_THE_PACKAGE | {
        "input.value",
        "output.value",
        "langfuse.observation.cost_details",
    }


@pytest.mark.parametrize(
    ("attributes", "kind", "problem"),
    [
        ({"gen_ai.provider.name": None}, "client", "chat m: has no gen_ai.provider.name"),
        ({"gen_ai.operation.name": None}, "client", "chat m: gen_ai.provider.name without an operation"),
        ({"gen_ai.prompt": "x"}, "client", "chat m: gen_ai.prompt is not known"),
        ({"temperature": 0.5}, "client", "chat m: temperature is not known"),
        ({"gen_ai.request.seed": "7"}, "client", "chat m: gen_ai.request.seed is a string_value"),
        ({"gen_ai.output.type": "yaml"}, "client", "chat m: gen_ai.output.type can't be yaml"),
        ({"server.address": "a"}, "client", "chat m: has half of an address"),
        ({"error.type": "E"}, "client", "chat m: has an error without a status, or a status without an error"),
        ({}, "internal", "chat m: is of kind SPAN_KIND_INTERNAL"),
        ({"gen_ai.input.messages": "[]"}, "client", "chat m: gen_ai.input.messages: is no list"),
        ({"gen_ai.output.messages": '[{"role": "assistant"}]'}, "client", "is no message"),
        ({"gen_ai.system_instructions": '[{"type": "uri"}]'}, "client", "is no text"),
    ],
)
async def test_the_collector_names_what_is_not_as_the_conventions_say(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    attributes: dict[str, tracing.Attribute | None],
    kind: tracing.SpanRole,
    problem: str,
) -> None:
    least = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "p", "gen_ai.request.model": "m"}
    said = {name: value for name, value in (least | attributes).items() if value is not None}
    async with tracing_to(collector, monkeypatch):
        tracing.begin("chat m", parent=None, kind=kind, attributes=said).end()
        await collector.named("chat m")
    assert problem in collector.problems[0]
    collector.problems.clear()


@each_row(
    ("kind", "base_url", "name", "provider", "server"),
    [
        ("openai", "https://api.openai.com/v1", "mine", "openai", ("api.openai.com", 443)),
        ("openai", "https://us-east1-aiplatform.googleapis.com/v1", "g", "gcp.vertex_ai", None),
        ("openai", "https://api.x.ai/v1", "g", "x_ai", None),
        ("openai", "https://max.ai/v1", "mine", "mine", None),
        ("openai", "http://[::1]:8000/v1", "local", "local", ("::1", 8000)),
        ("openai", "http://127.0.0.1/v1", "local", "local", ("127.0.0.1", 80)),
        ("azure", "https://gateway.example.com", "mine", "azure.ai.openai", None),
        ("anthropic", "https://gateway.example.com/v1", "mine", "anthropic", None),
        ("bedrock", "https://vpce.example.com", "mine", "aws.bedrock", None),
        ("openai", "https://a:port/v1", "odd", "odd", (None, None)),
        ("process", None, "script", "script", (None, None)),
    ],
)
def test_a_provider_is_called_as_the_conventions_do_or_as_the_config_does(
    kind: str, base_url: str | None, name: str, provider: str, server: tuple[str | None, int | None] | None
) -> None:
    said = provider_attributes(kind, base_url, name)
    assert (said["gen_ai.provider.name"], said["breakwater.provider"]) == (provider, name)
    if server is not None:
        assert (said.get("server.address"), said.get("server.port")) == server


@each_row(
    ("params", "said"),
    [
        ({"temperature": 1, "top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
        ({"n": 1, "seed": 2**64, "temperature": True, "presence_penalty": 10**400}, {}),
        ({"n": 3, "seed": 1.5, "frequency_penalty": "x"}, {"choice.count": 3}),
    ],
)
def test_parameters_are_said_where_they_are_what_the_conventions_take(
    params: dict[str, JsonValue], said: dict[str, object]
) -> None:
    attributes = request_attributes(params, None, json_schema=False)
    assert {name.removeprefix("gen_ai.request."): value for name, value in attributes.items()} == said


def test_a_format_and_stops_are_said() -> None:
    json_object: JsonValue = {"type": "json_object"}
    assert request_attributes({"response_format": json_object}, ["a", 1], json_schema=False) == {
        "gen_ai.request.stop_sequences": ("a",),
        "gen_ai.output.type": "json",
    }
    assert request_attributes({}, "a", json_schema=True)["gen_ai.output.type"] == "json"


def test_an_attempt_is_reported_with_what_is_known_of_it() -> None:
    assert outcome_attributes(attempt_that_failed()) == {
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "http.response.status_code": 429,
        "breakwater.outcome": "error",
        "breakwater.error_kind": "rate_limit",
        "breakwater.cost_usd": 0.0015,
        "breakwater.cost_basis": "billed",
        "langfuse.observation.cost_details": '{"total": 0.0015}',
    }
    broke_off = attempt_that_failed().model_copy(update={"first_token_ms": 1500, "finish_reason": None})
    said = outcome_attributes(broke_off, {"id": "x" * 300, "model": 7})
    assert said["gen_ai.response.time_to_first_chunk"] == 1.5
    assert said["gen_ai.response.finish_reasons"] == ("error",)
    assert (said["gen_ai.response.id"], said.get("gen_ai.response.model")) == ("x" * 256, None)
    unknown = attempt_that_failed().model_copy(update={"cost": None, "input_tokens": None, "error": None})
    said = outcome_attributes(unknown)
    assert not said.keys() & {
        "breakwater.cost_usd",
        "langfuse.observation.cost_details",
        "gen_ai.usage.input_tokens",
        "http.response.status_code",
    }


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
    said = repr(result_attributes(result)) + repr(outcome_attributes(failed))
    for private in ("sk-secret", "the answer", "the prompt", "private", "a tenant"):
        assert private not in said
    assert result_attributes(result)["breakwater.status"] == "succeeded"
