"""Reading back what was decided: the last message on a subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import nats.errors
from nats.aio.client import Client
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError

from breakwater.bus.errors import BusUnavailable
from breakwater.contracts.subjects import Stream

LOOKUP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """A stored message."""

    subject: str
    data: bytes
    sequence: int
    headers: Mapping[str, str]


class Lookup:
    """Looks messages up by subject, served by any replica (direct get)."""

    def __init__(self, connection: Callable[[], Client]) -> None:
        self._connection = connection

    async def last(self, stream: Stream, subject: str) -> Found | None:
        """The last message on a subject, or None.

        Raises:
            BusUnavailable: NATS does not answer.
        """
        try:
            message = (
                await self._connection()
                .jetstream(timeout=LOOKUP_TIMEOUT_S)
                .get_last_msg(stream.value, subject, direct=True)
            )
        except NotFoundError:
            return None
        except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not answer for {subject}: {error or type(error).__name__}") from error
        return Found(message.subject or subject, message.data or b"", message.seq or 0, _headers(message))

    async def identity(self, stream: Stream) -> str:
        """What tells this stream from one of the same name that was made after it was deleted: when it was created.

        Raises:
            BusUnavailable: NATS does not answer.
        """
        jetstream = self._connection().jetstream(timeout=LOOKUP_TIMEOUT_S)
        try:
            info = await jetstream.stream_info(stream.value)
        except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not answer for {stream}: {error or type(error).__name__}") from error
        return format(info.created.timestamp(), ".6f") if info.created else "unknown"


def _headers(message: RawStreamMsg) -> Mapping[str, str]:
    return cast(Mapping[str, str], message.headers or {})
