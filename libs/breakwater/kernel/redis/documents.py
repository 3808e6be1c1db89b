"""Documents in Redis: values that processes change concurrently, each on what it has read."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from breakwater.kernel.redis.connection import Redis, ScriptCommand, scripts_of

T = TypeVar("T")

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

    async def forget(self, names: Collection[str]) -> None:
        """Has documents begin anew. Raises StateUnavailableError."""
        if names:
            await self._redis.client.delete(*(self._prefix + name for name in names))

    async def _read(self, names: list[str]) -> list[tuple[T, str]]:
        """Reads documents, each with its revision."""
        loads = [ScriptCommand(_LUA["load"], [self._prefix + name], []) for name in names]
        return [
            (self._first if text is None else self._form.validate_json(text), revision or "0")
            for text, revision in await self._redis.run(loads)
        ]
