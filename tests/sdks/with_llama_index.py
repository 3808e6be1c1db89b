"""LlamaIndex, an index in memory. It takes its key from the environment."""

import os
from functools import partial

from checks import EMBEDDER, check, run
from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai import OpenAIEmbedding

TEXTS = [f"Ship {number} is in port {number % 7}." for number in range(250)]
embed = partial(OpenAIEmbedding, model=EMBEDDER, api_base=os.environ["OPENAI_BASE_URL"], max_retries=1)
embedder = embed()
check = partial(check, door="embeddings")


@check("an index of 250 documents, and a search")
def index() -> None:
    documents = [Document(text=text) for text in TEXTS]
    [best] = (
        VectorStoreIndex.from_documents(documents, embed_model=embedder)
        .as_retriever(similarity_top_k=1)
        .retrieve(TEXTS[42])
    )
    assert (best.text, round(best.score, 6)) == (TEXTS[42], 1.0)


@check("`get_text_embedding_batch`")
def batch() -> None:
    vectors = embedder.get_text_embedding_batch(TEXTS)
    assert len(vectors) == 250
    assert vectors[7] == embedder.get_text_embedding(TEXTS[7]) != vectors[8]


@check("`dimensions`")
def dimensions() -> None:
    assert len(embed(dimensions=256).get_query_embedding("ferry")) == 256


@check("async")
async def asynchronous() -> None:
    assert len(await embedder.aget_text_embedding_batch(TEXTS[:20])) == 20


run()
