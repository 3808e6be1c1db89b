"""`anthropic` for Python. It takes its base URL and key from the environment."""

import json
import os
import threading
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from checks import (
    CHAT,
    MESSAGES,
    PDF,
    PNG,
    QUESTION,
    RESPONSES,
    SLOW,
    Models,
    backoff_of,
    check,
    limited_task,
    raises,
    run,
)
from pydantic import BaseModel

ALL = (MESSAGES, CHAT, RESPONSES)
THINKER = "claude-thinker"
ASK: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": QUESTION}]}
TOOL: Any = {
    "name": "find_ship",
    "description": "Where a ship is.",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
BUSY = {"x-breakwater-total-timeout-s": "2"}
client = Anthropic()
create = client.messages.create
create_raw = client.messages.with_raw_response.create
check = partial(check, door="Messages")


class Ship(BaseModel):
    name: str
    knots: int


@check("create", models=ALL)
def message(models: Models) -> None:
    answer = create(model=models.writer, system="You know ships.", **ASK)
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    [block] = answer.content
    assert block.type == "text"
    assert QUESTION in block.text
    assert min(answer.usage.input_tokens, answer.usage.output_tokens) > 0
    assert answer._request_id


@check("blocks: images, documents, `cache_control`", models=(MESSAGES, CHAT))
def blocks(models: Models) -> None:
    document: Any = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    parts: Any = [
        {"type": "text", "text": "A document", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "document", "source": document, "title": "Ships"},
        {"type": "text", "text": QUESTION},
    ]
    system: Any = [{"type": "text", "text": "You know ships.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    answer = create(model=models.writer, max_tokens=500, system=system, messages=[{"role": "user", "content": parts}])
    assert QUESTION in answer.content[0].text


@check("stream, in the order of its events", models=ALL)
def stream(models: Models) -> None:
    events: list[Any] = list(create(model=models.writer, stream=True, **ASK))
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 1
    middle = ["content_block_start", *["content_block_delta"] * deltas, "content_block_stop"]
    assert kinds == ["message_start", *middle, "message_delta", "message_stop"]
    assert QUESTION in "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert events[0].message.content == []
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens > 0


@check("`stream()` helper: `text_stream`, the final message", models=ALL)
def stream_helper(models: Models) -> None:
    with client.messages.stream(model=models.writer, **ASK) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
        assert text == events.get_final_text()
        assert events.request_id
    assert QUESTION in text
    assert final.stop_reason == "end_turn"
    assert min(final.usage.input_tokens, final.usage.output_tokens) > 0


@check("a stream that breaks off", models=ALL)
def broken(models: Models) -> None:
    with client.messages.stream(model=f"{models.writer}-breaks", **ASK) as events:
        error = raises(anthropic.APIStatusError, lambda: list(events))
        assert events.current_message_snapshot.content[0].text
    assert (error.type, bool(error.request_id)) == ("api_error", True)


@check("tools and their results", models=ALL)
def tools(models: Models) -> None:
    asked = create(model=models.writer, tools=[TOOL], **ASK)
    assert asked.stop_reason == "tool_use"
    [call] = [block for block in asked.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("find_ship", {"name": "ferry"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "at sea"}
    messages: Any = [*ASK["messages"], {"role": "assistant", "content": asked.content}]
    messages.append({"role": "user", "content": [result]})
    answer = create(model=models.writer, max_tokens=500, tools=[TOOL], messages=messages)
    assert answer.stop_reason == "end_turn"
    failed = {**result, "content": [{"type": "text", "text": "no such ship"}], "is_error": True}
    messages[-1] = {"role": "user", "content": [failed, {"type": "text", "text": QUESTION}]}
    assert QUESTION in create(model=models.small, max_tokens=500, tools=[TOOL], messages=messages).content[0].text


@check("forced tool", models=ALL)
def forced_tool(models: Models) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "find_ship"}):
        asked = create(model=models.small, tools=[TOOL], tool_choice=choice, **ASK)
        [call] = [block for block in asked.content if block.type == "tool_use"]
        assert call.name == "find_ship", choice


@check("streamed tool calls", models=ALL)
def streamed_tools(models: Models) -> None:
    with client.messages.stream(model=models.writer, tools=[TOOL], **ASK) as events:
        parts = "".join(event.partial_json for event in events if event.type == "input_json")
        final = events.get_final_message()
    assert parts == '{"name":"ferry"}'
    [call] = [block for block in final.content if block.type == "tool_use"]
    assert (call.name, call.input, final.stop_reason) == ("find_ship", {"name": "ferry"}, "tool_use")


@check("`tool_runner`, whole and streamed", models=ALL)
def runner(models: Models) -> None:
    found: list[str] = []

    @beta_tool
    def find_ship(name: str) -> str:
        """Where a ship is."""
        found.append(name)
        return "at sea"

    for streams in (False, True):
        loop = client.beta.messages.tool_runner(model=models.writer, tools=[find_ship], stream=streams, **ASK)
        assert loop.until_done().stop_reason == "end_turn"
    assert found == ["ferry", "ferry"]


@check("a tool loop with thinking blocks, whole and streamed")
def thinking() -> None:
    for streams in (False, True):
        messages: Any = [*ASK["messages"]]
        asked = _thought(messages, streams=streams)
        thought, call = asked.content
        assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "A ship; look it up.", True)
        assert call.type == "tool_use"
        messages.append({"role": "assistant", "content": asked.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "at sea"}
        messages.append({"role": "user", "content": [result]})
        answer = _thought(messages, streams=streams)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[-1].text == "The ferry is at sea."


@check("a tool loop with thinking blocks over a fallback to a model of another API, and back", models=(CHAT, RESPONSES))
def fallback(models: Models) -> None:
    headers = {"x-breakwater-fallback-models": json.dumps([models.writer])}
    for streams in (False, True):
        asked = _thought(ASK["messages"], streams=streams)
        result = {"type": "tool_result", "tool_use_id": asked.content[-1].id, "content": "at sea"}
        messages: Any = [*ASK["messages"], {"role": "assistant", "content": asked.content}]
        messages.append({"role": "user", "content": [result]})
        other = _thought(messages, streams=streams, model="claude-overloaded", extra_headers=headers)
        assert (other.model, other.stop_reason) == (models.writer, "end_turn")
        messages.append({"role": "assistant", "content": other.content})
        messages.append({"role": "user", "content": "And now?"})
        again = _thought(messages, streams=streams)
        assert (again.model, again.content[-1].text[-8:]) == (THINKER, "And now?")


def _thought(messages: Any, *, streams: bool, model: str = THINKER, **more: Any) -> Any:
    options: Any = {
        "model": model,
        **more,
        "max_tokens": 4000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [TOOL],
        "messages": messages,
    }
    if not streams:
        return create(**options)
    with client.messages.stream(**options) as events:
        return events.get_final_message()


@check("thinking blocks, sent on to a model of another API", models=(CHAT, RESPONSES))
def other_thinking(models: Models) -> None:
    asked = _thought(ASK["messages"], streams=False)
    result = {"type": "tool_result", "tool_use_id": asked.content[-1].id, "content": "at sea"}
    messages: Any = [*ASK["messages"], {"role": "assistant", "content": asked.content}]
    messages.append({"role": "user", "content": [result]})
    answer = create(model=models.small, max_tokens=500, tools=[TOOL], messages=messages)
    assert answer.stop_reason == "end_turn"


@check("web search with citations, whole and streamed")
def search() -> None:
    options: Any = {"model": "claude-searcher", "tools": [{"type": "web_search_20250305", "name": "web_search"}], **ASK}
    with client.messages.stream(**options) as events:
        streamed = events.get_final_message()
    for answer in (create(**options), streamed):
        assert [block.type for block in answer.content] == ["server_tool_use", "web_search_tool_result", "text"]
        assert answer.content[0].input == {"query": "ferry"}
        assert [cited.url for cited in answer.content[2].citations] == ["https://ships.example.com/ferry"]
        assert answer.usage.server_tool_use.web_search_requests == 1


@check("parsed outputs", models=ALL)
def parsed(models: Models) -> None:
    answer = client.messages.parse(model=models.small, output_format=Ship, **ASK)
    assert isinstance(answer.parsed_output, Ship)
    with client.messages.stream(model=models.small, output_format=Ship, **ASK) as events:
        assert isinstance(events.get_final_message().parsed_output, Ship)


@check("`max_tokens`, `stop_sequences`", models=ALL)
def limits(models: Models) -> None:
    question = [{"role": "user", "content": QUESTION * 40}]
    assert create(model=models.writer, max_tokens=10, messages=question).stop_reason == "max_tokens"
    stopped = create(model=models.writer, stop_sequences=["ferry"], **ASK)
    assert stopped.content[0].text.endswith("the ")


@check("`count_tokens`", models=ALL)
def count(models: Models) -> None:
    messages = ASK["messages"]
    few = client.messages.count_tokens(model=models.writer, messages=messages).input_tokens
    many = client.messages.count_tokens(model=models.writer, messages=messages, system="You know ships.", tools=[TOOL])
    assert 0 < few < many.input_tokens


@check("a key by `x-api-key` and by bearer")
def keys() -> None:
    key = os.environ["ANTHROPIC_API_KEY"]
    for other in (Anthropic(api_key=key), Anthropic(api_key=None, auth_token=key)):
        assert QUESTION in other.messages.create(model=MESSAGES.writer, **ASK).content[0].text


@check("`with_raw_response`, `with_streaming_response`")
def raw() -> None:
    answer = create_raw(model=MESSAGES.writer, **ASK)
    assert QUESTION in answer.parse().content[0].text
    assert float(answer.headers["x-breakwater-cost-usd"]) > 0
    assert answer.headers["request-id"]
    with client.messages.with_streaming_response.create(model=MESSAGES.writer, **ASK) as streamed:
        assert QUESTION in streamed.parse().content[0].text


@check("errors")
def errors() -> None:
    unknown = raises(anthropic.NotFoundError, create, model="no-such", **ASK)
    assert unknown.type == "not_found_error"
    assert unknown.request_id
    wrong = raises(anthropic.AuthenticationError, Anthropic(api_key="wrong").messages.create, model="gpt-4o", **ASK)
    assert wrong.type == "authentication_error"
    bad = raises(anthropic.BadRequestError, create, model="gpt-4o", max_tokens=10, messages=[])
    assert bad.type == "invalid_request_error"
    assert "messages" in bad.message
    other = raises(anthropic.BadRequestError, create, model="gpt-4o", extra_body={"no_such": 1}, **ASK)
    assert "no_such" in other.message


@check("`RateLimitError` with `retry-after`, `OverloadedError`", models=(MESSAGES, CHAT))
def limited(models: Models) -> None:
    kind = models.writer.partition("-")[0]
    for streams in (False, True):
        busy = raises(anthropic.RateLimitError, create, model=f"{kind}-busy", extra_headers=BUSY, stream=streams, **ASK)
        assert busy.type == "rate_limit_error"
        assert 0 < int(busy.response.headers["retry-after"]) <= 30
    full = raises(anthropic.OverloadedError, create, model=f"{kind}-overloaded", extra_headers=BUSY, **ASK)
    assert full.type == "overloaded_error"


@check("what is left of a rate limit; the SDK's own backoff obeys `retry-after-ms`")
def backoff() -> None:
    left = create_raw(model=CHAT.small, extra_headers=limited_task(requests_per_minute=5), **ASK).headers
    assert (left["anthropic-ratelimit-requests-limit"], left["anthropic-ratelimit-requests-remaining"]) == ("5", "4")
    resets_at = datetime.fromisoformat(left["anthropic-ratelimit-requests-reset"])
    assert 50 < (resets_at - datetime.now(UTC)).total_seconds() <= 62
    assert "anthropic-ratelimit-tokens-limit" not in left

    def create_with(retries: int) -> Any:
        return client.with_options(max_retries=retries).messages.create(model=CHAT.small, extra_headers=busy, **ASK)

    busy = limited_task(concurrent_calls=1)
    slow_call = threading.Thread(
        target=client.messages.create, kwargs={"model": SLOW, "extra_headers": busy, **ASK}, daemon=True
    )
    slow_call.start()
    wait_s, took_s = backoff_of(anthropic.RateLimitError, create_with)
    assert wait_s <= took_s < wait_s + 3


@check("models")
def models() -> None:
    assert MESSAGES.writer in {model.id for model in client.models.list()}


@check("async create and stream")
async def asynchronous() -> None:
    async with AsyncAnthropic() as other:
        answer = await other.messages.create(model=MESSAGES.writer, **ASK)
        assert QUESTION in answer.content[0].text
        async with other.messages.stream(model=MESSAGES.writer, **ASK) as events:
            text = "".join([text async for text in events.text_stream])
        assert QUESTION in text


run()
