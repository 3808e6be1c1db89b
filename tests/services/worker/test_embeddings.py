"""Jobs for embeddings: vectors, money, fallbacks and what is kept of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from breakwater.config import Config
from breakwater.config.job_validation import validate_job
from breakwater.dialects.rules.embeddings import answer_of, size_of
from breakwater.jobs.contract.job import Job, NativeRequest
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.prices.rules.price import GENERIC, estimate_input_tokens
from tests.flow.kit import COST_NANO, PLANE_KEY, Plane, config_for, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.tables import each_row

PRICE = {"input_usd_per_mtok": 2, "output_usd_per_mtok": 0}
AGENT = {"model": "sim/e", "retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.01}, "breaker": "off"}
TEXTS = ["one", "two"]
SYSTEM = {
    "system_prompt": "Be kind.",
    "params": {"temperature": 0.5},
    "output": {"schema": "agent_decision"},
    "on_context_overflow": "trim",
    "reserve": "observed",
}


def embeds(dimensions: int = 8, *faults: dict[str, Any], **more: Any) -> dict[str, Any]:
    return model(*faults, dimensions=dimensions, usage={"input_tokens": 50, "output_tokens": 0}, **more)


def priced(**dimensions: int) -> dict[str, Any]:
    return {f"sim/{name}": {"price": PRICE, "dimensions": length} for name, length in dimensions.items()}


def job(job_id: str = "j", given: Any = TEXTS, *, agent: str = "index", **body: Any) -> dict[str, Any]:
    return {"agent": agent, "job_id": job_id, "api_request": {"api": "embeddings", "body": {"input": given, **body}}}


async def run(plane: Plane, asked: dict[str, Any]) -> dict[str, Any]:
    await plane.publish(asked)
    return await plane.result(asked["job_id"])


async def record_of(plane: Plane, job_id: str) -> dict[str, Any]:
    return await until(lambda: plane.last("EVENTS", f"bw.executions.*.{job_id}"), "the record")


async def test_a_job_has_vectors_in_its_result_and_a_summary_in_its_record(start_worker: StartWorker) -> None:
    async with start_worker({"sim/e": embeds()}, {"index": {**AGENT, **SYSTEM}}, more_models=priced(e=8)) as plane:
        result = await run(plane, job(dimensions=4, user="u"))
        record = await record_of(plane, "j")
        [call] = plane.sim.ledger.calls
    assert result["status"] == "succeeded", result["error"]
    assert result["output"] == record["output"] == {"embeddings": 2, "dimensions": 4}
    data = answer_of(result["response"], None)["data"]
    assert [(item["index"], len(item["embedding"])) for item in data] == [(0, 4), (1, 4)]
    assert "response" not in record
    assert (record["input"], record["messages"]) == (["one", "two"], [])
    assert record["params"] == {"dimensions": 4, "user": "u"}
    assert (result["input_tokens"], result["output_tokens"], result["total_cost"]) == (50, 0, "0.000100000")
    assert (result["cost_basis"], call.input_tokens) == ("billed", 50)


async def test_a_budget_holds_the_input_alone(start_worker: StartWorker) -> None:
    asked = job(given=["some text"] * 5)
    estimate = estimate_input_tokens(size_of(asked["api_request"]["body"]), GENERIC)
    async with start_worker({"sim/e": embeds()}, {"index": AGENT}, more_models=priced(e=8)) as plane:
        result = await run(plane, asked)
    assert result["attempts"][0]["reserved"] == f"{estimate * 2 / 1e6:.9f}"


async def test_usage_that_is_missing_is_estimated(start_worker: StartWorker) -> None:
    silent = embeds() | {"usage": {"input_tokens": 50, "output_tokens": 0, "report": False}}
    async with start_worker({"sim/e": silent}, {"index": AGENT}, more_models=priced(e=8)) as plane:
        result = await run(plane, job())
    [attempt] = result["attempts"]
    assert (attempt["cost_basis"], attempt["cost"], attempt["output_tokens"]) == ("estimated", attempt["reserved"], 0)


@pytest.mark.parametrize("private", [False, True])
async def test_texts_are_kept_only_where_prompts_are(start_worker: StartWorker, *, private: bool) -> None:
    agents = {"index": {**AGENT, "persist_prompts": not private}}
    async with start_worker({"sim/e": embeds()}, agents, more_models=priced(e=8), plane_key=PLANE_KEY) as plane:
        await plane.publish(job(given=["my secret tea", "mail me at ann@example.com"]))
        await plane.result("j")
        record = await record_of(plane, "j")
    assert record["input"] == (None if private else ["my secret tea", "mail me at [REDACTED]"])


async def test_token_ids_are_not_kept(start_worker: StartWorker) -> None:
    async with start_worker({"sim/e": embeds()}, {"index": AGENT}, more_models=priced(e=8)) as plane:
        result = await run(plane, job(given=[[101, 102], [103]]))
        record = await record_of(plane, "j")
    assert (result["output"], record["input"]) == (
        {"embeddings": 2, "dimensions": 8},
        ["2 token ids", "1 token ids"],
    )


async def test_the_next_model_answers_where_it_has_the_same_dimensions(start_worker: StartWorker) -> None:
    agents = {"index": {**AGENT, "fallback_models": ["sim/f"]}}
    models = {"sim/e": embeds(8, {"status": 500}), "sim/f": embeds(8)}
    async with start_worker(models, agents, more_models=priced(e=8, f=8)) as plane:
        result = await run(plane, job())
    assert (result["chosen_model"], result["attempts_count"]) == ("sim/f", 3)


@pytest.mark.parametrize("body", [{}, {"dimensions": 6}])
async def test_vectors_of_another_length_are_no_answer(start_worker: StartWorker, body: dict[str, Any]) -> None:
    agents = {"index": {**AGENT, "fallback_models": ["sim/f"]}}
    # The declared length is wrong, or the provider does not know the parameter: no test of ours, so the sizes differ.
    models = {"sim/e": embeds(7), "sim/f": embeds(8)}
    async with start_worker(models, agents, more_models=priced(e=8, f=8)) as plane:
        result = await run(plane, job(**body))
    classes = [attempt["error"] and attempt["error"]["class"] for attempt in result["attempts"]]
    expected = (["WrongDimensionsError", None], "sim/f", 8) if not body else ([None], "sim/e", 6)
    assert (classes, result["chosen_model"], result["output"]["dimensions"]) == expected
    if not body:
        assert result["attempts"][0]["error"]["message"] == (
            "the vectors have 7 dimensions, and models.sim/e.dimensions is 8"
        )
        assert result["wasted_cost"] == "0.000100000"


async def test_a_broken_answer_is_tried_again(start_worker: StartWorker) -> None:
    broken = embeds(8, {"requests": [1, 1], "kind": "no_choices"})
    async with start_worker({"sim/e": broken}, {"index": AGENT}, more_models=priced(e=8)) as plane:
        result = await run(plane, job())
    assert (result["status"], result["attempts_count"]) == ("succeeded", 2)
    assert result["attempts"][0]["error"]["class"] == "BrokenEmbeddingsError"


async def test_one_request_takes_what_fits_into_a_result(start_worker: StartWorker) -> None:
    async with start_worker({"sim/e": embeds(3072)}, {"index": AGENT}, more_models=priced(e=3072)) as plane:
        whole = await run(plane, job("j1", ["x"] * 100))
        too_many = await run(plane, job("j2", ["x"] * 200))
    assert whole["output"] == {"embeddings": 100, "dimensions": 3072}
    assert len(answer_of(whole["response"], None)["data"]) == 100
    assert (too_many["reason"], too_many["attempts"]) == ("invalid", [])
    assert "api_request.body.input: has 200 inputs; at most" in too_many["error"]["message"]


def config(**agent: Any) -> Config:
    more = {
        "more_providers": {
            "claude": {"kind": "anthropic", "base_url": "http://127.0.0.1:1"},
            "script": {"kind": "process", "command": ["cat"]},
        },
        "more_models": priced(e=8, f=8, g=9) | {"sim/h": {}},
    }
    return Config.model_validate(config_for("http://127.0.0.1:1/v1", {"index": {**AGENT, **agent}}, **more))


@each_row(
    ("agent", "body", "path", "words"),
    [
        ({}, {}, None, ""),
        ({"fallback_models": ["sim/f"]}, {}, None, ""),
        ({"fallback_models": ["sim/g"]}, {}, "model", "models.sim/g.dimensions is 9"),
        ({"fallback_models": ["sim/h"]}, {}, "model", "models.sim/h.dimensions"),
        ({"fallback_models": ["claude/m"]}, {}, "model", "'anthropic'"),
        ({"model": "claude/m"}, {}, "model", "'anthropic'"),
        ({"model": "script"}, {}, "model", "'process'"),
        ({}, {"input": []}, "api_request.body.input", "is empty"),
        ({}, {"dimensions": "8"}, "api_request.body.dimensions", "whole number"),
        ({}, {"service_tier": "flex"}, "api_request.body.service_tier", "has no price"),
        ({}, {"api_key": "x"}, "api_request.body.api_key", "for the config"),
        ({}, {"made_up": 1}, None, ""),
        ({"max_cost_usd": 1}, {"made_up": 1}, "api_request.body.made_up", "allowed_params"),
        ({"max_cost_usd": 1}, {"dimensions": 8, "encoding_format": "base64", "input_type": "query"}, None, ""),
        ({"max_cost_usd": 1, "allowed_params": ["made_up"]}, {"made_up": 1}, None, ""),
    ],
)
def test_what_can_not_be_embedded_is_refused_in_words(
    agent: dict[str, Any], body: dict[str, Any], path: str | None, words: str
) -> None:
    request = NativeRequest(api="embeddings", body={"input": "x", **body})
    problem = validate_job(config(**agent), config(**agent).limit_table, Job(agent="index", api_request=request))
    assert (None if problem is None else problem.path) == path
    assert problem is None or words in problem.message


def test_a_job_for_embeddings_does_not_stream() -> None:
    request = NativeRequest(api="embeddings", body={"input": "x"})
    problem = validate_job(config(), config().limit_table, Job(agent="index", api_request=request, stream=True))
    assert problem is not None
    assert problem.path == "stream"


async def test_the_agents_chat_settings_are_not_sent(start_worker: StartWorker) -> None:
    agent = {**AGENT, **SYSTEM, "params": {"temperature": 1, "dimensions": 5, "encoding_format": "base64", "stop": "x"}}
    async with start_worker({"sim/e": embeds()}, {"index": agent}, more_models=priced(e=8)) as plane:
        result = await run(plane, job())
    assert (result["status"], result["output"]) == ("succeeded", {"embeddings": 2, "dimensions": 5}), result["error"]
    assert json.dumps(result["response"]["data"][0]["embedding"]).startswith('{"float')


async def test_embeddings_are_no_steps_of_a_loop_and_their_cost_and_failures_count(start_worker: StartWorker) -> None:
    guard = {"max_iterations": 2, "max_tokens": 500, "consecutive_failures": 3}
    agents = {
        "index": {**AGENT, "guard": guard, "retry": {"max_attempts": 1}},
        "writer": {"model": "sim/m", "guard": guard, "retry": {"max_attempts": 1}},
        "dear": {**AGENT, "guard": {**guard, "max_cost_usd": "0.0005"}},
    }
    models = {
        "sim/e": embeds(8, {"requests": [21, 22], "status": 400}),
        "sim/m": model({"requests": [2, 2], "status": 400}),
    }
    of_task = {"task_id": "t"}

    def ask(job_id: str) -> dict[str, Any]:
        return {"agent": "writer", "job_id": job_id, "prompt": "x", **of_task}

    async with start_worker(models, agents, more_models=priced(e=8)) as plane:
        for number in range(20):
            assert (await run(plane, job(f"e{number}") | of_task))["status"] == "succeeded"
        assert (await run(plane, ask("w1")))["status"] == "succeeded", "the first of two iterations"
        task = await plane.worker.guards.tasks.load(TaskKey(None, "t"))
        assert (task[0].iterations, task[0].tokens, task[0].cost) == (1, 160, 20 * 100_000 + COST_NANO)
        refused = await run(plane, job("d1", agent="dear") | of_task)
        assert (refused["reason"], refused["error"]["class"]) == ("guard_tripped", "GuardTrippedError")
        await plane.worker.guards.tasks.reset(TaskKey(None, "t"))
        failed = [await run(plane, one) for one in (job("f1") | of_task, ask("w2"), job("f2") | of_task)]
        assert [result["reason"] for result in failed] == ["error"] * 3
        assert failed[-1]["statistics"]["consecutive_failures"] == 3


async def test_a_batch_calls_for_the_unknown_inputs_alone(start_worker: StartWorker) -> None:
    agents = {"index": {**AGENT, "cache": {"ttl_s": 600}}}
    async with start_worker({"sim/e": embeds()}, agents, more_models=priced(e=8)) as plane:
        first = await run(plane, job("j1", ["a", "b", "c"], encoding_format="base64"))
        mixed = await run(plane, job("j2", ["x", "b", "y", "a"], encoding_format="base64"))
        known = await run(plane, job("j3", ["y", "c"], encoding_format="base64"))
        single = await run(plane, job("j4", "a", encoding_format="base64"))
        others = [
            await run(plane, job("j5", ["a"])),
            await run(plane, job("j6", ["a"], encoding_format="base64", dimensions=4)),
            await run(plane, job("j7", ["a"], encoding_format="base64") | {"tenant": "acme"}),
            await run(plane, job("j8", ["a"], encoding_format="base64") | {"skip_cache": True}),
        ]
        whole = await run(plane, job("j9", ["x", "b", "y", "a"], encoding_format="base64") | {"skip_cache": True})
        asked = plane.sim.ledger.totals.calls
        record = await record_of(plane, "j2")

    def vectors(result: dict[str, Any]) -> list[tuple[int, str]]:
        return [(item["index"], item["embedding"]) for item in result["response"]["data"]]

    assert vectors(mixed) == vectors(whole)
    assert mixed["output"] == {"embeddings": 4, "dimensions": 8}
    assert [text for _, text in vectors(known)] == [vectors(mixed)[2][1], vectors(first)[2][1]]
    assert vectors(single) == vectors(first)[:1]
    assert [one["cache_hit"] for one in (first, mixed, known, single)] == [False, False, True, True]
    assert (known["attempts"], known["total_cost"], known["response"]["model"]) == ([], "0.000000000", "sim/e")
    assert [one["cache_hit"] for one in others] == [False] * 4
    assert asked == 7
    assert mixed["attempts"][0]["reserved"] < whole["attempts"][0]["reserved"]
    assert record["input"] == ["x", "b", "y", "a"]


async def test_the_vectors_of_a_fallback_are_not_kept(start_worker: StartWorker) -> None:
    agents = {"index": {**AGENT, "fallback_models": ["sim/f"], "cache": {"ttl_s": 600}, "retry": {"max_attempts": 1}}}
    models = {"sim/e": embeds(8, {"requests": [1, 1], "status": 500}), "sim/f": embeds(8)}
    async with start_worker(models, agents, more_models=priced(e=8, f=8)) as plane:
        found = [await run(plane, job(f"j{number}")) for number in range(3)]
    assert [(one["chosen_model"], one["cache_hit"]) for one in found] == [
        ("sim/f", False), ("sim/e", False), ("sim/e", True)
    ]  # fmt: skip
