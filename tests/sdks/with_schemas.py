"""Responses and Messages, held against the schemas of their specifications, which `llm-comply` has.

Of Responses, all cases of the Open Responses project in the words of its specification: `llm-comply` runs some of them,
and looks at the schemas of no event of Messages.
"""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import llm_comply
from checks import CHAT, MESSAGES, QUESTION, RESPONSES, Models, check, run
from llm_comply.schema import SpecLoader

ALL = (CHAT, RESPONSES, MESSAGES)
IMAGE = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
PDF = "data:application/pdf;base64,JVBERi0xLjQKJSVFT0YK"
FINDS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {"type": "function", "name": "find_ship", "description": "Position of a ship.", "parameters": FINDS}
SPECS = Path(llm_comply.__file__).parent / "specs"
open_responses, anthropic = (SpecLoader(str(SPECS / f"{name}.json")) for name in ("openresponses", "anthropic"))
EVENTS = {
    kind: name
    for name in open_responses.schema_names
    if name.endswith("StreamingEvent")
    for kind in (open_responses.get_schema(name) or {})["properties"]["type"]["enum"]
}
"""Schemas of Responses' events, by their type."""
responses, messages = partial(check, door="Responses"), partial(check, door="Messages")


def valid(loader: SpecLoader, schema: str, value: dict[str, Any]) -> dict[str, Any]:
    """The value, which has the form of a schema."""
    assert not (mistakes := loader.validate(value, schema)), (value.get("type"), mistakes)
    return value


