"""`langchain-openai` and `langchain-anthropic`. They take their base URLs and keys from the environment."""

from typing import Any

import tiktoken
from checks import CHAT, EMBEDDER, MESSAGES, QUESTION, RESPONSES, SMALL, WRITER, Models, check, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

ALL = (CHAT, RESPONSES, MESSAGES)


class Ship(BaseModel):
    """A ship."""

    name: str
    knots: int


@tool
def find_ship(name: str) -> str:
    """Where a ship is."""
    return f"{name} is at sea"


def chat(model: str, **more: Any) -> Any:
    return ChatOpenAI(model=model, stream_usage=True, **more)


def respond(model: str, **more: Any) -> Any:
    return ChatOpenAI(model=model, use_responses_api=True, **more)


def message(model: str, **more: Any) -> Any:
    return ChatAnthropic(model=model, **more)


def invoke(open_model: Any, models: Models) -> None:
    answer = open_model(models.writer).invoke([SystemMessage("You know ships."), HumanMessage(QUESTION)])
    assert QUESTION in answer.text
    assert answer.usage_metadata["total_tokens"] > 0


def batch(open_model: Any, models: Models) -> None:
    assert all(QUESTION in answer.text for answer in open_model(models.writer).batch([QUESTION] * 3))


def stream(open_model: Any, models: Models) -> None:
    pieces = list(open_model(models.writer).stream(QUESTION))
    assert QUESTION in "".join(piece.text for piece in pieces)
    assert len(pieces) > 1
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.usage_metadata["total_tokens"] > 0


async def asynchronous(open_model: Any, models: Models) -> None:
    model = open_model(models.writer)
    assert QUESTION in (await model.ainvoke(QUESTION)).text
    assert QUESTION in "".join([piece.text async for piece in model.astream(QUESTION)])


def tools(open_model: Any, models: Models) -> None:
    bound = open_model(models.writer).bind_tools([find_ship])
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
        found = open_model(models.small).with_structured_output(Ship, method=method).invoke(QUESTION)
        assert isinstance(found, Ship), method


for door, open_model, pairs in (
    ("chat", chat, (CHAT,)),
    ("Responses", respond, ALL),
    ("Messages", message, ALL),
):
    for what, function in (
        ("`invoke`", invoke),
        ("`batch`", batch),
        ("`stream`", stream),
        ("`ainvoke`, `astream`", asynchronous),
        ("tools and their results, streamed and not", tools),
        ("structured output, by schema and by tool", structured),
    ):
        check(what, door, pairs)(lambda models, function=function, open_model=open_model: function(open_model, models))


@check("`use_previous_response_id`", "Responses", ALL)
def chained(models: Models) -> None:
    model = respond(models.writer, use_previous_response_id=True)
    first = model.invoke("Remember the ferry.")
    second = model.invoke([HumanMessage("Remember the ferry."), first, HumanMessage(QUESTION)])
    assert QUESTION in second.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


@check("a tool loop with thinking blocks", "Messages")
def thinking() -> None:
    options: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 4000}
    bound = message("claude-thinker", **options).bind_tools([find_ship])
    asked = bound.invoke(QUESTION)
    assert [block["type"] for block in asked.content_blocks] == ["reasoning", "tool_call"]
    answer = bound.invoke([HumanMessage(QUESTION), asked, find_ship.invoke(asked.tool_calls[0])])
    assert answer.text == "The ferry is at sea."


@check("`embed_documents` and `embed_query`, as texts and as tokens", "embeddings")
def embeddings() -> None:
    # The real vocabulary would have to be downloaded: here each byte is a token.
    ranks = {bytes([number]): number for number in range(256)}
    tiktoken.registry.ENCODINGS["cl100k_base"] = tiktoken.Encoding(
        "cl100k_base", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={}
    )
    for as_tokens in (False, True):
        embedder = OpenAIEmbeddings(model=EMBEDDER, check_embedding_ctx_length=as_tokens)
        vectors = embedder.embed_documents([f"ship {number}" for number in range(20)])
        assert {len(vector) for vector in vectors} == {1536}
        assert vectors[3] == embedder.embed_query("ship 3") != vectors[4]


@check("`aembed_documents`, `dimensions`", "embeddings")
async def more_embeddings() -> None:
    embedder = OpenAIEmbeddings(model=EMBEDDER, check_embedding_ctx_length=False, dimensions=256)
    assert [len(vector) for vector in await embedder.aembed_documents([WRITER, SMALL])] == [256, 256]


run()
