"""Recovery after a crash: attempts that only the log has, and a lost call."""

from __future__ import annotations

from dataclasses import dataclass, replace

from breakwater.calls.assignment import Assignment, Checkpoint, InFlight
from breakwater.calls.rules.classify import WORKER_LOST
from breakwater.calls.rules.repairs import Repairs
from breakwater.jobs.contract.execution import Attempt
from breakwater.limits.store.budgets import Reservation
from breakwater.services.worker.attempt_record import attempt_of, recorded_attempt
from breakwater.services.worker.call_cost import CallCost, spent_at_most
from breakwater.services.worker.context import WorkerContext


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
    """The call that was in progress when its worker died, and the attempt to record for it."""


async def recover(worker: WorkerContext, job: Assignment, checkpoint: Checkpoint) -> Recovered:
    """Merges recorded attempts into the checkpoint, and finds a lost call."""
    last: Attempt | None = None
    number = len(checkpoint.attempts) + 1
    while (attempt := await recorded_attempt(worker, job, number)) is not None:
        checkpoint = _with_recorded(job, checkpoint, attempt)
        last = attempt
        number += 1
    flight = checkpoint.in_flight
    if flight is None or flight.number != number:
        return Recovered(checkpoint, last, None)
    reservation = await _reservation_of(worker, job, flight)
    if reservation is None and flight.reserved is not None and flight.reserved_at is None:
        # The job only waited for capacity. Each admission request saves the checkpoint, but only an admitted call has
        # a reservation, which lasts until its attempt is recorded, or a checkpoint restored after its admission.
        return Recovered(checkpoint.model_copy(update={"in_flight": None}), last, None)
    flight = flight if reservation is None else flight.model_copy(update={"reserved_at": reservation.at})
    # The worker may have died after it charged the cost. Then the remaining reservation is free and may be spent.
    spent = spent_at_most(flight)
    if reservation is not None and reservation.charged:
        flight = flight.model_copy(update={"reserved_tokens": reservation.tokens})
        if spent.usage is not None and spent.usage.input_tokens is not None:
            usage = replace(spent.usage, input_tokens=min(spent.usage.input_tokens, reservation.tokens))
            spent = replace(spent, usage=usage)
        spent = replace(spent, cost=reservation.amount, cost_basis="estimated")
    return Recovered(checkpoint, last, (flight, lost_attempt(job, flight, spent)))


def lost_attempt(job: Assignment, flight: InFlight, spent: CallCost) -> Attempt:
    """Returns the attempt to record for a call whose worker died."""
    error = WORKER_LOST.error_info()
    return attempt_of(job, flight, flight.started_at, "worker_lost", spent=spent, error=error)


def _with_recorded(job: Assignment, checkpoint: Checkpoint, attempt: Attempt) -> Checkpoint:
    """Adds an attempt from the log to a checkpoint that lags by one, or that Redis lost."""
    if attempt.model in job.chain:
        index = job.chain.index(attempt.model)
        if index != checkpoint.model_index:
            checkpoint = checkpoint.at_model(index)
    if attempt.cause != checkpoint.cause:
        # The repair was decided after the checkpoint was saved; otherwise, the checkpoint would have it.
        repairs_before = checkpoint.repairs or Repairs()
        repairs = repairs_before.replay(attempt.cause, job.messages, checkpoint.attempts, attempt.dropped_params)
        checkpoint = checkpoint.model_copy(update={"repairs": repairs})
    return checkpoint.after(attempt)


async def _reservation_of(worker: WorkerContext, job: Assignment, flight: InFlight) -> Reservation | None:
    """Returns the reservation or the charge of a lost call, including its time, which the checkpoint lacks."""
    attempt_id = job.attempt_id(flight.number)
    [reservation] = await worker.outages.retry_while_unavailable(lambda: worker.budgets.reservations([attempt_id]))
    return reservation
