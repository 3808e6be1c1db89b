"""AWS' binary event streams, read from a body as it arrives."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator

import orjson

from breakwater.calls.providers.base import UnusableAnswerError
from breakwater.calls.providers.extras import load_optional
from breakwater.calls.providers.server_sent import MAX_EVENT_BYTES, EventTooLargeError
from breakwater.jobs.rules.chat_messages import fields

EVENT_STREAM = "application/vnd.amazon.eventstream"
"""The content type of a body of such events."""

_PRELUDE_BYTES = 12
"""The beginning of an event: its length, that of its headers, and the checksum of both."""


class EventStreamReader:
    """Takes a body in pieces and yields its events as `EventReader` does those of a server-sent stream.

    An event's data is an object with the event's type as its only name; that of a `chunk`, which carries an event of
    the model's own API, is that event. Exceptions are events named `error`.
    """

    def __init__(self) -> None:
        # Only providers of AWS' need the package, and those can't be opened without it.
        [module] = load_optional("aws", "botocore.eventstream")
        self._buffer = module.EventStreamBuffer()
        self._refusal: type[Exception] = module.ParserError
        self._pending = bytearray()
        self._missing = _PRELUDE_BYTES
        """The bytes that the package's buffer lacks for the next step. It copies all that it has for each piece that it
        is given, so it gets the prelude of an event, and then the rest at once."""

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Takes the next piece. Yields name and data of each event that is complete.

        Raises:
            EventTooLargeError: the event that is not complete yet is too large.
            UnusableAnswerError: an event is corrupt: a checksum of it is wrong, or it can't be read, or has no type.
        """
        self._pending += piece
        try:
            while len(self._pending) >= self._missing:
                part = bytes(self._pending[: self._missing])
                del self._pending[: self._missing]
                self._buffer.add_data(part)
                if (message := next(self._buffer, None)) is None:
                    self._missing = int.from_bytes(part[:4]) - _PRELUDE_BYTES
                    if self._missing > MAX_EVENT_BYTES:
                        raise EventTooLargeError(f"an event of the stream is over {MAX_EVENT_BYTES} bytes")
                else:
                    self._missing = _PRELUDE_BYTES
                    yield _event(message.headers, message.payload)
        # The package's own error is for wrong checksums and lengths; the others are for a header of an unknown type.
        except (self._refusal, KeyError, struct.error, UnicodeDecodeError) as error:
            raise UnusableAnswerError(f"an event of the stream is corrupt ({type(error).__name__})") from error

    def end(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields nothing: what is left at the end of a body is no event."""
        yield from ()


def _event(headers: dict[str, object], payload: bytes) -> tuple[bytes, bytes]:
    match headers.get(":message-type"):
        case "exception":
            kind = str(headers.get(":exception-type") or "")
            details = _details(payload)
            message = details.get("message") or details.get("Message") or details.get("originalMessage")
            return b"error", orjson.dumps({"error": {"type": kind[:1].upper() + kind[1:], "message": message}})
        case "error":
            code, message = (str(headers.get(name) or "") for name in (":error-code", ":error-message"))
            return b"error", orjson.dumps({"error": {"type": code, "message": message}})
        case _:
            kind = headers.get(":event-type")
            if not isinstance(kind, str):
                raise UnusableAnswerError("an event of the stream has no type")
            if kind == "chunk":
                return b"", _decode(fields(_details(payload)).get("bytes"))
            return kind.encode(), b'{"%s":%s}' % (kind.encode(), payload or b"{}")


def _details(payload: bytes) -> dict[str, object]:
    try:
        details = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return {"message": payload.decode(errors="replace")}
    return {**fields(details)}


def _decode(data: object) -> bytes:
    try:
        return base64.b64decode(data, validate=True) if isinstance(data, str) else b""
    except binascii.Error as error:
        raise UnusableAnswerError("an event of the stream is not base64") from error
