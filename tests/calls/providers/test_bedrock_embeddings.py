"""Embeddings of Bedrock: OpenAI's requests as those of Titan and of Cohere's models, which the double checks."""

from __future__ import annotations

from typing import Any

import pytest

from breakwater.calls.providers.base import Answer, Call, CallError
from breakwater.calls.providers.registry import BedrockSettings
from breakwater.calls.rules.classify import BrokenAnswer, HttpFailure, NotSent
from breakwater.dialects.rules.embeddings import answer_of
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.prices.rules.usage import Usage
from tests.calls.providers.kit import call
from tests.tables import each_row

pytest.importorskip("botocore", reason="`make install` brings it")

from tests.bedrock import BEARER, COHERE_V3, COHERE_V4, REGION, TITAN_V1, TITAN_V2, RefusedError, bedrock, embedded

NOVA = "eu.amazon.nova-pro-v1:0"
ARN = f"arn:aws:bedrock:{REGION}::foundation-model/{TITAN_V2}"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDROCK_KEY", BEARER)


def settings(origin: str) -> BedrockSettings:
    key = SecretRef(env="BEDROCK_KEY")
    return BedrockSettings.model_validate({"kind": "bedrock", "region": REGION, "base_url": origin, "api_key": key})


def asking(model: str, **body: Any) -> Call:
    return call(model=model, messages=[], params={}, api="embeddings", native={"model": "ours", **body})


async def perform(origin: str, asked: Call) -> Answer:
    provider = settings(origin).open()
    try:
        return await provider.perform(asked)
    finally:
        await provider.close()


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.response is not None
    return [item["embedding"] for item in answer_of(answer.response, None)["data"]]


@each_row(
    ("model", "body", "sent", "usage"),
    [
        (TITAN_V1, {"input": "four"}, {"inputText": "four"}, Usage(4, 0)),
        (TITAN_V2, {"input": ["four"]}, {"inputText": "four"}, Usage(4, 0)),
        (
            TITAN_V2,
            {"input": "four", "dimensions": 256, "normalize": False, "encoding_format": "base64", "user": "ada"},
            {"inputText": "four", "dimensions": 256, "normalize": False},
            Usage(4, 0),
        ),
        (
            COHERE_V3,
            {"input": ["four", "sixsix"], "encoding_format": "float"},
            {"texts": ["four", "sixsix"], "input_type": "search_document", "embedding_types": ["float"]},
            Usage(10, 0),
        ),
        (
            COHERE_V4,
            {"input": "four", "dimensions": 512, "input_type": "search_query", "truncate": "END"},
            {
                "texts": ["four"],
                "input_type": "search_query",
                "truncate": "END",
                "output_dimension": 512,
                "embedding_types": ["float"],
            },
            Usage(4, 0),
        ),
    ],
)
async def test_a_request_of_openais_is_one_of_the_model(
    model: str, body: dict[str, Any], sent: dict[str, Any], usage: Usage
) -> None:
    async with bedrock(embedded) as double:
        answer = await perform(double.origin, asking(model, **body))
    [request] = double.requests
    assert (request.operation, request.model, request.body) == ("InvokeModel", model, sent)
    assert double.refused == []
    assert [vector[0] for vector in vectors(answer)] == [float(len(text)) for text in _texts(body["input"])]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (usage.input_tokens, usage.output_tokens)
    assert answer.response is not None
    assert answer.response["model"] == model


def _texts(asked: str | list[str]) -> list[str]:
    return [asked] if isinstance(asked, str) else asked


@each_row(
    ("model", "asked", "words"),
    [
        (TITAN_V2, [[1, 2, 3]], "Bedrock embeds texts, and no token ids"),
        (COHERE_V4, [1, 2, 3], "Bedrock embeds texts, and no token ids"),
        (TITAN_V2, ["a", "b"], "Titan embeds one text in a call: set max_inputs of its model to 1"),
    ],
)
async def test_what_a_model_can_not_embed_is_not_sent(model: str, asked: Any, words: str) -> None:
    async with bedrock(embedded) as double:
        with pytest.raises(CallError) as caught:
            await perform(double.origin, asking(model, input=asked))
    assert isinstance(caught.value.failure, NotSent)
    assert words in str(caught.value)
    assert double.requests == []


async def test_a_refusal_is_awss_and_an_answer_without_vectors_is_broken() -> None:
    async with bedrock(embedded) as double:
        with pytest.raises(CallError) as caught:
            await perform(double.origin, asking(TITAN_V1, input="x", dimensions=256))
        assert isinstance(caught.value.failure, HttpFailure)
        assert "extraneous key [dimensions]" in caught.value.failure.message
    for reply in ({}, {"embedding": None}, {"embeddings": {"int8": [[1]]}}, {"embeddings": [[0.5], [0.5]]}):
        async with bedrock([reply]) as double:
            with pytest.raises(CallError) as caught:
                await perform(double.origin, asking(COHERE_V4, input="x"))
            assert isinstance(caught.value.failure, BrokenAnswer), reply
            assert caught.value.maybe_billed


async def test_a_chat_with_a_model_of_embeddings_is_refused_by_aws() -> None:
    async with bedrock([RefusedError(400, "ValidationException", "The model does not support conversations.")]) as here:
        with pytest.raises(CallError, match="does not support conversations"):
            await perform(here.origin, call(model=TITAN_V2))


def test_which_models_embed_and_how_many_inputs() -> None:
    chosen = settings("http://127.0.0.1:1")
    found = {
        model: (tuple(chosen.apis_of(model)), chosen.max_inputs(model))
        for model in (
            TITAN_V1,
            TITAN_V2,
            ARN,
            "amazon.titan-embed-g1-text-02",
            COHERE_V3,
            COHERE_V4,
            "cohere.command-r",
        )
    }
    one, many, none = (("chat", "embeddings"), 1), (("chat", "embeddings"), 96), (("chat",), None)
    assert list(found.values()) == [one, one, one, one, many, many, none]
    compatible = chosen.model_copy(update={"api": "chat"})
    assert compatible.apis_of(TITAN_V2) == ("chat",)
