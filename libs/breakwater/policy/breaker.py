"""Opens and closes breakers. The state is a value; every function returns the next one.

    closed ──a rule fires──► open ──cool-down over──► half-open ──probe succeeds──► closed
                               ▲                          └──────probe fails──────► open
    any ──isolate──► isolated          any ──reset──► closed

The step from open to half-open is taken where a call asks to be admitted (`state.breakers`); all others are decided
here. Outcomes are known by their number in the event log and by the version of the breaker that let the call pass, and
never by a caller's clock. So one that is delivered twice, out of order or late needs no special care.

Where several call, what one of them sends must not close a model to the others. So no caller's failures make up more
than half of what opens it for all, and those of one job count once. The failures of one caller also count by
themselves: they open it for that caller alone, and calls of others pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from breakwater.contracts.events import BreakerRule, BreakerScope, BreakerState
from breakwater.contracts.subjects import encode_token
from breakwater.contracts.types import Message, Off
from breakwater.policy.formats import counted

ALL = "*"
"""The agent in the name of a breaker that all agents share."""

MAX_KEPT = 1000
"""Outcomes that are remembered one by one, the newest; no rule can ask for more."""

Preset = Literal[
    "feature",
    "tdd-red-green",
    "refactor",
    "incident-response",
    "migration-safety",
    "scientific-method",
    "debug",
    "review",
    "docs",
]

_STANDARD = {"consecutive_failures": 3, "same_error": 5}

PRESETS: Mapping[str, Mapping[str, int]] = {
    "feature": _STANDARD,
    # Red and green in turn look like failures; the same error over and over does not belong there.
    "tdd-red-green": {"consecutive_failures": 5, "same_error": 3},
    "refactor": {"consecutive_failures": 2, "same_error": 3},
    "incident-response": {"consecutive_failures": 2, "same_error": 2},
    "migration-safety": {"consecutive_failures": 1, "same_error": 2},
    # Many approaches are tried, and most of them fail.
    "scientific-method": {"consecutive_failures": 8, "same_error": 10},
    **dict.fromkeys(("debug", "review", "docs"), _STANDARD),
}
"""Presets of breakers and of guards."""

GUARD_PRESETS: Mapping[str, Mapping[str, int]] = {**PRESETS, "agent-run": {"max_iterations": 100}}
"""Presets of guards, including the one for agents that call their model in a loop."""


def with_preset(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as written, with those of the preset they name where they say nothing themselves."""
    preset = rules.get("preset")
    return {**(GUARD_PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **rules}


def take_preset(data: Any) -> Any:
    """Applies the `preset` of a model before its settings are checked."""
    return with_preset(cast(dict[str, Any], data)) if isinstance(data, dict) else data


class BreakerRules(Message):
    """Rules for opening, and for how long. At least one rule must be set; each can be `off`."""

    preset: Preset | None = Field(default=None, description="A named set of rules; settings next to it override it.")
    scope: BreakerScope = Field(
        default="agent_model",
        description=(
            "Failures that count together: of this agent on a model, of all agents on a model, "
            "or of all agents on a provider."
        ),
    )
    errors: Annotated[int | None, Off] = Field(
        default=None, ge=1, le=MAX_KEPT, description="Opens at this many failures within `within_s`."
    )
    within_s: float = Field(
        default=60.0, gt=0, le=86_400, description="The rolling window of errors, same_error and failure_rate."
    )
    consecutive_failures: Annotated[int | None, Off] = Field(
        default=3, ge=1, le=MAX_KEPT, description="Opens at this many consecutive failures."
    )
    same_error: Annotated[int | None, Off] = Field(
        default=5,
        ge=1,
        le=MAX_KEPT,
        description=("Opens if the same error occurs this often within `within_s`, even with successes in between."),
    )
    failure_rate: Annotated[float | None, Off] = Field(
        default=None, gt=0, le=1, description="Opens if this share of the calls within `within_s` failed."
    )
    minimum_calls: int = Field(default=10, ge=1, le=1_000_000, description="Calls needed to judge the failure rate.")
    cooldown_s: float = Field(
        default=60.0, gt=0, le=86_400, description="Time that calls are refused before a probe is admitted."
    )
    cooldown_growth: float = Field(
        default=1.0, ge=1, le=10, description="Factor by which each failed probe extends the next cool-down."
    )
    max_cooldown_s: float = Field(default=3600.0, gt=0, le=86_400, description="The longest cool-down.")
    cooldown_jitter: float = Field(
        default=0.0, ge=0, le=1, description="Up to this share of the cool-down is added to it at random."
    )

    _take_preset = model_validator(mode="before")(take_preset)

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        if not any((self.errors, self.consecutive_failures, self.same_error, self.failure_rate)):
            raise ValueError(
                "set errors, consecutive_failures, same_error or failure_rate, "
                "or switch the breaker off with `breaker: off`"
            )
        if self.cooldown_growth > 1 and self.max_cooldown_s < self.cooldown_s:
            raise ValueError("max_cooldown_s must not be less than cooldown_s, or the cool-down can't grow")
        return self


@dataclass(frozen=True, slots=True)
class BreakerKey:
    """Key of a breaker. One that agents share has the agent `*`; one of a whole provider the model `<provider>/*`."""

    agent: str
    model: str
    task: str | None = None
    """The task whose jobs bring the breaker. It is listed nowhere, and its transitions are not published."""

    @classmethod
    def of(cls, scope: BreakerScope, agent: str, model: str, provider: str) -> BreakerKey:
        """The breaker that a call belongs to."""
        match scope:
            case "agent_model":
                return cls(agent, model)
            case "model":
                return cls(ALL, model)
            case "provider":
                return cls(ALL, f"{provider}/{ALL}")

    @property
    def name(self) -> str:
        """The breaker's name: `<agent>/<model>`, each encoded as a subject token; then the task, where it has one."""
        name = f"{encode_token(self.agent)}/{encode_token(self.model)}"
        return name if self.task is None else f"{name}/{self.task}"


def short_hash(text: str) -> str:
    """A hash that distinguishes a job or a caller from others in a breaker; nothing can be read from it."""
    return blake2b(text.encode(), digest_size=4).hexdigest()


@lru_cache(maxsize=4096)
def caller_of(name: str | None, tenant: str | None) -> str:
    """A caller as a breaker knows it: by its key or program, and by the tenant that it calls for.

    Each counts by itself: neither tenants that a key makes up nor a tenant's many keys make several callers of one.
    """
    return f"k{short_hash(name or '')} t{short_hash(tenant or '')}"


@lru_cache(maxsize=4096)
def task_of(tenant: str | None, task_id: str) -> str:
    """A task as a breaker knows it. That of a job without one has the job's id."""
    return short_hash(f"{tenant or ''}\n{task_id}")


_NO_TENANT = f"t{short_hash('')}"
MAX_ERRORS_SEEN = 100

OWN_RUN_MS, MAX_OWN_RUN = 3_600_000, 100
"""Age and number of a caller's failures in a row that are kept beyond the window, where others succeed."""

SLICES = 100
"""Calls are counted in slices of the window, each 1 % of it, in whole ms: so exact is a failure rate's window."""

CALLERS_OF_SLICE = 8


@dataclass(frozen=True, slots=True)
class CountedFailure:
    """A counted failure: its sequence in the event log, when it was stored there (ms since the epoch), its error."""

    sequence: int
    at_ms: int
    error: str = ""
    """Identity of the error text; empty where it is not known."""
    job: str = ""
    caller: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True)
