"""OpenAI's embeddings through the HTTP API: the unmodified `openai` package, a worker, and providers of all kinds."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
import pytest_asyncio
from aiohttp import web

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from tests.calls.providers.kit import answering
from tests.flow.kit import model
from tests.openai_client import openai_client
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.worker.harness import WorkerPlane, running_worker
from tests.tables import each_row

NO_WAIT = {"max_attempts": 1}
AGENTS = {
    "index": {"model": "sim/e"},
    "two": {"model": "sim/down", "fallback_models": ["sim/e"], "retry": NO_WAIT, "breaker": "off"},
    "unlike": {"model": "sim/e", "fallback_models": ["sim/longer"]},
    "undeclared": {"model": "sim/e", "fallback_models": ["sim/unknown"]},
    "claude": {"model": "anthropic/claude"},
    "chat": {
        "model": "anthropic/claude",
        "fallback_models": ["sim/longer", "sim/e"],
        "allowed_models": ["sim/down"],
        "retry": NO_WAIT,
        "breaker": "off",
    },
    "capped": {"model": "sim/e", "max_cost_usd": "0.0000001"},
    "own": {"model": "own/m", "retry": NO_WAIT, "breaker": "off"},
}
PRICE = {"input_usd_per_mtok": 2, "output_usd_per_mtok": 0}
SIZES = {"sim/e": 8, "sim/down": 8, "sim/longer": 16}


@dataclass(frozen=True, slots=True)
class EmbeddingsPlane:
    api: HttpApi
    worker: WorkerPlane
    asked: list[Any]
    """Bodies that the provider of one's own was sent."""
    answers: list[Any]
    """What it answers."""
    key: str = field(default="")

    @property
    def sdk(self) -> Any:
        return openai_client(f"{self.api.url}/v1", self.key, max_retries=0)

    async def post(self, body: Any, **headers: str) -> tuple[int, Any, Any]:
        answer = await self.api.ask("POST", "/v1/embeddings", json=body, headers=headers)
        return answer.status, answer.json, answer.headers


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[EmbeddingsPlane]:
    directory = tmp_path_factory.mktemp("embeddings")
    asked, answers = list[Any](), list[Any]()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(json.loads(await request.read()))
        said = answers.pop(0)
        body = said if isinstance(said, bytes) else json.dumps(said).encode()
        return web.Response(body=body, content_type="application/json")

    models = {name: model(dimensions=size) for name, size in SIZES.items()}
    models["sim/down"]["faults"] = [{"status": 500}]
    async with (
        answering(answer) as origin,
        running_worker(
            directory,
            nats_url=module_nats_server.url,
            redis_url=redis_server.url,
            script={"models": {**models, "claude": model()}},
            agents=AGENTS,
            more_providers={
                "anthropic": {"kind": "anthropic", "base_url": "http://127.0.0.1:{sim_port}/v1"},
                "own": {"base_url": f"{origin}/v1"},
            },
            more_models={name: {"price": PRICE, "dimensions": size} for name, size in SIZES.items()},
        ) as worker,
    ):
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield EmbeddingsPlane(api, worker, asked, answers, create_key(settings.api_keys_file, "app", ("submit",)))


async def test_openais_client_reads_its_vectors(plane: EmbeddingsPlane) -> None:
    raw = await plane.sdk.embeddings.with_raw_response.create(model="index", input=["one", "two"])
    answer = raw.parse()
    assert [(item.index, len(item.embedding)) for item in answer.data] == [(0, 8), (1, 8)]
    assert (answer.model, answer.usage.prompt_tokens) == ("sim/e", answer.usage.total_tokens)
    assert raw.headers["x-breakwater-model"] == "sim/e"
    assert (raw.headers["x-breakwater-attempts"], raw.headers["x-breakwater-cache"]) == ("1", "miss")
    # The client asks for base64 by itself, and the same numbers come as floats.
    floats = await plane.sdk.embeddings.create(model="index", input=["one", "two"], encoding_format="float")
    assert [list(map(float, array("f", item.embedding))) for item in floats.data] == [
        pytest.approx(item.embedding) for item in answer.data
    ]
    single = await plane.sdk.embeddings.create(model="index/sim/e", input="one", dimensions=4)
    assert len(single.data[0].embedding) == 4


