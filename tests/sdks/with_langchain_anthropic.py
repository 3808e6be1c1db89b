"""`langchain-anthropic`. It takes its base URL and key from the environment."""

from typing import Any

from checks import CHAT, MESSAGES, QUESTION, RESPONSES, check, run
from langchain_anthropic import ChatAnthropic
from langchain_checks import add, find_ship
from langchain_core.messages import HumanMessage

add("Messages", ChatAnthropic, (MESSAGES, CHAT, RESPONSES))


@check("a tool loop with thinking blocks", "Messages")
def thinking() -> None:
    options: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4000}
    bound = ChatAnthropic(model="claude-thinker", **options).bind_tools([find_ship])
    asked = bound.invoke(QUESTION)
    assert [block["type"] for block in asked.content_blocks] == ["reasoning", "tool_call"]
    answer = bound.invoke([HumanMessage(QUESTION), asked, find_ship.invoke(asked.tool_calls[0])])
    assert answer.text == "The ferry is at sea."


run()
