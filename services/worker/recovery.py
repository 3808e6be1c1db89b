"""Recovery after a crash: of attempts that only the log has, and of a lost call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from breakwater.calls.assignment import Assignment, Checkpoint, InFlight
from breakwater.calls.rules.classify import WORKER_LOST, Classification
from breakwater.calls.rules.repairs import Repairs
from breakwater.jobs.contract.execution import Attempt
from breakwater.limits.store.budgets import Reservation
from services.worker.call import attempt_of, recorded_attempt, spent_at_most
from services.worker.context import WorkerContext


@dataclass(frozen=True, slots=True)
class Recovered:
    """The progress of a job after a crash.

    Only the step after the last recorded attempt is undecided; the log has all earlier ones.
    """

    checkpoint: Checkpoint
    """The checkpoint with all recorded attempts."""
    last: Attempt | None
    """The last recorded attempt that the checkpoint lacked."""
    lost: tuple[InFlight, Attempt] | None
    """A call whose worker died before it recorded it, and the attempt to record for it."""


async def recover(worker: WorkerContext, job: Assignment, checkpoint: Checkpoint) -> Recovered:
    """Merges recorded attempts into the checkpoint, and finds a lost call."""
    last: Attempt | None = None
    number = len(checkpoint.attempts) + 1
    while (found := await recorded_attempt(worker, job, number)) is not None:
        checkpoint, last, number = _with_recorded(job, checkpoint, found), found, number + 1
    flight = checkpoint.in_flight
    if flight is None or flight.number != number:
        return Recovered(checkpoint, last, None)
    held = await _held(worker, job, flight)
    if held is None and flight.reserved is not None and flight.reserved_at is None:
        # It only waited for capacity: the checkpoint is saved with each question, but only an admitted call has a
        # reservation until its attempt is recorded, or a checkpoint that was restored after its admission.
        return Recovered(checkpoint.model_copy(update={"in_flight": None}), last, None)
    flight = flight if held is None else flight.model_copy(update={"reserved_at": held.at})
    # Its worker may have died after it charged the cost: the rest of the reservation is free, and may be spent.
    spent = spent_at_most(flight)
    if held is not None and held.charged:
        spent = replace(spent, cost=held.amount, cost_basis="estimated")
    error = WORKER_LOST.error_info()
    lost = attempt_of(job, flight, flight.started_at, "worker_lost", spent=spent, error=error)
    return Recovered(checkpoint, last, (flight, lost))


def classification_of(attempt: Attempt, now: datetime) -> Classification:
    """Classifies a recorded failure, as of now."""
    error = attempt.error
    if error is None:
        # A success without a result: the worker died between the two, and the answer is lost.
        return WORKER_LOST
    waited_s = (now - attempt.completed_at).total_seconds()
    asked_s = None if error.retry_after_s is None else max(0.0, error.retry_after_s - waited_s)
    found = error.kind, error.class_, error.message, error.status_code, error.retryable, False, asked_s
    return Classification(*found, error.param)


def _with_recorded(job: Assignment, at: Checkpoint, attempt: Attempt) -> Checkpoint:
    """Adds an attempt from the log to a checkpoint that lags by one, or that Redis lost."""
    if attempt.model in job.chain:
        index = job.chain.index(attempt.model)
        if index != at.model_index:
            at = at.at_model(index)
    if attempt.cause != at.cause:
        # Decided after the checkpoint was saved; else the checkpoint has the repair.
        before = at.repairs or Repairs()
        repairs = before.replayed(attempt.cause, job.messages, at.attempts, attempt.dropped_params)
        at = at.model_copy(update={"repairs": repairs})
    return at.after(attempt)


async def _held(worker: WorkerContext, job: Assignment, flight: InFlight) -> Reservation | None:
    """Returns the reservation or the charge of a lost call: the checkpoint lacks its time."""
    attempt_id = job.attempt_id(flight.number)
    [held] = await worker.outages.retry_while_unavailable(lambda: worker.budgets.reservations([attempt_id]))
    return held
