"""A trace from the client over NATS and the worker to who performs the call, and its metrics in Prometheus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from breakwater.local.ports import free_port
from tests.flow.fixtures import StartPlane
from tests.flow.kit import model
from tests.otlp import collecting

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALLABLE = """
async def echo(request):
    return request["traceparent"]
"""


async def test_a_job_is_one_trace_from_its_client_to_its_provider(start_plane: StartPlane, tmp_path: Path) -> None:
    (tmp_path / "traced_agents.py").write_text(CALLABLE)
    agents = {
        "chat": {"model": "sim/bad", "fallback_models": ["sim/good"], "retry": {"max_attempts": 1}},
        "echo": {"provider": "echo"},
    }
    models = {"sim/bad": model({"status": 404}), "sim/good": model()}
    providers = {"echo": {"kind": "python", "callable": "traced_agents:echo"}}
    port = free_port()
    async with collecting() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "PYTHONPATH": str(tmp_path),
            "BREAKWATER_METRICS_PORT": str(port),
        }
        async with start_plane(
            models, agents, services=("worker",), environment=environment, more_providers=providers
        ) as plane:
            await plane.publish({"agent": "chat", "job_id": "j1", "prompt": "a secret plan"}, traceparent=CLIENT)
            await plane.publish({"agent": "echo", "job_id": "j2", "input": 1}, traceparent=CLIENT)
            result, echoed = await plane.result("j1"), await plane.result("j2")
            execution = await collector.named("invoke_agent chat")
            failed, answered = await collector.named("chat bad"), await collector.named("chat good")
            called = await collector.named("chat echo")
            async with asyncio.timeout(60), aiohttp.ClientSession() as http:
                url, openmetrics = f"http://127.0.0.1:{port}/metrics", "application/openmetrics-text; version=1.0.0"
                text = await (await http.get(url)).text()
                with_exemplars = await (await http.get(url, headers={"Accept": openmetrics})).text()
    trace = CLIENT.split("-")[1]
    assert {span.wire.trace_id.hex() for span in (execution, failed, answered)} == {trace}
    assert (result["trace_id"], result["params"]) == (trace, None), "the parameters are in the record only"
    assert execution.parent == CLIENT.split("-")[2]
    assert {failed.parent, answered.parent} == {execution.traceparent.split("-")[2]}
    assert failed.attributes["error.type"] == "NotFoundError"
    assert answered.attributes["gen_ai.usage.output_tokens"] == result["output_tokens"]
    assert echoed["output"] == called.traceparent
    assert "secret plan" not in str([span.wire for span in collector.spans])
    samples = {
        (sample.name, sample.labels.get("model"), sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["breakwater_attempts_total", "sim/bad", "error"] == 1
    assert samples["breakwater_attempts_total", "sim/good", "success"] == 1
    exemplars = {
        sample.name
        for family in openmetrics_families(with_exemplars)
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": trace}
    }
    assert exemplars == {"breakwater_attempt_duration_seconds_bucket", "breakwater_job_duration_seconds_bucket"}
