"""A collector of OpenTelemetry spans on a real port, which decodes what it is sent, and validates it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from breakwater.kernel.telemetry import tracing
from tests import semconv

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """A span as the collector sees it."""

    wire: WireSpan
    resource: dict[str, Value]

    @property
    def name(self) -> str:
        return self.wire.name

    @property
    def attributes(self) -> dict[str, Value]:
        return plain(self.wire.attributes)

    def content(self, name: str) -> list[dict[str, Any]]:
        """Messages or instructions that it carries."""
        return json.loads(str(self.attributes[name]))

    @property
    def traceparent(self) -> str:
        return f"00-{self.wire.trace_id.hex()}-{self.wire.span_id.hex()}-01"

    @property
    def parent(self) -> str:
        return self.wire.parent_span_id.hex()


@dataclass(slots=True)
class Collector:
    """What has come, and how it answers: with a status, or not before it is released."""

    url: str = ""
    status: int = 200
    hangs: bool = False
    requests: int = 0
    spans: list[Received] = field(default_factory=list[Received])
    problems: list[str] = field(default_factory=list[str])
    """Where spans are not as the semantic conventions say."""
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests += 1
        if self.hangs:
            await self.released.wait()
        if self.status == 200:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = plain(group.resource.attributes)
                spans = [span for scope in group.scope_spans for span in scope.spans]
                self.spans += [Received(span, resource) for span in spans]
                self.problems += [problem for span in spans for problem in semconv.problems(span)]
        return web.Response(status=self.status, content_type="application/x-protobuf")

    async def named(self, name: str) -> Received:
        """The one span of that name, once it has come."""
        deadline = time.monotonic() + 60
        while not (found := [span for span in self.spans if span.name == name]):
            assert time.monotonic() < deadline, f"no span {name!r} came, but {[span.name for span in self.spans]}"
            await asyncio.sleep(0.01)
        assert len(found) == 1, name
        return found[0]


def plain(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    values = {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}
    return {
        name: tuple(one.string_value for one in value.values) if isinstance(value, ArrayValue) else value
        for name, value in values.items()
    }


@asynccontextmanager
async def collecting() -> AsyncGenerator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
        assert not collector.problems, collector.problems
    finally:
        collector.released.set()
        await runner.cleanup()


@asynccontextmanager
async def tracing_to(collector: Collector, monkeypatch: pytest.MonkeyPatch, **environment: str) -> AsyncGenerator[None]:
    """Tracing switched on in this process."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracing.start("tester")
    try:
        yield
    finally:
        await asyncio.to_thread(tracing.stop)
