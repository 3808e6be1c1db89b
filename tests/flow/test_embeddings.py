"""Embeddings on a whole plane: hard caps, batches at once, and a worker that dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from breakwater.dialects.rules.embeddings import answer_of
from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port
from tests.flow.fixtures import StartPlane
from tests.flow.kit import model
from tests.helpers import until
from tests.openai_client import openai_client

PRICE = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 0}
MODELS = {"more_models": {"sim/e": {"price": PRICE, "dimensions": 64}}}


def embeds(**more: Any) -> dict[str, Any]:
    return model(dimensions=64, usage={"input_tokens": 20, "output_tokens": 0}) | {"price": PRICE, **more}


def job(job_id: str, given: Any) -> dict[str, Any]:
    return {"agent": "index", "job_id": job_id, "api_request": {"api": "embeddings", "body": {"input": given}}}


async def test_a_hard_cap_holds_while_many_jobs_embed_at_once(start_plane: StartPlane) -> None:
    budget = {"daily_usd": "0.0005", "enforcement": "hard"}
    agents = {"index": {"model": "sim/e", "budget": budget, "concurrency": 32}}
    async with start_plane({"sim/e": embeds(latency_ms=20)}, agents, **MODELS) as plane:
        for number in range(60):
            await plane.publish(job(f"j{number}", "x" * 40))
        results = [await plane.result(f"j{number}") for number in range(60)]
        spent = plane.sim.ledger.totals.cost_nano
    succeeded = sum(result["status"] == "succeeded" for result in results)
    assert {result["reason"] for result in results} == {None, "budget_exceeded"}
    assert succeeded * 20_000 == spent <= 500_000
    assert succeeded >= 20, "what fits is not refused"


async def test_a_thousand_inputs_come_back_in_their_order(start_plane: StartPlane, tmp_path: Path) -> None:
    agents = {"index": {"model": "sim/e", "concurrency": 32}}
    port, keys = free_port(), tmp_path / "keys.json"
    key = create_key(keys, "app", ("submit",))
    environment = {"BREAKWATER_HTTP_PORT": str(port), "BREAKWATER_API_KEYS_FILE": str(keys)}
    start = start_plane(
        {"sim/e": embeds(latency_ms=20)},
        agents,
        services=("worker", "request", "breaker", "budget"),
        environment=environment,
        **MODELS,
    )
    async with start as plane:
        await plane.ready("request")
        sdk = openai_client(f"http://127.0.0.1:{port}/v1", key)
        texts = [f"text {number}" for number in range(1000)]

        async def batch(begin: int) -> list[list[float]]:
            answer = await sdk.embeddings.create(model="index", input=texts[begin : begin + 100])
            return [item.embedding for item in answer.data]

        together = [
            vector for one in await asyncio.gather(*(batch(at) for at in range(0, 1000, 100))) for vector in one
        ]
        alone = [
            (await sdk.embeddings.create(model="index", input=texts[at])).data[0].embedding for at in (0, 499, 999)
        ]
    assert [together[at] for at in (0, 499, 999)] == alone
    assert len({tuple(vector) for vector in together}) == 1000


async def test_a_worker_that_dies_in_a_call_leaves_the_job_to_another_one(start_plane: StartPlane) -> None:
    agents = {"index": {"model": "sim/e", "breaker": "off", "cache": {"ttl_s": 60}}}
    hangs = embeds(faults=[{"requests": [1, 1], "hang_s": 600}])
    async with start_plane({"sim/e": hangs}, agents, **MODELS) as plane:
        await plane.publish(job("j", ["a", "b"]))
        await until(lambda: plane.sim.ledger.totals.in_progress, "the call")
        plane.kill("worker")
        plane.start("worker")
        result = await plane.result("j")
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]
    assert len(answer_of(result["response"], None)["data"]) == 2
