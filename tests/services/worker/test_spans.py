"""What the worker says on its spans, as a collector receives it that validates against the semantic conventions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from breakwater.calls.providers.base import Answer
from breakwater.kernel.security.encryption import new_key
from breakwater.kernel.telemetry import tracing
from breakwater.prices.rules.usage import Usage
from breakwater.services.worker import call, handler
from tests.flow.kit import model
from tests.otlp import collecting, tracing_to
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import ScriptedProvider

AT_ONCE = {"max_attempts": 2, "backoff": "constant", "base_s": 0}
CAPTURED: dict[str, Any] = {"capture_content": True}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def no_settings_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


async def test_calls_and_jobs_say_what_the_conventions_recommend(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {
        "sim/bad": model({"status": 500}),
        "sim/good": model(usage={"input_tokens": 100, "output_tokens": 40, "cached_tokens": 30}),
    }
    agent = {"model": "sim/bad", "fallback_models": ["sim/good"], "retry": {"max_attempts": 1}}
    asked = {"temperature": 1, "top_p": 0.5, "seed": 7, "n": 2, "stop": "END", "reasoning_effort": "low"}
    job = {"agent": "writer", "job_id": "j1", "task_id": "task-1", "prompt": "the prompt"}
    async with collecting() as collector:
        async with (
            tracing_to(collector, monkeypatch),
            start_worker(models, {"writer": agent}) as plane,
        ):
            result = await plane.run({**job, "params": asked, "stream": True})
            port = plane.sim.port
        invoked = (await collector.named("invoke_agent writer")).attributes
        failed = (await collector.named("chat bad")).attributes
        said = (await collector.named("chat good")).attributes
    assert failed["error.type"] == "ServerError"
    assert failed["http.response.status_code"] == 500
    first_chunk = said.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(first_chunk, float)
    assert isinstance(said.pop("gen_ai.response.id"), str)
    assert (
        said.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "sim",
            "gen_ai.request.model": "good",
            "gen_ai.response.model": "sim/good",
            "gen_ai.agent.name": "writer",
            "gen_ai.conversation.id": "task-1",
            "gen_ai.request.stream": True,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.top_p": 0.5,
            "gen_ai.request.seed": 7,
            "gen_ai.request.choice.count": 2,
            "gen_ai.request.max_tokens": 4096,
            "gen_ai.request.stop_sequences": ("END",),
            "gen_ai.response.finish_reasons": ("stop", "stop"),
            "gen_ai.request.reasoning.level": "low",
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": result["output_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 30,
            "server.address": "127.0.0.1",
            "server.port": port,
            "breakwater.model": "sim/good",
            "breakwater.provider": "sim",
        }.items()
    )
    assert json.loads(str(said["langfuse.observation.cost_details"])) == {"total": said["breakwater.cost_usd"]}
    assert invoked["gen_ai.conversation.id"] == "task-1"
    assert (invoked["breakwater.requested_model"], invoked["breakwater.chosen_model"]) == ("sim/bad", "sim/good")
    assert invoked["breakwater.input_tokens"] == result["input_tokens"]
    assert not [name for name in invoked if name.startswith("gen_ai.usage.")], "sums over calls are no usage"
    assert "the prompt" not in str([span.wire for span in collector.spans])


async def test_prompts_and_answers_are_said_where_they_are_wanted_and_kept(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = "the-mail@example.com"
    schema = {"schema": {"type": "object", "required": ["n"]}, "max_corrections": 1}
    models = {
        "sim/plain": model(answer=f"Write to {private}."),
        "sim/tools": model(tool_calls=[{"name": "weather", "arguments": {"city": "Kiel"}}]),
        "sim/json": model(answer="no JSON, the answer"),
    }
    agents = {
        "open": {"model": "sim/plain", "system_prompt": "Be brief."},
        "tools": {"model": "sim/tools"},
        "no-prompts": {"model": "sim/plain", "persist_prompts": False},
        "no-answers": {"model": "sim/json", "persist_responses": False, "output": schema},
        "program": {"provider": "program"},
    }
    program = ScriptedProvider(Answer({"said": 1}, Usage(None, None)))
    more = {"program": {"kind": "python", "callable": "asyncio:sleep"}}
    async with collecting() as collector:
        async with (
            tracing_to(collector, monkeypatch),
            start_worker(
                models,
                agents,
                tracing=CAPTURED | {"max_content_bytes": 600},
                more_providers=more,
                providers={"program": program},
            ) as plane,
        ):
            await plane.run({"agent": "open", "job_id": "j1", "prompt": f"I am {private}. {'x' * 5_000}"})
            await plane.run({"agent": "tools", "job_id": "j2", "prompt": "Weather?", "params": {"tools": [WEATHER]}})
            await plane.run({"agent": "no-prompts", "job_id": "j3", "prompt": "a prompt that is not kept"})
            await plane.run({"agent": "no-answers", "job_id": "j4", "prompt": "a prompt that is kept"})
            await plane.run({"agent": "program", "job_id": "j5", "input": {"n": [1]}})
        job = {name: await collector.named(f"invoke_agent {name}") for name in agents}
        calls = {
            (span.attributes["gen_ai.agent.name"], span.attributes["breakwater.attempt"]): span
            for span in collector.spans
            if span.name.startswith("chat ")
        }
    assert job["open"].content("gen_ai.system_instructions") == [{"type": "text", "content": "Be brief."}]
    system, user = calls["open", 1].content("gen_ai.input.messages")
    assert system == {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]}
    assert user["parts"][0]["content"].startswith("I am [REDACTED]. xxx")
    for span in (job["open"], calls["open", 1]):
        assert len(str(span.attributes["gen_ai.input.messages"]).encode()) <= 600
        [answer] = span.content("gen_ai.output.messages")
        assert (answer["role"], answer["finish_reason"]) == ("assistant", "stop")
        assert answer["parts"] == [{"type": "text", "content": "Write to [REDACTED]."}]
    assert str(job["open"].attributes["input.value"]).startswith("I am [REDACTED]. xxx")
    assert job["open"].attributes["output.value"] == "Write to [REDACTED]."
    [asked] = calls["tools", 1].content("gen_ai.output.messages")[0]["parts"]
    assert (asked["type"], asked["name"], asked["arguments"]) == ("tool_call", "weather", {"city": "Kiel"})
    for span in (job["no-prompts"], calls["no-prompts", 1]):
        assert "gen_ai.output.messages" in span.attributes
        assert not {"gen_ai.input.messages", "input.value"} & span.attributes.keys()
    for span in (job["no-answers"], calls["no-answers", 1], calls["no-answers", 2]):
        assert len(span.content("gen_ai.input.messages")) == 1, "the correction quotes the answer"
        assert not {"gen_ai.output.messages", "output.value"} & span.attributes.keys()
    assert job["program"].content("gen_ai.input.messages")[0]["parts"][0]["content"] == '{"n":[1]}'
    assert calls["program", 1].content("gen_ai.output.messages")[0]["parts"][0]["content"] == '{"said":1}'
    wire = str([span.wire for span in collector.spans])
    for kept in (private, "not kept", "no JSON, the answer"):
        assert kept not in wire


async def test_texts_that_are_encrypted_are_not_said(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(new_key())
    encryption = {"keys": [{"file": str(tmp_path / "key")}]}
    async with collecting() as collector:
        async with (
            tracing_to(collector, monkeypatch),
            start_worker(
                {"sim/m": model()}, {"a": {"model": "sim/m"}}, tracing=CAPTURED, encryption=encryption
            ) as plane,
        ):
            await plane.run({"agent": "a", "job_id": "j1", "prompt": "the prompt", "params": {"stop": "the end"}})
        await collector.named("invoke_agent a")
    assert collector.spans
    assert "messages" not in str([span.wire for span in collector.spans])
    assert "the end" not in str([span.wire for span in collector.spans])


async def test_nothing_is_worked_out_for_spans_that_nobody_records(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> tracing.SpanAttributes:
        raise AssertionError("attributes were made")

    at_the_end, at_the_beginning = (call, "call_ended"), (call, "call_began")
    for module, name in (at_the_end, (handler, "job_ended")):
        monkeypatch.setattr(module, name, fail)
    agents = {"a": {"model": "sim/m"}}
    async with collecting() as collector, start_worker({"sim/m": model()}, agents, tracing=CAPTURED) as plane:
        async with tracing_to(collector, monkeypatch, OTEL_TRACES_SAMPLER="always_off"):
            unsampled = await plane.run({"agent": "a", "job_id": "j1", "prompt": "x"})
        monkeypatch.setattr(*at_the_beginning, fail)
        monkeypatch.setattr(handler, "execution_attributes", fail)
        untraced = await plane.run({"agent": "a", "job_id": "j2", "prompt": "x"})
    assert {unsampled["status"], untraced["status"]} == {"succeeded"}
    assert (unsampled["trace_id"], untraced["trace_id"]) == (None, None)
