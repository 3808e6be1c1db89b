"""Providers of embeddings that take fewer inputs in a call than a job has, and those that know floats alone."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from aiohttp import web

from breakwater.calls.rules.retry import failures_on
from breakwater.config import Config
from breakwater.config.job_validation import validate_job
from breakwater.dialects.rules.embeddings import answer_of, form_refused, usage_of_all
from breakwater.jobs.contract.job import Job, NativeRequest
from breakwater.jobs.rules.record import totals
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.services.worker import attempts as attempts_module
from breakwater.services.worker.embeddings_batches import EmbeddingsBatches
from tests.calls.providers.kit import answering
from tests.flow.kit import config_for, model
from tests.helpers import until
from tests.records.samples import attempt
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane
from tests.services.worker.test_outcomes import fill

PRICE = {"input_usd_per_mtok": 2, "output_usd_per_mtok": 0}
RETRY = {"max_attempts": 2, "backoff": "constant", "base_s": 0.01}
AGENT = {"model": "own/e", "retry": RETRY, "breaker": "off"}
INPUTS = [f"text {number}" for number in range(25)]
REFUSALS: list[dict[str, Any]] = [
    {"error": {"message": "'encoding_format' must be float", "param": "encoding_format", "code": "invalid_value"}},
    {"error": {"message": "Unsupported encoding_format: base64", "type": "invalid_request_error"}},
    {"error": {"message": "<400> InternalError.Algo.InvalidParameter: The encoding_format is not supported"}},
    {"error": {"message": "base64 embeddings are not available for this model"}},
    {"detail": [{"type": "extra_forbidden", "loc": ["body", "encoding_format"], "msg": "Extra inputs not permitted"}]},
]


def vector(text: str) -> list[float]:
    return [float(len(text)), float(sum(text.encode())) / 4, -0.5]


def packed(text: str) -> str:
    return base64.b64encode(struct.pack("<3f", *vector(text))).decode()


@dataclass
class Server:
    """Embeds at most `most` inputs at a time, and knows floats alone where there is a `refusal` of base64."""

    most: int = 10
    refusal: dict[str, Any] | None = None
    fails: Callable[[int], int | None] = lambda _: None
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reports: bool = True
    tokens_each: int = 2

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(body)
        inputs = [body["input"]] if isinstance(body["input"], str) else body["input"]
        if (status := self.fails(len(self.calls))) is not None:
            return web.json_response({"error": {"message": "no"}}, status=status)
        if self.refusal is not None and body.get("encoding_format") is not None:
            return web.json_response(self.refusal, status=400)
        if len(inputs) > self.most:
            message = f"batch size is invalid, it should not be larger than {self.most}"
            return web.json_response({"error": {"message": message}}, status=400)
        as_text = body.get("encoding_format") == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": packed(text) if as_text else vector(text)}
            for index, text in enumerate(inputs)
        ]
        tokens = self.tokens_each * len(inputs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "model": "e-1", "data": data[::-1]}
        return web.json_response(answer | ({"usage": usage} if self.reports else {}))

    @property
    def sizes(self) -> list[int]:
        return [len(call["input"]) for call in self.calls]


@asynccontextmanager
async def embedding(
    start_worker: StartWorker, server: Server, agents: dict[str, Any] | None = None, **more: Any
) -> AsyncGenerator[WorkerPlane]:
    async with answering(server.answer) as origin:
        providers = {"own": {"base_url": f"{origin}/v1"}}
        models = {"own/e": {"price": PRICE, "dimensions": 3, "max_inputs": 10}}
        models |= {"own/f": {"price": PRICE, "dimensions": 3, "max_inputs": 7}}
        settings: dict[str, Any] = {"more_providers": providers, "more_models": models, **more}
        async with start_worker({"sim/m": model()}, agents or {"index": AGENT}, **settings) as plane:
            yield plane


def job(job_id: str, given: Any = INPUTS, *, agent: str = "index", **body: Any) -> dict[str, Any]:
    return {"agent": agent, "job_id": job_id, "api_request": {"api": "embeddings", "body": {"input": given, **body}}}


def check(result: dict[str, Any], inputs: list[str] = INPUTS) -> None:
    """All vectors are there, in order."""
    assert result["status"] == "succeeded", result["error"]
    data = answer_of(result["response"], None)["data"]
    assert [(item["index"], item["embedding"]) for item in data] == [
        (index, vector(text)) for index, text in enumerate(inputs)
    ]
    assert result["output"] == {"embeddings": len(inputs), "dimensions": 3}


async def test_floats_are_asked_for_and_translated_where_a_provider_refuses_base64(
    start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    for number, refusal in enumerate(REFUSALS):
        with subtests.test(number=number):
            server = Server(refusal=refusal)
            async with embedding(start_worker, server) as plane:
                first = await plane.run(job("j1", INPUTS[:2], encoding_format="base64"))
                second = await plane.run(job("j2", INPUTS[:2], encoding_format="base64"))
            assert [one["embedding"] for one in first["response"]["data"]] == [packed(text) for text in INPUTS[:2]]
            assert second["response"]["data"] == first["response"]["data"]
            assert [one["cause"] for one in first["attempts"]] == ["first", "parameter"]
            assert [one["cause"] for one in second["attempts"]] == ["first"], "the worker has learned it"
            assert [call.get("encoding_format") for call in server.calls] == ["base64", None, None]
            assert first["total_cost"] == second["total_cost"] == "0.000008000"


def test_only_a_refusal_of_the_form_is_one(subtests: pytest.Subtests) -> None:
    asked = {"encoding_format": "base64"}
    for body, status, param, text, is_refused in [
        (asked, 400, "encoding_format", "no", True),
        (asked, 422, None, "Invalid value for encoding-format", True),
        (asked, 400, None, "Base64 is not supported", True),
        (asked, 400, "input", "input is too long", False),
        (asked, 500, "encoding_format", "no", False),
        (asked, 429, None, "base64", False),
        ({}, 400, "encoding_format", "no", False),
    ]:
        with subtests.test(text, status=status):
            assert form_refused(body, status, param, text) is is_refused


async def test_a_batch_is_split_and_joined_in_order(start_worker: StartWorker) -> None:
    server = Server()
    async with embedding(start_worker, server) as plane:
        whole = await plane.run(job("j1"))
        as_text = await plane.run(job("j2", encoding_format="base64"))
        small = await plane.run(job("j3", INPUTS[:10]))
    check(whole)
    check(as_text)
    check(small, INPUTS[:10])
    assert server.sizes == [10, 10, 5, 10, 10, 5, 10]
    assert [one["cause"] for one in whole["attempts"]] == ["first", "batch", "batch"]
    assert [one["input_tokens"] for one in whole["attempts"]] == [20, 20, 10]
    assert [one["embedding"] for one in as_text["response"]["data"]] == [packed(text) for text in INPUTS]
    assert whole["response"]["usage"] == {"prompt_tokens": 50, "total_tokens": 50}
    assert (whole["input_tokens"], whole["total_cost"], whole["wasted_cost"]) == (50, "0.000100000", "0.000000000")
    reserved = [one["reserved"] for one in whole["attempts"]]
    assert reserved[0] > reserved[2]
    assert reserved[1] > reserved[2]


async def test_each_call_has_tries_of_its_own_and_the_next_model_goes_on(start_worker: StartWorker) -> None:
    once = Server(fails=lambda number: 500 if number in {2, 4} else None)
    async with embedding(start_worker, once) as plane:
        result = await plane.run(job("j1"))
    check(result)
    causes = ["first", "batch", "retry", "batch", "retry"]
    assert [one["cause"] for one in result["attempts"]] == causes
    assert (result["total_cost"], result["wasted_cost"]) == ("0.000100000", "0.000000000")

    down = Server(fails=lambda number: 500 if number in {2, 3} else None)
    agents = {"index": {**AGENT, "fallback_models": ["own/f"]}}
    async with embedding(start_worker, down, agents) as plane:
        result = await plane.run(job("j1"))
    check(result)
    assert down.sizes == [7, 7, 7, 7, 7, 4], "as many as each model of the chain takes"
    assert [one["model"] for one in result["attempts"]] == ["own/e"] * 3 + ["own/f"] * 3
    assert [one["cause"] for one in result["attempts"]] == ["first", "batch", "retry", "fallback", "batch", "batch"]


async def test_a_job_whose_later_call_fails_has_wasted_what_it_has_spent(start_worker: StartWorker) -> None:
    server = Server(fails=lambda number: 400 if number == 3 else None)
    async with embedding(start_worker, server) as plane:
        result = await plane.run(job("j1"))
    assert (result["status"], result["error"]["class"]) == ("dead_lettered", "BadRequestError")
    assert (result["total_cost"], result["wasted_cost"]) == ("0.000080000", "0.000080000")
    assert result["wasted_by_cause"] == {"failed": "0.000080000"}


async def test_a_budget_stops_a_job_between_two_calls(start_worker: StartWorker) -> None:
    server = Server(tokens_each=200)
    agents = {"index": {**AGENT, "budget": {"daily_usd": "0.003", "enforcement": "hard"}}}
    async with embedding(start_worker, server, agents) as plane:
        await fill(plane)
        result = await plane.run(job("j1"))
    assert result["reason"] == "budget_exceeded"
    # The cost of a call reaches Redis with the next question, or just before it.
    assert len(server.calls) in (1, 2)
    made = [("first", "0.004000000", False), ("batch", "0.004000000", False)][: len(server.calls)]
    assert [(one["cause"], one["cost"], one["short_circuited"]) for one in result["attempts"]] == [
        *made,
        ("batch", "0.000000000", True),
    ]


async def test_the_cache_has_an_entry_for_each_input_of_each_call(start_worker: StartWorker) -> None:
    server = Server()
    agents = {"index": {**AGENT, "cache": {"ttl_s": 600}}}
    async with embedding(start_worker, server, agents) as plane:
        await plane.run(job("j1", INPUTS[:12]))
        more = await plane.run(job("j2"))
        known = await plane.run(job("j3", INPUTS[::-1]))
    check(more)
    check(known, INPUTS[::-1])
    assert (server.sizes, known["cache_hit"]) == ([10, 2, 10, 3], True)


async def test_a_usage_that_one_call_lacks_is_not_added_up(start_worker: StartWorker) -> None:
    async with embedding(start_worker, Server(reports=False)) as plane:
        result = await plane.run(job("j1"))
    check(result)
    assert "usage" not in result["response"]
    assert result["cost_basis"] == "estimated"
    assert usage_of_all([{"prompt_tokens": 1, "total_tokens": 1}, None]) is None
    most = {"prompt_tokens": 2**64 - 1, "total_tokens": 2**64 - 1}
    assert usage_of_all([most, most]) == {"prompt_tokens": 2 * 10**18, "total_tokens": 2 * 10**18}


async def test_a_crash_repeats_no_call_whose_answer_was_kept(start_worker: StartWorker) -> None:
    """Workers die at their second call: before it, before its record, before its answer is kept, and after that."""
    server, reached = Server(), Counter[tuple[str, str]]()
    agents = {"index": {**AGENT, "concurrency": 4}}

    def dies(step: str, job_id: str) -> bool:
        reached[step, job_id] += 1
        return step == job_id and reached[step, job_id] == 2

    call, record, keep = attempts_module.call, attempts_module.record, EmbeddingsBatches._keep

    async def calling(worker: Any, asked: Any, *more: Any) -> Any:
        if dies("before-call", asked.execution_id):
            raise ClaimLostError(asked.execution_id)
        return await call(worker, asked, *more)

    async def recording(worker: Any, asked: Any, made: Any) -> Any:
        if dies("before-record", asked.execution_id):
            raise ClaimLostError(asked.execution_id)
        return await record(worker, asked, made)

    async def keeping(batches: Any, *more: Any) -> None:
        job_id = batches._job.execution_id
        if dies("before-kept", job_id):
            raise ClaimLostError(job_id)
        await keep(batches, *more)
        if dies("kept", job_id):
            raise ClaimLostError(job_id)

    names = ("before-call", "before-record", "before-kept", "kept")
    async with embedding(start_worker, server, agents) as plane:
        with (
            patch("breakwater.services.worker.attempts.call", calling),
            patch("breakwater.services.worker.attempts.record", recording),
            patch("breakwater.services.worker.embeddings_batches.EmbeddingsBatches._keep", keeping),
        ):
            for name in names:
                await plane.publish(job(name, [f"{name} {text}" for text in INPUTS]))
            async with asyncio.timeout(60):
                while any(reached[name, name] < 2 for name in names):
                    await asyncio.sleep(0.05)
            await plane.end()
        plane.begin()
        results = {name: await plane.result(name) for name in names}
    asked = Counter(text for body in server.calls for text in body["input"])
    for name, result in results.items():
        check(result, [f"{name} {text}" for text in INPUTS])
        times = [asked[f"{name} {text}"] for text in INPUTS]
        again = name in {"before-record", "before-kept"}
        assert times == [1] * 10 + [1 + again] * 10 + [1] * 5, name
        assert result["response"]["usage"] == {"prompt_tokens": 50, "total_tokens": 50}
    outcomes = {name: [one["outcome"] for one in result["attempts"]] for name, result in results.items()}
    lost = ["success", "worker_lost", "success", "success"]
    assert outcomes == {
        "before-call": lost,
        "before-record": lost,
        "before-kept": ["success"] * 4,
        "kept": ["success"] * 3,
    }
    assert results["kept"]["wasted_cost"] == "0.000000000"
    assert results["before-kept"]["wasted_by_cause"] == {"worker_lost": "0.000040000"}


async def test_equal_inputs_hide_no_call_that_was_lost(start_worker: StartWorker) -> None:
    server, record, ended = Server(), attempts_module.record, list[Any]()

    async def recording(worker: Any, asked: Any, made: Any) -> Any:
        ended.append(made)
        if len(ended) == 2:
            raise ClaimLostError(asked.execution_id)
        return await record(worker, asked, made)

    async with embedding(start_worker, server) as plane:
        with patch("breakwater.services.worker.attempts.record", recording):
            await plane.publish(job("j1", ["the same"] * 25))
            await until(lambda: len(ended) == 2, "the second call")
            await plane.end()
        plane.begin()
        result = await plane.result("j1")
    check(result, ["the same"] * 25)
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["success", "worker_lost", "success", "success"]
    assert len(server.calls) == 4


class Growing(Server):
    """Its vectors are longer in each call."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.calls.append(body := await request.json())
        numbers = [1.0] * len(self.calls)
        data = [{"index": index, "embedding": numbers} for index in range(len(body["input"]))]
        return web.json_response({"object": "list", "data": data})


