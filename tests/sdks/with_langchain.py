"""`langchain-openai`. It takes its base URL and key from the environment."""

from checks import QUESTION, SMALL, WRITER, check, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

writer = ChatOpenAI(model=WRITER)


class Ship(BaseModel):
    """A ship."""

    name: str
    knots: int


@tool
def find_ship(name: str) -> str:
    """Where a ship is."""
    return f"{name} is at sea"


@check("`invoke`")
def invoke() -> None:
    answer = writer.invoke(QUESTION)
    assert QUESTION in answer.content
    assert answer.usage_metadata["total_tokens"] > 0


@check("`batch`")
def batch() -> None:
    assert all(QUESTION in answer.content for answer in writer.batch([QUESTION] * 3))


@check("`stream`")
def stream() -> None:
    pieces = [piece.content for piece in writer.stream(QUESTION)]
    assert QUESTION in "".join(pieces)
    assert len(pieces) > 3


@check("`ainvoke`, `astream`")
async def asynchronous() -> None:
    assert QUESTION in (await writer.ainvoke(QUESTION)).content
    assert QUESTION in "".join([piece.content async for piece in writer.astream(QUESTION)])


@check("tools and their results")
def tools() -> None:
    bound = writer.bind_tools([find_ship])
    asked = bound.invoke(QUESTION)
    [call] = asked.tool_calls
    result = find_ship.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == "ferry is at sea"
    assert not bound.invoke([HumanMessage(QUESTION), asked, result]).tool_calls


@check("structured output, by schema and by tool")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        found = ChatOpenAI(model=SMALL).with_structured_output(Ship, method=method).invoke(QUESTION)
        assert isinstance(found, Ship), method


run()
