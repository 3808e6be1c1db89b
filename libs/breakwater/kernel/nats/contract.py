"""Messages about messages: dead letters; and what all records of states have in common."""

from __future__ import annotations

from datetime import datetime, timedelta

from pydantic import Field

from breakwater.kernel.types import Count, Encrypted, Event, Timestamp


class DeadLetter(Event):
    """A message that could not be handled, kept unchanged so that it can be inspected and replayed."""

    holds_texts = True

    reason: str
    agent: str | None = None
    error: str
    stream: str
    subject: str
    sequence: Count
    headers: dict[str, str] = Field(default_factory=dict)
    payload_base64: str = Field(default="", description="The original bytes; empty if `omitted_bytes` is set.")
    omitted_bytes: Count | None = Field(
        default=None,
        description="Size of an original that is too large to keep, or that the stream DLQ refused.",
    )
    omitted_sha256: str | None = Field(default=None, description="SHA-256 of that original, in hex.")
    encrypted: Encrypted = None
    withheld: bool = Field(
        default=False, description="True if the original must not be shown, because its agent keeps no prompts."
    )
    execution_id: str | None = None
    job_id: str | None = Field(default=None, description="Id of its job, as the caller chose it.")
    at: Timestamp


class StateRecord(Event):
    """The state of a thing since its last change, as a stream keeps it, with who made the change and why."""

    by: str
    reason: str | None
    at: Timestamp

    @property
    def state_id(self) -> str:
        """The id of the thing."""
        raise NotImplementedError

    @property
    def kept_s(self) -> int | None:
        """The seconds for which the stream keeps the record; None for as long as there is no later one."""
        raise NotImplementedError


ENDED_KEPT = timedelta(days=30)
"""The time for which a stream keeps the record of a thing that has ended. The audit log has it for longer."""

_FAR = timedelta(days=36_500)
"""NATS counts nanoseconds in 64 bits: a time that is much longer would overflow."""


def kept_s(at: datetime, ends_at: datetime | None) -> int | None:
    """Returns the seconds for which a record of a moment is kept: until long after the thing's end, if it has one."""
    if ends_at is None or (remaining := ends_at - at) > _FAR:
        return None
    return int((max(remaining, timedelta()) + ENDED_KEPT).total_seconds())
