"""How far a job is: all that another worker needs to go on after a crash."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

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
    input_tokens: Count | None = None
    """A high estimate; None for a program, which is no model."""
    max_tokens: Count | None = None
    """The output limit of the call, where budgets hold less for it than the job's own limit."""
    reserved_at: Timestamp | None = None
    """By Redis' clock; not known yet when the checkpoint is saved."""
    dropped_messages: Count = 0
    breaker_version: Count | None = None
    first_token_ms: Count | None = None
    """Some of its answer may be out. None: nothing is."""
    chunks: Count | None = None


class Checkpoint(Event):
    """Saved before each call and before each long wait. It never changes: what changes it gives another one."""

    dispatched_at: Timestamp
    deadline: Timestamp
    config_version: str | None = None
    """Of the config that the job began under, and ends under."""
    attempts: tuple[Attempt, ...] = ()
    model_index: int = 0
    """Where in the chain of models the job is."""
    model: str | None = None
    """Which model that is, while it is called or waited for: a config that changes meanwhile may change the chain."""
    cause: Cause | None = None
    """Why the next attempt is made, where it is a recovery."""
    repairs: Repairs | None = None
    """None until the first."""
    backoff_ms: int = 0
    """What was waited before the next attempt."""
    resume_at: Timestamp | None = None
    """When a long wait ends."""
    in_flight: InFlight | None = None
    partial: str = ""
    """What is out of an answer that broke off, and is to be continued."""

    def text(self) -> str:
        """As it is saved: JSON without what is as it was at the start."""
        return self.model_dump_json(exclude_defaults=True)

    def tried(self, model: str) -> bool:
        """Whether the job has come to this model before, if only to be refused."""
        return any(attempt.model == model for attempt in self.attempts)

    def is_last_of(self, chain: Sequence[str]) -> bool:
        """Whether no other model of the chain is left to be tried."""
        return self.model_index + 1 >= len(chain)

    def cause_of_next(self, model: str) -> Cause:
        """Why the next attempt is made."""
        if self.cause is not None:
            return self.cause
        if not self.attempts:
            return "first"
        return "retry" if self.tried(model) else "fallback"

    def after(self, attempt: Attempt) -> Checkpoint:
        """With an attempt that has ended and is recorded."""
        update = {"attempts": (*self.attempts, attempt), "in_flight": None, "cause": None}
        return self.model_copy(update=update | {"backoff_ms": 0, "resume_at": None})

    def at_model(self, index: int) -> Checkpoint:
        """At another model of the chain."""
        update = {"model_index": index, "model": None, "repairs": self.repairs and self.repairs.for_next_model()}
        return self.model_copy(update=update)

    def repaired(self, cause: Cause, repairs: Repairs) -> Checkpoint:
        """About to ask the same model again with what was mended."""
        return self.model_copy(update={"cause": cause, "repairs": repairs})

    def waiting(self, model: str, delay_s: float, until: datetime) -> Checkpoint:
        """Waiting before the next attempt on a model."""
        waited_ms = self.backoff_ms + round(delay_s * 1000)
        return self.model_copy(update={"backoff_ms": waited_ms, "resume_at": until, "model": model})

    def credited(self, waited: timedelta) -> Checkpoint:
        """With as much more time as an outage of the plane has cost."""
        return self.model_copy(update={"deadline": self.deadline + waited})