async def test_vectors_of_different_lengths_are_broken_and_not_too_large(start_worker: StartWorker) -> None:
    server = Growing()
    async with embedding(start_worker, server, more_models={"own/e": {"price": PRICE, "max_inputs": 10}}) as plane:
        result = await plane.run(job("j1"))
    assert (result["status"], result["error"]["kind"]) == ("dead_lettered", "server")
    assert result["error"]["class"] == "BrokenAnswerError"
    assert "different lengths: 1 to 2" in result["error"]["message"]
    assert len(server.calls) == 2


def _config() -> Config:
    models = {"sim/e": {"price": PRICE, "max_inputs": 2}, "sim/f": {"price": PRICE}}
    return Config.model_validate(config_for("http://127.0.0.1:1/v1", {"index": {"model": "sim/e"}}, more_models=models))


def test_a_job_needs_at_most_a_hundred_calls() -> None:
    config = _config()
    agent = config.agents["index"]
    assert config.max_inputs(agent, ["sim/f"]) is None
    assert config.max_inputs(agent, ["sim/f", "sim/e"]) == 2
    for count, words in ((200, None), (201, "has 201 inputs; at most 200 can be embedded, 2 in each call")):
        request = NativeRequest(api="embeddings", body={"input": ["x"] * count})
        problem = validate_job(config, config.limit_table, Job(agent="index", api_request=request))
        assert (problem is None) if words is None else (problem is not None and words in problem.message)


def test_attempts_of_earlier_batches_are_neither_failures_nor_waste() -> None:
    made = [
        attempt("e1", number=1, outcome="success", cost=3),
        attempt("e1", number=2, outcome="error", cause="batch", cost=2),
        attempt("e1", number=3, outcome="success", cause="retry", cost=5),
        attempt("e1", number=4, outcome="success", cause="batch", cost=7),
    ]
    assert failures_on(made[0].model, made[:3]) == {"server": 1, "worker_lost": 1}
    assert failures_on(made[0].model, made) == {"worker_lost": 1}
    answered, failed = totals(made, answered=True), totals(made, answered=False)
    assert (answered.total_cost, answered.wasted_cost, answered.wasted_by_cause) == (17, 2, {"retry": 2})
    assert (failed.wasted_cost, failed.wasted_by_cause) == (17, {"failed": 8, "retry": 2, "worker_lost": 7})
