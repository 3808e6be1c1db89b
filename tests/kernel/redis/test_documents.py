"""Documents in Redis: what was read before a document began anew is not saved over it."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from breakwater.kernel.nats.errors import EventStreamFullError
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.redis.documents import Documents


@dataclass
class Text:
    """A text, with events."""

    text: str = ""
    unpublished: tuple[str, ...] = ()


def documents_of(redis: Redis) -> Documents[Text]:
    return Documents(redis, "bw:text:", TypeAdapter(Text), Text(), 60_000)


async def test_a_forgotten_document_begins_anew_and_who_read_it_before_decides_again(redis: Redis) -> None:
    documents = documents_of(redis)
    await documents.change(["a"], lambda _, __: Text("old"))
    [(_, revision)] = await documents._read(["a"])
    await documents.forget(["a", "never there"])
    assert await documents.read(["a", "never there"]) == [Text(), Text()]
    await documents.change(["a"], lambda _, document: Text(document.text + "new"))
    [(document, now)] = await documents._read(["a"])
    assert document == Text("new")
    assert now != revision, "or a change of the old document would be saved"
    assert 0 < await redis.client.pttl("bw:text:never there") <= 60_000


async def test_events_that_find_no_room_stay_in_their_document(redis: Redis) -> None:
    documents = documents_of(redis)
    changed = await documents.change(["a", "b"], lambda name, _: Text(name, (f"{name}1", f"{name}2")))
    room, published = 1, list[str]()

    async def publish(event: str) -> None:
        if len(published) == room:
            raise EventStreamFullError("there is no room")
        published.append(event)

    await documents.publish(changed, publish)
    assert await documents.read(["a", "b"]) == [Text("a", ("a2",)), Text("b", ("b1", "b2"))]
    room = 4
    await documents.publish(await documents.change(["a", "b"], lambda _, document: document), publish)
    assert published == ["a1", "a2", "b1", "b2"]
    assert await documents.read(["a", "b"]) == [Text("a"), Text("b")]
