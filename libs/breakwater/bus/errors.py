"""Errors of the bus.

BusError
├── BusUnavailable      no server, no answer in time: try again later, with the same message id
│   └── NoRoom          the stream of an event is full: the same
├── PublishRefused      the stream does not take it: full, or too large
│   ├── TooLarge        over the server's limit for a message
│   ├── NoStream        no stream takes the subject: an agent that is not configured
│   └── StreamFull      a queue is full
├── AlreadyDecided      another writer was first (wrong last sequence on its own subject): read it back
└── NobodyListens       the service that answers a request is not running
"""

from __future__ import annotations

from breakwater.errors import Unavailable


class BusError(Exception):
    """Root of what this room raises."""


class BusUnavailable(BusError, Unavailable):  # noqa: N818  a condition, named as engineers say it
    """NATS does not answer. The message may or may not have been stored."""

    server = "nats"


class NoRoom(BusUnavailable):
    """The stream of an event is full. What the plane has to record waits for room, and nothing goes to make it."""


class PublishRefused(BusError):  # noqa: N818
    """The stream refused the message, which is not stored."""


class TooLarge(PublishRefused):
    """The message is over the server's limit."""


class NoStream(PublishRefused):
    """No stream takes the subject."""


class StreamFull(PublishRefused):
    """The stream, or the disk of its server, is full."""


class AlreadyDecided(BusError):  # noqa: N818
    """Another writer recorded this subject first."""


class NobodyListens(BusError):  # noqa: N818
    """No service is subscribed to the subject of a request."""


def unavailable(what: str, error: Exception) -> BusUnavailable:
    """BusUnavailable with the words of the error that nats-py or the network raised."""
    return BusUnavailable(f"{what}: {str(error).strip() or type(error).__name__}")
