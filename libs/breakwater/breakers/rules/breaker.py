"""Opens and closes breakers. A breaker's state is a value, and every function returns the next one.

    closed ──a rule fires──► open ──cool-down over──► half-open ──probe succeeds──► closed
                               ▲                          └──────probe fails──────► open
    any ──isolate──► isolated          any ──reset──► closed

Redis takes the step from open to half-open when a call asks to be admitted; all other steps are decided here. An
outcome is identified by its sequence number in the event log and by the version of the breaker that admitted its call,
never by a caller's clock. So outcomes that are delivered twice, out of order or late need no special care.

A job that fails, tries the model again and fails again is one sign of a broken model, not several. So failures in a
row and equal errors are counted in jobs, by the last attempt of each on the model, unless the rules count attempts.

When a breaker has several callers, one caller's requests must not cut off the others. So a single caller's failures
make up at most half of the failures that open the breaker for all, and those of one job count once. A caller's failures
also count separately: they open the breaker for that caller alone, and calls of others pass.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from breakwater.breakers.contract import BreakerRule, BreakerScope, BreakerState, CountedUnit
from breakwater.breakers.settings import MAX_KEPT, BreakerRules
from breakwater.kernel.formats import quantity
from breakwater.kernel.immutable import changed, immutable
from breakwater.kernel.nats.subjects import encode_token

ALL = "*"
"""The agent in the name of a breaker that all agents share."""


class BreakerKey(NamedTuple):
    """The key of a breaker.

    Attributes:
        agent: the agent; `*` for a breaker that all agents share.
        model: the model; `<provider>/*` for a breaker of a whole provider.
        task: the task whose jobs bring their own breaker. Such a breaker is listed nowhere, and its transitions are
            not published.
    """

    agent: str
    model: str
    task: str | None = None

    @classmethod
    def of(cls, scope: BreakerScope, agent: str, model: str, provider: str) -> BreakerKey:
        """Returns the key of the breaker that a call belongs to."""
        match scope:
            case "agent_model":
                return cls(agent, model)
            case "model":
                return cls(ALL, model)
            case "provider":
                return cls(ALL, f"{provider}/{ALL}")

    @property
    def name(self) -> str:
        """The breaker's name: `<agent>/<model>`, each encoded as a subject token, and `/<task>` if it has a task."""
        name = f"{encode_token(self.agent)}/{encode_token(self.model)}"
        return name if self.task is None else f"{name}/{self.task}"


def rules_of_unconfigured(key: BreakerKey) -> BreakerRules:
    """Returns rules for a breaker that only Redis knows: its agent, or its model, is not in the config."""
    if key.agent != ALL:
        return BreakerRules()
    return BreakerRules(scope="provider" if key.model.endswith(f"/{ALL}") else "model")


@lru_cache(maxsize=4096)
def short_hash(text: str) -> str:
    """Hashes a job or a caller to 8 hex digits, which distinguish it in a breaker and reveal nothing."""
    return blake2b(text.encode(), digest_size=4).hexdigest()


@lru_cache(maxsize=4096)
def caller_of(name: str | None, tenant: str | None) -> str:
    """Returns a caller's name in a breaker: the hash of its key or program, and of the tenant that it calls for.

    Keys and tenants count separately, so a caller cannot pass for several, neither by making up tenants nor by using
    many keys for one tenant.
    """
    return f"k{short_hash(name or '')} t{short_hash(tenant or '')}"


@lru_cache(maxsize=4096)
def task_of(tenant: str | None, task_id: str) -> str:
    """Returns a task's name in a breaker. For a job without a task, pass the job's id as `task_id`."""
    return short_hash(f"{tenant or ''}\n{task_id}")


_NO_TENANT = f"t{short_hash('')}"
MAX_ERRORS_SEEN = 100

OWN_RUN_MS = 3_600_000
"""The age up to which a caller's consecutive failures are kept beyond the window while others succeed."""
MAX_OWN_RUN = 100
"""The most failures that are kept for that reason."""

SLICES = 100
"""The slices of a window in which calls are counted. A failure rate's window is exact to one slice."""

CALLERS_OF_SLICE = 8
"""The number of callers that are counted separately in a slice."""


@immutable(slots=False)
class CountedFailure:
    """A counted failure.

    Attributes:
        sequence: its sequence number in the event log.
        at_ms: the time at which the log stored it, in milliseconds since the epoch.
        error: the identity of the error text; empty if unknown.
        job: the hash of its job; empty if unknown.
        caller: the caller as `caller_of` names it; empty if unknown.
        task: the hash of its task; empty if unknown.
        tried_again: True if the job was to call the model again, so that its end there was open.
    """

    sequence: int
    at_ms: int
    error: str = ""
    job: str = ""
    caller: str = ""
    task: str = ""
    tried_again: bool = False