def own_answer(*vectors: Any) -> dict[str, Any]:
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 8, "total_tokens": 8}, "id": "x-1"}


async def test_an_answer_is_the_providers_own_object(plane: EmbeddingsPlane) -> None:
    vectors = [[math.sin(number), 0.1, -0.0, 1e-310, 2.0] for number in range(100)]
    as_texts = [base64.b64encode(array("f", vector)).decode() for vector in vectors]
    plane.answers[:] = [own_answer(*vectors), own_answer(*as_texts)]
    plane.asked.clear()
    texts = [f"text {number}" for number in range(100)]
    body = {"input": texts, "user": "u", "made_up": [1, {"a": None}]}
    for form, expected in (("float", own_answer(*vectors)), ("base64", own_answer(*as_texts))):
        status, found, _ = await plane.post({**body, "model": "own", "encoding_format": form})
        assert (status, json.dumps(found)) == (200, json.dumps(expected))
    assert plane.asked == [{**body, "model": "m", "encoding_format": form} for form in ("float", "base64")]


async def test_an_answer_in_the_other_form_is_read_all_the_same(plane: EmbeddingsPlane) -> None:
    plane.answers[:] = [own_answer([0.5, 0.25]), own_answer(base64.b64encode(array("f", [0.5, 0.25])).decode())]
    assert (await plane.sdk.embeddings.create(model="own", input="x")).data[0].embedding == [0.5, 0.25]
    _, found, _ = await plane.post({"model": "own", "input": "x"})
    assert found == own_answer([0.5, 0.25])


async def test_numbers_of_any_size_pass(plane: EmbeddingsPlane) -> None:
    plane.answers[:] = [own_answer([0.5]) | {"seen": 10**30}]
    plane.asked.clear()
    status, found, _ = await plane.post({"model": "own", "input": [10**30], "made_up": 10**40})
    assert (status, found) == (200, own_answer([0.5]) | {"seen": 1e30})
    assert plane.asked == [{"model": "m", "input": [10**30], "made_up": 10**40}]


async def test_usage_that_is_null_is_left_out(plane: EmbeddingsPlane) -> None:
    plane.answers[:] = [{**own_answer([0.5]), "usage": None}]
    _, found, _ = await plane.post({"model": "own", "input": "x"})
    assert "usage" not in found


async def test_an_answer_of_many_long_vectors_comes_through(plane: EmbeddingsPlane) -> None:
    vectors = [[math.sin(number * 3072 + place) for place in range(3072)] for number in range(100)]
    plane.answers[:] = [own_answer(*vectors)]
    _, found, _ = await plane.post({"model": "own", "input": ["x"] * 100})
    assert found == own_answer(*vectors)


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "invalid_request"),
    ({"input": []}, "input", "invalid_request"),
    ({"input": [1.5]}, "input", "invalid_request"),
    ({"input": {"text": "x"}}, "input", "invalid_request"),
    ({"dimensions": 0}, "dimensions", "invalid_request"),
    ({"dimensions": "8"}, "dimensions", "invalid_request"),
    ({"encoding_format": "bytes"}, "encoding_format", "invalid_request"),
    ({"stream": True}, "stream", "invalid_request"),
    ({"service_tier": "flex"}, "service_tier", "invalid_request"),
    ({"model": "unlike"}, "model", "invalid_request"),
    ({"model": "undeclared"}, "model", "invalid_request"),
    ({"model": "claude"}, "model", "invalid_request"),
    ({"model": "capped", "made_up": 1}, "made_up", "invalid_request"),
    ({"input": ["x"] * 700, "dimensions": 3072}, "input", "invalid_request"),
    ({"dimensions": 10**30}, "input", "invalid_request"),
    ({"stream_options": {}}, "stream_options", "invalid_request"),
    ({"user": 7}, "user", "invalid_request"),
]


@each_row(("wrong", "param", "code"), INVALID)
async def test_a_request_that_can_not_be_made_is_refused_with_its_field(
    plane: EmbeddingsPlane, wrong: dict[str, Any], param: str, code: str
) -> None:
    status, found, _ = await plane.post({"model": "index", "input": "x", **wrong})
    assert (status, found["error"]["param"], found["error"]["code"]) == (400, param, code), found
    assert "api_request" not in found["error"]["message"]


