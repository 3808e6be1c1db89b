"""How far a job is: all that another worker needs to go on after a crash."""

from __future__ import annotations

from breakwater.contracts.execution import Attempt, Cause
from breakwater.contracts.types import Count, Event, Timestamp
from services.worker.repairs import Repairs


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
    reserved_at: Timestamp | None = None
    """By Redis' clock; not known yet when the checkpoint is saved."""
    dropped_messages: Count = 0
    breaker_version: Count | None = None


class Checkpoint(Event):
    """Saved before each call and before each long wait."""

    dispatched_at: Timestamp
    deadline: Timestamp
    attempts: tuple[Attempt, ...] = ()
    model_index: int = 0
    """Where in the chain of models the job is."""
    model: str | None = None
    """Which model that is, while it is called or waited for: a config that changes meanwhile may change the chain."""
    cause: Cause | None = None
    """Why the next attempt is made, where it is a recovery."""
    repairs: Repairs = Repairs()
    backoff_ms: int = 0
    """What was waited before the next attempt."""
    resume_at: Timestamp | None = None
    """When a long wait ends."""
    in_flight: InFlight | None = None
