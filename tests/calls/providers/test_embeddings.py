"""Embeddings on the wire: what is sent, what comes back, and answers that are none."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import pytest
from aiohttp import web

from breakwater.calls.providers.base import Call
from breakwater.calls.rules.classify import BrokenAnswer, HttpFailure
from breakwater.dialects.rules.embeddings import MAX_VECTOR_BYTES, answer_of
from breakwater.local.provider import SimulatedProvider
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import KEY, answering, call, failure, perform, saying, settings
from tests.flow.kit import model
from tests.tables import each_row


def embedding(given: Any = "a", **body: Any) -> Call:
    return call(messages=[], params={}, api="embeddings", native={"input": given, **body})


def answer(*vectors: Any, **more: Any) -> dict[str, Any]:
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 5, "total_tokens": 5}, **more}


@pytest.mark.parametrize(
    ("kind", "path"),
    [("openai", "/v1/embeddings"), ("azure", "/openai/deployments/m/embeddings?api-version=2024-10-21")],
)
async def test_the_body_goes_out_as_it_is_with_the_model(kind: str, path: str) -> None:
    seen: list[tuple[str, Any]] = []

    async def note(request: web.BaseRequest) -> web.StreamResponse:
        seen.append((request.raw_path, json.loads(await request.read())))
        return web.json_response(answer([0.5]))

    body = {"input": [[1, 2]], "dimensions": 1, "encoding_format": "float", "user": "u", "made_up": {"a": None}}
    async with answering(note) as origin:
        answered = await perform(settings(kind, origin), call(messages=[], params={}, api="embeddings", native=body))
    assert seen == [(path, {**body, "model": "m"})]
    assert (answered.output, answered.usage) == ({"embeddings": 1, "dimensions": 1}, Usage(5, 0))


async def test_the_simulated_provider_embeds_in_both_forms() -> None:
    async with SimulatedProvider({"api_keys": [KEY], "models": {"m": model()}}) as sim:
        at = settings("openai", sim.url.removesuffix("/v1"))
        floats = await perform(at, embedding(["one", "two"], dimensions=8))
        texts = await perform(at, embedding(["one", "two"], dimensions=8, encoding_format="base64"))
    assert floats.output == texts.output == {"embeddings": 2, "dimensions": 8}
    assert floats.response is not None
    assert texts.response is not None
    numbers = [item["embedding"] for item in answer_of(floats.response, None)["data"]]
    assert [len(vector) for vector in numbers] == [8, 8]
    encoded = [base64.b64encode(array("f", vector)).decode() for vector in numbers]
    assert [item["embedding"] for item in answer_of(texts.response, "base64")["data"]] == encoded


async def test_usage_that_is_missing_leaves_the_input_unknown_and_no_output() -> None:
    async with saying(answer([0.5], usage=None)) as origin:
        assert (await perform(settings("openai", origin), embedding())).usage == Usage(None, 0)


@each_row(
    "body",
    [
        {"object": "list", "data": []}, {}, {"choices": [{"message": {"content": "hi"}}]}, answer([0.5], [0.5]),
        answer([None]), answer([]), b"", b"not json", b"[]", b'{"data": [{"embedding": [NaN]}]}',
        b'data: {"choices": []}\n\ndata: [DONE]\n\n', {"data": [{"embedding": [0.5], "index": 3}]},
        answer([0.5], deep=json.loads("[" * 120 + "]" * 120)),
    ],
)  # fmt: skip
async def test_an_answer_without_a_vector_for_each_input_is_broken_and_may_be_billed(body: Any) -> None:
    async with saying(body) as origin:
        failed = await failure(settings("openai", origin), embedding())
    assert isinstance(failed.failure, BrokenAnswer)
    assert failed.maybe_billed


async def test_an_error_is_what_it_is_on_any_door() -> None:
    error = {"error": {"message": f"no {KEY}", "type": "invalid_request_error", "param": "dimensions", "code": "x"}}
    async with saying(error, 400) as origin:
        failed = await failure(settings("openai", origin), embedding())
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.failure.param) == (400, "dimensions")
    async with saying(error) as origin:
        in_answer = await failure(settings("openai", origin), embedding())
    assert not in_answer.maybe_billed


async def test_a_long_answer_is_read_and_one_that_can_not_be_stored_is_refused() -> None:
    vectors = [[1 / (index + 3)] * 3072 for index in range(100)]
    async with saying(answer(*vectors)) as origin:
        answered = await perform(settings("openai", origin), embedding(["x"] * 100))
    assert answered.response is not None
    assert answer_of(answered.response, None) == answer(*vectors)
    assert len(json.dumps(answer(*vectors))) > 4 * 2**20 > len(json.dumps(answered.response))
    long = base64.b64encode(bytes(MAX_VECTOR_BYTES)).decode()
    async with saying(answer(long)) as origin:
        failed = await failure(settings("openai", origin), embedding(encoding_format="base64"))
    assert "send fewer inputs" in str(failed.failure)


async def test_a_key_that_is_repeated_in_an_answer_is_hidden() -> None:
    async with saying(answer([0.5], model=f"m of {KEY}")) as origin:
        answered = await perform(settings("openai", origin), embedding())
    assert answered.response is not None
    assert answered.response["model"] == "m of [REDACTED]"
