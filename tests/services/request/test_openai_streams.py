"""Streams of chat completions: the unmodified `openai` package against the request service, a worker and a provider."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
import pytest_asyncio
from openai.lib.streaming.chat import ChunkEvent

from breakwater.calls.providers import http_stream
from breakwater.config import load_config
from breakwater.dialects.api import streams
from breakwater.dialects.api.chat import ChatEvents
from breakwater.identity import event_stream
from breakwater.identity.api_keys import create_key
from breakwater.jobs.api.cancels import Cancels
from breakwater.jobs.api.results import AwaitedResult, Waiters
from breakwater.jobs.contract.execution import AnswerChunks, PendingCancel
from breakwater.jobs.rules.ids import key_of
from breakwater.kernel.nats import subjects
from breakwater.kernel.process import background
from breakwater.kernel.surrogates import whole_escapes
from breakwater.local.ports import free_port
from tests.any_answers import AnyAnswer, any_provider_server
from tests.flow.kit import model
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, new_id, running, settings_for
from tests.services.request.test_openai_plane import TOOL, OpenAIPlane
from tests.services.worker.harness import WorkerPlane, running_worker

ANSWER = "".join(f"{number:03d} " for number in range(60))
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}], "stream": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
LOOKED_UP = [{"name": "find_ship", "arguments": {"name": "a ferry with a long name"}}]


def streaming(*faults: dict[str, Any], **more: Any) -> dict[str, Any]:
    return model(*faults, **{"answer": ANSWER, **more})


def broken(kind: str, after: int | None = 40, **more: Any) -> dict[str, Any]:
    return {"stream": kind, "after_chunks": after, **more}


MODELS = {
    "sim/fast": streaming(tool_calls=LOOKED_UP),
    "sim/slow": streaming(stream={"tokens_per_s": 100}),
    "sim/paced": streaming(stream={"tokens_per_s": 30}),
    "sim/late": streaming(broken("stall", 2, stall_s=0.4)),
    "sim/silent-bill": streaming(usage={"report": False}),
    "sim/thoughtful": streaming(latency_ms=500),
    "sim/ponderous": streaming(latency_ms=3_000),
    "sim/down-late": model({"hang_s": 60}),
    "sim/json": model(answer_json={"name": "ferry"}),
    "sim/down": model({"status": 500}),
    "sim/early": streaming(broken("cut", 0)),
    "sim/mute": streaming(broken("stall", 0)),
    "sim/cut": streaming(broken("cut")),
    "sim/stalled": streaming(broken("stall")),
    "sim/garbled": streaming(broken("malformed")),
    "sim/ended": streaming(broken("no_end")),
    "sim/failed": streaming(broken("error", error={"type": "overloaded_error", "message": "too much"})),
    "sim/cut-call": streaming(broken("cut", 3), tool_calls=LOOKED_UP),
    "sim/unmarked": streaming(broken("no_end", None)),
    "sim/rest": model(answer=ANSWER[160:]),
    "sim/overlap": model(answer=ANSWER[120:]),
    "sim/anew": model(answer=ANSWER),
    "sim/rest-cut": model(broken("cut", 10), answer=ANSWER[160:]),
    "sim/last": model(answer=ANSWER[200:]),
    "claude-rest": model(answer=ANSWER[140:]),
    "claude": streaming(tool_calls=LOOKED_UP),
}
BREAKS = {
    "cut": "the connection was lost",
    "stalled": "stalled",
    "garbled": "not JSON",
    "ended": "early",
    "failed": "too much",
}
ONCE: dict[str, Any] = {"retry": {"max_attempts": 1}, "breaker": "off", "timeout_s": 3, "stream_idle_timeout_s": 1.5}
GO_ON = {**ONCE, "on_stream_break": "continue"}
REST = f"""cat > /dev/null; echo '{{"status": "success", "code": 0, "result": "{ANSWER[150:]}"}}'"""
LINES = """cat > /dev/null; for word in one two three; do echo "{\\"delta\\": \\"$word \\"}"; sleep 0.1; done
echo '{"status": "success", "code": 0, "cost_usd": "0.001"}'"""
AGENTS = {
    "odd": {"model": "odd/m", **ONCE},
    "lines": {"provider": "lines"},
    "writer": {"model": "sim/fast"},
    "anthropic": {"model": "anthropic/claude"},
    "slow": {"model": "sim/slow"},
    "paced": {"model": "sim/paced"},
    "late": {"model": "sim/late"},
    "left": {"model": "sim/stalled"},
    "left-finishes": {"model": "sim/slow", "on_disconnect": "finish"},
    "left-shared": {"model": "sim/paced", "on_disconnect": "cancel"},
    "left-cancels": {"model": "sim/stalled", "on_disconnect": "cancel"},
    "cached": {"model": "sim/fast", "cache": {"ttl_s": 60}},
    "checked": {
        "model": "sim/json",
        "output": {"schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
    },
    "unmarked": {"model": "sim/unmarked", **ONCE},
    "estimated": {"model": "sim/silent-bill", **ONCE, "usage_estimates": True},
    "unreported": {"model": "sim/silent-bill", **ONCE},
    "pinged": {"model": "sim/thoughtful", **ONCE, "timeout_s": 20, "keepalive_before_answer_s": 0.1},
    "pinged-in-vain": {"model": "sim/down-late", **ONCE, "keepalive_before_answer_s": 0.1},
    "takes-turns": {
        "model": "sim/ponderous",
        "allowed_models": ["sim/fast"],
        "rate_limit": {"concurrent_calls": 1},
        **ONCE,
        "timeout_s": 20,
    },
    "backed-up": {"model": "sim/down", "fallback_models": ["sim/early", "sim/mute", "sim/fast"], **ONCE},
    "failing": {"model": "sim/down", "fallback_models": ["sim/early"], **ONCE},
    **{f"go-on-{name}": {"model": f"sim/{name}", "fallback_models": ["sim/rest"], **GO_ON} for name in BREAKS},
    **{
        f"from-{name}": {"model": "sim/cut", "fallback_models": models, **GO_ON}
        for name, models in {
            "overlap": ["sim/overlap"],
            "anew": ["sim/anew"],
            "anthropic": ["anthropic/claude-rest"],
            "down": ["sim/down", "sim/early", "sim/rest"],
            "cut": ["sim/rest-cut", "sim/last"],
            "program": ["tool/rest"],
            "nothing": ["sim/down"],
        }.items()
    },
    "calling": {"model": "sim/cut-call", "fallback_models": ["sim/rest"], **GO_ON},
    **{name: {"model": f"sim/{name}", "fallback_models": ["sim/fast"], **ONCE} for name in BREAKS},
}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[OpenAIPlane]:
    directory = tmp_path_factory.mktemp("streams")
    async with (
        any_provider_server() as (bodies, odd),
        _running(module_nats_server.url, redis_server.url, directory, odd["openai"]) as (api, worker),
    ):
        yield OpenAIPlane(api, worker, bodies)


@asynccontextmanager
async def _running(
    nats_url: str, redis_url: str, directory: Path, odd: dict[str, Any]
) -> AsyncGenerator[tuple[HttpApi, WorkerPlane]]:
    started = running_worker(
        directory,
        nats_url=nats_url,
        redis_url=redis_url,
        script={"models": MODELS},
        agents=AGENTS,
        more_providers={
            "odd": odd,
            "lines": {"kind": "process", "command": ["sh", "-c", LINES]},
            "tool": {"kind": "process", "command": ["sh", "-c", REST]},
            "anthropic": {"kind": "anthropic", "base_url": "http://127.0.0.1:{sim_port}/v1"},
        },
    )
    async with started as worker:
        settings = settings_for(nats_url, redis_url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield api, worker


async def chunks_of(plane: OpenAIPlane, name: str, **more: Any) -> list[Any]:
    return [chunk async for chunk in await plane.sdk().chat.completions.create(model=name, **{**ASK, **more})]


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == 0)


@pytest.mark.parametrize("name", ["writer", "anthropic"])
async def test_a_stream_is_the_providers_own_with_its_headers(plane: OpenAIPlane, name: str) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model=name, **ASK, **USAGE)
    chunks = [chunk async for chunk in raw.parse()]
    assert text_of(chunks) == ANSWER
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-2:] == [None, "stop"]
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [160]
    headers = raw.headers
    assert headers["content-type"] == "text/event-stream"
    assert headers["x-breakwater-model"] == AGENTS[name]["model"]
    assert (headers["x-breakwater-attempts"], headers["x-breakwater-cache"]) == ("1", "miss")
    result = await plane.worker.result(headers["x-breakwater-execution-id"])
    [attempt] = result["attempts"]
    assert (result["output"], attempt["chunks"], attempt["cost"]) == (ANSWER, 60, "0.000042000")
    assert 0 <= attempt["first_token_ms"] <= attempt["duration_ms"]


async def test_the_usage_comes_only_if_it_is_asked_for(plane: OpenAIPlane) -> None:
    chunks = await chunks_of(plane, "writer")
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in chunks)
    with pytest.raises(openai.BadRequestError, match="only allowed when") as refused:
        await plane.sdk().chat.completions.create(model="writer", messages=ASK["messages"], **USAGE)
    assert refused.value.param == "stream_options"


async def test_all_choices_are_streamed(plane: OpenAIPlane) -> None:
    chunks = await chunks_of(plane, "writer", n=2)
    said = [choice for chunk in chunks for choice in chunk.choices if choice.index == 1]
    assert "".join(choice.delta.content or "" for choice in said) == text_of(chunks) == ANSWER


@pytest.mark.parametrize("name", ["writer", "anthropic"])
async def test_tool_calls_are_streamed(plane: OpenAIPlane, name: str) -> None:
    ask = {"model": name, "messages": ASK["messages"], "tools": [TOOL]}
    async with plane.sdk().chat.completions.stream(**ask) as stream:
        events = [event async for event in stream]
        message = (await stream.get_final_completion()).choices[0].message
    assert len([event for event in events if isinstance(event, ChunkEvent)]) > 5
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("find_ship", '{"name":"a ferry with a long name"}')


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([{"index": 0, "id": "a", "function": {"name": "f", "arguments": {"x": 1}}},
          {"index": 0, "id": "b", "function": {"name": "g", "arguments": '{"y":2}'}}],
         [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]),
        ([{"function": {"name": "f", "arguments": {}}}, {"id": "", "function": {"name": "f", "arguments": "{}"}}],
         [(None, "f", "{}"), (None, "f", "{}")]),
        ([{"id": 7, "name": "f", "arguments": None}], [("7", "f", "{}")]),
        ([{"id": "a", "function": {"name": "f", "arguments": "{}"}},
          {"id": "a", "function": {"name": "g", "arguments": "{}"}}],
         [("a", "f", "{}"), (None, "g", "{}")]),
    ],
)  # fmt: skip
async def test_a_client_is_told_tool_calls_as_openai_tells_them(
    plane: OpenAIPlane, calls: Any, told: Any, streamed: bool
) -> None:
    name = new_id()
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    if streamed:
        events = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls]
        body = b"".join(b"data: %b\n\n" % orjson.dumps(event) for event in events) + b"data: [DONE]\n\n"
    else:
        body = orjson.dumps({"id": "a1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    plane.bodies[name] = AnyAnswer("openai", streamed, body)
    ask = {"model": "odd", "messages": [{"role": "user", "content": name}]}
    if streamed:
        async with plane.sdk().chat.completions.stream(**ask) as stream:
            choice = (await stream.get_final_completion()).choices[0]
            assert choice.finish_reason == "tool_calls"
    else:
        choice = (await plane.sdk().chat.completions.create(**ask)).choices[0]
    found = choice.message.tool_calls
    # Before all of it is here, a stream can't know that there are no arguments.
    arguments = [one.function.arguments or "{}" for one in found]
    assert [(one.function.name, text) for one, text in zip(found, arguments, strict=True)] == [one[1:] for one in told]
    assert all(one.id == (own or one.id) for one, (own, *_) in zip(found, told, strict=True))
    assert len({one.id for one in found}) == len(found)


async def test_chunks_are_chunks_and_have_a_usage_with_figures_or_none() -> None:
    none = {"prompt_tokens": None, "completion_tokens": None, "total_tokens": None}
    known = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    given = [{"object": "chat.completion", "choices": [], "usage": usage} for usage in (none, known)]
    events = ChatEvents("j1", "m", with_usage=True).events(given)
    found = [orjson.loads(line[6:]) for line in events.splitlines() if line]
    assert [(one["object"], one["usage"]) for one in found] == [
        ("chat.completion.chunk", None),
        ("chat.completion.chunk", known),
    ]


async def test_chunks_arrive_while_the_answer_is_produced(plane: OpenAIPlane) -> None:
    loop, times = asyncio.get_running_loop(), list[float]()
    async for _ in await plane.sdk().chat.completions.create(model="slow", **ASK):
        times.append(loop.time())
    took_s = times[-1] - times[0]
    assert took_s > 0.4
    assert max(after - before for before, after in pairwise(times)) < took_s * 0.75, "all came in two pieces"


async def test_what_comes_of_an_answer_in_a_short_time_is_one_message(
    plane: OpenAIPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, messages = new_id(), list[Any]()
    loop, gather_s = asyncio.get_running_loop(), 1.0
    monkeypatch.setattr(http_stream, "GATHER_S", gather_s)

    async def keep(message: Any) -> None:
        messages.append(orjson.loads(message.data)["chunks"])

    await plane.worker.client.subscribe(f"bw.chunks.slow.{job_id}", cb=keep)
    await asyncio.sleep(gather_s - loop.time() % gather_s)  # all of the answer comes before the next such moment
    result = await plane.worker.run({"agent": "slow", "job_id": job_id, "prompt": "Count.", "stream": True})
    await until(lambda: messages and messages[-1][-1]["choices"] == [])
    first = [choice["delta"].get("content") for chunk in messages[0] for choice in chunk["choices"]]
    assert "000 " in first
    assert "".join(filter(None, first)) != ANSWER, "the first is not to be waited for"
    assert len(messages) < result["attempts"][0]["chunks"] / 4


async def test_a_program_that_writes_lines_streams(plane: OpenAIPlane) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="lines", **ASK)
    chunks = [chunk async for chunk in raw.parse()]
    # Lines that are read at once are one chunk.
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "one two three "
    assert chunks[-1].choices[0].finish_reason == "stop"
    result = await plane.worker.result(raw.headers["x-breakwater-execution-id"])
    assert (result["output"], result["total_cost"]) == ("one two three ", "0.001000000")
    whole = await plane.sdk().chat.completions.create(model="lines", messages=ASK["messages"])
    assert whole.choices[0].message.content == "one two three "


async def test_what_is_silent_is_kept_open(plane: OpenAIPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.KEEP_ALIVE_S", 0.1)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {plane.key()}"}) as session:
        asked = session.post(f"{plane.api.url}/v1/chat/completions", json={"model": "late", **ASK})
        async with asked as response:
            body = (await response.read()).decode()
    assert ": still here\n\n" in body
    assert body.endswith("data: [DONE]\n\n")


async def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SEND_TIMEOUT_S", 0.05)
    inbox, ends, never = streams.ChunkInbox(), list[tuple[bool, bool]](), asyncio.Event()
    inbox.put(b'{"number": 1, "chunks": [{"choices": [{"index": 0, "delta": {"content": "000 "}}]}]}')

    async def decide() -> bytes | None:
        await never.wait()

    async def ended(whole: bool, stuck: bool) -> None:
        ends.append((whole, stuck))

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    deciding = asyncio.create_task(decide())
    stream = streams.EncodedStream(
        inbox, deciding, headers={}, encoder=ChatEvents("j1", "m", with_usage=False), error=lambda _: b"", close=ended
    )
    await stream({}, receive, send)
    await background.stop(deciding)
    assert ends == [(False, True)]


async def test_a_cached_answer_is_a_stream_at_no_cost(plane: OpenAIPlane) -> None:
    first = await chunks_of(plane, "cached", n=2)
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="cached", n=2, **ASK, **USAGE)
    chunks = [chunk async for chunk in raw.parse()]
    assert raw.headers["x-breakwater-cache"] == "hit"
    assert text_of(chunks) == text_of(first) == ANSWER
    assert chunks[0].id == first[0].id
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "stop"
    ] * 2
    assert chunks[-1].usage.completion_tokens == 80


async def test_an_answer_that_has_to_be_checked_comes_whole(plane: OpenAIPlane) -> None:
    chunks = await chunks_of(plane, "checked")
    assert text_of(chunks) == '{"name":"ferry"}'
    assert len(chunks) == 2


async def test_the_same_key_again_is_the_same_answer_at_no_cost(plane: OpenAIPlane) -> None:
    key = {"extra_headers": {"Idempotency-Key": new_id()}}
    first, before = await chunks_of(plane, "writer", **key), len(plane.worker.sim.ledger.calls)
    assert text_of(await chunks_of(plane, "writer", **key)) == text_of(first) == ANSWER
    assert len(plane.worker.sim.ledger.calls) == before


async def test_who_joins_late_gets_the_whole_answer(plane: OpenAIPlane) -> None:
    key, sdk = {"extra_headers": {"Idempotency-Key": new_id()}}, plane.sdk()
    first = await sdk.chat.completions.create(model="slow", **ASK, **key)
    early = [await anext(first) for _ in range(10)]
    late = await chunks_of(plane, "slow", **key)
    assert text_of(late) == ANSWER
    assert text_of([*early, *[chunk async for chunk in first]]) == ANSWER


async def left(plane: OpenAIPlane, name: str, **headers: str) -> str:
    """Asks for a stream, and leaves when some of it has come. Returns the job's id."""
    raw = await plane.sdk().chat.completions.with_raw_response.create(model=name, **ASK, extra_headers=headers)
    stream = raw.parse()
    for _ in range(10):
        await anext(stream)
    await stream.close()
    return raw.headers["x-breakwater-execution-id"]


