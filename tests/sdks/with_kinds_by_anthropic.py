"""`anthropic` for Python with a model of each kind of provider: tools and thinking, whole and streamed."""

from functools import partial
from typing import Any

from anthropic import Anthropic
from checks import ANSWER, KINDS, QUESTION, Models, check, run, task_of, thought_of

PARAMETERS: Any = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ASKED: Any = {"role": "user", "content": QUESTION}
MESSAGE: dict[str, Any] = {
    "max_tokens": 2000,
    "tools": [{"name": "find_ship", "input_schema": PARAMETERS}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
messages = Anthropic().messages
check = partial(check, door="Messages", models=KINDS)


def message(models: Models, turns: list[Any], *, streamed: bool) -> Any:
    headers = task_of(models, "anthropic", "Messages", streamed=streamed)
    asked: Any = {"model": models.writer, "messages": turns, "extra_headers": headers, **MESSAGE}
    if not streamed:
        return messages.create(**asked)
    with messages.stream(**asked) as events:
        return events.get_final_message()


def conversation(models: Models, *, streamed: bool) -> None:
    asked = message(models, [ASKED], streamed=streamed)
    assert asked.stop_reason == "tool_use"
    thoughts = [block.thinking for block in asked.content if block.type == "thinking"]
    assert "".join(thoughts) == thought_of(models, "Messages")
    call = asked.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "find_ship", {"name": "ferry"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "at sea"}
    turns = [ASKED, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = message(models, turns, streamed=streamed)
    assert (answer.content[-1].text, answer.stop_reason) == (ANSWER, "end_turn")
    for usage in (asked.usage, answer.usage):
        written = usage.cache_creation_input_tokens or 0
        assert (usage.input_tokens + written, usage.cache_read_input_tokens, usage.output_tokens) == (220, 1000, 9)


@check("each kind of provider: tools and thinking")
def whole(models: Models) -> None:
    conversation(models, streamed=False)


@check("each kind of provider: streamed tools and thinking")
def streamed(models: Models) -> None:
    conversation(models, streamed=True)


run()
