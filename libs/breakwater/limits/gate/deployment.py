"""The deployment: a model that answers with a rate limit is held for the whole fleet until that limit ends.

A long hold is probed by calls of other callers, one at a time. The same script counts first tries: they earn the
retries of an outage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from breakwater.breakers.rules.breaker import caller_of
from breakwater.calls.gate import Gate, Refused, WaitForCapacity
from breakwater.calls.rules.classify import NO_CREDENTIAL
from breakwater.calls.rules.holds import after_hold_s, waits_for_hold
from breakwater.calls.rules.retry import failures_on, hold_s, spared_s
from breakwater.calls.settings import RetryPolicy
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.redis.connection import ScriptCommand
from breakwater.limits.rules.refusals import model_held
from breakwater.limits.store.deployments import PROBE, Deployments


@dataclass(slots=True, kw_only=True)
class DeploymentGate(Gate):
    """Admits no call while the model is held, and counts a job's first try on it. `may_retry` admits retries."""

    deployments: Deployments
    policies: Mapping[str, RetryPolicy]
    """The policy of each agent, which decides how long a model is held."""
    jitter: Callable[[], float]
    refills_in_s: Callable[[str], float]
    """Returns the seconds until limits of a deployment's provider that are all but used up have some room again."""
    _counted: bool = False
    _probes: bool = False
    must_settle = True

    def ask(self) -> ScriptCommand:
        """Counts the call if it is the job's first on this model."""
        admission = self.admission
        target = admission.target
        self._counted = admission.lease_ms is not None and not admission.checkpoint.tried(target.model, target.listed)
        return self.deployments.admit_command(
            admission.target.deployment,
            first_try=self._counted,
            caller=self._caller(),
            attempt_id=admission.attempt_id,
            lease_ms=admission.lease_ms,
            spares=admission.has_alternatives,
        )

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Has the call wait while the model is held, or refuses it if another model may be called sooner."""
        self._probes = answer == PROBE and self.admission.lease_ms is not None
        if answer in {0, PROBE}:
            return None
        self._counted = False
        return self._wait_or_refusal(answer / 1000)

    def _wait_or_refusal(self, rest_s: float) -> Refused | WaitForCapacity:
        admission = self.admission
        target = admission.target
        error = model_held(admission.job.agent_name, target.unit, rest_s)
        refused = Refused("rate_limited", error, refused_by=f"provider:{target.provider}", of_deployment=True)
        waited_s = admission.waited.get(refused.reason, 0.0)
        is_last = admission.checkpoint.is_last_of(admission.job.chain)
        if not is_last and not waits_for_hold(waited_s + rest_s):
            return refused
        return WaitForCapacity(after_hold_s(rest_s, self.jitter()), refused)

    def release(self) -> ScriptCommand | None:
        """Takes back the first try and the probe, as the call was not made."""
        if not (self._counted or self._probes):
            return None
        admission = self.admission
        return self.deployments.take_back_command(
            admission.target.deployment, first_try=self._counted, attempt_id=admission.attempt_id
        )

    def settle(self, attempt: Attempt) -> ScriptCommand | None:
        """Holds the model after a rate limit, ends its hold if a probe has succeeded, or has it spared for a time."""
        deployments = self.deployments
        name = self.admission.target.deployment
        attempt_id = self.admission.attempt_id
        error = attempt.error
        if error is not None and error.kind == "rate_limit":
            failures = failures_on(attempt.model, (*self.admission.checkpoint.attempts, attempt))
            # By the agent's policy: the longer waits that a job wants are its own.
            policy = self.policies[self.admission.job.agent_name]
            if (wait_s := hold_s(error.retry_after_s, policy, failures)) > 0:
                return deployments.hold_command(name, wait_s, self._caller(), attempt_id)
        spare_s = self._spare_s(attempt) if self.admission.target.has_others else 0.0
        if not self._probes and spare_s <= 0:
            return None
        return deployments.settle_command(name, attempt_id, succeeded=attempt.outcome == "success", spare_s=spare_s)

    def _spare_s(self, attempt: Attempt) -> float:
        refills_in_s = self.refills_in_s(self.admission.target.deployment)
        if attempt.error is not None and attempt.error.class_ == NO_CREDENTIAL:
            return refills_in_s  # another worker may have one
        return max(spared_s(attempt, self.admission.checkpoint.attempts), refills_in_s)

    def _caller(self) -> str:
        return caller_of(self.admission.job.caller, self.admission.job.job.tenant)
