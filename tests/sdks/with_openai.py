"""`openai` for Python. It takes its base URL and key from the environment."""

import re
import threading
from typing import Any

import openai
from checks import QUESTION, SLOW, SMALL, WRITER, backoff_of, check, limited_task, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_ship",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
client = OpenAI()


class Ship(BaseModel):
    name: str
    knots: int


@check("chat")
def chat() -> None:
    answer = client.chat.completions.create(model=WRITER, **ASK)
    assert QUESTION in answer.choices[0].message.content
    assert answer.usage.total_tokens > 0


@check("`n`")
def choices() -> None:
    answer = client.chat.completions.create(model=WRITER, n=2, **ASK)
    assert [choice.index for choice in answer.choices] == [0, 1]


@check("`stop`, `logprobs`")
def stop() -> None:
    choice = client.chat.completions.create(model=WRITER, stop="ferry", logprobs=True, top_logprobs=2, **ASK).choices[0]
    assert choice.message.content.endswith("the ")
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content


@check("stream")
def stream() -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=WRITER, **options, **ASK))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert QUESTION in text
    assert chunks[-1].usage.total_tokens > 0
    assert len(chunks) > 3


@check("`stream()` helper")
def stream_helper() -> None:
    with client.chat.completions.stream(model=WRITER, **ASK) as events:
        assert any(event.type == "content.delta" for event in events)
        assert QUESTION in events.get_final_completion().choices[0].message.content


@check("tools and their results")
def tools() -> None:
    asked = client.chat.completions.create(model=WRITER, tools=[TOOL], **ASK)
    assert asked.choices[0].finish_reason == "tool_calls"
    [call] = asked.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("find_ship", '{"name":"ferry"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "at sea"}
    messages: Any = [*ASK["messages"], asked.choices[0].message, result]
    answer = client.chat.completions.create(model=WRITER, tools=[TOOL], messages=messages)
    assert answer.choices[0].finish_reason == "stop"


@check("forced tool")
def forced_tool() -> None:
    asked = client.chat.completions.create(model=SMALL, tools=[TOOL], tool_choice="required", **ASK)
    assert asked.choices[0].message.tool_calls[0].function.name == "find_ship"


@check("streamed tool calls")
def streamed_tools() -> None:
    with client.chat.completions.stream(model=WRITER, tools=[openai.pydantic_function_tool(Ship)], **ASK) as events:
        events.until_done()
    with client.chat.completions.stream(model=WRITER, tools=[TOOL], **ASK) as events:
        [call] = events.get_final_completion().choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("find_ship", '{"name":"ferry"}')


@check("parsed outputs")
def parsed() -> None:
    answer = client.chat.completions.parse(model=SMALL, response_format=Ship, **ASK)
    assert isinstance(answer.choices[0].message.parsed, Ship)


@check("streamed parsed outputs")
def streamed_parsed() -> None:
    with client.chat.completions.stream(model=SMALL, response_format=Ship, **ASK) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Ship)


@check("`with_raw_response`")
def raw() -> None:
    answer = client.chat.completions.with_raw_response.create(model=WRITER, **ASK)
    assert QUESTION in answer.parse().choices[0].message.content
    assert float(answer.headers["x-breakwater-cost-usd"]) > 0


@check("what is left of a rate limit, whole and streamed; the SDK's own backoff obeys `retry-after-ms`")
def backoff() -> None:
    create_raw = client.chat.completions.with_raw_response.create
    task = limited_task(requests_per_minute=5)
    for stream, remaining in ((False, "4"), (True, "3")):
        left = create_raw(model=SMALL, extra_headers=task, stream=stream, **ASK).headers
        assert (left["x-ratelimit-limit-requests"], left["x-ratelimit-remaining-requests"]) == ("5", remaining)
        assert re.fullmatch(r"1m0(\.\d+)?s|[2-5]\d(\.\d+)?s", left["x-ratelimit-reset-requests"])
        assert "x-ratelimit-limit-tokens" not in left

    def create_with(retries: int) -> Any:
        return client.with_options(max_retries=retries).chat.completions.create(model=SMALL, extra_headers=busy, **ASK)

    busy = limited_task(concurrent_calls=1)
    slow_call = threading.Thread(
        target=client.chat.completions.create, kwargs={"model": SLOW, "extra_headers": busy, **ASK}, daemon=True
    )
    slow_call.start()
    wait_s, took_s = backoff_of(openai.RateLimitError, create_with)
    assert wait_s <= took_s < wait_s + 3


@check("`with_streaming_response`")
def streaming_response() -> None:
    with client.chat.completions.with_streaming_response.create(model=WRITER, **ASK) as answer:
        assert QUESTION in answer.parse().choices[0].message.content


@check("models")
def models() -> None:
    assert WRITER in {model.id for model in client.models.list()}
    assert client.models.retrieve(WRITER).id == WRITER


@check("errors")
def errors() -> None:
    for raised, call in (
        (openai.NotFoundError, lambda: client.chat.completions.create(model="no-such", **ASK)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=WRITER, messages=[])),
        (openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list()),
    ):
        try:
            call()
        except raised:
            continue
        raise AssertionError(f"no {raised.__name__}")


@check("async chat and stream")
async def asynchronous() -> None:
    async with AsyncOpenAI() as other:
        answer = await other.chat.completions.create(model=WRITER, **ASK)
        assert QUESTION in answer.choices[0].message.content
        chunks = [chunk async for chunk in await other.chat.completions.create(model=WRITER, stream=True, **ASK)]
        assert QUESTION in "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


run()
