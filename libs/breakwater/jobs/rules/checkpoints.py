"""The part of a worker's checkpoint that others read: which attempt a job is in."""

from __future__ import annotations

from breakwater.kernel.types import Event, Timestamp


class InFlightCall(Event):
    """A call that may be under way."""

    number: int
    model: str
    started_at: Timestamp


class EndedAttempt(Event):
    """An attempt that has ended."""

    number: int
    model: str


class SavedCheckpoint(Event):
    """The progress of a job, as its worker saved it before its last call or its last long wait."""

    dispatched_at: Timestamp
    resume_at: Timestamp | None = None
    in_flight: InFlightCall | None = None
    model: str | None = None
    attempts: tuple[EndedAttempt, ...] = ()

    @property
    def last_number(self) -> int | None:
        """The number of the last attempt that began; None before the first."""
        if self.in_flight is not None:
            return self.in_flight.number
        return self.attempts[-1].number if self.attempts else None

    @property
    def current_model(self) -> str | None:
        """The model that is called or waited for, or that was called last; None before the first."""
        if self.in_flight is not None:
            return self.in_flight.model
        return self.model or (self.attempts[-1].model if self.attempts else None)