class Slice:
    """Calls of one caller that ended within one slice of a window: `number` of slices after the epoch."""

    number: int
    calls: int
    failed: int
    caller: str = ""
    """The caller; empty for all beyond the first `CALLERS_OF_SLICE`."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of one breaker."""

    state: BreakerState = "closed"
    failures: tuple[CountedFailure, ...] = ()
    """The latest, ordered by sequence: those in the window and those in a row; no more than `MAX_KEPT`."""
    forgotten: int = 0
    """Failures up to this sequence were counted, and are no longer kept."""
    last_success: int = 0
    """Sequence of the latest success."""
    open_until_ms: int = 0
    openings: int = 0
    """Number of times it has opened since it was closed last."""
    probe: str | None = None
    """The attempt that holds the half-open probe; its lease ends at `probe_until_ms`."""
    probe_until_ms: int = 0
    version: int = 0
    """Grows with each transition. Calls carry that of their admission."""
    counts_from: int = 0
    """Version of the latest transition that concerned all callers: outcomes of earlier admissions do not count."""
    closed_for: str = ""
    """The caller for which alone it was closed last: no outcomes of its admissions before `closed_version` count."""
    closed_version: int = 0
    closed_at: int = 0
    """Sequence of the probe that closed it last: what the log said before is over, also when it is delivered again."""
    total_failures: int = 0
    """Number of failures that were counted; only a reset starts over."""
    errors_seen: tuple[str, ...] = ()
    """The different errors among them, sorted; no more than `MAX_ERRORS_SEEN`."""
    slices: tuple[Slice, ...] = ()
    """Calls within the window, where a failure rate is to be known."""
    counted: tuple[int, ...] = ()
    """Sequences of the latest calls in `slices`, ordered."""
    last_failure_ms: int = 0
    last_success_ms: int = 0
    limited_since_ms: int = 0
    """The first rate limit since the last success; 0 where there is none."""
    changed_ms: int = 0
    """Time of its latest change of state; 0 where it never left the first."""
    reason: str = ""
    """Reason for that, in words; a half-open one keeps why it opened."""
    callers: tuple[tuple[str, int], ...] = ()
    """The latest two keys or programs that called, and the latest two tenants, with the times their calls ended."""
    alone: str = ""
    """The caller that it is open for, as the calls of others succeed or there were none: a key, a tenant, or both.
    Empty: it is open for all."""
    alone_name: str = ""
    """The same in words, for operators."""
    task: str = ""
    """The task, if any, whose failures are more than half of those that opened it."""
    successes: tuple[tuple[str, int], ...] = ()
    """The sequence of the latest success of each key and tenant that has failures."""
    probed_by: str = ""
    """The caller whose probe has failed. One other may probe immediately, without a cool-down."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An attempt as the breaker counts it. `failed` is None where the outcome says nothing about the model."""

    sequence: int
    attempt_id: str
    at_ms: int
    """Time at which the event was stored, by the log's clock: workers' clocks differ."""
    failed: bool | None
    error: str = ""
    version: int | None = None
    """Version of the breaker that let the call pass; None where that is not known."""
    limited: bool = False
    """True for a rate limit, which is no failure by itself: the model is busy."""
    job: str = ""
    """Hash of its execution; empty where that is not known."""
    caller: str = ""
    """The caller as `caller_of` names it; empty where that is not known."""
    names: tuple[str, str] = ("", "")
    """The same in words: the key or program, and the tenant."""
    task: str = ""
    """Hash of its task; empty where that is not known."""


