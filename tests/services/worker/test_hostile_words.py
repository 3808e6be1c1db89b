"""What a provider says where its own words go: a prompt that is not to be kept, and the key that it was sent."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from nats.aio.subscription import Subscription
from prometheus_client import REGISTRY, generate_latest

from breakwater.kernel.nats import subjects
from tests.calls.providers.kit import answering
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

SECRET = "bluewhale_4711"
KEY = "gateway/K3y-of-ours_0123456789"
PRIVATE: list[dict[str, Any]] = [{"persist_prompts": False}, {"persist_responses": False}]
RETRY = {"retry": {"max_attempts": 1}, "breaker": "off", "guard": "off"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 7}
Answers = Callable[[str], tuple[int, dict[str, Any] | list[dict[str, Any]]]]


def _completion(text: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "a", "model": "m", "choices": [choice], "usage": USAGE, **more}


def _message(*texts: str, **more: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": text} for text in texts]
    usage = {"input_tokens": 5, "output_tokens": 7}
    return {"id": "a", "model": "m", "content": blocks, "stop_reason": "end_turn", "usage": usage, **more}


def _reason(word: str) -> dict[str, Any]:
    found = _completion("hi")
    found["choices"][0]["finish_reason"] = word
    return found


def _chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"id": "a", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


WORDS: dict[str, tuple[str, int, Any]] = {
    "code": ("openai", 400, {"error": {"message": "no", "code": SECRET}}),
    "type": ("openai", 400, {"error": {"message": "no", "type": SECRET}}),
    "param": ("openai", 400, {"error": {"message": "no", "param": f"messages.{SECRET}"}}),
    "place": ("openai", 422, {"detail": [{"msg": "no", "loc": ["body", SECRET]}]}),
    "status": ("openai", 429, {"error": {"message": "no", "status": SECRET}}),
    "code in a 200": ("openai", 200, {"error": {"message": "no", "code": SECRET, "type": "overloaded_error"}}),
    "Anthropic's type": ("anthropic", 400, {"type": "error", "error": {"type": SECRET, "message": "no"}}),
    "reason": ("openai", 200, _reason(SECRET)),
    "Anthropic's reason": ("anthropic", 200, _message("hi", stop_reason=SECRET)),
    "reason without an answer": ("openai", 200, {"choices": [{"finish_reason": SECRET, "message": {}}]}),
    "model": ("openai", 200, _completion("hi", model=SECRET)),
    "model of a maker": ("openai", 200, _completion("hi", model=f"gpt-4o-{SECRET}")),
    "Anthropic's model": ("anthropic", 200, _message("hi", model=SECRET)),
    "terms": ("openai", 200, _completion("hi", service_tier=SECRET)),
    "usage": ("openai", 200, _completion("hi", usage={**USAGE, "prompt_tokens_details": {f"{SECRET}_tokens": "x"}})),
    "usage of a kind": (
        "openai",
        200,
        _completion("hi", usage={**USAGE, "completion_tokens_details": {f"{SECRET}_tokens": 10**12}}),
    ),
    "id": ("openai", 200, _completion("hi", id=SECRET, system_fingerprint=SECRET, object=SECRET)),
}


@asynccontextmanager
async def _plane(
    start_worker: StartWorker, given: dict[str, tuple[str, int, Any]], **settings: Any
) -> AsyncGenerator[WorkerPlane]:
    """A worker whose provider answers by the job's prompt."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        content = (await request.json())["messages"][0]["content"]
        _, status, body = given[content if isinstance(content, str) else content[0]["text"]]
        if not isinstance(body, list):
            return web.json_response(body, status=status)
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in body) + "data: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    async with answering(answer) as origin:
        kinds = ("openai", "anthropic")
        providers = {
            kind: {"kind": kind, "base_url": f"{origin}/v1", "api_key": {"env": "KEY_OF_OURS"}} for kind in kinds
        }
        agents: dict[str, dict[str, Any]] = {
            kind: {"model": f"{kind}/m", "allowed_models": list(_models(given, kind).values()), **RETRY}
            for kind in kinds
        }
        for name in agents:
            agents[name] |= settings.get("agent", {})
        more = {name: value for name, value in settings.items() if name != "agent"}
        async with start_worker({"sim/m": model()}, agents, more_providers=providers, **more) as plane:
            yield plane


def _models(given: dict[str, tuple[str, int, Any]], kind: str) -> dict[str, str]:
    """A model for each prompt, so that none waits for one that is busy."""
    return {name: f"{kind}/m{number}" for number, name in enumerate(given) if given[name][0] == kind}