@immutable()
class Slice:
    """The calls of one caller that ended within one slice of a window.

    Attributes:
        number: the slice's number, counted from the epoch.
        calls: how many calls ended.
        failed: how many of them failed.
        caller: the caller; empty for all callers beyond the first `CALLERS_OF_SLICE`.
    """

    number: int
    calls: int
    failed: int
    caller: str = ""


@immutable(slots=False)
class Breaker:
    """The state of one breaker."""

    state: BreakerState = "closed"
    failures: tuple[CountedFailure, ...] = ()
    """The latest failures, ordered by sequence: those in the window and the consecutive ones.

    At most `MAX_KEPT`, and besides as many that ended their jobs on the model.
    """
    count: CountedUnit = "jobs"
    """The unit that the rules counted in at the latest failure."""
    forgotten: int = 0
    """The highest sequence of the failures that were counted and are no longer kept."""
    last_success: int = 0
    """The sequence of the latest success."""
    open_until_ms: int = 0
    openings: int = 0
    """The number of times it has opened since it was last closed."""
    probe: str | None = None
    """The attempt that holds the half-open probe; its lease ends at `probe_until_ms`."""
    probe_until_ms: int = 0
    waits: bool = False
    """True once it was reported that it is half-open and waits for a call."""
    version: int = 0
    """Grows with each transition. Each call carries the version that admitted it."""
    counts_from: int = 0
    """The version of the latest transition that concerned all callers; outcomes of earlier admissions do not count."""
    closed_for: str = ""
    """The only caller for whom it was last closed; the caller's admissions before `closed_version` do not count."""
    closed_version: int = 0
    closed_at: int = 0
    """The sequence of the probe that last closed it; earlier events no longer count, even if delivered again."""
    total_failures: int = 0
    """The number of failures that were counted; only a reset starts over."""
    errors_seen: tuple[str, ...] = ()
    """The identities of their distinct errors, sorted; at most `MAX_ERRORS_SEEN`."""
    slices: tuple[Slice, ...] = ()
    """The calls within the window, if a rule needs a failure rate."""
    counted: tuple[int, ...] = ()
    """The sequences of the latest calls in `slices`, ordered."""
    last_failure_ms: int = 0
    last_success_ms: int = 0
    limited_since_ms: int = 0
    """The time of the first rate limit since the last success; 0 if there was none."""
    changed_ms: int = 0
    """The time of its latest change of state; 0 if there was none."""
    reason: str = ""
    """The reason for that change, in words; a half-open breaker keeps the reason for which it opened."""
    callers: tuple[tuple[str, int], ...] = ()
    """The latest two keys or programs that called and the latest two tenants, each with the time its call ended."""
    alone: str = ""
    """The only caller that it refuses (a key, a tenant, or both); empty if it refuses all."""
    alone_name: str = ""
    """The same in words, for operators."""
    task: str = ""
    """The task that caused more than half of the failures that opened it; empty if none did."""
    successes: tuple[tuple[str, int], ...] = ()
    """The sequence of the latest success of each key and tenant that has failures."""
    probed_by: str = ""
    """The caller whose probe has failed. One other caller may probe immediately, without a cool-down."""


@immutable(slots=False)
class Observation:
    """The outcome of an attempt, as a breaker counts it.

    Attributes:
        sequence: its sequence number in the event log.
        attempt_id: the attempt.
        at_ms: when the log stored the event, by the log's clock, because workers' clocks differ.
        failed: True for a failure, False for a success; None if the outcome says nothing about the model.
        error: the identity of the error text; empty if unknown.
        version: the version of the breaker that admitted the call; None if unknown.
        limited: True for a rate limit. By itself that is no failure, because the model is only busy.
        job: the hash of the execution; empty if unknown.
        caller: the caller as `caller_of` names it; empty if unknown.
        names: the caller in words: the key or program, and the tenant.
        task: the hash of the task; empty if unknown.
        tried_again: True if the job is to call the model again, so that its end there is open.
        gave_up: True if the job calls the model no more although that was planned: the call was refused, or the job's
            deadline cut it off. If it has failed before, it has failed.
    """

    sequence: int
    attempt_id: str
    at_ms: int
    failed: bool | None
    error: str = ""
    version: int | None = None
    limited: bool = False
    job: str = ""
    caller: str = ""
    names: tuple[str, str] = ("", "")
    task: str = ""
    tried_again: bool = False
    gave_up: bool = False


@immutable()
class BreakerChange:
    """A transition, with the figures that explain it."""

    before: Breaker
    after: Breaker
    rule: BreakerRule | None
    reason: str
    consecutive_failures: int
    errors: int
    error_hash: str | None = None
    by: str | None = None


