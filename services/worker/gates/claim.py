"""The claim: only the worker that holds the job may call, and its checkpoint is saved before it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from breakwater.state.connection import ScriptCall
from services.worker.checkpoint import Checkpoint
from services.worker.gates.gate import ClaimLost, Gate


@dataclass(slots=True)
class ClaimGate(Gate):
    """Saves the checkpoint for the time of the call and renews the claim, if the job is still ours."""

    def ask(self) -> ScriptCall | None:
        """The checkpoint says that the call may be under way."""
        flight = self.request.flight
        return self._save(self.request.checkpoint.model_copy(update={"in_flight": flight, "model": flight.model}))

    def read(self, answer: Any) -> ClaimLost | None:
        """Lost where a later delivery has the job, or another message with the same job id."""
        return None if answer else ClaimLost(self.request.job.execution_id)

    def give_back(self) -> ScriptCall | None:
        """The checkpoint as it was: after a crash the call must not be taken for one that was made."""
        return self._save(self.request.checkpoint)

    def _save(self, at: Checkpoint) -> ScriptCall | None:
        lease_ms, claim = self.request.lease_ms, self.request.job.claim
        return None if lease_ms is None else self.worker.executions.checkpoint_call(claim, at.text(), lease_ms=lease_ms)