@dataclass(frozen=True, slots=True)
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
    breaker: Breaker, seen: Observation, rules: BreakerRules, now_ms: int, jitter: float = 0.0
) -> tuple[Breaker, BreakerChange | None]:
    """Takes one outcome into account.

    While the breaker is open nothing changes: calls that were under way when it opened must not lengthen its
    cool-down. While it is half-open only the probe's outcome decides. And calls that began before it opened say nothing
    once it is closed again. What is delivered again changes nothing either, though time has passed. While it is open
    for one caller, all this holds for that caller, and for the others it is closed.

    Args:
        breaker: as it was.
        seen: the outcome.
        rules: of the agent that called.
        now_ms: ms since the epoch.
        jitter: at random from 0 to 1, for the cool-down.
    """
    is_stale = seen.version is not None and not _counts_from(breaker, seen.caller) <= seen.version <= breaker.version
    concerns = concerns_caller(breaker, seen.caller)
    if breaker.state == "isolated" or is_stale or (breaker.state == "open" and concerns):
        return breaker, None
    # The log's clock may be ahead of ours; what it says must not count for longer, nor only later, because of that.
    seen = replace(seen, at_ms=min(seen.at_ms, now_ms))
    if seen.failed is not None and (callers := _heard(breaker.callers, seen)) != breaker.callers:
        breaker = replace(breaker, callers=callers)
    if seen.failed is None and seen.limited and seen.at_ms > breaker.last_success_ms:
        breaker = replace(breaker, limited_since_ms=breaker.limited_since_ms or seen.at_ms)
        # What has answered nothing else for a whole window is not busy, but broken.
        seen = replace(seen, failed=seen.at_ms - breaker.limited_since_ms >= _window_ms(rules) or None)
    if breaker.state == "half_open" and concerns:
        return _after_probe(breaker, seen, rules, now_ms, jitter)
    if seen.failed is None or seen.sequence <= breaker.closed_at:
        return breaker, None
    if seen.failed and (seen.sequence <= breaker.forgotten or seen.sequence in _sequences(breaker)):
        return breaker, None  # it has been counted
    counted = _with_call(breaker, seen, rules, now_ms)
    if not seen.failed:
        return replace(
            counted,
            successes=_with_success(counted, seen),
            last_success=max(counted.last_success, seen.sequence),
            last_success_ms=max(counted.last_success_ms, seen.at_ms),
            limited_since_ms=0,
        ), None
    return _open_if_due(_with_failure(counted, seen, rules, now_ms), seen, rules, now_ms, jitter)