@pytest.mark.parametrize(("name", "has_key"), [("left", False), ("left-cancels", True)])
async def test_the_call_of_a_client_that_has_left_is_aborted_and_charged_by_what_came(
    plane: OpenAIPlane, name: str, has_key: bool
) -> None:
    key = {"Idempotency-Key": new_id()} if has_key else {}
    execution_id = await left(plane, name, **key)
    gone_at = datetime.now(UTC)
    result = await plane.worker.result(execution_id)
    assert (datetime.fromisoformat(result["completed_at"]) - gone_at).total_seconds() < 1
    assert (result["status"], result["cancellation"]["by"]) == ("cancelled", "client_disconnect")
    [attempt] = result["attempts"]
    assert (attempt["outcome"], attempt["cost_basis"]) == ("cancelled", "estimated")
    assert ANSWER.startswith(result["output"])
    if has_key:
        with pytest.raises(openai.ConflictError) as refused:
            await chunks_of(plane, name, extra_headers=key)
        assert refused.value.code == "cancelled"


async def test_a_retry_of_a_stream_that_was_left_is_a_call_of_its_own(plane: OpenAIPlane) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": new_id()}]}
    before = len(plane.worker.sim.ledger.calls)
    ids: list[str] = []
    for retries in ("0", "1"):
        headers = {"x-stainless-retry-count": retries}
        raw = await plane.sdk().chat.completions.with_raw_response.create(model="left", **ask, extra_headers=headers)
        stream = raw.parse()
        await anext(stream)
        await stream.close()
        ids.append(raw.headers["x-breakwater-execution-id"])
        assert (await plane.worker.result(ids[-1]))["status"] == "cancelled"
    assert len(set(ids)) == 2
    assert len(plane.worker.sim.ledger.calls) == before + 2