def call(path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of the answer to a GET, or to a POST with a body."""
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
        "anthropic-version": "2023-06-01",
    }
    data = None if body is None else json.dumps(body).encode()
    request = Request(os.environ["OPENAI_BASE_URL"] + path, data, headers)
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as refused:
        return refused.code, refused.read().decode()


def respond(models: Models, given: Any, **more: Any) -> dict[str, Any]:
    """A completed response, which has the form of the specification."""
    status, text = call("/responses", {"model": models.writer, "input": given, **more})
    assert status == 200, text
    return complete(json.loads(text))


def complete(response: dict[str, Any]) -> dict[str, Any]:
    valid(open_responses, "ResponseResource", response)
    assert response["status"] == "completed", response["status"]
    assert response["output"]
    return response


def stream(models: Models, given: Any, **more: Any) -> list[dict[str, Any]]:
    """The events of a response."""
    status, text = call("/responses", {"model": models.writer, "input": given, "stream": True, **more})
    assert status == 200, text
    return checked(text)


def checked(text: str) -> list[dict[str, Any]]:
    """Events, each in the form of the specification, numbered from 0, the last one with all of the response."""
    events = list(parsed(text))
    for number, event in enumerate(events):
        valid(open_responses, EVENTS[event["type"]], event)
        assert event["sequence_number"] == number
    begun = [event["type"] for event in events[:3] if event["type"] != "response.queued"]
    assert begun[:2] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    complete(events[-1]["response"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return events


def parsed(text: str) -> Iterator[dict[str, Any]]:
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if fields["data"] != "[DONE]":
            event = json.loads(fields["data"])
            assert fields["event"] == event["type"]
            yield event


def user(*content: dict[str, Any] | str) -> dict[str, Any]:
    """A message; a text stands for a part that is one."""
    parts = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in content]
    return {"type": "message", "role": "user", "content": parts}


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


@responses("a text", models=ALL)
def text(models: Models) -> None:
    [item] = respond(models, [user(QUESTION)])["output"]
    assert QUESTION in item["content"][0]["text"]


@responses("a streamed text", models=ALL)
def streamed_text(models: Models) -> None:
    events = stream(models, [user(QUESTION)])
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert len(deltas) > 1
    assert events[-1]["response"]["usage"]["total_tokens"] > 0


@responses("a system message", models=ALL)
def system(models: Models) -> None:
    said = {"type": "message", "role": "system", "content": "You are a pirate."}
    assert kinds(respond(models, [said, user("Say hello.")])) == ["message"]


@responses("several turns", models=ALL)
def turns(models: Models) -> None:
    said = {"type": "message", "role": "assistant", "content": "Hello Alice."}
    assert kinds(respond(models, [user("I am Alice."), said, user("Who am I?")])) == ["message"]


@responses("phases of the assistant's messages", models=ALL)
def phases(models: Models) -> None:
    said = {"type": "message", "role": "assistant", "content": "Let me see."}
    history = [said | {"phase": "commentary"}, said | {"phase": "final_answer"}]
    assert kinds(respond(models, [user("I am Alice."), *history, user("Who am I?")])) == ["message"]


@responses("a function call", models=ALL)
def function_call(models: Models) -> None:
    response = respond(models, [user(QUESTION)], tools=[TOOL])
    assert kinds(response) == ["function_call"]
    assert json.loads(response["output"][0]["arguments"]) == {"name": "ferry"}


@responses("a streamed function call", models=ALL)
def streamed_function_call(models: Models) -> None:
    events = stream(models, [user(QUESTION)], tools=[TOOL])
    [done] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done["arguments"] == '{"name":"ferry"}'
    added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    assert added == ["function_call"]


@responses("a function call and its output", models=ALL)
def round_trip(models: Models) -> None:
    demands = {"type": "function", "name": "find_ship"}
    asked = user(QUESTION)
    [call] = respond(models, [asked], tools=[TOOL], tool_choice=demands)["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "in port"}
    assert kinds(respond(models, [asked, call, output], tools=[TOOL])) == ["message"]


@responses("an image", models=ALL)
def image(models: Models) -> None:
    assert kinds(respond(models, [user("What is it?", {"type": "input_image", "image_url": IMAGE})])) == ["message"]


@responses("a file", models=ALL)
def file(models: Models) -> None:
    given = {"type": "input_file", "filename": "a.pdf", "file_data": PDF}
    assert kinds(respond(models, [user("What is it?", given)])) == ["message"]


@responses("`previous_response_id`", models=ALL)
def previous(models: Models) -> None:
    first = respond(models, "The word is papaya.")
    second = respond(models, "Which word is it?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@responses("a background response, followed and read", models=ALL)
def background(models: Models) -> None:
    status, text = call("/responses", {"model": models.writer, "input": QUESTION, "background": True})
    created = valid(open_responses, "ResponseResource", json.loads(text))
    assert (status, created["background"], created["status"] in ("queued", "in_progress")) == (200, True, True)
    place = f"/responses/{created['id']}"
    events = checked(call(f"{place}?stream=true")[1])
    assert json.loads(call(place)[1]) == complete(events[-1]["response"])
    rest = list(parsed(call(f"{place}?stream=true&starting_after=2")[1]))
    assert rest == events[3:]


@responses("a summary of the reasoning", models=(RESPONSES,))
def reasoning(models: Models) -> None:
    events = stream(models, [user(QUESTION)], reasoning={"effort": "low", "summary": "auto"})
    thought = events[-1]["response"]["output"][0]
    assert thought["type"] == "reasoning"
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == thought["summary"][0]["text"] != ""


@responses("a search of the web, where the provider speaks Responses", models=ALL)
def search(models: Models) -> None:
    demands = {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}
    status, text = call("/responses", {"model": models.small, "input": "ferries", **demands})
    if models == RESPONSES:
        # The specification has no schema of this item.
        assert (status, kinds(json.loads(text))) == (200, ["web_search_call", "message"]), text
    else:
        assert (status, json.loads(text)["error"]["param"]) == (400, "tools[0].type"), text


@responses("an error names the field")
def no_model() -> None:
    status, text = call("/responses", {"input": [user(QUESTION)]})
    error = json.loads(text)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", "model"), text


Blocks = list[dict[str, Any]]
USED = {"name": "find_ship", "description": "Position of a ship.", "input_schema": FINDS}


def asked(models: Models, *content: str | Blocks, **more: Any) -> dict[str, Any]:
    """The body of a request, whose messages are of the user and the assistant in turn."""
    said = [{"role": ("user", "assistant")[turn % 2], "content": given} for turn, given in enumerate(content)]
    return {"model": models.writer, "max_tokens": 2000, "messages": said, **more}


def message(models: Models, *content: str | Blocks, **more: Any) -> dict[str, Any]:
    """A message, whole and streamed in the form of the specification; both have the same content but for ids."""
    body = asked(models, *content, **more)
    (status, text), (_, events) = call("/messages", body), call("/messages", {**body, "stream": True})
    assert status == 200, text
    whole = valid(anthropic, "Message", json.loads(text))
    streamed = accumulated([event for event in parsed(events) if event["type"] != "ping"])
    assert streamed["stop_reason"] == whole["stop_reason"]
    assert [shape(block) for block in streamed["content"]] == [shape(block) for block in whole["content"]]
    return whole


def shape(block: dict[str, Any]) -> tuple[Any, ...]:
    """The parts of a block that are the same in two answers of a simulated model."""
    return block["type"], block.get("name"), block.get("input"), block.get("thinking"), "signature" in block


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events in the form of the specification come to."""
    result, blocks = dict[str, Any](), list[dict[str, Any]]()
    for event in events:
        valid(anthropic, "MessageStreamEvent", event)
        match event:
            case {"type": "message_start"}:
                assert not result
                result = event["message"]
            case {"type": "content_block_start"}:
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | ({"input": ""} if "input" in event["content_block"] else {}))
            case {"type": "content_block_delta", "delta": delta}:
                for name in delta.keys() & {"text", "thinking", "signature", "partial_json"}:
                    blocks[event["index"]]["input" if name == "partial_json" else name] += delta[name]
            case {"type": "message_delta"}:
                result |= event["delta"]
                assert event["usage"]["output_tokens"] > 0
            case _:
                pass
    assert events[-1]["type"] == "message_stop"
    content = [
        {**block, "input": json.loads(block["input"] or "{}")} if "input" in block else block for block in blocks
    ]
    return {**result, "content": content}


