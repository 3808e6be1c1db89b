"""`litellm` as a client. It takes its base URL and key from the environment."""

import os
from typing import Any

import litellm
from checks import EMBEDDER, MESSAGES, QUESTION, SMALL, WRITER, check, run

ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "api_base": os.environ["OPENAI_BASE_URL"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_ship",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


@check("`completion`")
def completion() -> None:
    answer = litellm.completion(f"openai/{WRITER}", **ASK)
    assert QUESTION in answer.choices[0].message.content
    assert answer.usage.total_tokens > 0


@check("stream")
def stream() -> None:
    chunks = list(litellm.completion(f"openai/{WRITER}", stream=True, **ASK))
    assert QUESTION in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(chunks) > 3


@check("`acompletion`")
async def asynchronous() -> None:
    answer = await litellm.acompletion(f"openai/{WRITER}", **ASK)
    assert QUESTION in answer.choices[0].message.content
    chunks = [chunk async for chunk in await litellm.acompletion(f"openai/{WRITER}", stream=True, **ASK)]
    assert QUESTION in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("tools and their results")
def tools() -> None:
    asked = litellm.completion(f"openai/{WRITER}", tools=[TOOL], **ASK).choices[0].message
    [call] = asked.tool_calls
    assert call.function.name == "find_ship"
    result = {"role": "tool", "tool_call_id": call.id, "content": "at sea"}
    more = {**ASK, "messages": [*ASK["messages"], asked, result]}
    assert litellm.completion(f"openai/{WRITER}", tools=[TOOL], **more).choices[0].finish_reason == "stop"


@check("JSON schema")
def schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "ship", "schema": TOOL["function"]["parameters"]}}
    answer = litellm.completion(f"openai/{SMALL}", response_format=form, **ASK)
    assert answer.choices[0].message.content.startswith('{"name":')


@check("`NotFoundError`")
def unknown_model() -> None:
    try:
        litellm.completion("openai/no-such", **ASK)
    except litellm.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


@check("`responses`, whole and streamed", "Responses")
def responses() -> None:
    ask: dict[str, Any] = {"model": f"openai/{WRITER}", "input": QUESTION, "api_base": os.environ["OPENAI_BASE_URL"]}
    answer = litellm.responses(**ask)
    assert QUESTION in answer.output[0].content[0].text
    events = list(litellm.responses(stream=True, **ask))
    assert QUESTION in "".join(event.delta for event in events if event.type == "response.output_text.delta")


@check("`completion` of an `anthropic/` model, whole and streamed", "Messages")
def messages() -> None:
    ask: dict[str, Any] = {"messages": ASK["messages"], "api_base": os.environ["ANTHROPIC_BASE_URL"]}
    answer = litellm.completion(f"anthropic/{MESSAGES.writer}", **ask)
    assert QUESTION in answer.choices[0].message.content
    chunks = list(litellm.completion(f"anthropic/{MESSAGES.writer}", stream=True, **ask))
    assert QUESTION in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("`embedding`", "embeddings")
def embedding() -> None:
    answer = litellm.embedding(f"openai/{EMBEDDER}", [QUESTION, "tug"], api_base=os.environ["OPENAI_BASE_URL"])
    assert [len(one["embedding"]) for one in answer.data] == [1536, 1536]


run()