async def test_a_missing_field_and_an_unknown_model_are_refused(plane: EmbeddingsPlane) -> None:
    status, found, _ = await plane.post({"model": "index"})
    assert (status, found["error"]["param"]) == (400, "input")
    with pytest.raises(openai.NotFoundError) as unknown:
        await plane.sdk.embeddings.create(model="none-such", input="x")
    assert unknown.value.code == "model_not_found"


async def test_a_fallback_with_the_same_dimensions_answers(plane: EmbeddingsPlane) -> None:
    raw = await plane.sdk.embeddings.with_raw_response.create(model="two", input="x")
    assert (raw.headers["x-breakwater-model"], raw.headers["x-breakwater-attempts"]) == ("sim/e", "2")
    assert len(raw.parse().data[0].embedding) == 8


async def test_a_model_that_is_named_falls_back_only_to_those_of_its_agent_with_the_same_dimensions(
    plane: EmbeddingsPlane,
) -> None:
    status, answer, headers = await plane.post({"model": "chat/sim/down", "input": "a"})
    assert (status, headers["x-breakwater-model"], answer["model"]) == (200, "sim/e", "sim/e")
    # One that the caller names itself is refused.
    body = {"model": "chat/sim/down", "input": "a", "breakwater": {"fallback_models": ["sim/longer"]}}
    status, answer, _ = await plane.post(body)
    assert (status, answer["error"]["param"]) == (400, "model")


async def test_the_jobs_own_cap_refuses_what_does_not_fit(plane: EmbeddingsPlane) -> None:
    with pytest.raises(openai.RateLimitError) as refused:
        await plane.sdk.embeddings.create(model="capped", input="x" * 1000)
    assert refused.value.code == "insufficient_quota"


async def test_an_input_that_is_too_long_is_named_as_the_request_does(plane: EmbeddingsPlane) -> None:
    text = "This model's maximum context length is 8192 tokens, however you requested 9000 tokens"
    plane.answers[:] = [
        {"error": {"message": text, "type": "invalid_request_error", "code": "context_length_exceeded"}}
    ]
    status, found, _ = await plane.post({"model": "own", "input": "x"})
    assert (status, found["error"]["param"], found["error"]["code"]) == (400, "input", "context_length_exceeded")


async def test_a_broken_answer_is_an_error_and_never_a_vector(plane: EmbeddingsPlane) -> None:
    for broken in (own_answer(), own_answer([None]), own_answer([0.5], [0.5]), {"choices": []}, b"{", b"[]"):
        plane.answers[:] = [broken]
        status, found, _ = await plane.post({"model": "own", "input": "x"})
        assert (status, found["error"]["code"]) == (502, "provider_error"), broken


async def test_a_repeated_request_with_the_same_key_is_answered_from_its_record(plane: EmbeddingsPlane) -> None:
    plane.answers[:] = [own_answer([0.1, 0.2])]
    found = [await plane.post({"model": "own", "input": "once"}, **{"Idempotency-Key": "e-1"}) for _ in range(2)]
    assert [body for _, body, _ in found] == [own_answer([0.1, 0.2])] * 2
    status, refused, _ = await plane.post({"model": "own", "input": "other"}, **{"Idempotency-Key": "e-1"})
    assert (status, refused["error"]["code"]) == (409, "id_conflict")


async def test_a_dry_run_has_a_plan_and_no_vectors(plane: EmbeddingsPlane) -> None:
    before = len(plane.worker.sim.ledger.calls)
    status, found, _ = await plane.post({"model": "two", "input": "x", "breakwater": {"dry_run": True}})
    assert (status, found["data"]) == (200, [])
    plans = found["breakwater"]["models"]
    assert [(one["model"], one["admission"]) for one in plans] == [("sim/down", "admitted"), ("sim/e", "admitted")]
    assert len(plane.worker.sim.ledger.calls) == before


async def test_ten_batches_at_once_come_through(plane: EmbeddingsPlane) -> None:
    async def batch(number: int) -> list[list[float]]:
        texts = [f"text {number} {index}" for index in range(100)]
        answer = await plane.sdk.embeddings.create(model="index", input=texts)
        assert [item.index for item in answer.data] == list(range(100))
        return [item.embedding for item in answer.data]

    vectors = [vector for batch in await asyncio.gather(*map(batch, range(10))) for vector in batch]
    assert len({tuple(vector) for vector in vectors}) == 1000