def concerns_caller(breaker: Breaker, caller: str) -> bool:
    """True if its state holds for a caller; False if it is open for another one alone, and this one may call."""
    return not caller or set(breaker.alone.split()) <= set(caller.split())


def _counts_from(breaker: Breaker, caller: str) -> int:
    """The first version of admissions whose outcomes count for a caller."""
    is_its_own = bool(breaker.closed_for) and set(breaker.closed_for.split()) <= set(caller.split())
    return max(breaker.counts_from, breaker.closed_version) if is_its_own else breaker.counts_from


def is_open_for_one(breaker: Breaker) -> bool:
    """True if it stops one caller while others call."""
    alone, since_ms = breaker.alone.split(), breaker.changed_ms - 60_000
    kinds = {name[0] for name in alone}
    others = (at_ms for name, at_ms in breaker.callers if name[0] in kinds and name not in alone and name != _NO_TENANT)
    return bool(alone) and breaker.state in {"open", "half_open"} and any(at_ms >= since_ms for at_ms in others)


def isolate(
    breaker: Breaker, *, by: str, why: str, rules: BreakerRules, now_ms: int
) -> tuple[Breaker, BreakerChange | None]:
    """Forces it open until an operator resets it. Nothing changes where it is isolated already."""
    if breaker.state == "isolated":
        return breaker, None
    reason = _operator_reason("isolated", by, why)
    for_all = replace(breaker, open_until_ms=0, alone="", alone_name="", task="", probed_by="")
    after = _moved(for_all, "isolated", reason, now_ms)
    return after, _change(breaker, after, None, reason, rules, now_ms, by=by)


def reset(breaker: Breaker, *, by: str, why: str, rules: BreakerRules, now_ms: int) -> tuple[Breaker, BreakerChange]:
    """Closes it and forgets all that was counted; of a closed one, too."""
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


def _operator_reason(what: str, by: str, why: str) -> str:
    return f"{what} by {by}: {why}" if why else f"{what} by {by}"


def _after_probe(
    breaker: Breaker, seen: Observation, rules: BreakerRules, now_ms: int, jitter: float
) -> tuple[Breaker, BreakerChange | None]:
    if seen.attempt_id != breaker.probe:
        return breaker, None
    if seen.failed is None:
        # The probe says nothing about the model's health: the next call may probe.
        return replace(breaker, probe=None, probe_until_ms=0), None
    if seen.failed:
        failed, reason = _with_failure(breaker, seen, rules, now_ms), "the half-open probe failed"
        failed = replace(failed, probed_by="" if breaker.probed_by else seen.caller)
        opened = _opened(failed, reason, rules, now_ms, jitter)
        return opened, _change(breaker, opened, "probe_failed", reason, rules, now_ms)
    reason = "the half-open probe succeeded"
    if breaker.alone:
        closed = _closed_for_one(breaker, seen, reason, now_ms)
        return closed, _change(breaker, closed, None, reason, rules, now_ms)
    closed = Breaker(
        changed_ms=now_ms,
        reason=reason,
        last_success=seen.sequence,
        closed_at=seen.sequence,
        version=breaker.version + 1,
        counts_from=breaker.version + 1,
        total_failures=breaker.total_failures,
        errors_seen=breaker.errors_seen,
        last_failure_ms=breaker.last_failure_ms,
        last_success_ms=max(breaker.last_success_ms, seen.at_ms),
        callers=breaker.callers,
    )
    return closed, _change(breaker, closed, None, reason, rules, now_ms)


