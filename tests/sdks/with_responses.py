"""`openai` for Python, its Responses API. It takes its base URL and key from the environment."""

import time
from functools import partial
from typing import Any

import openai
from checks import CHAT, MESSAGES, PDF, PNG, QUESTION, RESPONSES, SMALL, WRITER, Models, check, raises, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

ALL = (CHAT, RESPONSES, MESSAGES)
SLOW = "gpt-slow"
TOOL: Any = {
    "type": "function",
    "name": "find_ship",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "strict": True,
}
client = OpenAI()
respond = client.responses
check = partial(check, door="Responses")


class Ship(BaseModel):
    name: str
    knots: int


@check("create with a string", models=ALL)
def create(models: Models) -> None:
    answer = respond.create(model=models.writer, input=QUESTION)
    assert QUESTION in answer.output_text
    assert (answer.status, answer.object, answer.error) == ("completed", "response", None)
    assert answer.id.startswith("resp_")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0


@check("items, `instructions`, `metadata`", models=ALL)
def items(models: Models) -> None:
    turns: Any = [
        {"role": "developer", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Ahoy", "annotations": []}],
            "type": "message",
        },
        {"role": "user", "content": QUESTION},
    ]
    answer = respond.create(
        model=models.writer, input=turns, instructions="You know ships.", metadata={"order": "4711"}
    )
    assert QUESTION in answer.output_text
    assert answer.metadata == {"order": "4711"}
    assert answer.instructions == "You know ships."


@check("images and files", models=ALL)
def images(models: Models) -> None:
    parts: Any = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"},
        {"type": "input_file", "filename": "ships.pdf", "file_data": f"data:application/pdf;base64,{PDF}"},
    ]
    answer = respond.create(model=models.writer, input=[{"role": "user", "content": parts}])
    assert QUESTION in answer.output_text