async def _recorded(plane: WorkerPlane, agent: str, job_id: str) -> str:
    await until(lambda: plane.last("EVENTS", subjects.execution(agent, job_id)), "the record, after the result")
    found = [await plane.messages(stream, "bw.>") for stream in ("EVENTS", "DLQ", "ALERTS")]
    return json.dumps(found)


@pytest.mark.parametrize("agent", PRIVATE)
async def test_a_word_of_a_prompt_in_a_place_for_words_is_kept_as_its_hash(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, agent: dict[str, Any], subtests: pytest.Subtests
) -> None:
    monkeypatch.setenv("KEY_OF_OURS", KEY)
    async with _plane(start_worker, WORDS, agent=agent) as plane:
        progress = await plane.client.subscribe("bw.progress.>")
        for number, (name, (kind, _, _)) in enumerate(WORDS.items()):
            with subtests.test(name):
                job_id = f"j{number}"
                job = {"agent": kind, "model": _models(WORDS, kind)[name], "job_id": job_id, "prompt": name}
                result = await plane.run(job)
                assert len(result["attempts"]) == 1
                places = {
                    "events": await _recorded(plane, kind, job_id),
                    "result": json.dumps(result),
                    "progress": str(await _received(progress)),
                    "logs": plane.log("worker"),
                }
                assert [place for place, text in places.items() if SECRET in text or SECRET.upper() in text] == []
                if name in ("code", "code in a 200"):
                    assert "code #" in result["attempts"][0]["error"]["message"]
        assert SECRET.lower() not in generate_latest(REGISTRY).decode().lower()


async def _received(subscription: Subscription) -> list[bytes]:
    """What has come on a subscription since the last look."""
    return [(await subscription.next_msg(timeout=5)).data for _ in range(subscription.pending_msgs)]


async def test_known_codes_are_kept_as_they_are(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_OURS", KEY)
    errors = {
        code: ("openai", 400, {"error": {"message": "no", "code": code, "param": "tools[0].function.parameters"}})
        for code in ("invalid_value", "Model_Not_Found", "string_above_max_length", "InvalidParameter")
    }
    async with _plane(start_worker, errors, agent=PRIVATE[0]) as plane:
        for code in errors:
            error = (await plane.run({"agent": "openai", "job_id": code, "prompt": code}))["error"]
            assert f", code {code};" in error["message"]
            assert error["param"] == "tools[0].function.parameters"


_HALVES = KEY[:11], KEY[11:]
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": KEY})}}
KEYS: dict[str, tuple[str, int, Any]] = {
    "text": ("openai", 200, _completion(f"your key is {KEY}!")),
    "escaped": ("openai", 200, _completion(f"é {KEY}")),
    "call": ("openai", 200, {**_completion(""), "choices": [{"message": {"content": None, "tool_calls": [_CALL]}}]}),
    "elsewhere": (
        "openai",
        200,
        _completion("hi", model=KEY, system_fingerprint=KEY, service_tier=KEY, note={KEY: [KEY]}),
    ),
    "reason": ("openai", 200, _reason(KEY)),
    "no answer": ("openai", 200, {"object": "error", "message": f"no {KEY}", "code": KEY}),
    "blocks": ("anthropic", 200, _message(*_HALVES)),
    "Anthropic's": ("anthropic", 200, _message(f"key {KEY}", model=KEY)),
    "streamed": ("openai", 200, [_chunk({"content": f"key {KEY}"}), _chunk({}, "stop")]),
    "streamed in pieces": ("openai", 200, [*(_chunk({"content": half}) for half in _HALVES), _chunk({}, "stop")]),
}


async def test_the_key_that_a_provider_quotes_in_an_answer_goes_nowhere(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setenv("KEY_OF_OURS", KEY)
    async with _plane(start_worker, KEYS) as plane:
        chunks = await plane.client.subscribe("bw.chunks.>")
        for number, (name, (kind, _, body)) in enumerate(KEYS.items()):
            with subtests.test(name):
                job_id = f"j{number}"
                job = {"agent": kind, "model": _models(KEYS, kind)[name], "job_id": job_id, "prompt": name}
                result = await plane.run({**job, "include_response": True, "stream": isinstance(body, list)})
                assert len(result["attempts"]) == 1
                places = {
                    "events": await _recorded(plane, kind, job_id),
                    "result": json.dumps(result),
                    "chunks": str(await _received(chunks)),
                    "logs": plane.log("worker"),
                }
                assert [place for place, text in places.items() if KEY in text] == []
                assert (result["status"] == "succeeded") == (name != "no answer")
        assert KEY not in generate_latest(REGISTRY).decode()