@asynccontextmanager
async def replica(plane: OpenAIPlane) -> AsyncGenerator[str]:
    """The URL of another process of the request service, as it were."""
    settings = plane.api.settings.model_copy(update={"http_port": free_port()})
    config = load_config(plane.worker.directory / "breakwater.yaml")
    async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
        yield api.url


async def opened(
    sdk: Any, name: str, retries: str, ask: dict[str, Any] = ASK, key: str | None = None
) -> tuple[str, Any]:
    """Begins a stream as the SDK does, at first or again. Returns the job's id, and the stream."""
    headers = {"x-stainless-retry-count": retries, **({} if key is None else {"Idempotency-Key": key})}
    raw = await sdk.chat.completions.with_raw_response.create(model=name, **ask, extra_headers=headers)
    return raw.headers["x-breakwater-execution-id"], raw.parse()


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_job_goes_on_while_a_retry_at_another_replica_waits_for_it(plane: OpenAIPlane, has_key: bool) -> None:
    key, ask = new_id() if has_key else None, {**ASK, "messages": [{"role": "user", "content": new_id()}]}
    sdk, before = plane.sdk(), len(plane.worker.sim.ledger.calls)
    async with replica(plane) as url:
        job_id, stream = await opened(sdk, "left-shared", "0", ask, key)
        await anext(stream)
        again, retry = await opened(sdk.with_options(base_url=f"{url}/v1"), "left-shared", "1", ask, key)
        await stream.close()
        assert again == job_id
        assert text_of([chunk async for chunk in retry]) == ANSWER
        assert len(plane.worker.sim.ledger.calls) == before + 1


