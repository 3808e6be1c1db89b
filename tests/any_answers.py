"""Answers as no provider should send them: good ones of all dialects, with arbitrary JSON in any of their places."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import hypothesis
import orjson
from aiohttp import web
from hypothesis import strategies as st

from breakwater.dialects.rules.chat_chunks import Assembly, missing_chunks_of
from breakwater.dialects.rules.chat_completions import completion_of
from breakwater.dialects.rules.embeddings import answer_of
from breakwater.dialects.rules.messages import message_of
from breakwater.dialects.rules.messages_stream import MessageStream
from breakwater.dialects.rules.responses_answer import EchoedRequest, response_of
from breakwater.dialects.rules.responses_stream import ContradictionError, ResponseEvents, event_bytes
from breakwater.jobs.contract.execution import Attempt, Execution, Result
from breakwater.jobs.store.records import is_result_of
from breakwater.kernel.nats import subjects
from breakwater.records.rows import attempt_row, execution_row
from tests.anthropic_client import accumulated
from tests.calls.providers.kit import answering
from tests.helpers import until
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


def _event(kind: str, index: int | None = None, **more: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **({} if index is None else {"output_index": index}), **more}


_ITEMS: list[dict[str, Any]] = [
    {"id": "r1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Well"}], "encrypted_content": "e"},
    {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hi there", "annotations": [{"type": "url_citation", "url": "u"}]}],
    },
    {"id": "f1", "type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"id":1}'},
    {"id": "w1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
]
_RESPONSE: dict[str, Any] = {
    "id": "resp_a1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "m",
    "output": _ITEMS,
    "incomplete_details": None,
    "usage": {"input_tokens": 5, "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 2}},
}
_WHOLE["responses"] = _RESPONSE
_STREAMS["responses"] = [
    _event("created", response={**_RESPONSE, "status": "in_progress", "output": []}),
    _event("output_item.added", 0, item={**_ITEMS[0], "summary": []}),
    _event("reasoning_summary_part.added", 0, summary_index=0, part={"type": "summary_text", "text": ""}),
    _event("reasoning_summary_text.delta", 0, item_id="r1", summary_index=0, delta="Well"),
    _event("output_item.done", 0, item=_ITEMS[0]),
    _event("output_item.added", 1, item={**_ITEMS[1], "content": []}),
    _event("content_part.added", 1, item_id="m1", content_index=0, part={"type": "output_text", "text": ""}),
    _event("output_text.delta", 1, item_id="m1", content_index=0, delta="hi "),
    _event("output_text.delta", 1, item_id="m1", content_index=0, delta="there", logprobs=[]),
    _event("content_part.done", 1, item_id="m1", content_index=0, part=_ITEMS[1]["content"][0]),
    _event("output_item.done", 1, item=_ITEMS[1]),
    _event("output_item.added", 2, item={**_ITEMS[2], "arguments": ""}),
    _event("function_call_arguments.delta", 2, item_id="f1", delta='{"id":1}'),
    _event("output_item.done", 2, item=_ITEMS[2]),
    _event("output_item.added", 3, item=_ITEMS[3]),
    _event("output_item.done", 3, item=_ITEMS[3]),
    _event("completed", response=_RESPONSE),
]
_SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
_FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
_WHOLE["messages"] = {**_WHOLE["anthropic"], "content": [_SEARCH, _FOUND, *_WHOLE["anthropic"]["content"]]}
_STREAMS["messages"] = [
    *_STREAMS["anthropic"][:-2],
    *_block(3, {**_SEARCH, "input": {}}, {"type": "input_json_delta", "partial_json": '{"query":"q"}'}),
    *_block(4, _FOUND),
    *_STREAMS["anthropic"][-2:],
]
_WHOLE["embeddings"] = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
    "model": "m",
    "usage": {"prompt_tokens": 5, "total_tokens": 5},
}
KINDS = tuple(_WHOLE)
_SERVER = {"messages": "anthropic", "responses": "openai", "embeddings": "openai"}
"""Kinds of providers that speak another API, too."""
_ASKED = EchoedRequest(job_id="j1", created_at=1, model="m")


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
    streamed = streamed and kind in _STREAMS
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
            asked: dict[str, Any] = {"prompt": name}
            if answer.kind in _SERVER:
                said = [{"role": "user", "content": name}]
                body = {"messages": said} if answer.kind == "messages" else {"input": name}
                asked = {"api_request": {"api": answer.kind, "body": body}}
            job = {"agent": answer.agent(name), "job_id": name, **asked, "stream": answer.streamed}
            await self.plane.publish({**job, "include_response": True})
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
            # A provider's own tools have no price in the config.
            assert attempt["cost"] is not None or self.bodies[name].kind in _SERVER
            outcome = (attempt["error"] or {}).get("class", "success")
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if result["status"] != "succeeded":
            return
        kind, attempt = self.bodies[name].kind, result["attempts"][-1]
        chunks = self.bodies[name].streamed and attempt["chunks"]
        if chunks:
            await until(lambda: self._all_came(name, result))
        if kind in _SERVER:
            _check_native(kind, self.chunks.get(name, ()), orjson.loads(orjson.dumps(result)))
            return
        completion = completion_of(result)
        for choice in completion["choices"]:
            _check_message(choice["message"])
            assert choice["finish_reason"]
        if chunks:
            sent = Assembly()
            for chunk in self.chunks[name]:
                assert sent.add(chunk) is chunk, "a client is told nothing odd"
            for message in sent.messages().values():
                _check_message(message)
            assert missing_chunks_of(completion, sent) is not None

    def _all_came(self, name: str, result: dict[str, Any]) -> bool:
        came = Assembly()
        for chunk in self.chunks.get(name, ()):
            came.add(chunk)
        return came.chunks >= result["attempts"][-1]["chunks"]


def _check_native(kind: str, chunks: Sequence[dict[str, Any]], result: dict[str, Any]) -> None:
    """The client of the API reads it, whole and streamed; a stream that said something else says so at its end."""
    if kind == "embeddings":
        assert orjson.dumps(answer_of(result["response"], "float"))
    elif kind == "messages":
        stored, stream = message_of(result), MessageStream("j1")
        events, rest = stream.feed(chunks), stream.end(result)
        assert rest is not None
        accumulated([*events, *rest])
        whole = MessageStream("j1").end(result)
        assert whole is not None
        assert accumulated(whole)["content"] == stored["content"]
    else:
        whole, encoder = response_of(_ASKED, result), ResponseEvents(_ASKED)
        sent = encoder.begin()
        for chunk in chunks:
            sent += encoder.add(chunk)
        with suppress(ContradictionError):
            sent += encoder.end(result)
            output = sent[-1]["response"]["output"]
            output = sent[-1]["response"]["output"]
            assert list(map(_without_ids, output)) == list(map(_without_ids, whole["output"]))
        assert b"".join(map(event_bytes, sent))


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    # An item that was never begun has those that were made when its first piece came.
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


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


def _provider(kind: str, base_url: str) -> dict[str, Any]:
    speaks = {"api": kind} if kind == "responses" else {}
    return {"kind": _SERVER.get(kind, kind), "base_url": base_url, **speaks}


@asynccontextmanager
async def any_provider_server() -> AsyncGenerator[tuple[dict[str, AnyAnswer], dict[str, Any]]]:
    """A server that answers by the job's prompt; gives its answers, and the providers of a config that calls it."""
    bodies: dict[str, AnyAnswer] = {}

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked = await request.json()
        given_input = asked.get("input")
        content = given_input if isinstance(given_input, str) else (given_input or asked["messages"])[0]["content"]
        given = bodies[content if isinstance(content, str) else content[0]["text"]]
        kind = "text/event-stream" if given.streamed else "application/json"
        return web.Response(body=given.body, status=given.status, content_type=kind)

    async with answering(answer) as origin:
        yield bodies, {kind: _provider(kind, f"{origin}/v1") for kind in KINDS}


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
    odd = [line for line in plane.logs if line["event"] in {"answer_not_read", "job_handling_failed"}]
    assert not odd, odd
    return provider.outcomes