def _closed_for_one(breaker: Breaker, seen: Observation, reason: str, now_ms: int) -> Breaker:
    """Closes one that was open for one caller: that one's failures are forgotten, and what others did still counts."""
    forgotten = [failure.sequence for failure in breaker.failures if concerns_caller(breaker, failure.caller)]
    return replace(
        breaker,
        state="closed",
        reason=reason,
        changed_ms=now_ms,
        version=breaker.version + 1,
        closed_for=breaker.alone,
        closed_version=breaker.version + 1,
        failures=tuple(one for one in breaker.failures if not concerns_caller(breaker, one.caller)),
        forgotten=max(breaker.forgotten, *forgotten, 0),
        slices=tuple(one for one in breaker.slices if not concerns_caller(breaker, one.caller)),
        last_success=max(breaker.last_success, seen.sequence),
        last_success_ms=max(breaker.last_success_ms, seen.at_ms),
        limited_since_ms=0,
        open_until_ms=0,
        openings=0,
        probe=None,
        probe_until_ms=0,
        alone="",
        alone_name="",
        task="",
        probed_by="",
    )


def _open_if_due(
    breaker: Breaker, seen: Observation, rules: BreakerRules, now_ms: int, jitter: float
) -> tuple[Breaker, BreakerChange | None]:
    # Of what kind several have called within the window: `k`, keys or programs; `t`, tenants. Of none: one alone.
    since = now_ms - _window_ms(rules)
    kinds = Counter(name[0] for name, at_ms in breaker.callers if at_ms > since)
    several = [kind for kind, names in kinds.items() if names > 1]
    due = _rule_that_fires(breaker, seen.error, several, rules, now_ms)
    # A key's many tenants are one key still, also where no other key has called lately; a tenant's many keys likewise.
    ones = [name for name in seen.caller.split() if name[0] not in several and not (several and name == _NO_TENANT)]
    if due is None and several:
        own = [
            (_in_common(fired[2], seen), fired)
            for name in seen.caller.split()
            if name[0] in several and name != _NO_TENANT
            if (fired := _rule_for_one(_of_caller(breaker, name), seen, rules, now_ms)) is not None
        ]
        ones, due = max(own, key=lambda found: len(found[0]), default=(ones, None))
    elif due is not None and several:
        jobs, callers = len(_of_jobs(due[2])), len({failure.caller for failure in due[2]})
        due = due[0], f"{due[1]}, of {counted(jobs, 'job')} of {counted(callers, 'caller')}", due[2]
    if due is None:
        return breaker, None
    rule, reason, failures = due
    if breaker.state != "closed":
        # It is open for another caller, so two see it: it opens for what both have in common, or for all.
        ones = [name for name in ones if name in breaker.alone.split()]
    alone = replace(
        breaker, alone=" ".join(ones), alone_name=_in_words(ones, seen), task=_task_of(failures), probed_by=""
    )
    opened = _opened(alone, reason, rules, now_ms, jitter)
    repeated = seen.error if rule == "same_error" else None
    return opened, _change(breaker, opened, rule, reason, rules, now_ms, error_hash=repeated)


def _of_caller(breaker: Breaker, name: str) -> Breaker:
    """The part of a breaker that is about the calls of one key or one tenant."""
    return replace(
        breaker,
        failures=tuple(failure for failure in breaker.failures if name in failure.caller),
        slices=tuple(one for one in breaker.slices if name in one.caller),
        last_success=dict(breaker.successes).get(name, 0),
    )


