"""`pydantic-ai` with a model of each kind of provider: its loop of tools, with thinking, whole and streamed."""

from typing import Any

from checks import ANSWER, KINDS, QUESTION, Models, check, run, task_of, thought_of
from pydantic_ai import Agent
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

DOORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (OpenAIChatModel, {"openai_reasoning_effort": "low"}),
    "Responses": (OpenAIResponsesModel, {"openai_reasoning_effort": "low", "openai_reasoning_summary": "auto"}),
    "Messages": (AnthropicModel, {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}}),
}


def clerk(models: Models, door: str, found: list[str], *, streamed: bool) -> Any:
    model, settings = DOORS[door]
    headers = task_of(models, "pydantic-ai-slim", door, streamed=streamed)
    # It knows of OpenAI's names only that their models want their reasoning back.
    more: Any = {"profile": {"openai_supports_encrypted_reasoning_content": True}} if door == "Responses" else {}
    agent = Agent(
        model(models.writer, **more), model_settings={**settings, "max_tokens": 2000, "extra_headers": headers}
    )

    @agent.tool_plain
    def find_ship(name: str) -> str:
        found.append(name)
        return "at sea"

    return agent


def examine(models: Models, door: str, result: Any, output: str, found: list[str]) -> None:
    assert (output, found) == (ANSWER, ["ferry"])
    parts = [part for message in result.all_messages() for part in message.parts]
    # Reasoning that is no summary it keeps beside the text.
    thoughts = [
        part.content or "".join((part.provider_details or {}).get("raw_content", ()))
        for part in parts
        if isinstance(part, ThinkingPart)
    ]
    assert "".join(thoughts[:1]) == thought_of(models, door), thoughts
    usage = result.usage
    assert (usage.requests, usage.cache_read_tokens, usage.output_tokens) == (2, 2000, 18), usage


def whole(door: str, models: Models) -> None:
    found: list[str] = []
    result = clerk(models, door, found, streamed=False).run_sync(QUESTION)
    examine(models, door, result, result.output, found)


async def streamed(door: str, models: Models) -> None:
    found: list[str] = []
    async with clerk(models, door, found, streamed=True).run_stream(QUESTION) as result:
        output = await result.get_output()
    examine(models, door, result, output, found)


for through in DOORS:
    check("each kind of provider: tools and thinking", through, KINDS)(
        lambda models, through=through: whole(through, models)
    )
    check("each kind of provider: streamed tools and thinking", through, KINDS)(
        lambda models, through=through: streamed(through, models)
    )
run()
