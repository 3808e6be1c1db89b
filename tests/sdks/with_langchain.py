"""`langchain-openai`. It takes its base URL and key from the environment."""

from functools import partial

import tiktoken
from checks import CHAT, EMBEDDER, MESSAGES, QUESTION, RESPONSES, SMALL, WRITER, Models, check, run
from langchain_checks import add
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

ALL = (CHAT, RESPONSES, MESSAGES)

# With a base URL of one's own it asks for no usage of streams by itself.
add("chat", partial(ChatOpenAI, stream_usage=True), (CHAT,))
respond = partial(ChatOpenAI, use_responses_api=True)
add("Responses", respond, ALL)


@check("`use_previous_response_id`", "Responses", ALL)
def chained(models: Models) -> None:
    model = respond(model=models.writer, use_previous_response_id=True)
    first = model.invoke("Remember the ferry.")
    second = model.invoke([HumanMessage("Remember the ferry."), first, HumanMessage(QUESTION)])
    assert QUESTION in second.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


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
