"""The claim: only the worker that holds the job may call, and it saves the checkpoint first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from breakwater.calls.assignment import Checkpoint
from breakwater.calls.gate import AskAgain, Gate
from breakwater.jobs.held_claims import JobCancelledError
from breakwater.jobs.store.executions import ClaimLostError, Executions
from breakwater.kernel.redis.connection import ScriptCommand


@dataclass(slots=True, kw_only=True)
class ClaimGate(Gate):
    """Saves the checkpoint and renews the claim, if this worker still holds it; and receives cancel requests."""

    executions: Executions

    def ask(self) -> ScriptCommand | None:
        """Saves a checkpoint with the call in flight."""
        flight = self.admission.flight
        return self._save(self.admission.checkpoint.model_copy(update={"in_flight": flight, "model": flight.model}))

    def read(self, answer: Any) -> ClaimLostError | JobCancelledError | AskAgain | None:
        """Fails if another handling has taken the job over. Asks again if the job has got its first child."""
        job = self.admission.job
        claim_state = self.executions.read_claim_answer(answer)
        if claim_state is None:
            return ClaimLostError(job.execution_id)
        if claim_state.cancels:
            cancel = job.lease.cancel
            cancel.receive(claim_state.cancels)
            if cancel.cancellation is not None:
                return JobCancelledError(cancel.cancellation)
        if not claim_state.has_children or job.lease.has_children:
            return None
        # From now on, it counts in the task that has its id.
        job.lease.has_children = True
        return AskAgain()

    def release(self) -> ScriptCommand | None:
        """Restores the checkpoint: after a crash, the call must not count as made."""
        return self._save(self.admission.checkpoint)

    def _save(self, at: Checkpoint) -> ScriptCommand | None:
        if self.admission.lease_ms is None:
            return None
        return self.executions.checkpoint_command(self.admission.job.claim, at.text())
