"""`openai` for Python with a model of each kind of provider: tools and thinking, whole and streamed."""

import json
from typing import Any

from checks import ANSWER, KINDS, QUESTION, Models, check, run, task_of, thought_of
from openai import OpenAI

PARAMETERS: Any = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL: Any = {"type": "function", "function": {"name": "find_ship", "parameters": PARAMETERS}}
FUNCTION: Any = {"type": "function", "name": "find_ship", "parameters": PARAMETERS}
ASKED: Any = {"role": "user", "content": QUESTION}
openai = OpenAI()


def settings(models: Models, door: str, *, streamed: bool) -> dict[str, Any]:
    """What both calls of a conversation have in common. Claude thinks where its own param says so."""
    is_claude = models.writer.endswith(("claude", "anthropic"))
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if is_claude and door == "chat" else {}
    return {
        "model": models.writer,
        "extra_headers": task_of(models, "openai", door, streamed=streamed),
        "extra_body": {"max_tokens": 2000, **thinking} if door == "chat" else {},
    }


def chat(models: Models, messages: list[Any], *, streamed: bool) -> Any:
    chats = openai.chat.completions
    asked: Any = {"messages": messages, "tools": [TOOL], "reasoning_effort": "low"}
    asked |= settings(models, "chat", streamed=streamed)
    if not streamed:
        return chats.create(**asked)
    with chats.stream(**asked, stream_options={"include_usage": True}) as events:
        return events.get_final_completion()


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without what the SDK's own parser has added to it."""
    for call in message["tool_calls"]:
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return {name: value for name, value in message.items() if name != "parsed"}


def conversation(models: Models, *, streamed: bool) -> None:
    asked = chat(models, [ASKED], streamed=streamed)
    [choice] = asked.choices
    assert choice.finish_reason == "tool_calls"
    message = choice.message.to_dict(exclude_none=True)
    blocks = "".join(block["thinking"] for block in message.get("thinking_blocks") or ())
    assert (message.get("reasoning_content") or blocks) == thought_of(models, "chat"), message
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find_ship", {"name": "ferry"})
    turns = [ASKED, as_sent(message), {"role": "tool", "tool_call_id": call.id, "content": "at sea"}]
    answer = chat(models, turns, streamed=streamed)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    for usage in (asked.usage, answer.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (1220, 9)
        assert usage.prompt_tokens_details.cached_tokens == 1000


@check("each kind of provider: tools and thinking", models=KINDS)
def chats(models: Models) -> None:
    conversation(models, streamed=False)


@check("each kind of provider: streamed tools and thinking", models=KINDS)
def streamed_chats(models: Models) -> None:
    conversation(models, streamed=True)


def response(models: Models, items: list[Any], *, streamed: bool) -> Any:
    asked: Any = {
        "input": items,
        "tools": [FUNCTION],
        "store": False,
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    asked |= {"include": ["reasoning.encrypted_content"], **settings(models, "Responses", streamed=streamed)}
    if not streamed:
        return openai.responses.create(**asked)
    with openai.responses.stream(**asked) as events:
        return events.get_final_response()


def responses_conversation(models: Models, *, streamed: bool) -> None:
    first = response(models, [ASKED], streamed=streamed)
    parts = [
        part.text
        for item in first.output
        if item.type == "reasoning"
        for part in (*item.summary, *(item.content or ()))
    ]
    assert "".join(parts) == thought_of(models, "Responses"), first.output
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("find_ship", {"name": "ferry"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "at sea"}
    second = response(models, [ASKED, *first.output, result], streamed=streamed)
    assert (second.output_text, second.status) == (ANSWER, "completed")
    for usage in (first.usage, second.usage):
        assert (usage.input_tokens, usage.output_tokens) == (1220, 9)
        assert usage.input_tokens_details.cached_tokens == 1000


@check("each kind of provider: tools and thinking", "Responses", KINDS)
def responses(models: Models) -> None:
    responses_conversation(models, streamed=False)


@check("each kind of provider: streamed tools and thinking", "Responses", KINDS)
def streamed_responses(models: Models) -> None:
    responses_conversation(models, streamed=True)


run()
