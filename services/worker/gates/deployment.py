"""The deployment: a model that answers with a rate limit is held for the whole fleet until that limit ends.

The same script counts first tries: they earn the retries of an outage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from breakwater.contracts.execution import Attempt
from breakwater.policy.rate_limit import after_hold_s, waits_for_hold
from breakwater.policy.refusals import model_held
from breakwater.policy.retry import failures_on, hold_s
from breakwater.state.connection import ScriptCall
from services.worker.gates.gate import Gate, Refused, WaitForCapacity


@dataclass(slots=True)
class DeploymentGate(Gate):
    """Admits no call while the model is held, and counts a job's first try on it. `may_retry` admits retries."""

    _counted: bool = False
    must_settle = True

    def ask(self) -> ScriptCall:
        """Counts the call if it is the job's first on this model."""
        request = self.request
        self._counted = request.lease_ms is not None and not request.checkpoint.tried(request.flight.model)
        return self.worker.deployments.admit_call(request.target.deployment, first_try=self._counted)

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Has the call wait while the model is held, or refuses it if another model may be called sooner."""
        if not answer:
            return None
        self._counted = False
        request, rest_s = self.request, answer / 1000
        error = model_held(request.job.agent_name, request.target.model, rest_s)
        refused = Refused("rate_limited", error, refused_by=f"provider:{request.target.provider}")
        waited_s = request.waited.get(refused.reason, 0.0)
        is_last = request.checkpoint.is_last_of(request.job.chain)
        if not is_last and not waits_for_hold(waited_s + rest_s):
            return refused
        return WaitForCapacity(after_hold_s(rest_s, self.worker.jitter()), refused)

    def release(self) -> ScriptCall | None:
        """Takes back the first try, as it was not made."""
        return self.worker.deployments.take_back_call(self.request.target.deployment) if self._counted else None

    def settle(self, attempt: Attempt) -> ScriptCall | None:
        """Holds the model if it has answered with a rate limit."""
        error = attempt.error
        if error is None or error.kind != "rate_limit":
            return None
        failures = failures_on(attempt.model, (*self.request.checkpoint.attempts, attempt))
        wait_s = hold_s(error.retry_after_s, self.request.job.agent.retry, failures)
        return self.worker.deployments.hold_call(self.request.target.deployment, wait_s) if wait_s > 0 else None
