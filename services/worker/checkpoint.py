"""How far a job is: all that another worker needs to go on after a crash."""

from __future__ import annotations

from breakwater.contracts.execution import Attempt, Cause
from breakwater.contracts.types import Count, Event, Timestamp


class InFlight(Event):
    """An attempt whose call may be under way."""

    number: int
    model: str
    provider: str
    cause: Cause
    started_at: Timestamp
    backoff_ms: Count
    reserved: int | None
    """Worst-case cost in nano-dollars; None where the model has no price."""


class Checkpoint(Event):
    """Saved before each call and before each long wait."""

    dispatched_at: Timestamp
    deadline: Timestamp
    attempts: tuple[Attempt, ...] = ()
    model_index: int = 0
    """Where in the chain of models the job is."""
    tries: int = 0
    """Attempts made on that model."""
    backoff_ms: int = 0
    """What was waited before the next attempt."""
    in_flight: InFlight | None = None
