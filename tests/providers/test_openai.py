from __future__ import annotations

from typing import Any

import pytest

from breakwater.embedded.ports import free_port
from breakwater.embedded.provider import SimulatedProvider
from breakwater.policy.classify import BrokenAnswer, HttpFailure, TransportFailure
from breakwater.policy.price import Usage
from breakwater.providers.base import Answer, Call, CallFailed
from breakwater.providers.openai import OpenAICompatible
from tests.flow.kit import USAGE, model

TOOL = {"type": "function", "function": {"name": "look_up"}}


def call(**more: Any) -> Call:
    fields: dict[str, Any] = {
        "attempt_id": "j:1",
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "params": {"max_tokens": 100, "tools": [TOOL]},
        "timeout_s": 5.0,
    }
    return Call(**(fields | more))


async def perform(*faults: dict[str, Any], timeout_s: float = 5.0, key: str | None = None, **behaviour: Any) -> Answer:
    script: dict[str, Any] = {"models": {"m": model(*faults, **behaviour)}}
    if key is not None:
        script["api_keys"] = ["right"]
    async with SimulatedProvider(script) as sim:
        provider = OpenAICompatible(sim.url, api_key=key)
        try:
            return await provider.perform(call(timeout_s=timeout_s))
        finally:
            await provider.close()
            assert sim.ledger.totals.calls + sim.ledger.totals.in_progress <= 1, "it must never retry by itself"


async def failure(*faults: dict[str, Any], **more: Any) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await perform(*faults, **more)
    return caught.value


async def test_an_answer_is_its_text_and_its_usage() -> None:
    answer = await perform(answer="hello back", usage={**USAGE, "cached_tokens": 20})
    assert answer == Answer("hello back", Usage(120, 40, 20))


async def test_an_answer_that_calls_tools_is_the_whole_message() -> None:
    answer = await perform(tool_calls=[{"name": "look_up", "arguments": {"id": 7}}])
    assert isinstance(answer.output, dict)
    [tool_call] = answer.output["tool_calls"]
    assert tool_call["function"]["name"] == "look_up"


async def test_usage_that_is_not_reported_is_unknown() -> None:
    assert (await perform(usage={**USAGE, "report": False})).usage == Usage(None, None)


async def test_an_error_brings_status_text_code_and_headers_and_was_not_billed() -> None:
    error = {"type": "invalid_request_error", "code": "context_length_exceeded", "message": "too long"}
    failed = await failure({"status": 400, "error": error})
    assert isinstance(failed.failure, HttpFailure)
    assert (failed.failure.status, failed.failure.code, failed.failure.message) == (
        400,
        "context_length_exceeded",
        "too long",
    )
    assert not failed.maybe_billed
    limited = await failure({"status": 429, "retry_after_s": 3})
    assert isinstance(limited.failure, HttpFailure)
    assert float(limited.failure.headers["retry-after"]) == 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("malformed_json", "not JSON"),
        ("empty_body", "empty"),
        ("no_choices", "no choices"),
        ("error_in_200", "carries an error"),
    ],
)
async def test_a_200_that_cannot_be_used_may_have_been_billed(kind: str, words: str) -> None:
    failed = await failure({"kind": kind})
    assert isinstance(failed.failure, BrokenAnswer)
    assert words in failed.failure.message
    assert failed.maybe_billed


@pytest.mark.parametrize("kind", ["truncated", "reset"])
async def test_a_connection_that_breaks_may_have_been_billed(kind: str) -> None:
    failed = await failure({"kind": kind})
    assert isinstance(failed.failure, TransportFailure)
    assert failed.failure.kind == "network"
    assert failed.maybe_billed


async def test_no_answer_in_time_is_a_timeout_that_may_have_been_billed() -> None:
    failed = await failure({"hang_s": 60}, timeout_s=0.1)
    assert failed.failure == TransportFailure("timeout", "TimeoutError", "no answer within 0.1 s")
    assert failed.maybe_billed


async def test_a_refused_connection_was_never_billed() -> None:
    provider = OpenAICompatible(f"http://127.0.0.1:{free_port()}/v1")
    with pytest.raises(CallFailed) as caught:
        await provider.perform(call())
    await provider.close()
    assert isinstance(caught.value.failure, TransportFailure)
    assert caught.value.failure.kind == "network"
    assert not caught.value.maybe_billed


async def test_a_key_is_sent_and_shows_in_no_error_and_no_repr() -> None:
    await perform(key="right")
    failed = await failure(key="wrong-secret-key")
    assert isinstance(failed.failure, HttpFailure)
    assert failed.failure.status == 401
    assert "wrong-secret-key" not in str(failed)
    assert "right" not in repr(OpenAICompatible("http://x/v1", api_key="right"))
