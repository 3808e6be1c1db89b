"""Errors of the bus.

BusError
├── BusUnavailableError         no server, or no response in time: retry later with the same message id
│   └── EventStreamFullError    the stream of an event is full: the same
├── PublishRefusedError         the stream does not take it: full, or too large
│   ├── MessageTooLargeError    over the server's limit for a message
│   ├── NoStreamError           no stream takes the subject: an agent that is not configured
│   └── StreamFullError         a queue is full
├── AlreadyDecidedError         another writer was first (wrong last sequence on its own subject): read it back
└── NoRespondersError           the service that answers a request is not running
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import nats.errors
from nats.js.errors import APIError

from breakwater.kernel.errors import BreakwaterError, UnavailableError


class BusError(BreakwaterError):
    """The base class of this room's errors."""


class BusUnavailableError(BusError, UnavailableError):
    """NATS does not respond. A message may or may not have been stored."""

    server = "nats"


class EventStreamFullError(BusUnavailableError):
    """The stream of an event is full. The event waits for room: no stored event is dropped for it."""


class PublishRefusedError(BusError):
    """The stream refused the message, which is not stored."""


class MessageTooLargeError(PublishRefusedError):
    """The message is over the server's limit."""


class NoStreamError(PublishRefusedError):
    """No stream takes the subject."""


class StreamFullError(PublishRefusedError):
    """The stream, or the disk of its server, is full."""


class AlreadyDecidedError(BusError):
    """Another writer recorded this subject first."""


class NoRespondersError(BusError):
    """No service is subscribed to the subject of a request."""


def unavailable(problem: str, error: Exception) -> BusUnavailableError:
    """Makes a BusUnavailableError with the text of an error of nats-py or the network."""
    return BusUnavailableError(f"{problem}: {str(error).strip() or type(error).__name__}")


@contextmanager
def translated_errors(about: str) -> Generator[None]:
    """Translates the errors of a request to JetStream into BusUnavailableError."""
    try:
        yield
    except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
        raise unavailable(f"NATS did not respond about {about}", error) from error
