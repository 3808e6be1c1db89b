"""The breaker: refuses calls to a model that keeps failing, and lets one probe pass when its cool-down is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar

from breakwater.breakers.rules.admission import PROBE_WAIT_S
from breakwater.breakers.rules.breaker import ALL, BreakerKey, caller_of, task_of
from breakwater.breakers.rules.refusals import breaker_open
from breakwater.breakers.rules.transitions import half_opened
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import ALIVE_MS, BreakerAdmitted, BreakerRefused, Breakers
from breakwater.calls.assignment import Assignment
from breakwater.calls.gate import Gate, GateVerdict, Refused, WaitForCapacity
from breakwater.calls.targets import Target
from breakwater.jobs.metrics import WorkerMetrics
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.formats import moment
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage, Outages
from breakwater.kernel.redis.connection import ScriptCommand, StateUnavailableError
from breakwater.kernel.types import time_from_ms

CHECK_EVERY_S = ALIVE_MS / 5000

PROBE_POLL_S = 0.1
"""The interval of the checks for that; random jitter at most doubles it."""

MISSING = (
    "no breaker service is running, or it has not read the event log yet: failing models "
    "are still called; start one with `python -m breakwater.services breaker`, or check its log"
)


_key_of = lru_cache(maxsize=4096)(BreakerKey.of)
"""Each call asks for its breaker's key twice: at its admission, and when it has ended."""


def breaker_of_agent(job: Assignment, target: Target) -> BreakerKey | None:
    """Returns the key of the agent's breaker for a deployment; None if the agent's breakers are switched off."""
    rules = job.agent.breaker
    return None if rules is None else _key_of(rules.scope, job.agent_name, target.unit, target.provider)


def breaker_of_task(job: Assignment, target: Target) -> BreakerKey | None:
    """Returns the key of the task's breaker for a deployment; None if the job sets no breaker rules."""
    if job.breaker is None:
        return None
    task = TaskKey(job.job.tenant, job.ids.own_task_key)
    return BreakerKey(ALL, target.unit, task.short_name)


