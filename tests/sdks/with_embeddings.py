"""`openai` for Python, its embeddings. It takes its base URL and key from the environment."""

import base64
import struct
from functools import partial

import openai
from checks import EMBEDDER, QUESTION, check, raises, run
from openai import AsyncOpenAI, OpenAI

client = OpenAI()
embed = client.embeddings
check = partial(check, door="embeddings")


@check("a text")
def text() -> None:
    answer = embed.create(model=EMBEDDER, input=QUESTION)
    [one] = answer.data
    assert (answer.object, one.object, one.index, len(one.embedding)) == ("list", "embedding", 0, 1536)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0


@check("batches")
def batch() -> None:
    texts = [f"{QUESTION} {number}" for number in range(100)]
    answer = embed.create(model=EMBEDDER, input=texts)
    assert [one.index for one in answer.data] == list(range(100))
    [third] = embed.create(model=EMBEDDER, input=texts[3]).data
    assert answer.data[3].embedding == third.embedding != answer.data[4].embedding


@check("`encoding_format`: the same numbers")
def encodings() -> None:
    floats = embed.create(model=EMBEDDER, input=QUESTION, encoding_format="float").data[0].embedding
    packed = base64.b64decode(embed.create(model=EMBEDDER, input=QUESTION, encoding_format="base64").data[0].embedding)
    assert struct.pack(f"<{len(floats)}f", *floats) == packed


@check("`dimensions`")
def dimensions() -> None:
    assert len(embed.create(model=EMBEDDER, input=QUESTION, dimensions=256).data[0].embedding) == 256


@check("tokens")
def tokens() -> None:
    assert embed.create(model=EMBEDDER, input=[1, 2, 3]).usage.prompt_tokens == 3
    assert len(embed.create(model=EMBEDDER, input=[[1, 2, 3], [4]]).data) == 2


@check("errors")
def errors() -> None:
    raises(openai.NotFoundError, embed.create, model="no-such", input=QUESTION)
    raises(
        openai.AuthenticationError, client.with_options(api_key="wrong").embeddings.create, model=EMBEDDER, input="a"
    )
    assert raises(openai.BadRequestError, embed.create, model=EMBEDDER, input=[]).param == "input"


@check("`with_raw_response`")
def raw() -> None:
    answer = embed.with_raw_response.create(model=EMBEDDER, input=QUESTION)
    assert len(answer.parse().data) == 1
    assert float(answer.headers["x-breakwater-cost-usd"]) > 0


@check("async")
async def asynchronous() -> None:
    async with AsyncOpenAI() as other:
        assert len((await other.embeddings.create(model=EMBEDDER, input=[QUESTION] * 2)).data) == 2


run()
