"""Asking a service something, and waiting for its answer: core NATS, nothing is stored."""

from __future__ import annotations

import nats.errors

from breakwater.bus.errors import BusUnavailable, NobodyListens
from breakwater.bus.lookup import Connection


async def ask(connection: Connection, subject: str, data: bytes, timeout_s: float) -> bytes:
    """What the first one answers who hears it.

    Raises:
        NobodyListens: nobody is there to answer.
        BusUnavailable: NATS is away, or no answer came in time; whoever was asked may have done it all the same.
    """
    try:
        answer = await connection().request(subject, data, timeout=timeout_s)
    except nats.errors.NoRespondersError as error:
        raise NobodyListens(f"nobody listens on {subject}") from error
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise BusUnavailable(f"no answer came on {subject} within {timeout_s:g} s") from error
    except (nats.errors.Error, OSError) as error:
        raise BusUnavailable(f"NATS did not take {subject}: {str(error) or type(error).__name__}") from error
    return answer.data
