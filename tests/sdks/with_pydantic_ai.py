"""`pydantic-ai`. It takes its base URLs and keys from the environment."""

from typing import Any

from checks import CHAT, EMBEDDER, MESSAGES, QUESTION, RESPONSES, Models, check, run
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel, OpenAIResponsesModelSettings

ALL = (CHAT, RESPONSES, MESSAGES)


class Ship(BaseModel):
    name: str
    knots: int


def text(kind: Any, models: Models) -> None:
    result = Agent(kind(models.writer), system_prompt="Answer briefly.").run_sync(QUESTION)
    assert QUESTION in result.output
    assert result.usage.total_tokens > 0


async def stream(kind: Any, models: Models) -> None:
    async with Agent(kind(models.writer)).run_stream(QUESTION) as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
    assert QUESTION in "".join(pieces)
    assert len(pieces) > 1
    assert answer.usage.total_tokens > 0


async def tool(kind: Any, models: Models) -> None:
    agent = Agent(kind(models.writer))
    found: list[str] = []

    @agent.tool_plain
    def find_ship(name: str) -> str:
        found.append(name)
        return "at sea"

    await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as answer:
        assert await answer.get_output()
    assert found == ["ferry", "ferry"]


def typed(kind: Any, models: Models) -> None:
    # Of other models than Claude, it does not know that they take a schema through this door.
    by_schema = () if kind is AnthropicModel and models is not MESSAGES else (NativeOutput(Ship),)
    for output in (Ship, *by_schema):
        assert isinstance(Agent(kind(models.small), output_type=output).run_sync(QUESTION).output, Ship), output


def history(kind: Any, models: Models) -> None:
    agent = Agent(kind(models.writer))
    first = agent.run_sync("Remember the ferry.")
    second = agent.run_sync(QUESTION, message_history=first.all_messages())
    assert QUESTION in second.output
    assert second.usage.input_tokens > first.usage.input_tokens


for door, kind, pairs in (
    ("chat", OpenAIChatModel, (CHAT,)),
    ("Responses", OpenAIResponsesModel, ALL),
    ("Messages", AnthropicModel, ALL),
):
    for what, function in (
        ("text", text),
        ("stream", stream),
        ("a tool, streamed and not", tool),
        ("typed output, by tool and by schema", typed),
        ("a conversation", history),
    ):
        check(what, door, pairs)(lambda models, function=function, kind=kind: function(kind, models))


def thinks(model: Any, settings: Any) -> None:
    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def find_ship(name: str) -> str:
        return f"{name} is at sea"

    result = agent.run_sync(QUESTION)
    parts = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert [part for part in parts if part in ("thinking", "tool-call", "text")] == [
        "thinking",
        "tool-call",
        "thinking",
        "text",
    ]
    assert result.output == "The ferry is at sea."


@check("a tool loop with reasoning items", "Responses")
def reasoning() -> None:
    thinks(OpenAIResponsesModel("gpt-5-thinker"), OpenAIResponsesModelSettings(openai_reasoning_summary="detailed"))


@check("a tool loop with thinking blocks", "Messages")
def thinking() -> None:
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    thinks(AnthropicModel("claude-thinker"), AnthropicModelSettings(anthropic_thinking=enabled, max_tokens=4000))


@check("`embed_documents`, `embed_query`", "embeddings")
def embeddings() -> None:
    embedder = Embedder(f"openai:{EMBEDDER}")
    found = embedder.embed_documents_sync(["the ferry", "the tug"])
    assert [len(vector) for vector in found.embeddings] == [1536, 1536]
    assert found.usage.input_tokens > 0
    assert list(embedder.embed_query_sync("the ferry").embeddings[0]) == list(found.embeddings[0])


run()
