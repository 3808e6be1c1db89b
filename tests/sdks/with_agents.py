"""`openai-agents`, the Agents SDK, with its defaults: Responses. It takes its base URL and key from the environment."""

from functools import partial
from typing import Any

import openai
from agents import Agent, Runner, SQLiteSession, WebSearchTool, function_tool
from agents.extensions.handoff_prompt import prompt_with_handoff_instructions
from checks import CHAT, MESSAGES, QUESTION, RESPONSES, Models, araises, check, run
from pydantic import BaseModel

ALL = (CHAT, RESPONSES, MESSAGES)
check = partial(check, door="Responses")


class Ship(BaseModel):
    name: str
    knots: int


found: list[str] = []


@function_tool
def find_ship(name: str) -> str:
    """Where a ship is."""
    found.append(name)
    return "at sea"


@check("`run`", models=ALL)
async def text(models: Models) -> None:
    result = await Runner.run(Agent(name="clerk", instructions="Answer briefly.", model=models.writer), QUESTION)
    assert QUESTION in result.final_output
    assert result.context_wrapper.usage.total_tokens > 0


@check("an agent without settings")
async def defaults() -> None:
    found.clear()
    result = await Runner.run(Agent(name="clerk", tools=[find_ship]), QUESTION)
    assert found == ["ferry"]
    assert result.final_output


@check("tools over several turns", models=ALL)
async def tools(models: Models) -> None:
    found.clear()
    clerk = Agent(name="clerk", model=models.writer, tools=[find_ship])
    first = await Runner.run(clerk, QUESTION)
    turns: Any = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
    second = await Runner.run(clerk, turns)
    assert found == ["ferry", "ferry"]
    steps = [item.type for item in second.new_items if item.type != "reasoning_item"]
    assert steps == ["tool_call_item", "tool_call_output_item", "message_output_item"]


@check("`run_streamed` with tools", models=ALL)
async def streamed(models: Models) -> None:
    found.clear()
    result = Runner.run_streamed(Agent(name="clerk", model=models.writer, tools=[find_ship]), QUESTION)
    raw, items = "", []
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            raw += event.data.delta
        elif event.type == "run_item_stream_event" and event.name != "reasoning_item_created":
            items.append(event.name)
    assert found == ["ferry"]
    assert items == ["tool_called", "tool_output", "message_output_created"]
    assert raw == result.final_output != ""


@check("`output_type`", models=ALL)
async def typed(models: Models) -> None:
    clerk = Agent(name="clerk", model=models.small, output_type=Ship)
    assert isinstance((await Runner.run(clerk, QUESTION)).final_output, Ship)
    streamed = Runner.run_streamed(clerk, QUESTION)
    async for _ in streamed.stream_events():
        pass
    assert isinstance(streamed.final_output, Ship)


@check("handoff", models=ALL)
async def handoff(models: Models) -> None:
    pilot = Agent(name="pilot", model=models.small)
    prompt = prompt_with_handoff_instructions("Hand over to the pilot.")
    clerk = Agent(name="clerk", instructions=prompt, model=f"{models.writer}-handoff", handoffs=[pilot])
    result = await Runner.run(clerk, QUESTION)
    assert result.last_agent.name == "pilot"
    assert QUESTION in result.final_output


@check("an agent as a tool", models=ALL)
async def nested(models: Models) -> None:
    inner = Agent(name="pilot", model=models.small)
    tool = inner.as_tool(tool_name="find_ship", tool_description="Where a ship is.")
    outer = Agent(name="clerk", model=f"{models.writer}-nested", tools=[tool])
    result = await Runner.run(outer, QUESTION)
    [output] = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert "ferry" in output


@check("a session", models=ALL)
async def session(models: Models) -> None:
    clerk, kept = Agent(name="clerk", model=models.writer), SQLiteSession("sdks")
    first = await Runner.run(clerk, "Remember the ferry.", session=kept)
    second = await Runner.run(clerk, QUESTION, session=kept)
    assert second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens
    assert QUESTION in second.final_output


@check("`auto_previous_response_id`", models=ALL)
async def chained(models: Models) -> None:
    found.clear()
    clerk = Agent(name="clerk", model=models.writer, tools=[find_ship])
    result = await Runner.run(clerk, QUESTION, auto_previous_response_id=True)
    assert found == ["ferry"]
    assert len({response.response_id for response in result.raw_responses}) == 2
    more = await Runner.run(clerk, "And now?", previous_response_id=result.last_response_id)
    assert found == ["ferry", "ferry"]
    assert more.final_output


@check("a model that thinks")
async def thinking() -> None:
    found.clear()
    result = await Runner.run(Agent(name="clerk", model="gpt-5-thinker", tools=[find_ship]), QUESTION)
    assert [item.type for item in result.new_items if "reasoning" in item.type] == ["reasoning_item"] * 2
    assert (result.final_output, found) == ("The ferry is at sea.", ["ferry"])


@check("errors")
async def errors() -> None:
    for raised, param, more in (
        (openai.NotFoundError, "model", {"model": "no-such"}),
        (openai.BadRequestError, "tools[0].type", {"model": CHAT.small, "tools": [WebSearchTool()]}),
    ):
        error = await araises(raised, Runner.run(Agent(name="clerk", **more), QUESTION))
        assert error.param == param


run()
