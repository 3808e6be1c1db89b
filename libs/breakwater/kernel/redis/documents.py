"""Documents in Redis: values that processes change concurrently, each on what it has read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from pydantic import TypeAdapter

from breakwater.kernel.immutable import changed
from breakwater.kernel.nats.errors import EventStreamFullError
from breakwater.kernel.redis.connection import Redis, ScriptCommand, scripts_of


class Document(Protocol):
    """A dataclass that holds the events which its changes cause, until they are published."""

    @property
    def unpublished(self) -> tuple[Any, ...]:
        """Events that may not be published yet, in order."""
        ...


T = TypeVar("T", bound=Document)

_LUA = scripts_of(__file__)


class Documents(Generic[T]):
    """Documents of one kind. One that Redis has lost, or that was not changed for long, begins anew."""

    def __init__(self, redis: Redis, prefix: str, form: TypeAdapter[T], first: T, keep_ms: int) -> None:
        """Names the documents.

        Args:
            redis: where they are.
            prefix: of their keys.
            form: how they are written.
            first: what a document is that Redis does not have.
            keep_ms: the time after its last change for which a document is kept.
        """
        self._redis = redis
        self._prefix = prefix
        self._form = form
        self._first = first
        self._keep_ms = keep_ms

    async def read(self, names: Collection[str]) -> list[T]:
        """Reads documents in one round trip. Raises StateUnavailableError."""
        return [document for document, _ in await self._read(list(names))]

    async def change(self, names: Collection[str], decide: Callable[[str, T], T]) -> dict[str, T]:
        """Changes documents, each in one piece, in a round trip that reads and one that writes.

        Args:
            names: the documents.
            decide: returns a document after the change, given its name and what it is. Called again for one that
                another process has changed meanwhile.

        Returns:
            The documents after the change, by name.

        Raises:
            StateUnavailableError: some may be changed.
        """
        documents: dict[str, T] = {}
        waiting: list[str] = list(names)
        while waiting:
            saves: list[ScriptCommand] = []
            for name, (document, revision) in zip(waiting, await self._read(waiting), strict=True):
                documents[name] = decide(name, document)
                text = self._form.dump_json(documents[name]).decode()
                saves.append(ScriptCommand(_LUA["save"], [self._prefix + name], [revision, text, self._keep_ms]))
            saved = await self._redis.run(saves)
            waiting = [name for name, is_saved in zip(waiting, saved, strict=True) if not is_saved]
        return documents

    async def publish(self, documents: Mapping[str, T], publish: Callable[[Any], Awaitable[object]]) -> None:
        """Publishes the events of documents, and takes them out of these.

        Where EVENTS is full, the rest stays in the documents until these change again: nobody has to wait for it.

        Args:
            documents: the documents, by name, as `change` returned them.
            publish: publishes an event, which it may be given again.

        Raises:
            StateUnavailableError: and what `publish` raises; it may be repeated.
        """
        published: dict[str, list[Any]] = {}
        with suppress(EventStreamFullError):
            for name, document in documents.items():
                for event in document.unpublished:
                    await publish(event)
                    published.setdefault(name, []).append(event)

        def without(name: str, document: T) -> T:
            remaining = tuple(event for event in document.unpublished if event not in published[name])
            return changed(document, unpublished=remaining)

        await self.change(published, without)

    async def forget(self, names: Collection[str]) -> None:
        """Has documents begin anew; who read one before can't save it any more. Raises StateUnavailableError."""
        await self._redis.run([ScriptCommand(_LUA["forget"], [self._prefix + name], [self._keep_ms]) for name in names])

    async def _read(self, names: list[str]) -> list[tuple[T, str]]:
        """Reads documents, each with its revision."""
        loads = [ScriptCommand(_LUA["load"], [self._prefix + name], []) for name in names]
        return [
            (self._first if text is None else self._form.validate_json(text), revision or "0")
            for text, revision in await self._redis.run(loads)
        ]