def observe(
    breaker: Breaker, observation: Observation, rules: BreakerRules, now_ms: int, jitter: float = 0.0
) -> tuple[Breaker, BreakerChange | None]:
    """Applies one outcome to a breaker.

    Nothing changes while the breaker is open: calls that were in flight when it opened must not extend its cool-down.
    While it is half-open, only the probe's outcome counts. Once it is closed again, outcomes of calls admitted before
    it opened are ignored, and so are outcomes that are delivered again. If it refuses one caller, all this holds for
    that caller, and for all others it is closed.

    Args:
        breaker: the current state.
        observation: the outcome.
        rules: the rules of the calling agent.
        now_ms: the current time, in milliseconds since the epoch.
        jitter: a random number from 0 to 1, for the cool-down.

    Returns:
        The next state, and its transition; None if there is no transition.
    """
    is_stale = (
        observation.version is not None
        and not _counts_from(breaker, observation.caller) <= observation.version <= breaker.version
    )
    # The plane's own probe is nobody's, and tries a breaker that refuses one caller, too.
    concerns = concerns_caller(breaker, observation.caller) or observation.attempt_id == breaker.probe
    if breaker.state == "isolated" or is_stale or (breaker.state == "open" and concerns):
        return breaker, None
    # The log's clock may be ahead of ours. That must neither keep an outcome counting for longer nor delay it.
    if observation.at_ms > now_ms:
        observation = changed(observation, at_ms=now_ms)
    callers = breaker.callers if observation.failed is None else _with_caller(breaker.callers, observation)
    is_probed = breaker.state == "half_open" and concerns
    if observation.failed is False and observation.sequence > breaker.closed_at and not is_probed:
        counted = _with_call(breaker, observation, rules, now_ms)
        return changed(
            counted,
            callers=callers,
            successes=_with_success(counted, observation),
            last_success=max(counted.last_success, observation.sequence),
            last_success_ms=max(counted.last_success_ms, observation.at_ms),
            limited_since_ms=0,
        ), None
    if callers != breaker.callers:
        breaker = changed(breaker, callers=callers)
    if observation.failed is None and observation.limited and observation.at_ms > breaker.last_success_ms:
        breaker = changed(breaker, limited_since_ms=breaker.limited_since_ms or observation.at_ms)
        # A model that has only refused calls for a whole window is not busy but broken.
        observation = changed(
            observation, failed=observation.at_ms - breaker.limited_since_ms >= _window_ms(rules) or None
        )
    if is_probed:
        return _after_probe(breaker, observation, rules, now_ms, jitter)
    if observation.gave_up and observation.failed is None:
        return _after_giving_up(breaker, observation, rules, now_ms, jitter)
    if not observation.failed or observation.sequence <= breaker.closed_at:
        return breaker, None
    if observation.sequence <= breaker.forgotten or (
        _comes_before_others(breaker, observation) and observation.sequence in _sequences(breaker)
    ):
        return breaker, None  # it has been counted
    counted = _with_call(breaker, observation, rules, now_ms)
    return _open_if_due(_with_failure(counted, observation, rules, now_ms), observation, rules, now_ms, jitter)


def _after_giving_up(
    breaker: Breaker, observation: Observation, rules: BreakerRules, now_ms: int, jitter: float
) -> tuple[Breaker, BreakerChange | None]:
    """Counts the latest failure of a job that was to try again and did not."""
    open_ends = [
        failure
        for failure in breaker.failures
        if failure.tried_again and failure.job == observation.job and failure.sequence < observation.sequence
    ]
    if not open_ends:
        return breaker, None
    last = open_ends[-1]
    failures = tuple(
        changed(failure, tried_again=False) if failure is last else failure for failure in breaker.failures
    )
    observation = changed(observation, error=last.error)
    return _open_if_due(changed(breaker, failures=failures), observation, rules, now_ms, jitter)


def concerns_caller(breaker: Breaker, caller: str) -> bool:
    """Returns False if a breaker refuses only another caller, so that this one may call; else True."""
    return not caller or not breaker.alone or set(breaker.alone.split()) <= set(caller.split())


def _counts_from(breaker: Breaker, caller: str) -> int:
    """Returns the first version of the breaker whose admissions count for a caller."""
    if not breaker.closed_for or not set(breaker.closed_for.split()) <= set(caller.split()):
        return breaker.counts_from
    return max(breaker.counts_from, breaker.closed_version)


def is_open_for_one(breaker: Breaker) -> bool:
    """Returns True if a breaker refuses one caller while others call."""
    alone = breaker.alone.split()
    kinds = {name[0] for name in alone}
    since_ms = breaker.changed_ms - 60_000
    return (
        bool(alone)
        and breaker.state in {"open", "half_open"}
        and any(
            name[0] in kinds and name not in alone and name != _NO_TENANT and at_ms >= since_ms
            for name, at_ms in breaker.callers
        )
    )