async def test_a_retry_is_never_answered_that_its_own_client_has_left(
    plane: OpenAIPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_order, ordering, order = asyncio.Event(), asyncio.Event(), Cancels.request

    async def late(cancels: Cancels, given: PendingCancel) -> PendingCancel:
        ordering.set()
        await may_order.wait()
        return await order(cancels, given)

    monkeypatch.setattr(Cancels, "request", late)
    sdk, ask = plane.sdk(), {**ASK, "messages": [{"role": "user", "content": new_id()}]}
    first, stream = await opened(sdk, "left", "0", ask)
    await stream.close()
    await ordering.wait()
    # Its order is about to be given.
    again, retry = await opened(sdk, "left", "1", ask)
    may_order.set()
    await anext(retry)
    await retry.close()
    assert again != first


async def test_a_retry_with_the_key_of_a_call_that_was_left_is_a_call_of_its_own(plane: OpenAIPlane) -> None:
    sdk, key = plane.sdk(), new_id()
    execution_id, stream = await opened(sdk, "left-cancels", "0", key=key)
    await stream.close()
    assert execution_id == key_of("key:app", key)
    assert (await plane.worker.result(execution_id))["status"] == "cancelled"
    again, retry = await opened(sdk, "left-cancels", "1", key=key)
    await retry.close()
    assert again != key
    assert (await plane.worker.result(again))["cancellation"]["by"] == "client_disconnect"


@pytest.mark.parametrize(("name", "has_key"), [("slow", True), ("left-finishes", False)])
async def test_the_answer_is_finished_where_it_can_be_asked_for_again_or_the_agent_wants_it(
    plane: OpenAIPlane, name: str, has_key: bool
) -> None:
    execution_id = await left(plane, name, **({"Idempotency-Key": new_id()} if has_key else {}))
    result = await plane.worker.result(execution_id)
    assert (result["status"], result["output"]) == ("succeeded", ANSWER)


async def test_a_job_goes_on_while_another_client_waits_for_it(
    plane: OpenAIPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen, waiting = Waiters.listen, list[str]()

    def counted(waiters: Waiters, execution_id: str, **more: Any) -> AwaitedResult:
        waiting.append(execution_id)
        return listen(waiters, execution_id, **more)

    monkeypatch.setattr(Waiters, "listen", counted)
    key = {"extra_headers": {"Idempotency-Key": new_id()}}
    first = await plane.sdk().chat.completions.create(model="left-shared", **ASK, **key)
    await anext(first)
    other = asyncio.create_task(chunks_of(plane, "left-shared", **key))
    await until(lambda: len(waiting) == 2)
    await first.close()
    assert not other.done()
    assert text_of(await other) == ANSWER


async def test_what_the_bus_has_lost_follows_with_the_result(plane: OpenAIPlane) -> None:
    job_id = new_id()
    key = {"extra_headers": {"Idempotency-Key": job_id}}
    stream = await plane.sdk().chat.completions.create(model="paced", **ASK, **key)
    early = [await anext(stream) for _ in range(2)]
    # As after a gap: what is numbered so can't be the next message.
    await plane.worker.client.publish(
        subjects.chunks("paced", key_of("key:app", job_id)), b'{"number": 999, "chunks": []}'
    )
    late = [chunk async for chunk in stream]
    assert text_of([*early, *late]) == ANSWER
    assert len(late) < 50
    assert late[-1].choices[0].finish_reason == "stop"


async def test_what_fails_before_the_answer_begins_is_not_seen(plane: OpenAIPlane) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="backed-up", **ASK)
    assert text_of([chunk async for chunk in raw.parse()]) == ANSWER
    assert (raw.headers["x-breakwater-model"], raw.headers["x-breakwater-attempts"]) == ("sim/fast", "4")
    result = await plane.worker.result(raw.headers["x-breakwater-execution-id"])
    assert [one["first_token_ms"] is None for one in result["attempts"]] == [True, True, True, False]


async def test_a_failure_without_an_answer_is_a_status(plane: OpenAIPlane) -> None:
    before = len(plane.worker.sim.ledger.calls)
    with pytest.raises(openai.InternalServerError) as failed:
        await plane.sdk().chat.completions.create(model="failing", **ASK)
    assert (failed.value.status_code, failed.value.code) == (502, "provider_unreachable")
    assert failed.value.response.headers["x-should-retry"] == "false"
    assert len(plane.worker.sim.ledger.calls) == before + 2


@pytest.mark.parametrize(("name", "words"), BREAKS.items())
async def test_an_answer_that_breaks_off_is_an_error_in_the_stream(plane: OpenAIPlane, name: str, words: str) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model=name, **ASK)
    said = list[Any]()
    with pytest.raises(openai.APIError, match=words):
        await _keep(raw.parse(), said)
    assert text_of(said) == ANSWER[:160]
    result = await plane.worker.result(raw.headers["x-breakwater-execution-id"])
    [attempt] = result["attempts"]
    assert (result["status"], result["reason"], result["output"]) == ("dead_lettered", "error", ANSWER[:160])
    assert (attempt["chunks"], attempt["cost_basis"]) == (40, "estimated")
    # At least what the provider billed, and not the worst case.
    billed = plane.worker.sim.ledger.calls[-1]
    assert billed.output_tokens <= attempt["output_tokens"] < 400
    # The record comes after the result.
    record = await until(partial(plane.worker.last, "EVENTS", f"bw.executions.{name}.{result['execution_id']}"))
    assert record["output"] == ANSWER[:160]


