"""Answers as no provider should send them: good ones of both dialects, with arbitrary JSON in any of their places."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import hypothesis
from aiohttp import web
from hypothesis import strategies as st

from breakwater.analytics.rows import attempt_row, execution_row
from breakwater.bus.records import is_result_of
from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt, Execution, Result
from breakwater.policy.chat_chunks import Assembly, rest_of
from breakwater.policy.chat_completions import completion_of
from breakwater.policy.dialects.messages import message_of
from breakwater.policy.dialects.messages_stream import MessageStream
from tests.anthropic_client import accumulated
from tests.helpers import until
from tests.providers.kit import answering
from tests.services.worker.harness import WorkerPlane

_WORDS = (
    *("", "null", "stop", "error", "tool_calls", "length", "tool_use", "end_turn", "text", "thinking", "function"),
    *("{", "}", '{"a": 1}', "ping", "[DONE]", "c1", "assistant"),
)
_NAMES = (
    *("choices", "delta", "message", "content", "index", "id", "type", "function", "name", "arguments", "tool_calls"),
    *("usage", "finish_reason", "stop_reason", "text", "input", "partial_json", "custom", "object", "detail"),
)


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([10**15, 2**63, -(10**30), 0.5, 1e300])
    | st.sampled_from(_WORDS)
    | st.text(max_size=5)
)
JSON = st.recursive(
    _SCALARS | st.sampled_from([90, 97, 100, 150, 196, 199, 252, 260, 900]).map(_nested),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=3),
    max_leaves=6,
)

_FUNCTION = {"name": "look_up", "arguments": '{"id":1}'}
_CALL = {"index": 0, "id": "c1", "type": "function", "function": _FUNCTION}
_OPENAI_USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1}}
_ANTHROPIC_USAGE = {"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": 1}
_ERROR = {"error": {"message": "too much", "type": "overloaded_error", "code": 529, "param": None}}


def _chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"id": "a1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _block(index: int, block: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": block},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


_WHOLE: dict[str, dict[str, Any]] = {
    "openai": {
        "id": "a1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"},
            {"index": 1, "message": {"content": [{"type": "text", "text": "hi"}], "tool_calls": [_CALL, _CALL]}},
        ],
        "usage": _OPENAI_USAGE,
    },
    "anthropic": {
        "id": "a1",
        "content": [
            {"type": "thinking", "thinking": "Well", "signature": "s"},
            {"type": "text", "text": "hi"},
            {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"id": 1}},
        ],
        "stop_reason": "tool_use",
        "usage": _ANTHROPIC_USAGE,
    },
}
_STREAMS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        _chunk({"role": "assistant", "content": ""}),
        _chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Well"}]}]}),
        _chunk({"content": "hi ", "reasoning_content": "so"}),
        _chunk({"content": "there", "refusal": None, "audio": {"data": "UklG"}}),
        _chunk({"tool_calls": [{**_CALL, "function": {**_FUNCTION, "arguments": ""}}]}),
        _chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"id":1}'}}]}),
        _chunk({"tool_calls": [{**_CALL, "id": "c2"}]}),
        _chunk({}, "tool_calls"),
        {"id": "a1", "choices": [], "usage": _OPENAI_USAGE},
    ],
    "anthropic": [
        {"type": "message_start", "message": {"id": "a1", "model": "m", "usage": _ANTHROPIC_USAGE}},
        {"type": "ping"},
        *_block(0, {"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "Well"}),
        *_block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "hi"}),
        *_block(
            2,
            {"type": "tool_use", "id": "c1", "name": "look_up", "input": {}},
            {"type": "input_json_delta", "partial_json": '{"id"'},
            {"type": "input_json_delta", "partial_json": ":1}"},
        ),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ],
}
KINDS = tuple(_WHOLE)


@dataclass(frozen=True, slots=True)
class AnyAnswer:
    """What one call is answered. `body` is JSON, or server-sent events."""

    kind: str
    streamed: bool
    body: bytes
    status: int = 200

    def agent(self, name: str) -> str:
        """Who asks for it, by the name of the job."""
        return f"{self.kind}-{'continue' if int(name[1:]) % 2 else 'fail'}"

    def is_native(self, name: str) -> bool:
        """True if the job is a request of Anthropic's Messages."""
        return self.kind == "anthropic" and int(name[1:]) % 4 > 1


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if len(path) > 9:
        return [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def put(value: Any, path: Sequence[Any], new: Any) -> Any:
    if not path:
        return new
    value[path[0]] = put(value[path[0]], path[1:], new)
    return value


@st.composite
def any_answers(draw: st.DrawFn) -> AnyAnswer:
    """A good answer with up to three places of it replaced, or events left out or said twice."""
    kind, streamed = draw(st.sampled_from(KINDS)), draw(st.booleans())
    if not streamed and draw(st.booleans()):
        error = put(copy.deepcopy(_ERROR), draw(st.sampled_from(places(_ERROR))), draw(JSON))
        return AnyAnswer(kind, streamed, json.dumps(error).encode(), draw(st.sampled_from([200, 400, 422, 500])))
    given: Any = copy.deepcopy(_STREAMS[kind] if streamed else _WHOLE[kind])
    for _ in range(draw(st.integers(0, 3))):
        given = put(given, draw(st.sampled_from(places(given)[streamed:])), draw(JSON))
    if not streamed:
        return AnyAnswer(kind, streamed, json.dumps(given).encode())
    at = draw(st.integers(0, len(given)))
    middle = draw(
        st.sampled_from(["", "data:\n\n", "event: ping\n\n", "id: 3\nretry\ndata: null\n\n", ": so\n\n", "CUT"])
    )
    if draw(st.booleans()):
        middle += f"data: {json.dumps(draw(JSON | st.just(_ERROR)))}\n\n"
    events = [f"data: {json.dumps(event)}\n\n" for event in given]
    events[at : at + draw(st.integers(0, 2))] = [middle] * (1 + draw(st.booleans()))
    text = "".join(events) + draw(st.sampled_from(["", "data: [DONE]\n\n", "data: [DONE]"]))
    return AnyAnswer(kind, streamed, text.partition("CUT")[0].encode())


@dataclass(slots=True)
class AnyProvider:
    """Answers each job with what a test has for it, and keeps what is published."""

    plane: WorkerPlane
    bodies: dict[str, AnyAnswer]
    chunks: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])
    outcomes: dict[str, int] = field(default_factory=dict[str, int])

    async def check(self, answers: Sequence[AnyAnswer]) -> None:
        """Runs a job for each answer, and looks at what has become of it."""
        names = [f"j{len(self.bodies) + number}" for number in range(len(answers))]
        self.bodies |= dict(zip(names, answers, strict=True))
        for name in names:
            answer = self.bodies[name]
            job = {"agent": answer.agent(name), "job_id": name, "stream": answer.streamed, "include_response": True}
            body = {"messages": [{"role": "user", "content": name}], "max_tokens": 100}
            native = {"api_request": {"api": "messages", "body": body}}
            await self.plane.publish(job | (native if answer.is_native(name) else {"prompt": name}))
        for name, result in zip(names, await asyncio.gather(*map(self.plane.result, names)), strict=True):
            try:
                await self._check(name, result)
                await check_that_all_read_it(self.plane, self.bodies[name].agent(name), name)
            except Exception as error:
                raise AssertionError(f"{self.bodies[name]} came to {result}") from error

    async def _check(self, name: str, result: dict[str, Any]) -> None:
        assert 1 <= len(result["attempts"]) <= 2
        for attempt in result["attempts"]:
            assert attempt["outcome"] in {"success", "error"}, (attempt, self.bodies[name])
            assert attempt["cost"] is not None
            outcome = (attempt["error"] or {}).get("class", "success")
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if result["status"] != "succeeded":
            return
        if self.bodies[name].is_native(name):
            await self._check_native(name, result)
            return
        completion = completion_of(result)
        for choice in completion["choices"]:
            _check_message(choice["message"])
            assert choice["finish_reason"]
        if self.bodies[name].streamed and result["attempts"][-1]["chunks"]:
            sent = Assembly()
            await until(lambda: self._all_came(name, result))
            for chunk in self.chunks[name]:
                assert sent.add(chunk) is chunk, "a client is told nothing odd"
            for message in sent.messages().values():
                _check_message(message)
            assert rest_of(completion, sent) is not None

    async def _check_native(self, name: str, result: dict[str, Any]) -> None:
        whole = MessageStream(name).end(result)
        assert whole is not None
        assert accumulated(whole)["content"] == message_of(result)["content"]
        if self.bodies[name].streamed and result["attempts"][-1]["chunks"]:
            await until(lambda: self._all_came(name, result))
            stream = MessageStream(name)
            events = [event for chunk in self.chunks[name] for event in stream.feed([chunk])]
            rest = stream.end(result)
            assert rest is not None
            accumulated([*events, *rest])

    def _all_came(self, name: str, result: dict[str, Any]) -> bool:
        came = Assembly()
        for chunk in self.chunks.get(name, ()):
            came.add(chunk)
        return came.chunks >= result["attempts"][-1]["chunks"]


