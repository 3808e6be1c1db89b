"""Secure deletion of single messages: each server that has a message overwrites its bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import orjson

from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.lookup import ClientGetter, translated_errors
from breakwater.kernel.nats.subjects import Stream

AT_ONCE = 64
TIMEOUT_S = 10.0
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


async def _delete(connection: ClientGetter, stream: Stream, sequence: int) -> bool:
    with translated_errors(f"message {sequence} of {stream}"):
        # Without `no_erase`, which would leave the bytes where they are.
        request = orjson.dumps({"seq": sequence})
        answer = await connection().request(f"$JS.API.STREAM.MSG.DELETE.{stream}", request, timeout=TIMEOUT_S)
        outcome = orjson.loads(answer.data)
        if (error := outcome.get("error")) is None:
            return True
        description = str(error.get("description"))
        if _GONE.fullmatch(description):
            return False
        raise BusUnavailableError(f"NATS did not delete message {sequence} of {stream}: {description}")