def isolate(
    breaker: Breaker, *, by: str, why: str, rules: BreakerRules, now_ms: int
) -> tuple[Breaker, BreakerChange | None]:
    """Forces a breaker open until an operator resets it. Nothing changes if it is already isolated."""
    if breaker.state == "isolated":
        return breaker, None
    reason = _operator_reason("isolated", by, why)
    for_all = changed(breaker, open_until_ms=0, alone="", alone_name="", task="", probed_by="")
    after = _move(for_all, "isolated", reason, now_ms)
    return after, _change(breaker, after, None, reason, rules, now_ms, by=by)


def reset(breaker: Breaker, *, by: str, why: str, rules: BreakerRules, now_ms: int) -> tuple[Breaker, BreakerChange]:
    """Closes a breaker and forgets all that it counted, also if it is already closed."""
    reason = _operator_reason("reset", by, why)
    after = Breaker(
        version=breaker.version + 1,
        counts_from=breaker.version + 1,
        changed_ms=now_ms,
        reason=reason,
        closed_at=max(breaker.closed_at, breaker.last_success, breaker.forgotten, *_sequences(breaker)),
        last_failure_ms=breaker.last_failure_ms,
        last_success_ms=breaker.last_success_ms,
        callers=breaker.callers,
    )
    return after, _change(breaker, after, None, reason, rules, now_ms, by=by)


def state_at(breaker: Breaker, now_ms: int) -> BreakerState:
    """Returns a breaker's state: half-open once its cool-down is over, though no call may have come yet."""
    return "half_open" if breaker.state == "open" and breaker.open_until_ms <= now_ms else breaker.state


def wait_for_call(breaker: Breaker, rules: BreakerRules, now_ms: int) -> tuple[Breaker, BreakerChange | None]:
    """Makes a breaker half-open whose cool-down is over without a call, or that has lost its probe.

    Nothing changes if that was done before, so that a breaker which is seldom called is reported once.
    """
    if state_at(breaker, now_ms) != "half_open" or breaker.waits or (breaker.probe and breaker.probe_until_ms > now_ms):
        return breaker, None
    ended = "the cool-down has ended" if breaker.state == "open" else "its probe has ended without an outcome"
    after = changed(_move(breaker, "half_open", breaker.reason, now_ms), waits=True, probed_by="")
    return after, _change(breaker, after, None, f"{ended}; it waits for a call to try it", rules, now_ms)


def awaits_call(breaker: Breaker, now_ms: int) -> bool:
    """Returns True if a breaker was reported to wait for a call, and none tries it now."""
    is_probed = breaker.probe is not None and breaker.probe_until_ms > now_ms
    return breaker.state == "half_open" and breaker.waits and not is_probed


def _operator_reason(action: str, by: str, why: str) -> str:
    return f"{action} by {by}: {why}" if why else f"{action} by {by}"


def _after_probe(
    breaker: Breaker, observation: Observation, rules: BreakerRules, now_ms: int, jitter: float
) -> tuple[Breaker, BreakerChange | None]:
    if observation.attempt_id != breaker.probe:
        return breaker, None
    if observation.failed is None:
        # The probe's outcome says nothing about the model's health: the next call may probe.
        return changed(breaker, probe=None, probe_until_ms=0), None
    if observation.failed:
        reason = "the half-open probe failed"
        failed = _with_failure(breaker, observation, rules, now_ms)
        failed = changed(failed, probed_by="" if breaker.probed_by else observation.caller)
        opened = _open(failed, reason, rules, now_ms, jitter)
        return opened, _change(breaker, opened, "probe_failed", reason, rules, now_ms)
    reason = "the half-open probe succeeded"
    if breaker.alone:
        closed = _close_for_one(breaker, observation, reason, now_ms)
        return closed, _change(breaker, closed, None, reason, rules, now_ms)
    closed = Breaker(
        changed_ms=now_ms,
        reason=reason,
        last_success=observation.sequence,
        closed_at=observation.sequence,
        version=breaker.version + 1,
        counts_from=breaker.version + 1,
        total_failures=breaker.total_failures,
        errors_seen=breaker.errors_seen,
        last_failure_ms=breaker.last_failure_ms,
        last_success_ms=max(breaker.last_success_ms, observation.at_ms),
        callers=breaker.callers,
    )
    return closed, _change(breaker, closed, None, reason, rules, now_ms)