def _rule_for_one(
    of_one: Breaker, seen: Observation, rules: BreakerRules, now_ms: int
) -> tuple[BreakerRule, str, Sequence[CountedFailure]] | None:
    """The rule that fires for one key, or one tenant. Several tenants of a key count as several callers within it."""
    names = {name for failure in of_one.failures for name in failure.caller.split()}
    within = [kind for kind, number in Counter(name[0] for name in names).items() if number > 1]
    return _rule_that_fires(of_one, seen.error, within, rules, now_ms)


def _in_common(failures: Sequence[CountedFailure], seen: Observation) -> list[str]:
    """The key, the tenant or both that the latest failure shares with all of these."""
    return [name for name in seen.caller.split() if all(name in failure.caller for failure in failures)]


def _in_words(ones: Sequence[str], seen: Observation) -> str:
    named = zip(seen.caller.split(), ("key", "tenant"), seen.names, strict=False)
    words = [f"{kind} {name}" for one, kind, name in named if one in ones and name]
    return " and ".join(words) or ("the keys of operators" if ones else "")


def _task_of(failures: Sequence[CountedFailure]) -> str:
    """The task of more than half of some failures; empty where there is none."""
    [(task, number)] = Counter(failure.task for failure in failures).most_common(1) or [("", 0)]
    return task if 2 * number > len(failures) else ""


def _with_success(breaker: Breaker, seen: Observation) -> tuple[tuple[str, int], ...]:
    """The latest successes of those that have failures, with one more."""
    if not breaker.failures:
        return ()
    failed = {name for caller in {failure.caller for failure in breaker.failures} for name in caller.split()}
    latest = dict(breaker.successes)
    for name in seen.caller.split():
        if any(name in failure.caller for failure in breaker.failures if failure.sequence < seen.sequence):
            latest[name] = max(latest.get(name, 0), seen.sequence)
    return tuple(sorted((name, sequence) for name, sequence in latest.items() if name in failed))


def _rule_that_fires(
    breaker: Breaker, error: str, several: Sequence[str], rules: BreakerRules, now_ms: int
) -> tuple[BreakerRule, str, Sequence[CountedFailure]] | None:
    """The rule, the reason in words, and the failures that it counts."""
    in_a_row = [failure for failure in breaker.failures if failure.sequence > breaker.last_success]
    if _reaches(in_a_row, rules.consecutive_failures, several):
        found = counted(len(in_a_row), "consecutive failure")
        return "consecutive_failures", f"{found} (threshold: {rules.consecutive_failures})", in_a_row
    recent = _within(breaker.failures, rules, now_ms)
    same = [failure for failure in recent if failure.error == error] if error else []
    if _reaches(same, rules.same_error, several):
        found = f"Same error repeated {counted(len(same), 'time')}"
        return "same_error", f"{found} (threshold: {rules.same_error})", same
    window = f"within {rules.within_s:g} s"
    if _reaches(recent, rules.errors, several):
        found = counted(len(recent), "error")
        return "errors", f"{found} {window} (threshold: {rules.errors})", recent
    calls, failed = calls_within(breaker, rules, now_ms)
    if calls >= rules.minimum_calls and _fails_at_rate(breaker, several, rules, now_ms):
        assert rules.failure_rate is not None
        threshold = f"{_percent(rules.failure_rate)} of at least {rules.minimum_calls}"
        found = f"{_percent(failed / calls)} of {counted(calls, 'call')}"
        return "failure_rate", f"{found} failed {window} (threshold: {threshold})", recent
    return None


def _heard(callers: tuple[tuple[str, int], ...], seen: Observation) -> tuple[tuple[str, int], ...]:
    """The latest callers, with one more call: two of a kind are kept, enough to know that several call."""
    latest = dict(callers)
    for name in seen.caller.split():
        latest[name] = max(seen.at_ms, latest.get(name, 0))
    newest = sorted(latest.items(), key=lambda one: (one[0][0], -one[1], one[0]))
    return tuple(one for _, kind in groupby(newest, key=lambda one: one[0][0]) for one in list(kind)[:2])


def _named(caller: str, kind: str) -> str:
    return next((name for name in caller.split() if name[0] == kind), "")


