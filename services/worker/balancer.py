"""Chooses the deployment of a call by what this worker knows of each.

It is advice, from the answers and the refusals that this worker got: what is left of a provider's limits, how long a
breaker is open, where a session was last. Only the gates decide, in the one round trip of an admission, and another
deployment is asked when one refuses. So nothing here is shared or stored, and what is wrong costs a round trip.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from breakwater.calls.assignment import Assignment, Checkpoint
from breakwater.calls.gate import Refused, WaitForCapacity
from breakwater.calls.rules.choice import Candidate, ChoicePolicy, order
from breakwater.calls.rules.quota import Quota, quotas
from breakwater.calls.rules.retry import did_no_work
from breakwater.calls.targets import Target
from breakwater.jobs.contract.execution import Attempt

RECHECK_S = 5.0
"""The longest time for which a refusal is remembered: an operator or a probe on another worker may end its reason."""

LIMITED_S = 1.0
"""The time for which a rate limit without a time of its own is remembered."""

WARM_S = 300.0
"""The time for which providers keep a prompt in their cache at least."""

MAX_SESSIONS = 20_000

_LATENCY_SHARE = 0.2
"""The weight of the newest call in the mean of latencies."""
_LATENCY_S = 60.0
"""The time after which a latency says nothing, and the deployment is tried again."""


@dataclass(slots=True)
class _Standing:
    """The facts that are known of one deployment, with times of the monotonic clock, in seconds."""

    quotas: tuple[Quota, ...] = ()
    heard_at: float = 0.0
    latency_ms: float | None = None
    answered_at: float = 0.0


class Balancer:
    """Orders the deployments of a model for each call.

    Args:
        clock: returns the seconds of a monotonic clock.
        now: returns the time of day, for limits whose reset is a moment.
    """

    def __init__(self, clock: Callable[[], float], now: Callable[[], datetime]) -> None:
        self._clock = clock
        self._now = now
        self._standings: dict[str, _Standing] = {}
        self._blocked: dict[tuple[str, str], float] = {}
        """When a gate may admit calls of an agent (or of any, with an empty name) to a deployment again."""
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """The deployment of each session's last call, and when its cache is cold."""

    def order_for(
        self,
        job: Assignment,
        checkpoint: Checkpoint,
        targets: Sequence[Target],
        policy: ChoicePolicy,
        tokens: int,
    ) -> list[Target]:
        """Returns the deployments in the order in which the job's next call asks them.

        Args:
            job: the job.
            checkpoint: its progress. A call that repairs a request goes where the request failed.
            targets: the deployments that it may call.
            policy: how they are chosen.
            tokens: the most tokens that the call can use.
        """
        now = self._clock()
        failures = [attempt.deployment for attempt in checkpoint.attempts if attempt.model == targets[0].model]
        by_id = {target.deployment: target for target in targets}
        last, warm_until = self._sessions.get(job.session, (None, 0.0)) if policy.sticky else (None, 0.0)
        candidates = [
            self._candidate(job.agent_name, target, now, tokens, failures.count(target.listed)) for target in targets
        ]
        last = last if warm_until > now else None
        ranked = order(candidates, policy, session=job.session, call=job.execution_id, last=last)
        chosen = [by_id[candidate.id] for candidate in ranked]
        if checkpoint.cause not in {None, "batch"} and failures:
            chosen.sort(key=lambda target: target.listed != failures[-1])
        return chosen

    def may_call(self, agent: str, target: Target) -> bool:
        """Returns True if no refusal of the deployment is remembered."""
        return not self._blocked_s(agent, target.deployment, self._clock())

    def note_refusal(self, agent: str, target: Target, verdict: Refused | WaitForCapacity) -> None:
        """Remembers a gate's refusal, so that the next calls ask others first."""
        waits = isinstance(verdict, WaitForCapacity)
        wait_s = verdict.delay_s if waits else verdict.error.retry_after_s
        self._block(agent, target.deployment, RECHECK_S if wait_s is None else wait_s)

    def note_call(self, job: Assignment, target: Target, tokens: int) -> None:
        """Notes a call that is about to be made, with the most tokens that it has."""
        self._blocked.pop((job.agent_name, target.deployment), None)
        standing = self._standings.setdefault(target.deployment, _Standing())
        standing.quotas = tuple(quota.less(tokens) for quota in standing.quotas)
        self._sessions[job.session] = target.deployment, self._clock() + WARM_S
        self._sessions.move_to_end(job.session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def hear(self, deployment: str, headers: Mapping[str, str]) -> None:
        """Reads what is left of a provider's limits, which corrects what was counted since the last answer."""
        if stated := quotas(headers, self._now()):
            standing = self._standings.setdefault(deployment, _Standing())
            standing.quotas = stated
            standing.heard_at = self._clock()

    def note_end(self, target: Target, attempt: Attempt) -> None:
        """Notes the end of a call: how long its answer took, or that the deployment refuses all calls for some time."""
        if attempt.error is not None and did_no_work(attempt.error):
            named_s = attempt.error.retry_after_s
            limited = attempt.error.kind == "rate_limit"
            self._block("", target.deployment, (LIMITED_S if limited else RECHECK_S) if named_s is None else named_s)
        if attempt.outcome != "success":
            return
        self._blocked.pop(("", target.deployment), None)
        standing = self._standings.setdefault(target.deployment, _Standing())
        now = self._clock()
        before = standing.latency_ms if now - standing.answered_at < _LATENCY_S else None
        newest = float(attempt.first_token_ms or attempt.duration_ms)
        standing.latency_ms = newest if before is None else before + (newest - before) * _LATENCY_SHARE
        standing.answered_at = now

    def _candidate(self, agent: str, target: Target, now: float, tokens: int, failures: int) -> Candidate:
        standing = self._standings.get(target.deployment)
        blocked_s = self._blocked_s(agent, target.deployment, now)
        headroom = 1.0
        fits = True
        latency_ms = None
        if standing is not None:
            age_s = now - standing.heard_at
            valid = [quota for quota in standing.quotas if age_s < quota.reset_s]
            headroom = min((quota.share for quota in valid), default=1.0)
            fits = all(quota.fits(tokens) for quota in valid)
            latency_ms = standing.latency_ms if now - standing.answered_at < _LATENCY_S else None
        return Candidate(
            target.deployment, target.weight, target.overflow, blocked_s, headroom, fits, latency_ms, failures
        )

    def _blocked_s(self, agent: str, deployment: str, now: float) -> float:
        until = max(self._blocked.get((name, deployment), 0.0) for name in (agent, ""))
        return max(0.0, until - now)

    def _block(self, agent: str, deployment: str, wait_s: float) -> None:
        self._blocked[agent, deployment] = self._clock() + min(wait_s, RECHECK_S)