@dataclass(slots=True, kw_only=True)
class BreakerGate(Gate):
    """Asks the breaker of the agent and the model."""

    breakers: Breakers
    publisher: Publisher
    outages: Outages
    now: Callable[[], datetime]
    jitter: Callable[[], float]
    subject: ClassVar[str] = "agent"

    _key: BreakerKey | None = None
    _admitted: BreakerAdmitted | None = None

    def ask(self) -> ScriptCommand | None:
        """Returns None if the agent's breakers are switched off."""
        admission = self.admission
        self._key = breaker_of_agent(admission.job, admission.target)
        if self._key is None:
            return None
        job = admission.job.job
        caller = "" if admission.job.is_probe else caller_of(admission.job.caller, job.tenant)
        # A task with a breaker of its own is not stopped by what its own failures have opened.
        has_own = admission.job.breaker is not None
        task = task_of(job.tenant, admission.job.ids.own_task_key) if has_own else ""
        return self.breakers.admit_command(self._key, admission.attempt_id, admission.lease_ms, caller, task)

    def _rules(self) -> BreakerRules | None:
        return self.admission.job.agent.breaker

    def _note(self, admitted: BreakerAdmitted) -> None:
        # The outcome will count for this version of the breaker only.
        self.announces = admitted.became_half_open
        self.flight_fields["breaker_version"] = admitted.version

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Refuses while the breaker is open, and while another call is its probe, after a short wait for its end."""
        match self.breakers.read_admission(answer):
            case BreakerRefused() as refused:
                verdict = self._refusal(refused)
                # Not where another model can be tried immediately.
                is_last = self.admission.checkpoint.is_last_of(self.admission.job.chain)
                if refused.probing and is_last and self.admission.waited.get("breaker_open", 0.0) < PROBE_WAIT_S:
                    return WaitForCapacity(PROBE_POLL_S * (1 + self.jitter()), verdict)
                return verdict
            case BreakerAdmitted() as admitted:
                self._admitted = admitted
                self._note(admitted)
                if admitted.probe:
                    self.flight_fields["cause"] = "probe"
                return None

    def release(self) -> ScriptCommand | None:
        """Releases the probe, so that the next call can be it."""
        if self._key is None or self._admitted is None or not self._admitted.probe:
            return None
        return self.breakers.return_probe_command(self._key, self.admission.attempt_id)

    async def announce(self, verdict: GateVerdict | None) -> None:
        """Publishes that the breaker is half-open, even if the call is refused."""
        del verdict
        rules = self._rules()
        assert self._key is not None
        assert rules is not None
        [loaded] = await self.breakers.load([self._key])
        if loaded.breaker.state != "half_open":
            return  # an operator forced it open or reset it meanwhile, which has been published
        event = half_opened(self._key, loaded.breaker, rules, loaded.now_ms)
        subject = subjects.breaker(self._key.agent, self._key.model)
        await self.outages.retry_while_unavailable(
            lambda: self.publisher.event(subject, event, id=event.transition_id, at=event.at)
        )

    def _refusal(self, refused: BreakerRefused) -> Refused:
        user_message = "This agent is paused for now. Please try again later."
        rules = self._rules()
        wait_s: float | None = None
        state: str | None = None
        if refused.until_ms:
            wait_s = refused.wait_ms / 1000
            until = moment(time_from_ms(refused.until_ms))
            if refused.probing and rules is not None and rules.cooldown_s < wait_s:
                # A probe ends long before its lease: then calls are admitted, or another cool-down begins.
                wait_s = rules.cooldown_s
                until = moment(self.now() + timedelta(seconds=wait_s))
            state = "half-open, and its probe is in flight" if refused.probing else f"open until {until}"
            why = "temporarily unavailable because of recent failures"
            user_message = f"This {self.subject} is {why}. Please try again after {until}."
        assert self._key is not None
        error = breaker_open(
            self._key,
            refused.reason,
            state=state,
            task_id=self.admission.job.ids.own_task_id,
            retry_after_s=wait_s,
            user_message=user_message,
        )
        return Refused("breaker_open", error, statistics=refused.statistics, of_deployment=True)


@dataclass(slots=True, kw_only=True)
class TaskBreakerGate(BreakerGate):
    """Asks the breaker of the task and the model, if the job sets one.

    The agent's own breaker applies too, unless the task's own failures have opened it.
    """

    bound: Callable[[str, str | None], None]
    """Lists a breaker, by its key in Redis, among those of a caller: too many are deleted."""
    subject = "task"

    def ask(self) -> ScriptCommand | None:
        """Returns None if the job sets no breaker."""
        self._key = breaker_of_task(self.admission.job, self.admission.target)
        if self._key is None:
            return None
        admit = self.breakers.admit_command(self._key, self.admission.attempt_id, self.admission.lease_ms, "")
        if self.admission.lease_ms is not None:
            self.bound(admit.keys[0], self.admission.job.caller)
        return admit

    def _rules(self) -> BreakerRules | None:
        return self.admission.job.breaker

    def _note(self, admitted: BreakerAdmitted) -> None:
        """Sets no fields: its changes are not published, and the attempt has the version of the agent's breaker."""


class BreakerWatch:
    """Reports when no breaker service is alive: until one is, calls to failing models are not stopped."""

    def __init__(self, breakers: Breakers, metrics: WorkerMetrics, grace_s: float = ALIVE_MS / 1000) -> None:
        """Takes the time that a breaker service may need to start, as all services start together."""
        self._breakers = breakers
        self._metrics = metrics
        self._grace_s = grace_s
        self._outage = Outage("breakers")

    async def run(self, every_s: float = CHECK_EVERY_S) -> None:
        """Checks until cancelled."""
        loop = asyncio.get_running_loop()
        grace_until = loop.time() + self._grace_s
        while True:
            try:
                alive = await self._breakers.alive()
            except StateUnavailableError:
                alive = None  # logged by the retries of a call to Redis
                # A breaker service may notice later than this worker that Redis is back.
                grace_until = loop.time() + self._grace_s
            if alive:
                grace_until = 0.0
                self._outage.note_success()
            elif alive is False and loop.time() >= grace_until:
                self._outage.note_failure(MISSING)
            if alive is not None:
                self._metrics.set_breaker_service_alive(alive)
            await asyncio.sleep(background.aligned_delay(every_s))