@check("stream, in the order of its events", models=ALL)
def stream(models: Models) -> None:
    events: list[Any] = list(respond.create(model=models.writer, input=QUESTION, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    ended = events[-1].response
    assert QUESTION in text
    assert text == events[-4].text == ended.output_text == respond.retrieve(ended.id).output_text
    assert ended.usage.total_tokens > 0


@check("`stream()` helper", models=ALL)
def stream_helper(models: Models) -> None:
    with respond.stream(model=models.writer, input=QUESTION) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events.get_final_response().output_text
    assert QUESTION in text


@check("a stream that breaks off", models=ALL)
def broken(models: Models) -> None:
    with respond.stream(model=f"{models.writer}-breaks", input=QUESTION) as stream:
        *events, last = stream
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.response.output[0].content[0].text == text != ""
    raises(RuntimeError, stream.get_final_response)


@check("tools and their results", models=ALL)
def tools(models: Models) -> None:
    asked = respond.create(model=models.writer, input=QUESTION, tools=[TOOL])
    [call] = [item for item in asked.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("find_ship", '{"name":"ferry"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "at sea"}
    turns: Any = [{"role": "user", "content": QUESTION}, *asked.output, result]
    assert respond.create(model=models.writer, input=turns, tools=[TOOL]).output_text


@check("forced tool", models=ALL)
def forced_tool(models: Models) -> None:
    for choice in ("required", {"type": "function", "name": "find_ship"}):
        asked = respond.create(model=models.small, input=QUESTION, tools=[TOOL], tool_choice=choice)
        [call] = [item for item in asked.output if item.type == "function_call"]
        assert call.name == "find_ship", choice


@check("streamed tool calls", models=ALL)
def streamed_tools(models: Models) -> None:
    with respond.stream(model=models.writer, input=QUESTION, tools=[TOOL]) as events:
        seen: list[Any] = list(events)
        [call] = [item for item in events.get_final_response().output if item.type == "function_call"]
    deltas = [event for event in seen if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in seen if event.type == "response.function_call_arguments.done"]
    assert "".join(event.delta for event in deltas) == done.arguments == call.arguments == '{"name":"ferry"}'
    assert {done.item_id, *(event.item_id for event in deltas)} == {call.id}


@check("parsed outputs", models=ALL)
def parsed(models: Models) -> None:
    assert isinstance(respond.parse(model=models.small, input=QUESTION, text_format=Ship).output_parsed, Ship)
    with respond.stream(model=models.small, input=QUESTION, text_format=Ship) as events:
        assert isinstance(events.get_final_response().output_parsed, Ship)


@check("`max_output_tokens`", models=ALL)
def limit(models: Models) -> None:
    answer = respond.create(model=models.writer, input=QUESTION, max_output_tokens=16)
    assert answer.status == "completed"
    answer = respond.create(model=models.writer, input=QUESTION * 40, max_output_tokens=16)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    kinds = [
        event.type
        for event in respond.create(model=models.writer, input=QUESTION * 40, max_output_tokens=16, stream=True)
    ]
    assert kinds[-1] == "response.incomplete"


@check("reasoning items, sent back with `encrypted_content`", models=(RESPONSES,))
def reasoning(models: Models) -> None:
    options: Any = {
        "model": "gpt-5-thinker",
        "tools": [TOOL],
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    asked = respond.create(input=QUESTION, **options)
    assert [item.type for item in asked.output] == ["reasoning", "function_call"]
    assert asked.output[0].encrypted_content
    result = {"type": "function_call_output", "call_id": asked.output[1].call_id, "output": "at sea"}
    turns: Any = [{"role": "user", "content": QUESTION}, *asked.output, result]
    with respond.stream(input=turns, **options) as events:
        answer = events.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "The ferry is at sea."


@check("web search with citations, whole and streamed")
def search() -> None:
    options: Any = {"model": "gpt-5-searcher", "input": QUESTION, "tools": [{"type": "web_search"}]}
    with respond.stream(**options) as events:
        streamed = events.get_final_response()
    for answer in (respond.create(**options), streamed):
        assert [item.type for item in answer.output] == ["web_search_call", "message"]
        [cited] = answer.output[1].content[0].annotations
        assert (cited.type, cited.url) == ("url_citation", "https://ships.example.com/ferry")


@check("`previous_response_id`, `retrieve`, `input_items`", models=ALL)
def previous(models: Models) -> None:
    first = respond.create(model=models.writer, input="Remember the ferry.")
    second = respond.create(model=models.writer, input=QUESTION, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert respond.retrieve(second.id).to_dict() == second.to_dict()
    [item] = list(respond.input_items.list(first.id))
    assert item.content[0].text == "Remember the ferry."


@check("background, polled", models=ALL)
def background(models: Models) -> None:
    answer = respond.create(model=models.writer, input=QUESTION, background=True)
    assert answer.status in {"queued", "in_progress"}
    assert answer.background
    answer = _ended(answer.id)
    assert answer.status == "completed"
    assert QUESTION in answer.output_text


@check("a background stream, resumed with `starting_after`", models=ALL)
def resumed(models: Models) -> None:
    seen: list[Any] = []
    with respond.create(model=models.writer, input=QUESTION, background=True, stream=True) as events:
        for event in events:
            seen.append(event)
            if len(seen) == 6:
                break
    begun, last = seen[0].response.id, seen[-1].sequence_number
    assert last == 5
    seen += respond.retrieve(begun, stream=True, starting_after=last)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert QUESTION in text
    assert text == seen[-1].response.output_text == respond.retrieve(begun).output_text
    assert list(respond.retrieve(begun, stream=True, starting_after=10_000)) == []
    with respond.stream(response_id=begun, starting_after=last) as again:
        assert "".join(event.delta for event in again if event.type == "response.output_text.delta") == "".join(
            event.delta for event in seen[6:] if event.type == "response.output_text.delta"
        )


@check("`cancel`")
def cancel() -> None:
    answer = respond.create(model=SLOW, input=QUESTION, background=True)
    assert respond.cancel(answer.id).status == "cancelled"
    assert _ended(answer.id).status == "cancelled"


@check("`delete`, `store=False`")
def deleted() -> None:
    answer = respond.create(model=WRITER, input=QUESTION)
    respond.delete(answer.id)
    raises(openai.NotFoundError, respond.retrieve, answer.id)
    raises(openai.NotFoundError, respond.delete, answer.id)
    answer = respond.create(model=WRITER, input=QUESTION, store=False)
    raises(openai.NotFoundError, respond.retrieve, answer.id)


@check("`with_raw_response`, `with_streaming_response`")
def raw() -> None:
    answer = respond.with_raw_response.create(model=WRITER, input=QUESTION)
    assert QUESTION in answer.parse().output_text
    assert float(answer.headers["x-breakwater-cost-usd"]) > 0
    with respond.with_streaming_response.create(model=WRITER, input=QUESTION) as streamed:
        assert QUESTION in streamed.parse().output_text


@check("errors")
def errors() -> None:
    ask: Any = {"model": SMALL, "input": QUESTION}
    raises(openai.NotFoundError, respond.create, **{**ask, "model": "no-such"})
    raises(openai.NotFoundError, respond.retrieve, "resp_01JZZZZZZZZZZZZZZZZZZZZZZZ")
    raises(openai.AuthenticationError, client.with_options(api_key="wrong").responses.create, **ask)
    assert raises(openai.BadRequestError, respond.create, conversation="conv_1", **ask).param == "conversation"
    hosted = raises(openai.BadRequestError, respond.create, tools=[{"type": "web_search"}], **ask)
    assert hosted.param == "tools[0].type"
    assert raises(openai.BadRequestError, respond.create, extra_body={"no_such": 1}, **ask).param == "no_such"
    busy = {"x-breakwater-total-timeout-s": "2"}
    limited = raises(openai.RateLimitError, respond.create, model="gpt-busy", input=QUESTION, extra_headers=busy)
    assert 0 < int(limited.response.headers["retry-after"]) <= 30


@check("async create, stream and background")
async def asynchronous() -> None:
    async with AsyncOpenAI() as other:
        answer = await other.responses.create(model=WRITER, input=QUESTION)
        assert QUESTION in answer.output_text
        async with other.responses.stream(model=WRITER, input=QUESTION, background=True) as events:
            final = await events.get_final_response()
        assert QUESTION in final.output_text
        assert (await other.responses.retrieve(final.id)).output_text == final.output_text


def _ended(response_id: str) -> Any:
    """A response when it has ended."""
    for _ in range(200):
        answer = respond.retrieve(response_id)
        if answer.status not in {"queued", "in_progress"}:
            return answer
        time.sleep(0.1)
    raise AssertionError(f"{response_id} is {answer.status}")


run()