@messages("a text", models=ALL)
def message_text(models: Models) -> None:
    answer = message(models, QUESTION, system="You are a pirate.", metadata={"user_id": "u"})
    assert (answer["stop_reason"], answer["type"], answer["role"]) == ("end_turn", "message", "assistant")
    assert QUESTION in answer["content"][-1]["text"]
    assert answer["usage"]["input_tokens"] > 0


@messages("several turns", models=ALL)
def message_turns(models: Models) -> None:
    assert message(models, "I am Alice.", "Hello Alice.", "Who am I?")["stop_reason"] == "end_turn"


@messages("a tool's use and its result", models=ALL)
def tool_use(models: Models) -> None:
    first = message(models, QUESTION, tools=[USED])
    assert (first["stop_reason"], first["content"][-1]["input"]) == ("tool_use", {"name": "ferry"})
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "in port"}
    assert message(models, QUESTION, first["content"], [result], tools=[USED])["stop_reason"] == "end_turn"


@messages("a demanded tool", models=ALL)
def demanded(models: Models) -> None:
    answer = message(models, QUESTION, tools=[USED], tool_choice={"type": "tool", "name": "find_ship"})
    assert answer["stop_reason"] == "tool_use"


@messages("an image", models=ALL)
def message_image(models: Models) -> None:
    kind, data = IMAGE.removeprefix("data:").split(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data}
    given = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    assert message(models, given)["stop_reason"] == "end_turn"


@messages("a document", models=(MESSAGES,))
def message_document(models: Models) -> None:
    kind, data = PDF.removeprefix("data:").split(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data}
    given = [{"type": "document", "source": source}, {"type": "text", "text": "What is it?"}]
    assert message(models, given)["stop_reason"] == "end_turn"


@messages("thoughts and their signatures", models=(MESSAGES,))
def message_thoughts(models: Models) -> None:
    thinks = {"type": "enabled", "budget_tokens": 1024}
    first = message(models, QUESTION, tools=[USED], thinking=thinks)
    assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "in port"}
    second = message(models, QUESTION, first["content"], [result], tools=[USED], thinking=thinks)
    assert [block["type"] for block in second["content"]] == ["thinking", "text"]


@messages("the output limit", models=ALL)
def message_limit(models: Models) -> None:
    assert message(models, QUESTION, max_tokens=1)["stop_reason"] == "max_tokens"


@messages("`count_tokens`", models=ALL)
def count_tokens(models: Models) -> None:
    body = asked(models, QUESTION)
    del body["max_tokens"]
    status, text = call("/messages/count_tokens", body)
    assert status == 200, text
    assert json.loads(text)["input_tokens"] > 0


@messages("an error has the form of the specification")
def message_error() -> None:
    status, text = call("/messages", {"model": "gpt-4o", "messages": []})
    assert status == 400, text
    valid(anthropic, "ErrorResponse", json.loads(text))
    assert json.loads(text)["error"]["type"] == "invalid_request_error"


if __name__ == "__main__":
    run()
