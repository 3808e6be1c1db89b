"""Chooses the deployment of a call by what this worker knows of each.

It is advice, from the answers and the refusals that this worker got: what is left of a provider's limits and of our
own, how long a breaker is open, where a session was last. Only the gates decide, in the one round trip of an admission,
and another deployment is asked when one refuses. So nothing here is stored, and what is wrong costs a round trip.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from breakwater.calls.assignment import Assignment, Checkpoint
from breakwater.calls.gate import Refused, WaitForCapacity
from breakwater.calls.rules.choice import Candidate, ChoicePolicy, order
from breakwater.calls.rules.quota import ALL, DEFAULT_RESET_S, Quota, Room, quotas, room_in, used_up_s
from breakwater.calls.rules.retry import RECHECK_S, spared_s
from breakwater.calls.targets import Target
from breakwater.jobs.contract.execution import Attempt
from breakwater.limits.rules.caller_limits import WindowState
from breakwater.limits.rules.scopes import parts_of

WARM_S = 300.0
"""The time for which providers keep a prompt in their cache at least."""

MAX_SESSIONS = 20_000

_ROOM_S = 0.25
"""The time for which the room in limits is not computed again unless something is known of them anew."""

_LATENCY_SHARE = 0.2
"""The weight of the newest call in the mean of latencies."""
_LATENCY_S = 60.0
"""The time after which a latency says nothing, and the deployment is tried again."""


@dataclass(slots=True)
class _Standing:
    """The facts that are known of one deployment, with times of the monotonic clock, in seconds."""

    quotas: Sequence[Quota] = ()
    """The rest of its provider's limits, by the latest answer."""
    heard_at: float = 0.0
    calls: int = 0
    """The calls since, and the most tokens that they can use. Where no other answer states limits, they are counted
    anew from time to time, as the limits have filled up."""
    tokens: int = 0
    counted_until: float = 0.0
    refilled_at: float = 0.0
    """The time at which limits of its provider that were all but used up have some room again."""
    own_quotas: Sequence[Quota] = ()
    """The rest of our own limits, as of the latest admission or refusal."""
    admitted_at: float = 0.0
    room: Room = ALL
    """The room that all of them leave: each call looks at that of each deployment, and changes it for one."""
    room_until: float = 0.0
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
        name = job.session if policy.sticky else job.execution_id
        last, warm_until = self._sessions.get(name, (None, 0.0)) if policy.sticky else (None, 0.0)
        candidates = [
            self._candidate(job.agent_name, target, now, tokens, failures.count(target.listed) if failures else 0)
            for target in targets
        ]
        last = last if warm_until > now else None
        ranked = order(candidates, policy, name=name, last=last)
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

    def note_call(self, job: Assignment, target: Target, tokens: int, policy: ChoicePolicy) -> None:
        """Notes a call that is about to be made, with the most tokens that it has."""
        self._blocked.pop((job.agent_name, target.deployment), None)
        standing = self._standing_of(target.deployment)
        now = self._clock()
        if now >= standing.counted_until:
            standing.calls = standing.tokens = 0
            standing.counted_until = now + DEFAULT_RESET_S
        standing.calls += 1
        standing.tokens += tokens
        standing.room_until = 0.0
        if not policy.sticky:
            return
        self._sessions[job.session] = target.deployment, now + WARM_S
        self._sessions.move_to_end(job.session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def hear(self, deployment: str, headers: Mapping[str, str]) -> None:
        """Reads what is left of a provider's limits, which corrects what was counted since the last answer."""
        if stated := quotas(headers, self._now()):
            standing = self._standing_of(deployment)
            now = self._clock()
            standing.quotas = stated
            standing.calls = standing.tokens = 0
            standing.heard_at = now
            standing.room_until = 0.0
            standing.counted_until = now + max(DEFAULT_RESET_S, *(quota.reset_s for quota in stated))
            standing.refilled_at = now + min(used_up_s(stated), RECHECK_S)

    def hear_own(self, deployment: str, windows: Iterable[WindowState]) -> None:
        """Reads what is left of our own limits of a deployment, as of its latest admission or refusal for the fleet."""
        standing = self._standing_of(deployment)
        standing.own_quotas = [
            Quota(window.unit == "tokens", max(0, window.remaining), window.limit, window.empty_in_ms / 1000)
            for window in windows
            if _is_of_deployment(window.scope)
        ]
        standing.admitted_at = self._clock()
        standing.room_until = 0.0

    def refills_in_s(self, deployment: str) -> float:
        """Returns the seconds until limits of its provider that are all but used up have room again; 0 if they have."""
        standing = self._standings.get(deployment)
        return 0.0 if standing is None else max(0.0, standing.refilled_at - self._clock())

    def note_end(self, target: Target, attempt: Attempt, earlier: Iterable[Attempt]) -> None:
        """Notes the end of a call: how long its answer took, or that the deployment refuses all calls for some time.

        Args:
            target: the deployment.
            attempt: the call.
            earlier: the job's attempts before.
        """
        if (wait_s := spared_s(attempt, earlier)) > 0:
            self._block("", target.deployment, wait_s)
        if attempt.outcome != "success":
            return
        self._blocked.pop(("", target.deployment), None)
        standing = self._standing_of(target.deployment)
        now = self._clock()
        before = standing.latency_ms if now - standing.answered_at < _LATENCY_S else None
        newest = float(attempt.first_token_ms or attempt.duration_ms)
        standing.latency_ms = newest if before is None else before + (newest - before) * _LATENCY_SHARE
        standing.answered_at = now

    def _standing_of(self, deployment: str) -> _Standing:
        standing = self._standings.get(deployment)
        if standing is None:
            standing = self._standings[deployment] = _Standing()
        return standing

    def _candidate(self, agent: str, target: Target, now: float, tokens: int, failures: int) -> Candidate:
        standing = self._standings.get(target.deployment)
        blocked_s = self._blocked_s(agent, target.deployment, now) if self._blocked else 0.0
        if standing is None:
            return Candidate(target.deployment, target.weight, target.overflow, blocked_s, failures=failures)
        if now >= standing.room_until:
            standing.room = _room_of(standing, now)
            standing.room_until = now + _ROOM_S
        room = standing.room
        fits = tokens <= room.tokens and room.requests >= 1
        latency_ms = standing.latency_ms if now - standing.answered_at < _LATENCY_S else None
        return Candidate(
            target.deployment, target.weight, target.overflow, blocked_s, room.share, fits, latency_ms, failures
        )

    def _blocked_s(self, agent: str, deployment: str, now: float) -> float:
        blocked = self._blocked
        return max(0.0, blocked.get((agent, deployment), 0.0) - now, blocked.get(("", deployment), 0.0) - now)

    def _block(self, agent: str, deployment: str, wait_s: float) -> None:
        self._blocked[agent, deployment] = self._clock() + min(wait_s, RECHECK_S)


def _room_of(standing: _Standing, now: float) -> Room:
    theirs = room_in(standing.quotas, now - standing.heard_at, standing.calls, standing.tokens)
    if not standing.own_quotas:
        return theirs
    own = room_in(standing.own_quotas, now - standing.admitted_at)
    return Room(*map(min, theirs, own))


@lru_cache(maxsize=4096)
def _is_of_deployment(scope: str) -> bool:
    """Returns True if a limit in a scope is of a deployment, whoever calls it."""
    return {part.kind for part in parts_of(scope)} <= {"deployment", "provider"}
