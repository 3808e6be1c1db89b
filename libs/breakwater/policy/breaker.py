"""When a breaker opens and closes. Its state is a value; every function returns the next one.

The history is a bounded set of failures, each known by its number in the event log. Adding one twice changes nothing
and the order does not matter, so redelivered and late events need no special care.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from pydantic import Field, model_validator

from breakwater.contracts.events import BreakerRule, BreakerState
from breakwater.contracts.types import Message


class BreakerRules(Message):
    """When to open, and for how long. At least one rule must be set."""

    errors: int | None = Field(default=None, ge=1, le=1000, description="Open at this many failures within `within_s`.")
    within_s: float = Field(default=60.0, gt=0, le=86_400)
    consecutive_failures: int | None = Field(default=3, ge=1, le=1000, description="Open at this many in a row.")
    cooldown_s: float = Field(default=60.0, gt=0, le=86_400, description="How long calls are refused before a probe.")

    @model_validator(mode="after")
    def _some_rule(self) -> Self:
        if self.errors is None and self.consecutive_failures is None:
            raise ValueError("set errors or consecutive_failures, or switch the breaker off with `breaker: off`")
        return self


@dataclass(frozen=True, slots=True)
class Failure:
    """A counted failure: its sequence in the event log and when it ended (milliseconds since the epoch)."""

    sequence: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of one breaker."""

    state: BreakerState = "closed"
    failures: tuple[Failure, ...] = ()
    """The latest, ordered by sequence; no more than the rules can ask for."""
    last_success: int = 0
    """Sequence of the latest success."""
    open_until_ms: int = 0
    probe: str | None = None
    """The attempt that holds the half-open probe; its lease ends at `probe_until_ms`."""
    probe_until_ms: int = 0
    version: int = 0
    closed_at: int = 0
    """Sequence of the probe that closed it last: what the log told before is over, also when it is told again."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an attempt's event tells the breaker. `failed` is None where the outcome says nothing about the model."""

    sequence: int
    attempt_id: str
    ended_at_ms: int
    failed: bool | None


@dataclass(frozen=True, slots=True)
class Change:
    """A transition, with the figures that explain it."""

    before: Breaker
    after: Breaker
    rule: BreakerRule | None
    reason: str
    consecutive_failures: int
    errors: int


def observe(breaker: Breaker, seen: Observation, rules: BreakerRules, now_ms: int) -> tuple[Breaker, Change | None]:
    """Takes one outcome into account.

    While the breaker is open nothing changes: calls that were under way when it opened must not lengthen its
    cool-down. While it is half-open only the probe's outcome decides.
    """
    if breaker.state == "open":
        return breaker, None
    if breaker.state == "half_open":
        return _after_probe(breaker, seen, rules, now_ms)
    if seen.failed is None or seen.sequence <= breaker.closed_at:
        return breaker, None
    if not seen.failed:
        return replace(breaker, last_success=max(breaker.last_success, seen.sequence)), None
    recorded = replace(breaker, failures=_with_failure(breaker.failures, seen, rules))
    return _open_if_due(recorded, rules, now_ms)


def _after_probe(
    breaker: Breaker, seen: Observation, rules: BreakerRules, now_ms: int
) -> tuple[Breaker, Change | None]:
    if seen.attempt_id != breaker.probe:
        return breaker, None
    if seen.failed is None:
        # The probe says nothing about the model's health: the next call may probe at once.
        return replace(breaker, probe=None, probe_until_ms=0), None
    if seen.failed:
        failures = _with_failure(breaker.failures, seen, rules)
        opened = replace(_opened(breaker, rules, now_ms), failures=failures)
        return opened, _change(breaker, opened, "probe_failed", "the half-open probe failed", rules, now_ms)
    closed = Breaker(last_success=seen.sequence, closed_at=seen.sequence, version=breaker.version + 1)
    return closed, _change(breaker, closed, None, "the half-open probe succeeded", rules, now_ms)


def _open_if_due(breaker: Breaker, rules: BreakerRules, now_ms: int) -> tuple[Breaker, Change | None]:
    consecutive = consecutive_failures(breaker)
    errors = errors_within(breaker, rules, now_ms)
    opened = _opened(breaker, rules, now_ms)
    if rules.consecutive_failures is not None and consecutive >= rules.consecutive_failures:
        reason = f"{consecutive} consecutive failures (threshold: {rules.consecutive_failures})"
        return opened, _change(breaker, opened, "consecutive_failures", reason, rules, now_ms)
    if rules.errors is not None and errors >= rules.errors:
        reason = f"{errors} errors within {rules.within_s:g} s (threshold: {rules.errors})"
        return opened, _change(breaker, opened, "errors", reason, rules, now_ms)
    return breaker, None


def _change(
    before: Breaker, after: Breaker, rule: BreakerRule | None, reason: str, rules: BreakerRules, now_ms: int
) -> Change:
    figures = after if after.failures else before
    return Change(before, after, rule, reason, consecutive_failures(figures), errors_within(figures, rules, now_ms))


def _opened(breaker: Breaker, rules: BreakerRules, now_ms: int) -> Breaker:
    until = now_ms + round(rules.cooldown_s * 1000)
    return replace(
        breaker, state="open", open_until_ms=until, probe=None, probe_until_ms=0, version=breaker.version + 1
    )


def _with_failure(failures: Sequence[Failure], seen: Observation, rules: BreakerRules) -> tuple[Failure, ...]:
    kept = {failure.sequence: failure for failure in failures}
    kept[seen.sequence] = Failure(seen.sequence, seen.ended_at_ms)
    needed = max(rules.errors or 0, rules.consecutive_failures or 0)
    return tuple(kept[sequence] for sequence in sorted(kept))[-needed:]


def consecutive_failures(breaker: Breaker) -> int:
    """Failures since the latest success."""
    return sum(failure.sequence > breaker.last_success for failure in breaker.failures)


def errors_within(breaker: Breaker, rules: BreakerRules, now_ms: int) -> int:
    """Failures within the rolling window that ends now."""
    since = now_ms - round(rules.within_s * 1000)
    return sum(failure.at_ms > since for failure in breaker.failures)
