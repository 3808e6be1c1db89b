"""A tenant whose prompts make a model fail, beside one that works: the breaker of both is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from aiohttp import web

from tests.flow.fixtures import StartPlane
from tests.flow.kit import PRICE, Plane, model
from tests.helpers import until

ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class Upstream:
    """Answers 500 to what is poison, and to all while `is_down`."""

    url: str
    is_down = False

    async def answer(self, request: web.Request) -> web.Response:
        is_poison = "poison" in await request.text()
        await asyncio.sleep(0.005)
        if "boom" in await request.text() or is_poison or self.is_down:
            return web.json_response({"error": {"message": "internal error"}}, status=500)
        return web.json_response(ANSWER)


@asynccontextmanager
async def upstream() -> AsyncGenerator[Upstream]:
    served, app = Upstream(), web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    app.router.add_post("/v1/embeddings", served.answer)  # with a chat
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield served
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("scope", ["agent_model", "provider"])
async def test_a_tenant_whose_prompts_fail_closes_no_model_to_another_and_an_outage_does(
    start_plane: StartPlane, scope: str
) -> None:
    numbers = count()

    async def run(plane: Plane, tenant: str, prompt: str = "hello") -> dict[str, Any]:
        job_id = f"{tenant}-{next(numbers)}"
        await plane.publish({"agent": "writer", "job_id": job_id, "prompt": prompt, "tenant": tenant})
        return await plane.result(job_id)

    async with upstream() as served:
        agents = {
            "writer": {
                "model": "own/m",
                "retry": {"max_attempts": 3, "base_s": 0.01, "max_delay_s": 0.01},
                "breaker": {"consecutive_failures": 3, "same_error": 3, "errors": 3, "scope": scope},
            }
        }
        own = {"own": {"kind": "openai", "base_url": served.url}}
        plane_of = start_plane(
            {"sim/m": model()}, agents, services=("worker", "breaker"), retry_budget="off",
            more_providers=own, more_models={"own/m": {"price": PRICE}},
        )  # fmt: skip
        async with plane_of as plane:
            breakers = "bw.breakers.*.*"

            async def states() -> list[str]:
                return [event["to_state"] for event in await plane.messages("EVENTS", breakers)]

            await until(lambda: _filled(plane), what="the breakers to be filled")
            # Its failures open the breaker for it alone: the calls of another pass, and its own do not.
            assert (await run(plane, "hostile", "poison"))["reason"] == "error"
            assert (await run(plane, "hostile", "poison"))["reason"] == "breaker_open"
            results = await asyncio.gather(*(run(plane, "good") for _ in range(8)))
            assert {result["status"] for result in results} == {"succeeded"}

            attacking = asyncio.Event()

            async def attack() -> None:
                while not attacking.is_set():
                    assert (await run(plane, "hostile", "poison"))["reason"] == "breaker_open"

            attacks = [asyncio.create_task(attack()) for _ in range(2)]
            for _ in range(12):
                result = await run(plane, "good")
                assert (result["status"], len(result["attempts"])) == ("succeeded", 1)
            attacking.set()
            await asyncio.gather(*attacks)
            [only] = await plane.messages("EVENTS", breakers)
            assert (only["to_state"], only["reason"].endswith("(threshold: 3)")) == ("open", True)

            served.is_down = True
            failed = await asyncio.gather(*(run(plane, tenant) for tenant in ("good", "hostile") * 3))
            assert {result["status"] for result in failed} == {"dead_lettered"}
            assert (await run(plane, "good"))["reason"] == (await run(plane, "third"))["reason"] == "breaker_open"
            await until(lambda: _published(plane, breakers, 2), what="the opening")
            [*_, opened] = await plane.messages("EVENTS", breakers)
            assert opened["to_state"] == "open"
            assert "of 2 callers" in opened["reason"]


async def test_one_bad_job_leaves_its_models_to_others_and_three_that_end_in_failure_open_them(
    start_plane: StartPlane,
) -> None:
    """All of one key, with and without a fallback, and by a request of another API."""
    retry = {"max_attempts": 3, "base_s": 0.01, "max_delay_s": 0.01}
    agents = {
        "batch": {"model": "own/m", "retry": retry},
        "chain": {"model": "own/m", "fallback_models": ["own/n"], "retry": retry},
    }
    numbers = count()

    async def run(plane: Plane, agent: str, **sent: Any) -> dict[str, Any]:
        job_id = f"j{next(numbers)}"
        await plane.publish({"agent": agent, "job_id": job_id, **sent})
        return await plane.result(job_id)

    async with upstream() as served:
        own = {"own": {"kind": "openai", "base_url": served.url}}
        prices = {f"own/{name}": {"price": PRICE} for name in "mn"}
        plane_of = start_plane(
            {"sim/m": model()}, agents, services=("worker", "breaker"), retry_budget="off",
            more_providers=own, more_models=prices,
        )  # fmt: skip
        async with plane_of as plane:
            await until(lambda: _filled(plane), what="the breakers to be filled")
            embeddings = {"api": "embeddings", "body": {"input": "hello"}}
            for _ in range(3):
                result = await run(plane, "batch", api_request=embeddings)
                [attempt] = result["attempts"]
                assert (attempt["error"]["class"], attempt["counts_for_breaker"]) == ("WrongAnswerKindError", False)
            for agent, models in (("batch", ["own/m"]), ("chain", ["own/m", "own/n"])):
                for _ in range(2):
                    result = await run(plane, agent, prompt="boom")
                    assert [one["model"] for one in result["attempts"]] == [name for name in models for _ in range(3)]
                    assert [one["tried_again"] for one in result["attempts"]] == [True, True, False] * len(models)
                result = await run(plane, agent, prompt="hello")
                assert (result["status"], result["chosen_model"], len(result["attempts"])) == ("succeeded", "own/m", 1)
            assert await plane.messages("EVENTS", "bw.breakers.*.*") == []
            for agent in agents:
                for _ in range(3):
                    assert (await run(plane, agent, prompt="boom"))["status"] == "dead_lettered"
                assert (await run(plane, agent, prompt="hello"))["reason"] == "breaker_open"
            opened = await plane.messages("EVENTS", "bw.breakers.*.*", at_least=3)
            assert {(event["agent"], event["model"]) for event in opened} == {
                ("batch", "own/m"), ("chain", "own/m"), ("chain", "own/n")
            }  # fmt: skip
            assert {event["reason"] for event in opened} == {"3 jobs in a row failed (threshold: 3)"}


async def _filled(plane: Plane) -> bool:
    return '"breakers_filled"' in plane.log("breaker")


async def _published(plane: Plane, subject: str, number: int) -> bool:
    return len(await plane.messages("EVENTS", subject)) >= number
