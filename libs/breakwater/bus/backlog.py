"""How far a durable consumer is behind."""

from __future__ import annotations

from dataclasses import dataclass

import nats.errors
from nats.js.errors import APIError, NotFoundError

from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import LOOKUP_TIMEOUT_S, Connection
from breakwater.contracts.subjects import Stream


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a consumer has before it."""

    waiting: int
    """Messages that were not delivered yet."""
    in_work: int
    """Messages that were delivered and not acknowledged yet."""


async def backlog(connection: Connection, stream: Stream, durable: str) -> Backlog | None:
    """What a durable consumer has before it; None where it was never made.

    Raises:
        BusUnavailable: NATS does not answer, or not to this user.
    """
    try:
        info = await connection().jetstream(timeout=LOOKUP_TIMEOUT_S).consumer_info(stream.value, durable)
    except NotFoundError:
        return None
    except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
        raise BusUnavailable(f"NATS did not answer for {durable}: {str(error) or type(error).__name__}") from error
    return Backlog(info.num_pending or 0, info.num_ack_pending or 0)