GOING_ON = [name for name in AGENTS if name.startswith(("go-on-", "from-")) and name != "from-nothing"]


@pytest.mark.parametrize("name", GOING_ON)
async def test_an_answer_that_breaks_off_goes_on_without_a_character_lost_or_doubled(
    plane: OpenAIPlane, name: str
) -> None:
    raw = await plane.sdk().chat.completions.with_raw_response.create(model=name, **ASK, **USAGE)
    chunks = [chunk async for chunk in raw.parse()]
    result = await plane.worker.result(raw.headers["x-breakwater-execution-id"])
    first, *_, last = result["attempts"]
    assert (result["status"], result["output"], result["chosen_model"]) == ("succeeded", ANSWER, last["model"])
    assert text_of(chunks) == ANSWER
    assert len({(chunk.id, chunk.model) for chunk in chunks}) == 1
    assert [one.finish_reason for chunk in chunks for one in chunk.choices if one.finish_reason] == ["stop"]
    assert (first["outcome"], first["chunks"], first["cost_basis"]) == ("error", 40, "estimated")
    assert last["cause"] == "fallback"


async def test_what_is_out_is_the_output_where_nothing_could_continue_it(plane: OpenAIPlane) -> None:
    said = list[Any]()
    raw = await plane.sdk().chat.completions.with_raw_response.create(model="from-nothing", **ASK)
    with pytest.raises(openai.APIError):
        await _keep(raw.parse(), said)
    result = await plane.worker.result(raw.headers["x-breakwater-execution-id"])
    assert text_of(said) == result["output"] == ANSWER[:160]
    assert [one["model"] for one in result["attempts"]] == ["sim/cut", "sim/down"]


