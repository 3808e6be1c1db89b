"""What providers answer: how it stands in attempts, results and records, and what it costs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

from prometheus_client import REGISTRY

from breakwater.calls.providers.base import Answer, Call
from breakwater.jobs.contract.execution import Attempt, Execution, Result
from breakwater.kernel.nats import subjects
from breakwater.kernel.types import nano_from_usd
from breakwater.prices.rules.usage import Usage
from breakwater.records.rows import attempt_row, execution_row
from tests.flow.kit import COST, COST_NANO, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import ScriptedProvider

AGENT = {"retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.01}, "breaker": "off", "max_tokens": 100}
ABSURD = {"reports": {"output_tokens": 10**15}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


async def test_what_a_model_said_is_told_with_why_it_stopped_and_what_it_cost(start_worker: StartWorker) -> None:
    faults: dict[str, dict[str, Any]] = {
        "plain": {"answer": "hi"},
        "created": {"status": 201},
        "marked": {"kind": "byte_order_mark"},
        "filtered": {"answer": "I can't", "finish_reason": "content_filter"},
        "vague": {"answer": "hi", "finish_reason": "Quite done!"},
        "absurd": {"answer": "hi", **ABSURD},
        "beyond": {"answer": "hi", "reports": {"input_tokens": 10**17}},
        "cached": {"answer": "hi", "reports": {"cached_tokens": 10**19}},
        "short": {"answer": "hi there " * 20},
    }
    agents = {name: {**AGENT, "model": f"sim/{name}"} for name in faults}
    agents["short"]["max_tokens"] = 1
    results: dict[str, dict[str, Any]] = {}
    async with start_worker({f"sim/{name}": model(fault) for name, fault in faults.items()}, agents) as plane:
        for name in faults:
            await plane.publish({"agent": name, "job_id": name, "prompt": "hello"})
        for name in faults:
            results[name] = await plane.result(name)
            # Whatever was answered: the contract reads what was recorded, and ClickHouse takes it.
            await until(partial(plane.last, "EVENTS", subjects.execution(name, name)), "the record, after the result")
            record = await plane.jetstream.get_last_msg("EVENTS", subjects.execution(name, name))
            attempt = await plane.jetstream.get_last_msg("EVENTS", subjects.attempt(name, name, 1))
            assert record.data is not None
            assert attempt.data is not None
            execution = Execution.model_validate_json(record.data)
            assert execution.finish_reason == results[name]["finish_reason"]
            assert execution_row(execution, 1)
            assert attempt_row(Attempt.model_validate_json(attempt.data), 1, datetime.now(UTC))
    assert {result["status"] for result in results.values()} == {"succeeded"}
    assert {name: result["finish_reason"] for name, result in results.items()} == {
        "plain": "stop",
        "created": "stop",
        "marked": "stop",
        "filtered": "content_filter",
        "vague": None,
        "absurd": "stop",
        "beyond": "stop",
        "cached": "stop",
        "short": "length",
    }
    costs = {name: (result["total_cost"], result["cost_basis"]) for name, result in results.items()}
    assert {costs[name] for name in ("plain", "created", "marked", "filtered", "vague")} == {(COST, "billed")}
    words = {"absurd": "1.00e+15 output tokens", "beyond": "1.00e+17 input tokens", "cached": "1.00e+18 cached tokens"}
    for name, said in words.items():
        [attempt] = results[name]["attempts"]
        assert costs[name] == (attempt["reserved"], "estimated")
        assert 0 < attempt["input_tokens"] < 100, "estimated, as if nothing had been reported"
        assert 0 < attempt["output_tokens"] < 100
        assert attempt["usage_problem"].startswith(said)


async def test_an_answer_that_says_nothing_fails_by_why_the_model_stopped(start_worker: StartWorker) -> None:
    silent: dict[str, dict[str, Any]] = {
        "filtered": {"kind": "no_content", "finish_reason": "content_filter"},
        "blank": {"answer": "", "finish_reason": "content_filter"},
        "void": {"answer": ""},
        "thought": {"kind": "no_content", "finish_reason": "length"},
        "empty": {"kind": "no_content"},
        "called": {"kind": "no_content", "finish_reason": "tool_calls"},
        "interrupted": {"answer": "The first", "finish_reason": "error"},
    }
    models = {f"sim/{name}": model(fault) for name, fault in silent.items()} | {"sim/good": model()}
    agents = {name: {**AGENT, "model": f"sim/{name}", "fallback_models": ["sim/good"]} for name in silent}
    async with start_worker(models, agents) as plane:
        for name in silent:
            await plane.publish({"agent": name, "job_id": name, "prompt": "hello"})
        results = {name: await plane.result(name) for name in silent}
    said = {
        name: [
            (one["error"]["class"], one["finish_reason"], one["counts_for_breaker"]) for one in result["attempts"][:-1]
        ]
        for name, result in results.items()
    }
    assert said == {
        "filtered": [("ContentFilteredError", "content_filter", False)],
        "blank": [("ContentFilteredError", "content_filter", False)],
        "thought": [("OutputLimitError", "length", False)],
        "void": [("EmptyAnswerError", "stop", True)] * 2,
        "empty": [("EmptyAnswerError", "stop", True)] * 2,
        "called": [("EmptyAnswerError", "tool_calls", True)] * 2,
        "interrupted": [("BrokenAnswerError", "error", True)] * 2,
    }
    for result in results.values():
        assert (result["status"], result["chosen_model"], result["finish_reason"]) == ("succeeded", "sim/good", "stop")
        assert {attempt["cost"] for attempt in result["attempts"]} == {COST}, "the provider reported what it billed"


async def test_an_agent_may_accept_an_answer_that_says_nothing(start_worker: StartWorker) -> None:
    silent = {
        "void": {"answer": ""},
        "empty": {"kind": "no_content"},
        "thought": {"answer": "", "finish_reason": "length"},
    }
    agents = {name: {**AGENT, "model": f"sim/{name}", "on_empty_answer": "accept"} for name in silent}
    async with start_worker({f"sim/{name}": model(fault) for name, fault in silent.items()}, agents) as plane:
        results = [
            await plane.run({"agent": name, "job_id": f"{name}-{stream}", "prompt": "hello", "stream": stream})
            for name in ("void", "empty")
            for stream in (False, True)
        ]
        limited = await plane.run({"agent": "thought", "job_id": "thought", "prompt": "hello"})
    for result in results:
        assert (result["status"], result["output"], result["finish_reason"]) == ("succeeded", "", "stop")
        assert (len(result["attempts"]), result["cost_basis"]) == (1, "billed")
    assert limited["error"]["class"] == "OutputLimitError", "it has not ended by itself"


async def test_an_answer_that_nobody_can_read_is_a_broken_one(start_worker: StartWorker) -> None:
    def fail(call: Call) -> Answer:
        raise TypeError(f"can't read {call.messages}")

    provider = ScriptedProvider(fail, Answer("done", Usage(120, 40)))
    async with start_worker(
        {"sim/m": model()}, {"writer": {**AGENT, "model": "sim/m"}}, providers={"sim": provider}
    ) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        [line] = [line for line in plane.logs if line["event"] == "answer_not_read"]
    broken, good = result["attempts"]
    assert (broken["outcome"], broken["error"]["class"], good["outcome"]) == ("error", "BrokenAnswerError", "success")
    assert (broken["cost"], broken["cost_basis"]) == (broken["reserved"], "estimated"), "it may have been billed"
    assert (line["attempt_id"], line["error"]) == ("j1:1", "TypeError")
    assert "in fail" in line["traceback"]
    assert "hello" not in str((line, result)), "what it says may quote the answer"


async def test_all_choices_and_tool_calls_are_returned_also_from_the_cache(start_worker: StartWorker) -> None:
    calls = [{"name": "look_up", "arguments": {"id": number}} for number in (1, 2)]
    models = {"sim/m": model(), "sim/tools": model(tool_calls=calls)}
    agents = {
        "writer": {**AGENT, "model": "sim/m", "cache": {"ttl_s": 600}},
        "caller": {**AGENT, "model": "sim/tools"},
    }
    async with start_worker(models, agents) as plane:
        several = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "hello", "params": {"n": 3}})
        again = await plane.run({"agent": "writer", "job_id": "j2", "prompt": "hello", "params": {"n": 3}})
        one, called = await asyncio.gather(
            plane.run({"agent": "writer", "job_id": "j3", "prompt": "hello"}),
            plane.run({"agent": "caller", "job_id": "j4", "prompt": "hello", "params": {"tools": [TOOL], "n": 2}}),
        )
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert {choice["output"] for choice in several["choices"]} == {several["output"]}
    assert (again["cache_hit"], again["choices"], again["finish_reason"]) == (True, several["choices"], "stop")
    assert (one["choices"], one["finish_reason"]) == ([], "stop")
    assert [choice["finish_reason"] for choice in called["choices"]] == ["tool_calls"] * 2
    for output in (called["output"], *(choice["output"] for choice in called["choices"])):
        functions = [call["function"] for call in output["tool_calls"]]
        assert functions == [{"name": "look_up", "arguments": f'{{"id":{number}}}'} for number in (1, 2)]
    assert Result.model_validate(called).choices[1].index == 1


REPORTED: dict[str, Usage] = {
    "none": Usage(None, None),
    "zeros": Usage(None, 0, problem="0 input tokens were reported"),
    "silent": Usage(120, 0),
    "blind": Usage(None, 40),
    "priority": Usage(120, 40, terms=("priority",)),
    "sound": Usage(120, 40, parts={"input_audio": 100}),
    "lying": Usage(120, 40, problem="the parts are 160 tokens, and the total is 120"),
}


async def test_unknown_is_never_zero_and_what_is_doubted_is_estimated_and_counted_by_provider(
    start_worker: StartWorker,
) -> None:
    said = "The harbour was quiet. " * 10
    provider = ScriptedProvider(*[Answer(said, usage, finish_reason="stop") for usage in REPORTED.values()])
    found: dict[str, tuple[int, str]] = {}
    reserved = 0
    read = {"provider": "sim"}
    before = REGISTRY.get_sample_value("breakwater_usage_problems_total", read) or 0
    async with start_worker(
        {"sim/m": model()}, {"a": {**AGENT, "model": "sim/m", "max_tokens": 1000}}, providers={"sim": provider}
    ) as plane:
        for name in REPORTED:
            result = await plane.run({"agent": "a", "job_id": name, "prompt": "hello"})
            [attempt] = result["attempts"]
            found[name] = nano_from_usd(Decimal(attempt["cost"])), attempt["cost_basis"]
            reserved = nano_from_usd(Decimal(attempt["reserved"]))
            assert min(attempt["input_tokens"], attempt["output_tokens"]) > 0
            doubted = name not in ("none", "blind")
            assert (attempt["usage_problem"] is not None) == doubted, name
    assert {basis for _, basis in found.values()} == {"estimated"}
    assert found["none"][0] == reserved, "a model may think more than it says"
    assert len(said) // 4 * 600 < found["zeros"][0] < reserved, "by the texts"
    assert 120 * 150 + len(said) // 4 * 600 < found["silent"][0] <= reserved
    assert found["blind"][0] > 40 * 600
    assert found["priority"][0] == COST_NANO * 5 // 2
    assert found["sound"][0] == COST_NANO + 100 * 15 * 150
    assert found["lying"][0] == COST_NANO
    after = REGISTRY.get_sample_value("breakwater_usage_problems_total", read)
    assert after == before + 5