def _close_for_one(breaker: Breaker, observation: Observation, reason: str, now_ms: int) -> Breaker:
    """Closes a breaker that refused one caller: forgets that caller's calls and keeps those of others."""
    forgotten = [failure.sequence for failure in breaker.failures if concerns_caller(breaker, failure.caller)]
    return changed(
        breaker,
        state="closed",
        reason=reason,
        changed_ms=now_ms,
        version=breaker.version + 1,
        closed_for=breaker.alone,
        closed_version=breaker.version + 1,
        failures=tuple(failure for failure in breaker.failures if not concerns_caller(breaker, failure.caller)),
        forgotten=max(breaker.forgotten, *forgotten, 0),
        slices=tuple(calls for calls in breaker.slices if not concerns_caller(breaker, calls.caller)),
        last_success=max(breaker.last_success, observation.sequence),
        last_success_ms=max(breaker.last_success_ms, observation.at_ms),
        limited_since_ms=0,
        open_until_ms=0,
        openings=0,
        probe=None,
        probe_until_ms=0,
        waits=False,
        alone="",
        alone_name="",
        task="",
        probed_by="",
    )


def _open_if_due(
    breaker: Breaker, observation: Observation, rules: BreakerRules, now_ms: int, jitter: float
) -> tuple[Breaker, BreakerChange | None]:
    if len(breaker.failures) < _fewest_failures(rules):
        return breaker, None
    # The kinds of names of which several have called within the window: `k`, keys or programs; `t`, tenants.
    since = now_ms - _window_ms(rules)
    kinds = [name[0] for name, at_ms in breaker.callers if at_ms > since]
    several = [kind for kind in dict.fromkeys(kinds) if kinds.count(kind) > 1]
    fired = _rule_that_fires(breaker, observation.error, several, rules, now_ms)
    # The names that it opens for alone; none: for all. A key remains one key however many tenants it calls for, even
    # if no other key has called recently, and so does a tenant with many keys.
    alone = [
        name for name in observation.caller.split() if name[0] not in several and not (several and name == _NO_TENANT)
    ]
    if fired is None and several:
        fired_for_caller = [
            (_in_common(fired_rule[2], observation), fired_rule)
            for name in observation.caller.split()
            if name[0] in several and name != _NO_TENANT
            if (fired_rule := _rule_for_one(breaker, name, observation, rules, now_ms)) is not None
        ]
        alone, fired = max(fired_for_caller, key=lambda match: len(match[0]), default=(alone, None))
    elif fired is not None and several:
        rule, reason, failures = fired
        jobs = quantity(len(_of_jobs(failures)), "job")
        callers = quantity(len({failure.caller for failure in failures}), "caller")
        says_jobs = rule in {"consecutive_failures", "same_error"} and rules.count == "jobs"
        fired = rule, f"{reason}, of {callers}" if says_jobs else f"{reason}, of {jobs} of {callers}", failures
    if fired is None:
        return breaker, None
    rule, reason, failures = fired
    if breaker.state != "closed":
        # It is already open for another caller: now it opens for what both have in common, or else for all.
        alone = [name for name in alone if name in breaker.alone.split()]
    due = changed(
        breaker,
        alone=" ".join(alone),
        alone_name=_in_words(alone, observation),
        task=_task_of(failures),
        probed_by="",
    )
    opened = _open(due, reason, rules, now_ms, jitter)
    repeated = observation.error if rule == "same_error" else None
    return opened, _change(breaker, opened, rule, reason, rules, now_ms, error_hash=repeated)


def _fewest_failures(rules: BreakerRules) -> int:
    """Returns the number of failures below which no rule fires."""
    if rules.failure_rate is not None:
        return 1
    thresholds = rules.consecutive_failures, rules.same_error, rules.errors
    return min([threshold for threshold in thresholds if threshold is not None], default=1)


def _rule_for_one(
    breaker: Breaker, name: str, observation: Observation, rules: BreakerRules, now_ms: int
) -> tuple[BreakerRule, str, Sequence[CountedFailure]] | None:
    """Returns the rule that the calls of one key or tenant fire. Several tenants of a key count as several callers."""
    failures = tuple([failure for failure in breaker.failures if name in failure.caller])
    if len(failures) < _fewest_failures(rules):
        return None
    of_caller = changed(
        breaker,
        failures=failures,
        slices=tuple([counted_slice for counted_slice in breaker.slices if name in counted_slice.caller]),
        last_success=dict(breaker.successes).get(name, 0),
    )
    names = {name for caller in {failure.caller for failure in failures} for name in caller.split()}
    several = [kind for kind, number in Counter(name[0] for name in names).items() if number > 1]
    return _rule_that_fires(of_caller, observation.error, several, rules, now_ms)


def _in_common(failures: Sequence[CountedFailure], observation: Observation) -> list[str]:
    """Returns the key, the tenant or both that the latest failure shares with all `failures`."""
    return [name for name in observation.caller.split() if all(name in failure.caller for failure in failures)]