def _of_jobs(failures: Sequence[CountedFailure]) -> Sequence[CountedFailure]:
    """The last failure of each job."""
    return tuple({failure.job or failure.sequence: failure for failure in failures}.values())


def _reaches(failures: Sequence[CountedFailure], threshold: int | None, several: Sequence[str]) -> bool:
    """True if there are so many failures; where several call, of different jobs, at most half of them of one caller."""
    if threshold is None or len(failures) < threshold or not several:
        return threshold is not None and len(failures) >= threshold
    needed = max(threshold, 2)
    most, of_jobs = -(-needed // 2), _of_jobs(failures)
    return all(
        sum(min(count, most) for count in Counter(_named(one.caller, kind) for one in of_jobs).values()) >= needed
        for kind in several
    )


def _fails_at_rate(breaker: Breaker, several: Sequence[str], rules: BreakerRules, now_ms: int) -> bool:
    """True if the share of calls that may fail is reached; where several call, also without each one of them."""
    if rules.failure_rate is None:
        return False
    live = _live(breaker.slices, rules, now_ms)
    # Half of the failures that are enough at the fewest calls: a single one of the others is no rate.
    least = max(1, int(rules.failure_rate * rules.minimum_calls) // 2)
    parts = [live]
    for kind in several:
        names = {_named(one.caller, kind) for one in live}
        parts += [[one for one in live if _named(one.caller, kind) != name] for name in names]
    for part in parts:
        calls, failed = sum(one.calls for one in part), sum(one.failed for one in part)
        # Divided, not multiplied: 7 of 100 are a share of 0.07, and yet fewer than 0.07 * 100 in floats.
        if failed < (least if several else 1) or failed / calls < rules.failure_rate:
            return False
    return True


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
    in_a_row, errors = consecutive_failures(figures), errors_within(figures, rules, now_ms)
    return BreakerChange(before, after, rule, reason, in_a_row, errors, error_hash, by)


def cooldown_ms(rules: BreakerRules, openings: int, jitter: float) -> int:
    """Time for which it stays open.

    Args:
        rules: the settings.
        openings: how often it has opened in a row, this time included.
        jitter: at random from 0 to 1.
    """
    # In floats, and capped before it is a number of milliseconds: growth**openings may be beyond any integer.
    ceiling = max(rules.cooldown_s, rules.max_cooldown_s)
    grown = rules.cooldown_s
    for _ in range(openings - 1):
        grown *= rules.cooldown_growth
        if grown >= ceiling or rules.cooldown_growth == 1.0:
            break
    return round(min(grown, ceiling) * (1 + rules.cooldown_jitter * jitter) * 1000)


def _opened(breaker: Breaker, reason: str, rules: BreakerRules, now_ms: int, jitter: float) -> Breaker:
    openings = breaker.openings + 1
    until_ms = now_ms + cooldown_ms(rules, openings, jitter)
    return _moved(replace(breaker, open_until_ms=until_ms, openings=openings), "open", reason, now_ms)


def _moved(breaker: Breaker, state: BreakerState, reason: str, now_ms: int) -> Breaker:
    """The breaker in another state, in which no probe is under way."""
    version = breaker.version + 1
    return replace(
        breaker,
        state=state,
        reason=reason,
        changed_ms=now_ms,
        version=version,
        # Outcomes of others count on while it opens for one caller, again and again.
        counts_from=breaker.counts_from if breaker.alone else version,
        probe=None,
        probe_until_ms=0,
    )


def _sequences(breaker: Breaker) -> list[int]:
    return [failure.sequence for failure in breaker.failures]


def _with_failure(breaker: Breaker, seen: Observation, rules: BreakerRules, now_ms: int) -> Breaker:
    """Counts a failure that is not known yet."""
    place = bisect_left(_sequences(breaker), seen.sequence)
    failure = CountedFailure(seen.sequence, seen.at_ms, seen.error, seen.job, seen.caller, seen.task)
    failures = (*breaker.failures[:place], failure, *breaker.failures[place:])
    kept = _needed(failures, breaker, rules, now_ms)
    remaining = {one.sequence for one in kept}
    dropped = [one.sequence for one in failures if one.sequence not in remaining]
    errors = breaker.errors_seen
    if seen.error and seen.error not in errors and len(errors) < MAX_ERRORS_SEEN:
        errors = tuple(sorted((*errors, seen.error)))
    return replace(
        breaker,
        failures=kept,
        forgotten=max(breaker.forgotten, *dropped, 0),
        total_failures=breaker.total_failures + 1,
        errors_seen=errors,
        last_failure_ms=max(breaker.last_failure_ms, seen.at_ms),
    )


def _needed(
    failures: Sequence[CountedFailure], breaker: Breaker, rules: BreakerRules, now_ms: int
) -> tuple[CountedFailure, ...]:
    """The newest, from the first on that is in a row or in the window, and before them those in a row of their callers.

    Also where no rule asks for these: transitions report how many there are.
    """
    since, successes = now_ms - _window_ms(rules), dict(breaker.successes)
    first = next(
        (n for n, one in enumerate(failures) if one.sequence > breaker.last_success or one.at_ms > since), len(failures)
    )
    own_runs = [
        one
        for one in failures[:first]
        if one.at_ms > now_ms - OWN_RUN_MS
        if any(one.sequence > successes.get(name, 0) for name in one.caller.split())
    ]
    return (*own_runs[-MAX_OWN_RUN:], *failures[first:])[-MAX_KEPT:]


def _with_call(breaker: Breaker, seen: Observation, rules: BreakerRules, now_ms: int) -> Breaker:
    """Counts a call for the failure rate, where there is one."""
    if rules.failure_rate is None:
        return breaker
    counted = breaker.counted
    place = bisect_left(counted, seen.sequence)
    if place < len(counted) and counted[place] == seen.sequence:
        return breaker
    if place == 0 and len(counted) >= MAX_KEPT:
        return breaker  # older than all that are remembered: it may have been counted
    slices = {(one.number, one.caller): one for one in _live(breaker.slices, rules, now_ms)}
    number, caller = seen.at_ms // _slice_ms(rules), seen.caller
    if (number, caller) not in slices and sum(one == number for one, _ in slices) >= CALLERS_OF_SLICE:
        caller = ""
    held = slices.get((number, caller), Slice(number, 0, 0))
    slices[number, caller] = Slice(number, held.calls + 1, held.failed + bool(seen.failed), caller)
    return replace(
        breaker,
        slices=tuple(_live([slices[one] for one in sorted(slices)], rules, now_ms)),
        counted=(*counted[:place], seen.sequence, *counted[place:])[-MAX_KEPT:],
    )


def _window_ms(rules: BreakerRules) -> int:
    return round(rules.within_s * 1000)


def _slice_ms(rules: BreakerRules) -> int:
    return max(1, -(-_window_ms(rules) // SLICES))


def _live(slices: Sequence[Slice], rules: BreakerRules, now_ms: int) -> list[Slice]:
    """Slices that are wholly within the rolling window that ends now.

    The ones that begin later have another length, from before a change of the rules: they say nothing.
    """
    length_ms = _slice_ms(rules)
    since = now_ms - _window_ms(rules)
    return [one for one in slices if since < one.number * length_ms <= now_ms]


def calls_within(breaker: Breaker, rules: BreakerRules, now_ms: int) -> tuple[int, int]:
    """Calls within the rolling window that ends now, and how many of them failed; to 1 % of the window."""
    live = _live(breaker.slices, rules, now_ms)
    return sum(one.calls for one in live), sum(one.failed for one in live)


def consecutive_failures(breaker: Breaker) -> int:
    """Failures since the latest success."""
    return sum(failure.sequence > breaker.last_success for failure in breaker.failures)


def errors_within(breaker: Breaker, rules: BreakerRules, now_ms: int) -> int:
    """Failures within the rolling window that ends now."""
    return len(_within(breaker.failures, rules, now_ms))


def _within(failures: Sequence[CountedFailure], rules: BreakerRules, now_ms: int) -> list[CountedFailure]:
    since = now_ms - _window_ms(rules)
    return [failure for failure in failures if failure.at_ms > since]