async def test_a_tool_call_that_breaks_off_is_not_continued(plane: OpenAIPlane) -> None:
    before = len(plane.worker.sim.ledger.calls)
    with pytest.raises(openai.APIError):
        await chunks_of(plane, "calling", tools=[TOOL])
    assert len(plane.worker.sim.ledger.calls) == before + 1


async def _keep(stream: Any, said: list[Any]) -> None:
    """Notes what comes of a stream before it raises."""
    async for chunk in stream:
        said.append(chunk)


async def test_the_mark_of_the_end_may_be_missing(plane: OpenAIPlane) -> None:
    assert text_of(await chunks_of(plane, "unmarked")) == ANSWER


async def test_a_job_over_nats_is_answered_in_pieces_to_its_reply_subject_too(plane: OpenAIPlane) -> None:
    job_id, client, received = new_id(), plane.worker.client, dict[str, list[Any]]()
    inbox = client.new_inbox()
    for subject in (inbox, f"bw.chunks.writer.{job_id}"):

        async def keep(message: Any) -> None:
            received.setdefault(message.subject, []).append(orjson.loads(message.data))

        await client.subscribe(subject, cb=keep)
    await plane.worker.publish(
        {"agent": "writer", "job_id": job_id, "prompt": "Count.", "stream": True, "reply_to": inbox}
    )
    await until(lambda: "status" in received.get(inbox, [{}])[-1])
    *messages, result = received[inbox]
    assert messages == received[f"bw.chunks.writer.{job_id}"]
    assert result["output"] == ANSWER
    read = [AnswerChunks.model_validate(message) for message in messages]
    assert [message.number for message in read] == list(range(1, len(read) + 1))
    assert {(message.execution_id, message.agent, message.attempt, message.model) for message in read} == {
        (job_id, "writer", 1, "sim/fast")
    }
    chunks: list[Any] = [chunk for one in read for chunk in one.chunks if chunk["choices"]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER


PINGED = {
    "chat/completions": (ASK, b": still here\n\n", b"[DONE]", b'"code":"timeout"'),
    "responses": ({"input": "hi"}, b": still here\n\n", b"response.completed", b"response.failed"),
    "messages": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400},
        b'event: ping\ndata: {"type":"ping"}\n\n',
        b"message_stop",
        b"event: error",
    ),
}
"""Of each API: a request, a ping, the end of a stream, and a failure in one."""