def _in_words(alone: Sequence[str], observation: Observation) -> str:
    """Describes, for operators, the hashed key and tenant that a breaker refuses."""
    callers = zip(observation.caller.split(), ("key", "tenant"), observation.names, strict=False)
    words = [f"{kind} {name}" for hashed, kind, name in callers if hashed in alone and name]
    return " and ".join(words) or ("the keys of operators" if alone else "")


def _task_of(failures: Sequence[CountedFailure]) -> str:
    """Returns the task that caused more than half of the failures; empty if none did."""
    [(task, number)] = Counter(failure.task for failure in failures).most_common(1) or [("", 0)]
    return task if 2 * number > len(failures) else ""


def _with_success(breaker: Breaker, observation: Observation) -> tuple[tuple[str, int], ...]:
    """Returns the latest successes of the keys and tenants that have failures, with one more success."""
    if not breaker.failures:
        return ()
    failed = {name for caller in {failure.caller for failure in breaker.failures} for name in caller.split()}
    latest = dict(breaker.successes)
    for name in observation.caller.split():
        if name not in failed:
            continue
        if any(name in failure.caller for failure in breaker.failures if failure.sequence < observation.sequence):
            latest[name] = max(latest.get(name, 0), observation.sequence)
    return tuple(sorted([(name, sequence) for name, sequence in latest.items() if name in failed]))


def _rule_that_fires(
    breaker: Breaker, error: str, several: Sequence[str], rules: BreakerRules, now_ms: int
) -> tuple[BreakerRule, str, Sequence[CountedFailure]] | None:
    """Returns the first rule that fires, the reason in words, and the failures that the rule counts."""
    window = f"within {rules.within_s:g} s"
    unit = "job" if rules.count == "jobs" else "call"
    consecutive = _counted([failure for failure in breaker.failures if failure.sequence > breaker.last_success], rules)
    if _reaches(consecutive, rules.consecutive_failures, several):
        figure = f"{quantity(len(consecutive), unit)} {'in a row ' if len(consecutive) > 1 else ''}failed"
        return "consecutive_failures", f"{figure} (threshold: {rules.consecutive_failures})", consecutive
    recent = _within(breaker.failures, rules, now_ms)
    same = _counted([failure for failure in recent if failure.error == error] if error else [], rules)
    if _reaches(same, rules.same_error, several):
        figure = f"Same error in {quantity(len(same), unit)} {window}"
        return "same_error", f"{figure} (threshold: {rules.same_error})", same
    if _reaches(recent, rules.errors, several):
        figure = quantity(len(recent), "error")
        return "errors", f"{figure} {window} (threshold: {rules.errors})", recent
    if rules.failure_rate is None:
        return None
    calls, failed = calls_within(breaker, rules, now_ms)
    if calls >= rules.minimum_calls and _fails_at_rate(breaker, several, rules, now_ms):
        threshold = f"{_percent(rules.failure_rate)} of at least {rules.minimum_calls}"
        figure = f"{_percent(failed / calls)} of {quantity(calls, 'call')}"
        return "failure_rate", f"{figure} failed {window} (threshold: {threshold})", recent
    return None


def _with_caller(callers: tuple[tuple[str, int], ...], observation: Observation) -> tuple[tuple[str, int], ...]:
    """Returns the latest callers with those of one more call. Two of each kind suffice to prove that several call."""
    latest = dict(callers)
    names = observation.caller.split()
    at_ms = observation.at_ms
    for name in names:
        latest[name] = max(at_ms, latest.get(name, 0))
    if len(latest) == len(names):
        return tuple(latest.items())  # nobody else has called
    newest = sorted([(name[0], -called_ms, name) for name, called_ms in latest.items()])
    return tuple(
        [
            (name, -before_ms)
            for place, (kind, before_ms, name) in enumerate(newest)
            if place < 2 or newest[place - 2][0] != kind
        ]
    )


def _name_of_kind(caller: str, kind: str) -> str:
    return next((name for name in caller.split() if name[0] == kind), "")


def _of_jobs(failures: Sequence[CountedFailure]) -> Sequence[CountedFailure]:
    """Returns the last failure of each job."""
    return tuple({failure.job or failure.sequence: failure for failure in failures}.values())


def _counted(failures: Sequence[CountedFailure], by: BreakerRules | Breaker) -> Sequence[CountedFailure]:
    """Returns those of the failures that count as one each: of a job the last, unless it tried the model again."""
    if by.count == "attempts":
        return failures
    return _of_jobs([failure for failure in failures if not failure.tried_again])


