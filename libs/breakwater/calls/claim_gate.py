"""The claim: only the worker that holds the job may call, and it saves the checkpoint first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from breakwater.calls.assignment import Checkpoint
from breakwater.calls.gate import Gate, Refused, WaitForCapacity
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.redis.connection import ScriptCall
from breakwater.limits.rules.refusals import task_budget_held
from services.worker.leases import JobCancelledError


@dataclass(slots=True)
class ClaimGate(Gate):
    """Saves the checkpoint and renews the claim, if this worker still holds it; and receives cancel requests."""

    def ask(self) -> ScriptCall | None:
        """Saves a checkpoint with the call in flight."""
        flight = self.request.flight
        return self._save(self.request.checkpoint.model_copy(update={"in_flight": flight, "model": flight.model}))

    def read(self, answer: Any) -> ClaimLostError | JobCancelledError | WaitForCapacity | None:
        """Fails if another handling has taken the job over. Asks again if the job has got its first child."""
        job = self.request.job
        claim_state = self.worker.executions.kept(answer)
        if claim_state is None:
            return ClaimLostError(job.execution_id)
        if claim_state.cancels:
            cancel = self.worker.leases.claims[job.claim].cancel
            cancel.receive(claim_state.cancels)
            if cancel.cancellation is not None:
                return JobCancelledError(cancel.cancellation)
        if not claim_state.has_children or (live_claim := self.worker.leases.claims[job.claim]).has_children:
            return None
        live_claim.has_children = True
        return WaitForCapacity(0.0, Refused("budget_exceeded", task_budget_held(job.agent_name), refused_by="task"))

    def release(self) -> ScriptCall | None:
        """Restores the checkpoint: after a crash, the call must not count as made."""
        return self._save(self.request.checkpoint)

    def _save(self, at: Checkpoint) -> ScriptCall | None:
        if self.request.lease_ms is None:
            return None
        return self.worker.executions.checkpoint_call(self.request.job.claim, at.text())