async def _stored(plane: WorkerPlane, stream: str, subject: str) -> bytes:
    await until(lambda: plane.last(stream, subject), "the record, after the result")
    return (await plane.jetstream.get_last_msg(stream, subject, direct=True)).data or b""


async def check_that_all_read_it(plane: WorkerPlane, agent: str, job_id: str) -> None:
    """What is published of a job is read by whoever waits for it, by the services, and by the rows of ClickHouse."""
    result = await _stored(plane, "RESULTS", subjects.result(job_id))
    assert is_result_of(result, job_id)
    assert Result.model_validate_json(result).execution_id == job_id
    record = Execution.model_validate_json(await _stored(plane, "EVENTS", subjects.execution(agent, job_id)))
    assert execution_row(record, 1)
    for attempt in record.attempts:
        recorded = await _stored(plane, "EVENTS", subjects.attempt(agent, job_id, attempt.number))
        assert attempt_row(Attempt.model_validate_json(recorded), 1, datetime.now(UTC))


def _check_message(message: dict[str, Any]) -> None:
    assert message.get("content") is None or isinstance(message["content"], str)
    calls = message.get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert isinstance(call["id"], str)
        assert "custom" in call or isinstance(call["function"]["arguments"], str)


def agents() -> dict[str, Any]:
    """One for each dialect, and for what is done when a stream breaks."""
    common = {"retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.001}, "breaker": "off", "guard": "off"}
    return {
        f"{kind}-{on_break}": {"model": f"{kind}/m", **common, "on_stream_break": on_break, "concurrency": 50}
        for kind in KINDS
        for on_break in ("continue", "fail")
    }


@asynccontextmanager
async def any_provider_server() -> AsyncGenerator[tuple[dict[str, AnyAnswer], dict[str, Any]]]:
    """A server that answers by the job's prompt; gives its answers, and the providers of a config that calls it."""
    bodies: dict[str, AnyAnswer] = {}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked = await request.json()
        content = asked["messages"][0]["content"]
        given = bodies[content if isinstance(content, str) else content[0]["text"]]
        kind = "text/event-stream" if given.streamed else "application/json"
        return web.Response(body=given.body, status=given.status, content_type=kind)

    async with answering(answer) as origin:
        yield bodies, {kind: {"kind": kind, "base_url": f"{origin}/v1"} for kind in KINDS}


async def check_examples(plane: WorkerPlane, bodies: dict[str, AnyAnswer], **settings: Any) -> Mapping[str, int]:
    """Has Hypothesis try its examples on a running worker. Returns how many attempts have come to what.

    Args:
        plane: whose config has `agents()`, and the providers of `any_provider_server`.
        bodies: of that server.
        settings: of Hypothesis.
    """
    provider, loop = AnyProvider(plane, bodies), asyncio.get_running_loop()

    async def note(message: Any) -> None:
        said = json.loads(message.data)
        provider.chunks.setdefault(said["execution_id"], []).extend(said["chunks"])

    await plane.client.subscribe("bw.chunks.>", cb=note)

    @hypothesis.settings(deadline=None, suppress_health_check=list(hypothesis.HealthCheck), **settings)
    @hypothesis.given(st.lists(any_answers(), min_size=10, max_size=10))
    def check(answers: list[AnyAnswer]) -> None:
        asyncio.run_coroutine_threadsafe(provider.check(answers), loop).result(60)

    await asyncio.to_thread(check)
    # The last line of defence is for what nobody has thought of.
    assert not [line for line in plane.logs if line["event"] in {"answer_not_read", "job_handling_failed"}]
    return provider.outcomes
