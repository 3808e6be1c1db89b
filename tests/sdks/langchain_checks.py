"""Checks of LangChain that are the same for each of its chat models."""

from collections.abc import Callable
from typing import Any

from checks import QUESTION, Models, check
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel


class Ship(BaseModel):
    """A ship."""

    name: str
    knots: int


@tool
def find_ship(name: str) -> str:
    """Where a ship is."""
    return f"{name} is at sea"


def invoke(open_model: Any, models: Models) -> None:
    answer = open_model(model=models.writer).invoke([SystemMessage("You know ships."), HumanMessage(QUESTION)])
    assert QUESTION in answer.text
    assert answer.usage_metadata["total_tokens"] > 0


def batch(open_model: Any, models: Models) -> None:
    assert all(QUESTION in answer.text for answer in open_model(model=models.writer).batch([QUESTION] * 3))


def stream(open_model: Any, models: Models) -> None:
    pieces = list(open_model(model=models.writer).stream(QUESTION))
    assert QUESTION in "".join(piece.text for piece in pieces)
    assert len(pieces) > 1
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata["total_tokens"] > 0


async def asynchronous(open_model: Any, models: Models) -> None:
    model = open_model(model=models.writer)
    assert QUESTION in (await model.ainvoke(QUESTION)).text
    assert QUESTION in "".join([piece.text async for piece in model.astream(QUESTION)])


def tools(open_model: Any, models: Models) -> None:
    bound = open_model(model=models.writer).bind_tools([find_ship])
    asked = bound.invoke(QUESTION)
    [call] = asked.tool_calls
    result = find_ship.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content == "ferry is at sea"
    assert not bound.invoke([HumanMessage(QUESTION), asked, result]).tool_calls
    pieces = list(bound.stream(QUESTION))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("find_ship", {"name": "ferry"})]
    assert not bound.invoke([HumanMessage(QUESTION), whole, find_ship.invoke(whole.tool_calls[0])]).tool_calls


def structured(open_model: Any, models: Models) -> None:
    for method in ("json_schema", "function_calling"):
        found = open_model(model=models.small).with_structured_output(Ship, method=method).invoke(QUESTION)
        assert isinstance(found, Ship), method


def add(door: str, open_model: Callable[..., Any], models: tuple[Models, ...]) -> None:
    """Adds the checks of a chat model, which is opened by a model's name."""
    for what, function in (
        ("`invoke`", invoke),
        ("`batch`", batch),
        ("`stream`", stream),
        ("`ainvoke`, `astream`", asynchronous),
        ("tools and their results, streamed and not", tools),
        ("structured output, by schema and by tool", structured),
    ):
        check(what, door, models)(lambda pair, function=function: function(open_model, pair))
