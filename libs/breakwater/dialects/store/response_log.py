"""RESPONSES: the requests of stored responses, and the chunks of answers that are kept, in order.

The chunks of an execution are a log of one writer at a time. Each message names the one before it
(`Nats-Expected-Last-Subject-Sequence`), so a worker that another has replaced can add nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Any, cast

import orjson

from breakwater.dialects.contract.stored_response import StoredResponse
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.bodies import IN_MESSAGE_BYTES, BodyLostError, BodyReader, BodyReference, BodyWriter
from breakwater.kernel.nats.errors import (
    AlreadyDecidedError,
    BusError,
    BusUnavailableError,
    EventStreamFullError,
    NoStreamError,
    StreamFullError,
)
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.publisher import PublishAck, Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.security.encryption import Cipher

_CHUNKS = ("chunks",)
"""The fields of a message of chunks that hold texts."""
_BODY = ("body",)
"""The fields of a request that hold texts."""


class ChunksDroppedError(BusError):
    """The messages that were added before are gone: the stream was full, or someone emptied it."""


DELETED = "deleted"
"""`type` of the message that replaces deleted chunks."""


class ResponseLog:
    """Reads and writes RESPONSES."""

    def __init__(self, publisher: Publisher, lookup: Lookup, cipher: Cipher) -> None:
        self._publisher = publisher
        self._lookup = lookup.as_stored()
        self._cipher = cipher
        self._bodies = BodyReader(lookup)
        self._body_writer = BodyWriter(publisher)

    async def keep(self, response: StoredResponse, *, private: bool, lasts: timedelta) -> StoredResponse:
        """Stores the request of a response once. Returns what is stored, perhaps by another process.

        A large request is put into the object store, where it expires with the response. RESPONSES then has it without
        its input, which only those need who continue the response or list its input.

        Args:
            response: what is to be known of it.
            private: its texts must not be stored in plain.
            lasts: the time for which RESPONSES keeps it.

        Raises:
            BusUnavailableError: it is not stored for sure; do it again.
            DecryptionError: it is stored already, and its texts can't be read.
        """
        document = response.json_bytes()
        encrypt = partial(self._cipher.encrypt_document, document, private=private, names=_BODY)
        stored = encrypt() if len(document) <= IN_MESSAGE_BYTES else await asyncio.to_thread(encrypt)
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}
        reference: BodyReference | None = None
        if len(stored) > IN_MESSAGE_BYTES:
            is_encrypted = self._cipher.on or private
            reference = BodyReference.of(stored, encrypted=is_encrypted, job_bytes=len(document))
            until = response.created_at + lasts
            await self._body_writer.put(reference, stored, response.agent, response.execution_id, until=until)
            headers[Header.BODY.value] = str(reference)
            stored = self._without_input(response, private=private)
        subject = subjects.kept_request(response.execution_id)
        try:
            await self._publish(subject, stored, headers)
        except AlreadyDecidedError:
            if reference is not None:
                await self._body_writer.remove_if_possible(reference.name)
            return await self._read_without_input(await self._lookup.winner(Stream.RESPONSES, subject))
        return response

    async def find(self, execution_id: str) -> StoredResponse | None:
        """The request of a stored response that is not deleted; None if there is none. Raises as `keep`.

        A large request comes without its input.
        """
        subject = subjects.kept_request(execution_id)
        # A replica may not have it yet, or not know yet that it was deleted; the leader does.
        message = await self._lookup.newest_on(Stream.RESPONSES, subject)
        stored = None if message is None else await self._read_without_input(message)
        return None if stored is None or stored.deleted else stored

    async def find_all(
        self, execution_ids: tuple[str, ...], take_room: Callable[[int], Awaitable[None]]
    ) -> dict[str, StoredResponse]:
        """The whole requests of the stored responses among these, by execution. Raises as `keep`.

        Args:
            execution_ids: the executions of the responses.
            take_room: is called with the size of all of them, before large ones are read into memory.
        """
        wanted = list(map(subjects.kept_request, execution_ids))
        async with aclosing(self._lookup.last_on(Stream.RESPONSES, wanted)) as stored:
            messages = [message async for message in stored]
        references = [BodyReference.parse(message.headers.get(Header.BODY.value)) for message in messages]
        sizes = (
            len(message.data) if reference is None else reference.job_bytes
            for message, reference in zip(messages, references, strict=True)
        )
        await take_room(sum(sizes))
        responses = [
            await self._read(message, reference) for message, reference in zip(messages, references, strict=True)
        ]
        return {response.execution_id: response for response in responses}

    async def delete(self, response: StoredResponse) -> None:
        """Replaces a response by the note that it was deleted, which stays. Raises BusUnavailableError: do it again."""
        execution_id = response.execution_id
        rollup = {Header.ROLLUP.value: "sub"}
        # The request is deleted last: while it exists, the deletion can be repeated.
        marker = orjson.dumps({"type": DELETED, "execution_id": execution_id})
        await self._publish(subjects.kept_chunks(execution_id), marker, rollup)
        subject = subjects.kept_request(execution_id)
        request = await self._lookup.newest_on(Stream.RESPONSES, subject)
        body = None if request is None else BodyReference.parse(request.headers.get(Header.BODY.value))
        if body is not None:
            await self._body_writer.remove(body.name)
        note = response.model_copy(update={"deleted": True, "body": {}, "previous": ()})
        await self._publish(subject, note.json_bytes(), rollup)

    async def messages(
        self, execution_id: str, *, after: int = 0, whole: bool = False
    ) -> tuple[list[dict[str, Any]], int]:
        """The messages of chunks from one sequence on, and the sequence of the last.

        Args:
            execution_id: of the answer.
            after: the last sequence that is known already.
            whole: a replica that is behind the leader is an outage.

        Raises:
            BusUnavailableError: NATS does not answer.
            DecryptionError: the texts can't be read.
        """
        messages: list[dict[str, Any]] = []
        subject = subjects.kept_chunks(execution_id)
        scan = self._lookup.scan(Stream.RESPONSES, subject, start=after + 1, complete=whole)
        async with aclosing(scan) as stored:
            async for message in stored:
                after = message.sequence
                messages.append(cast(dict[str, Any], orjson.loads(self._cipher.decrypt_document(message.data))))
        return messages, after

    async def end(self, execution_id: str) -> tuple[int, int]:
        """The number and sequence of the last message of chunks, as the leader knows it; zeros while there is none.

        The number is -1 for deleted chunks. Raises BusUnavailableError.
        """
        newest = await self._lookup.newest_on(Stream.RESPONSES, subjects.kept_chunks(execution_id))
        if newest is None:
            return 0, 0
        return int(orjson.loads(newest.data).get("number", -1)), newest.sequence

    def seal(self, message: bytes, *, private: bool) -> bytes:
        """A message of chunks as it is stored. A repeated `append` takes the same bytes."""
        return self._cipher.encrypt_document(message, private=private, names=_CHUNKS)

    async def append(self, execution_id: str, stored: bytes, last: int) -> int:
        """Adds a message of chunks, and returns its sequence.

        Args:
            execution_id: of the answer.
            stored: as `seal` returns it.
            last: the sequence of the message before it; 0 for the first.

        Raises:
            AlreadyDecidedError: another writer has added one, or the response was deleted.
            ChunksDroppedError: none of those before it is there any more.
            BusUnavailableError: not stored for sure; do it again.
        """
        subject = subjects.kept_chunks(execution_id)
        try:
            added = await self._publish(subject, stored, {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(last)})
        except AlreadyDecidedError:
            # It is our own message if the acknowledgement of an earlier try was lost.
            newest = await self._lookup.newest_on(Stream.RESPONSES, subject)
            if newest is None and last:
                raise ChunksDroppedError(f"the chunks of {execution_id} are gone") from None
            if newest is None or newest.data != stored:
                raise
            return newest.sequence
        return added.sequence

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> PublishAck:
        try:
            return await self._publisher.raw(subject, payload, headers)
        except NoStreamError as error:
            # The stream always exists, so the cluster must be choosing a new leader.
            raise BusUnavailableError(str(error)) from error
        except StreamFullError as error:
            raise EventStreamFullError(f"{error}: the server has no storage left") from error

    def _without_input(self, response: StoredResponse, *, private: bool) -> bytes:
        """Returns a large request as RESPONSES stores it; without anything if it is large even without its input."""
        for body in ({name: value for name, value in response.body.items() if name != "input"}, {}):
            document = response.model_copy(update={"body": body}).json_bytes()
            stored = self._cipher.encrypt_document(document, private=private, names=_BODY)
            if len(stored) <= IN_MESSAGE_BYTES:
                break
        return stored

    async def _read_without_input(self, message: StoredMessage) -> StoredResponse:
        """Reads a request; a large one without its input, if that is what makes it large."""
        reference = BodyReference.parse(message.headers.get(Header.BODY.value))
        response = StoredResponse.model_validate_json(self._cipher.decrypt_document(message.data))
        return response if reference is None or response.body else await self._read(message, reference)

    async def _read(self, message: StoredMessage, reference: BodyReference | None) -> StoredResponse:
        if reference is None:
            return StoredResponse.model_validate_json(self._cipher.decrypt_document(message.data))
        try:
            stored = await self._bodies.read(reference)
        except BodyLostError:
            # It has expired, or is being deleted.
            outline = StoredResponse.model_validate_json(self._cipher.decrypt_document(message.data))
            return outline.model_copy(update={"deleted": True})
        return StoredResponse.model_validate_json(await asyncio.to_thread(self._cipher.decrypt_document, stored))
