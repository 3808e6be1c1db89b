"""Reading back what was decided: the last message on a subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar, cast

import nats.errors
import structlog
from nats.aio.client import Client
from nats.js.api import StreamInfo
from nats.js.errors import APIError, NotFoundError
from pydantic import ValidationError

from breakwater.bus.errors import BusUnavailable
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import Event

LOOKUP_TIMEOUT_S = 5.0

EventT = TypeVar("EventT", bound=Event)

Connection = Callable[[], Client]
"""Gives the connection, once there is one: for services, which do not name NATS' own types."""


@dataclass(frozen=True, slots=True)
class Found:
    """A stored message."""

    subject: str
    data: bytes
    sequence: int
    headers: Mapping[str, str]
    stored_at: datetime
    """When the server took it: UTC, by the server's clock, cut to microseconds."""

    def read(self, model: type[EventT]) -> EventT | None:
        """The message as one of the contract's; None, and a line in the log, where it is none."""
        try:
            return model.model_validate_json(self.data)
        except ValidationError:
            structlog.get_logger().warning("event_unreadable", sequence=self.sequence, subject=self.subject)
            return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a stream is, and holds."""

    identity: str
    """Tells it from one of the same name that was made after it was deleted."""
    created: datetime
    first: int
    """The oldest sequence that is stored; 0 or 1 where nothing was ever removed."""
    last: int


def found(data: bytes | None, headers: Mapping[str, str]) -> Found:
    """What a direct get answered, which says in headers of its own where the message stands."""
    return Found(
        subject=headers["Nats-Subject"],
        data=data or b"",
        sequence=int(headers["Nats-Sequence"]),
        headers=headers,
        stored_at=datetime.fromisoformat(headers["Nats-Time-Stamp"]),
    )


def no_stream(stream: Stream) -> BusUnavailable:
    """Nobody listens for direct gets: the server can't tell a stream that was never made from one that is down."""
    return BusUnavailable(
        f"no server holds the stream {stream}: `breakwater setup` creates it; if it was created, wait for its servers"
    )


class Lookup:
    """Looks messages up by subject, served by any replica (direct get)."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def last(self, stream: Stream, subject: str) -> Found | None:
        """The last message on a subject, or None.

        Raises:
            BusUnavailable: NATS does not answer, or has no such stream.
        """
        try:
            message = (
                await self._connection()
                .jetstream(timeout=LOOKUP_TIMEOUT_S)
                .get_last_msg(stream.value, subject, direct=True)
            )
        except NotFoundError:
            return None
        except nats.errors.NoRespondersError as error:
            raise no_stream(stream) from error
        except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not answer for {subject}: {str(error) or type(error).__name__}") from error
        return found(message.data, cast(Mapping[str, str], message.headers or {}))

    async def next(self, stream: Stream, subject_filter: str, sequence: int) -> Found | None:
        """The first stored message from a sequence on that matches, or None. Raises as `last`."""
        jetstream = self._connection().jetstream(timeout=LOOKUP_TIMEOUT_S)
        try:
            message = await jetstream.get_msg(stream.value, sequence, subject_filter, direct=True, next=True)
        except NotFoundError:
            return None
        except nats.errors.NoRespondersError as error:
            raise no_stream(stream) from error
        except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not answer for {stream}: {str(error) or type(error).__name__}") from error
        return found(message.data, cast(Mapping[str, str], message.headers or {}))

    async def facts(self, stream: Stream) -> Facts:
        """What a stream is and holds now. Raises BusUnavailable: NATS does not answer."""
        info = await self._info(stream)
        created = info.created or datetime.fromtimestamp(0, UTC)
        return Facts(_identity(info), created, info.state.first_seq, info.state.last_seq)

    async def counts(self, stream: Stream, subject_filter: str) -> dict[str, int]:
        """How many messages each subject holds that matches, as the server counts them. Raises as `facts`.

        One answer names 100,000 subjects at most; this is for streams that have fewer.
        """
        jetstream = self._connection().jetstream(timeout=LOOKUP_TIMEOUT_S)
        try:
            info = await jetstream.stream_info(stream.value, subjects_filter=subject_filter)
        except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not answer for {stream}: {str(error) or type(error).__name__}") from error
        return dict(info.state.subjects or {})

    async def acknowledged(self, stream: Stream, durable: str) -> int:
        """Up to which sequence a durable consumer has acknowledged all that it was to get; 0 for nothing yet.

        Raises:
            BusUnavailable: NATS does not answer, or has no such consumer.
        """
        jetstream = self._connection().jetstream(timeout=LOOKUP_TIMEOUT_S)
        try:
            info = await jetstream.consumer_info(stream.value, durable)
        except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not answer for {durable}: {str(error) or type(error).__name__}") from error
        return info.ack_floor.stream_seq if info.ack_floor is not None else 0

    async def identity(self, stream: Stream) -> str:
        """What tells this stream from one of the same name that was made after it was deleted: when it was created.

        Raises:
            BusUnavailable: NATS does not answer.
        """
        return _identity(await self._info(stream))

    async def _info(self, stream: Stream) -> StreamInfo:
        jetstream = self._connection().jetstream(timeout=LOOKUP_TIMEOUT_S)
        try:
            return await jetstream.stream_info(stream.value)
        except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not answer for {stream}: {str(error) or type(error).__name__}") from error


def _identity(info: StreamInfo) -> str:
    return format(info.created.timestamp(), ".6f") if info.created else "unknown"
