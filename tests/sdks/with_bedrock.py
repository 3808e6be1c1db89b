"""`anthropic` for Python with models of Bedrock's: tools and thinking, whole and streamed."""

from typing import Any

from anthropic import Anthropic
from checks import BEDROCK, QUESTION, Models, check, run

PARAMETERS: Any = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ASKED: Any = {"role": "user", "content": QUESTION}
ANSWER = "The ferry is at sea."
MESSAGE: dict[str, Any] = {
    "max_tokens": 2000,
    "tools": [{"name": "find_ship", "input_schema": PARAMETERS}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
messages = Anthropic().messages


def turns_after(asked: Any) -> list[Any]:
    """The conversation after a message that has called the tool, as Anthropic's SDK gives its blocks back."""
    assert asked.stop_reason == "tool_use"
    thoughts = [block for block in asked.content if block.type == "thinking"]
    assert thoughts[0].thinking == "A ship; look it up."
    call = asked.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "find_ship", {"name": "ferry"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "at sea"}
    return [ASKED, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]


@check("Bedrock: tools and thinking", door="Messages", models=BEDROCK)
def whole_messages(models: Models) -> None:
    asked = messages.create(model=models.writer, messages=[ASKED], **MESSAGE)
    answer = messages.create(model=models.writer, messages=turns_after(asked), **MESSAGE)
    assert answer.content[-1].text == ANSWER
    assert answer.usage.cache_read_input_tokens == 1000


@check("Bedrock: streamed tools and thinking", door="Messages", models=BEDROCK)
def streamed_messages(models: Models) -> None:
    with messages.stream(model=models.writer, messages=[ASKED], **MESSAGE) as events:
        asked = events.get_final_message()
    with messages.stream(model=models.writer, messages=turns_after(asked), **MESSAGE) as events:
        assert events.get_final_text() == ANSWER


run()
