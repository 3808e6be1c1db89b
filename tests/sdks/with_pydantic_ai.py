"""`pydantic-ai`. It takes its base URL and key from the environment."""

from checks import QUESTION, SMALL, WRITER, check, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel


class Ship(BaseModel):
    name: str
    knots: int


@check("text")
def text() -> None:
    result = Agent(OpenAIChatModel(WRITER), system_prompt="Answer briefly.").run_sync(QUESTION)
    assert QUESTION in result.output
    assert result.usage.total_tokens > 0


@check("stream")
async def stream() -> None:
    async with Agent(OpenAIChatModel(WRITER)).run_stream(QUESTION) as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
    assert QUESTION in "".join(pieces)
    assert len(pieces) > 3


@check("a tool")
def tool() -> None:
    agent = Agent(OpenAIChatModel(WRITER))
    found: list[str] = []

    @agent.tool_plain
    def find_ship(name: str) -> str:
        found.append(name)
        return "at sea"

    agent.run_sync(QUESTION)
    assert found == ["ferry"]


@check("typed output, by tool and by schema")
def typed() -> None:
    for output in (Ship, NativeOutput(Ship)):
        assert isinstance(Agent(OpenAIChatModel(SMALL), output_type=output).run_sync(QUESTION).output, Ship)


run()
