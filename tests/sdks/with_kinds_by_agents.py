"""`openai-agents` with a model of each kind of provider: its loop of tools, with thinking, whole and streamed."""

from functools import partial
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool
from checks import ANSWER, KINDS, QUESTION, Models, check, run, task_of, thought_of
from openai.types.shared import Reasoning

check = partial(check, door="Responses", models=KINDS)
found: list[str] = []


@function_tool
def find_ship(name: str) -> str:
    """Where a ship is."""
    found.append(name)
    return "at sea"


def clerk(models: Models, *, streamed: bool) -> Any:
    found.clear()
    headers = task_of(models, "openai-agents", "Responses", streamed=streamed)
    settings = ModelSettings(extra_headers=headers, reasoning=Reasoning(effort="low", summary="auto"))
    return Agent(name="clerk", model=models.writer, tools=[find_ship], model_settings=settings)


def examine(models: Models, result: Any) -> None:
    assert (result.final_output, found) == (ANSWER, ["ferry"])
    thoughts = [
        part.text
        for item in result.new_items
        if item.type == "reasoning_item"
        for part in (*item.raw_item.summary, *(item.raw_item.content or ()))
    ]
    assert "".join(thoughts[:1]) == thought_of(models, "Responses"), thoughts
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.input_tokens, usage.output_tokens) == (2, 2440, 18)
    assert usage.input_tokens_details.cached_tokens == 2000


@check("each kind of provider: tools and thinking")
async def whole(models: Models) -> None:
    examine(models, await Runner.run(clerk(models, streamed=False), QUESTION))


@check("each kind of provider: streamed tools and thinking")
async def streamed(models: Models) -> None:
    result = Runner.run_streamed(clerk(models, streamed=True), QUESTION)
    async for _ in result.stream_events():
        pass
    examine(models, result)


run()
