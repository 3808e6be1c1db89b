"""`anthropic`'s client of Vertex AI, called without a plane: its double speaks what that understands."""

import json
import os
from typing import Any

from anthropic import AnthropicVertex
from checks import ANSWER, QUESTION, THOUGHT, check, run

MODEL = "claude-opus-4-5@20251101"
ASKED: Any = {"role": "user", "content": QUESTION}
MESSAGE: dict[str, Any] = {
    "max_tokens": 2000,
    "tools": [{"name": "find_ship", "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}}}],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}


@check("the double of Vertex AI, without a plane", "Messages")
def conversations() -> None:
    double = json.loads(os.environ["VERTEX_DOUBLE"])
    vertex = AnthropicVertex(
        base_url=f"{double['url']}/v1", region="europe-west4", project_id="my-project", access_token=double["token"]
    )
    for streamed in (False, True):

        def answer(turns: list[Any], streamed: bool = streamed) -> Any:
            if not streamed:
                return vertex.messages.create(model=MODEL, messages=turns, **MESSAGE)
            with vertex.messages.stream(model=MODEL, messages=turns, **MESSAGE) as events:
                return events.get_final_message()

        asked = answer([ASKED])
        thought, call = asked.content
        assert (thought.thinking, call.name, call.input) == (THOUGHT, "find_ship", {"name": "ferry"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "at sea"}
        turns = [ASKED, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        assert answer(turns).content[-1].text == ANSWER


run()