@pytest.mark.long(about_s=10)
async def test_a_client_that_asked_for_it_is_pinged_before_its_answer_begins(plane: OpenAIPlane, subtests: Any) -> None:
    headers = {"Authorization": f"Bearer {plane.key()}"}
    for path, (body, ping, end, failure) in PINGED.items():
        for agent, last in (("pinged", end), ("pinged-in-vain", failure)):
            with subtests.test(f"{path} {agent}"):
                asked = {**body, "model": agent, "stream": True}
                async with plane.api.http.post(f"{plane.api.url}/v1/{path}", json=asked, headers=headers) as response:
                    stream = await response.read()
                assert response.status == 200
                assert "x-breakwater-execution-id" in response.headers
                assert stream.startswith(ping)
                assert last in stream


async def test_a_stream_that_waits_for_a_limit_begins_and_is_pinged_before_its_first_token(
    plane: OpenAIPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.1)
    headers = {"Authorization": f"Bearer {plane.key()}"}
    before = len(plane.worker.sim.ledger.calls)
    holder = asyncio.create_task(chunks_of(plane, "takes-turns"))
    await until(lambda: len(plane.worker.sim.ledger.calls) > before)

    async def wait_for_turn(path: str) -> None:
        body, ping, end, _ = PINGED[path]
        asked = {**body, "model": "takes-turns/sim/fast", "stream": True}
        async with plane.api.http.post(f"{plane.api.url}/v1/{path}", json=asked, headers=headers) as response:
            assert response.status == 200
            assert not holder.done(), "the status comes while the limit has no room"
            # What is left of a limit is not known before the call is admitted.
            assert not [name for name in response.headers if "ratelimit" in name.lower()]
            stream = await response.read()
        assert stream.startswith(ping)
        assert end in stream

    await asyncio.gather(*map(wait_for_turn, PINGED))
    assert text_of(await holder) == ANSWER


