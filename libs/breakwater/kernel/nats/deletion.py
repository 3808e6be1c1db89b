"""Secure deletion of single messages: each server that has a message overwrites its bytes.

A message that was acknowledged in a work queue, or has expired, is gone without that: its bytes stay in its file until
no message of the file is left. The server also rewrites files of which less than half is still needed, but not the one
that it writes to. So `begin_new_file` has it write to another.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import orjson

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusUnavailableError, NoStreamError, translated_errors
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream

AT_ONCE = 64
TIMEOUT_S = 10.0

FILE_BYTES = 8 * 1024 * 1024
"""The largest file of a stream."""
FILLER = bytes(256 * 1024)
REWRITTEN_AFTER_S = 125.0
"""The server looks for files to rewrite at least every two minutes, and once a second under `breakwater up`."""

_GONE = re.compile(r"sequence \d+ not found|no message found|deleted message")
"""The server's words for a message that it has no longer; their code is that of all failed deletions."""


async def delete_messages(connection: ClientGetter, stream: Stream, sequences: Sequence[int]) -> int:
    """Deletes messages, and returns how many of them the stream still had.

    Raises:
        BusUnavailableError: NATS does not respond, or refuses; repeating it is safe.
    """
    deleted = 0
    for start in range(0, len(sequences), AT_ONCE):
        outcomes = await asyncio.gather(
            *(_delete(connection, stream, sequence) for sequence in sequences[start : start + AT_ONCE])
        )
        deleted += sum(outcomes)
    return deleted


async def require_filler(connection: ClientGetter, stream: Stream) -> None:
    """Makes sure that `begin_new_file` can do it.

    Raises:
        NoStreamError: the stream has the config of an earlier version.
        BusUnavailableError: NATS does not respond.
    """
    with translated_errors(stream):
        info = await connection().jetstream(timeout=TIMEOUT_S).stream_info(stream.value)
    if subjects.filler(stream) not in (info.config.subjects or ()):
        raise NoStreamError(f"the stream {stream} has the config of an earlier version: run `breakwater setup` first")


async def begin_new_file(connection: ClientGetter, stream: Stream) -> None:
    """Fills the file that a stream writes to with what is deleted at once.

    Within `REWRITTEN_AFTER_S`, all files are rewritten of which less than half is still needed.

    Raises:
        BusUnavailableError: NATS does not respond, or the stream has no room for 256 KB.
    """
    subject = subjects.filler(stream)
    with translated_errors(subject):
        if (filler := await Lookup(connection).newest_on(stream, subject)) is not None:
            await _delete(connection, stream, filler.sequence, erase=False)  # of an erasure that was killed
        for _ in range(FILE_BYTES // len(FILLER) + 1):
            stored = await connection().jetstream().publish(subject, FILLER, timeout=TIMEOUT_S)
            await _delete(connection, stream, stored.seq, erase=False)


async def _delete(connection: ClientGetter, stream: Stream, sequence: int, *, erase: bool = True) -> bool:
    with translated_errors(f"message {sequence} of {stream}"):
        request = orjson.dumps({"seq": sequence, "no_erase": not erase})
        answer = await connection().request(f"$JS.API.STREAM.MSG.DELETE.{stream}", request, timeout=TIMEOUT_S)
        outcome = orjson.loads(answer.data)
        if (error := outcome.get("error")) is None:
            return True
        description = str(error.get("description"))
        if _GONE.fullmatch(description):
            return False
        raise BusUnavailableError(f"NATS did not delete message {sequence} of {stream}: {description}")