def _reaches(failures: Sequence[CountedFailure], threshold: int | None, several: Sequence[str]) -> bool:
    """Returns True if the failures reach a threshold.

    If there are several callers, each job counts once, and each caller for at most half of the threshold.
    """
    if threshold is None or len(failures) < threshold:
        return False
    if not several:
        return True
    needed = max(threshold, 2)
    most_of_one = -(-needed // 2)
    of_jobs = _of_jobs(failures)
    for kind in several:
        counts = Counter(_name_of_kind(failure.caller, kind) for failure in of_jobs)
        if sum(min(count, most_of_one) for count in counts.values()) < needed:
            return False
    return True


def _fails_at_rate(breaker: Breaker, several: Sequence[str], rules: BreakerRules, now_ms: int) -> bool:
    """Returns True if the failure rate is reached; with several callers, also without any one of them."""
    if rules.failure_rate is None:
        return False
    live = _live(breaker.slices, rules, now_ms)
    parts = [live]
    for kind in several:
        names = {_name_of_kind(calls.caller, kind) for calls in live}
        parts += [[calls for calls in live if _name_of_kind(calls.caller, kind) != name] for name in names]
    # Without one caller, half of the failures that suffice at `minimum_calls` must remain: one failure is no rate.
    least_failures = max(1, int(rules.failure_rate * rules.minimum_calls) // 2) if several else 1
    for part in parts:
        total, failed = _totals(part)
        # Divided, not multiplied: 7 of 100 are a share of 0.07, and yet fewer than 0.07 * 100 in floats.
        if failed < least_failures or failed / total < rules.failure_rate:
            return False
    return True


def _totals(slices: Sequence[Slice]) -> tuple[int, int]:
    """Returns the calls in some slices, and how many of them failed."""
    return sum(calls.calls for calls in slices), sum(calls.failed for calls in slices)


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def _change(
    before: Breaker,
    after: Breaker,
    rule: BreakerRule | None,
    reason: str,
    rules: BreakerRules,
    now_ms: int,
    *,
    error_hash: str | None = None,
    by: str | None = None,
) -> BreakerChange:
    figures = after if after.failures else before
    return BreakerChange(
        before,
        after,
        rule,
        reason,
        consecutive_failures(figures),
        errors_within(figures, rules, now_ms),
        error_hash,
        by,
    )


def cooldown_ms(rules: BreakerRules, openings: int, jitter: float) -> int:
    """Returns how long a breaker stays open.

    Args:
        rules: its rules.
        openings: how often it has opened without being closed in between, this time included.
        jitter: a random number from 0 to 1.
    """
    # A loop that stops at the ceiling: growth**openings may overflow a float.
    ceiling = max(rules.cooldown_s, rules.max_cooldown_s)
    grown = rules.cooldown_s
    for _ in range(openings - 1):
        grown *= rules.cooldown_growth
        if grown >= ceiling or rules.cooldown_growth == 1.0:
            break
    return round(min(grown, ceiling) * (1 + rules.cooldown_jitter * jitter) * 1000)


def _open(breaker: Breaker, reason: str, rules: BreakerRules, now_ms: int, jitter: float) -> Breaker:
    openings = breaker.openings + 1
    until_ms = now_ms + cooldown_ms(rules, openings, jitter)
    return _move(changed(breaker, open_until_ms=until_ms, openings=openings), "open", reason, now_ms)


def _move(breaker: Breaker, state: BreakerState, reason: str, now_ms: int) -> Breaker:
    """Returns the breaker in another state, without a probe."""
    version = breaker.version + 1
    return changed(
        breaker,
        state=state,
        reason=reason,
        changed_ms=now_ms,
        version=version,
        # While it opens for one caller, even repeatedly, the outcomes of others still count.
        counts_from=breaker.counts_from if breaker.alone else version,
        probe=None,
        probe_until_ms=0,
        waits=False,
    )


def _comes_before_others(breaker: Breaker, observation: Observation) -> bool:
    return bool(breaker.failures) and observation.sequence <= breaker.failures[-1].sequence


def _sequences(breaker: Breaker) -> list[int]:
    return [failure.sequence for failure in breaker.failures]


def _with_failure(breaker: Breaker, observation: Observation, rules: BreakerRules, now_ms: int) -> Breaker:
    """Counts a failure that was not counted before."""
    place = len(breaker.failures)
    if _comes_before_others(breaker, observation):
        place = bisect_left(_sequences(breaker), observation.sequence)
    new_failure = CountedFailure(
        observation.sequence,
        observation.at_ms,
        observation.error,
        observation.job,
        observation.caller,
        observation.task,
        observation.tried_again,
    )
    failures = (*breaker.failures[:place], new_failure, *breaker.failures[place:])
    needed = _failures_to_keep(failures, breaker, rules, now_ms)
    forgotten = breaker.forgotten
    if len(needed) < len(failures):
        remaining = {failure.sequence for failure in needed}
        forgotten = max(forgotten, *(failure.sequence for failure in failures if failure.sequence not in remaining))
    errors = breaker.errors_seen
    if observation.error and observation.error not in errors and len(errors) < MAX_ERRORS_SEEN:
        errors = tuple(sorted((*errors, observation.error)))
    return changed(
        breaker,
        failures=needed,
        count=rules.count,
        forgotten=forgotten,
        total_failures=breaker.total_failures + 1,
        errors_seen=errors,
        last_failure_ms=max(breaker.last_failure_ms, observation.at_ms),
    )


def _failures_to_keep(
    failures: Sequence[CountedFailure], breaker: Breaker, rules: BreakerRules, now_ms: int
) -> tuple[CountedFailure, ...]:
    """Returns the failures to keep: those in the window, consecutive ones, and ones that are consecutive for a caller.

    They are kept even if no rule needs them, because transitions report how many there are.
    """
    since = now_ms - _window_ms(rules)
    successes = dict(breaker.successes)
    first = next(
        (
            index
            for index, failure in enumerate(failures)
            if failure.sequence > breaker.last_success or failure.at_ms > since
        ),
        len(failures),
    )
    earlier = [failure for failure in failures[:first] if failure.at_ms > now_ms - OWN_RUN_MS]
    # A caller without a success since a failure is in a run of its own: by its key, or by its tenant.
    run_since = {
        caller: min([successes.get(name, 0) for name in caller.split()], default=math.inf)
        for caller in {failure.caller for failure in earlier}
    }
    own_runs = [failure for failure in earlier if failure.sequence > run_since[failure.caller]]
    needed = (*own_runs[-MAX_OWN_RUN:], *failures[first:])
    if len(needed) <= MAX_KEPT:
        return needed
    # However often jobs try again, as many of those that ended are kept as a rule can need.
    newest = needed[-MAX_KEPT:]
    last_of_jobs = [failure for failure in needed if not failure.tried_again][-MAX_KEPT:]
    older = [failure for failure in last_of_jobs if failure.sequence < newest[0].sequence]
    return (*older, *newest)


def _with_call(breaker: Breaker, observation: Observation, rules: BreakerRules, now_ms: int) -> Breaker:
    """Counts a call for the failure rate, if a rule needs it."""
    if rules.failure_rate is None:
        return breaker
    sequences = breaker.counted
    place = bisect_left(sequences, observation.sequence)
    if place < len(sequences) and sequences[place] == observation.sequence:
        return breaker
    if place == 0 and len(sequences) >= MAX_KEPT:
        return breaker  # older than all remembered calls: it may have been counted
    slices = {(calls.number, calls.caller): calls for calls in _live(breaker.slices, rules, now_ms)}
    number = observation.at_ms // _slice_ms(rules)
    caller = observation.caller
    if (number, caller) not in slices and sum(key[0] == number for key in slices) >= CALLERS_OF_SLICE:
        caller = ""
    earlier = slices.get((number, caller), Slice(number, 0, 0))
    slices[number, caller] = Slice(number, earlier.calls + 1, earlier.failed + bool(observation.failed), caller)
    return changed(
        breaker,
        slices=tuple(_live([slices[key] for key in sorted(slices)], rules, now_ms)),
        counted=(*sequences[:place], observation.sequence, *sequences[place:])[-MAX_KEPT:],
    )


def _window_ms(rules: BreakerRules) -> int:
    return round(rules.within_s * 1000)


def _slice_ms(rules: BreakerRules) -> int:
    return max(1, -(-_window_ms(rules) // SLICES))


def _live(slices: Sequence[Slice], rules: BreakerRules, now_ms: int) -> list[Slice]:
    """Returns the slices within the rolling window that ends now.

    Slices in the future were counted with another length, before the rules changed, and are dropped.
    """
    length_ms = _slice_ms(rules)
    since = now_ms - _window_ms(rules)
    return [calls for calls in slices if since < calls.number * length_ms <= now_ms]


def calls_within(breaker: Breaker, rules: BreakerRules, now_ms: int) -> tuple[int, int]:
    """Returns the calls within the rolling window that ends now, and how many failed; exact to 1 % of the window."""
    return _totals(_live(breaker.slices, rules, now_ms))


def consecutive_failures(breaker: Breaker) -> int:
    """Counts the jobs that failed since the latest success, or the calls if the rules count attempts."""
    return len(_counted([failure for failure in breaker.failures if failure.sequence > breaker.last_success], breaker))


def errors_within(breaker: Breaker, rules: BreakerRules, now_ms: int) -> int:
    """Counts the failures within the rolling window that ends now."""
    return len(_within(breaker.failures, rules, now_ms))


def _within(failures: Sequence[CountedFailure], rules: BreakerRules, now_ms: int) -> list[CountedFailure]:
    since = now_ms - _window_ms(rules)
    return [failure for failure in failures if failure.at_ms > since]