async def test_a_usage_that_no_model_reports_is_estimated_for_clients_where_asked(
    plane: OpenAIPlane, subtests: Any
) -> None:
    headers = {"Authorization": f"Bearer {plane.key()}"}
    for path, (body, *_) in PINGED.items():
        for stream in (False, True):
            with subtests.test(f"{path} {stream=}"):
                options = USAGE if stream and path == "chat/completions" else {}
                asked = {**body, "model": "estimated", "stream": stream, **options}
                async with plane.api.http.post(f"{plane.api.url}/v1/{path}", json=asked, headers=headers) as response:
                    text = await response.text()
                usages = re.findall(r'"usage":({[^{}]*(?:{[^{}]*}[^{}]*)*})', text)
                usage = orjson.loads(usages[-1])
                assert usage["estimated"] is True
                tokens = [usage.get("input_tokens") or usage["prompt_tokens"]]
                tokens += [usage.get("output_tokens") or usage["completion_tokens"]]
                assert all(0 < count < 300 for count in tokens)
    chunks = await chunks_of(plane, "unreported", **USAGE)
    assert [chunk.usage for chunk in chunks if chunk.usage] == []


HALVES = {
    "text": ["ok \ud83d", "\ude00 end ", "\ud83d"],
    "arguments": ['{"a": "\\ud83d', "\ud83d", "\ude00", '\\ude00"}'],
}
"""Pieces of an answer. In the arguments, halves are escaped once more, too: in the JSON that they are."""


async def test_half_of_a_surrogate_pair_breaks_no_answer(plane: OpenAIPlane, subtests: pytest.Subtests) -> None:
    begun, *more = HALVES["arguments"]
    deltas: list[dict[str, Any]] = [{"content": text} for text in HALVES["text"]]
    deltas.append({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": begun}}]})
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in more]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "".join(HALVES["arguments"])}}
    message = {"role": "assistant", "content": "".join(HALVES["text"]), "tool_calls": [call]}
    whole = json.dumps({"id": "a1", "choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": {},
        "messages": {"max_tokens": 100},
        "responses": {},
    }
    for streamed, body in ((True, stream), (False, whole)):
        for path, more_of_api in asked.items():
            with subtests.test(path, streamed=streamed):
                name = new_id()
                plane.bodies[name] = AnyAnswer("openai", streamed, body)
                says = {"input": name} if path == "responses" else {"messages": [{"role": "user", "content": name}]}
                answer = await plane.api.ask(
                    "POST",
                    f"/v1/{path}",
                    data=orjson.dumps({"model": "odd", "stream": streamed, **says, **more_of_api}),
                    headers={"Authorization": f"Bearer {plane.key()}"},
                )
                assert (answer.status, answer.headers["x-breakwater-attempts"]) == (200, "1"), answer.body
                text, arguments = _said(answer.body, streamed=streamed)
                assert text == "ok \U0001f600 end \ufffd"
                assert orjson.loads(whole_escapes(arguments)) == {"a": "\ufffd\U0001f600\ufffd"}


def _said(body: bytes, *, streamed: bool) -> tuple[str, str]:
    """The text of an answer of any API, and the arguments of its call."""
    if streamed:
        events = [orjson.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
        deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
        texts = [delta.get("content") or "" for delta in deltas]
        arguments = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
        for event in events:
            match event:
                case {"type": "content_block_delta", "delta": {"text": text}}:
                    texts.append(text)
                case {"type": "content_block_delta", "delta": {"partial_json": text}}:
                    arguments.append(text)
                case {"type": "response.output_text.delta", "delta": text}:
                    texts.append(text)
                case {"type": "response.function_call_arguments.delta", "delta": text}:
                    arguments.append(text)
                case _:
                    pass
        return "".join(texts), "".join(arguments)
    match orjson.loads(body):
        case {"choices": [{"message": {"content": text, "tool_calls": [{"function": {"arguments": arguments}}]}}]}:
            return text, arguments
        case {"content": [{"text": text}, {"input": value}]}:
            return text, orjson.dumps(value).decode()
        case {"output": [{"content": [{"text": text}]}, {"arguments": arguments}]}:
            return text, arguments
        case other:
            raise AssertionError(other)
