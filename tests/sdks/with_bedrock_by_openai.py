"""`openai` for Python with models of Bedrock's: tools and thinking, whole and streamed."""

import json
from typing import Any

from checks import BEDROCK, QUESTION, Models, check, run
from openai import OpenAI

PARAMETERS: Any = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL: Any = {"type": "function", "function": {"name": "find_ship", "parameters": PARAMETERS}}
FUNCTION: Any = {"type": "function", "name": "find_ship", "parameters": PARAMETERS}
ASKED: Any = {"role": "user", "content": QUESTION}
ANSWER = "The ferry is at sea."
openai = OpenAI()


@check("Bedrock: tools", models=BEDROCK)
def whole_chats(models: Models) -> None:
    asked = openai.chat.completions.create(model=models.writer, messages=[ASKED], tools=[TOOL])
    [choice] = asked.choices
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"name": "ferry"}
    turns: Any = [ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "at sea"}]
    answer = openai.chat.completions.create(model=models.writer, messages=turns, tools=[TOOL])
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.prompt_tokens_details.cached_tokens == 1000


@check("Bedrock: streamed tools", models=BEDROCK)
def streamed_chats(models: Models) -> None:
    with openai.chat.completions.stream(model=models.writer, messages=[ASKED], tools=[TOOL]) as events:
        [choice] = events.get_final_completion().choices
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"name": "ferry"}
    with openai.chat.completions.stream(model=models.writer, messages=[ASKED]) as events:
        assert events.get_final_completion().choices[0].message.content == ANSWER


@check("Bedrock: tools and thinking", door="Responses", models=BEDROCK)
def responses(models: Models) -> None:
    asked: Any = {"model": models.writer, "tools": [FUNCTION], "store": False}
    asked["include"] = ["reasoning.encrypted_content"]
    first: Any = openai.responses.create(input=[ASKED], **asked)
    with openai.responses.stream(input=[ASKED], **asked) as events:
        streamed: Any = events.get_final_response()
    for response in (first, streamed):
        [call] = [item for item in response.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "at sea"}
        second = openai.responses.create(input=[ASKED, *response.output, result], **asked)
        assert second.output_text == ANSWER


run()
