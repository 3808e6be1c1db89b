"""The transitions of breakers as events, and breakers rebuilt from them."""

from __future__ import annotations

from dataclasses import replace

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import Breaker, BreakerChange, BreakerKey, consecutive_failures, errors_within
from breakwater.breakers.rules.health import CallHealth, health_of_model, open_for
from breakwater.breakers.settings import BreakerRules
from breakwater.kernel.types import ms_from_time, time_from_ms


def transition(key: BreakerKey, change: BreakerChange, rules: BreakerRules, now_ms: int) -> BreakerTransition:
    """Returns the event of a transition that was decided at `now_ms` (milliseconds since the epoch)."""
    after = change.after
    # The event of a reset has the counts from before it, which are forgotten from then on.
    figures = after if after.total_failures else change.before
    return BreakerTransition(
        transition_id=f"{key.name}#{after.version}@{now_ms}",
        scope=rules.scope,
        agent=key.agent,
        model=key.model,
        from_state=change.before.state,
        to_state=after.state,
        waits=after.waits,
        rule=change.rule,
        reason=change.reason,
        by=change.by,
        health=health_of_model(after.state, CallHealth(consecutive_failures(after)), only_for=open_for(after)).health,
        consecutive_failures=change.consecutive_failures,
        total_failures=figures.total_failures,
        unique_errors=len(figures.errors_seen),
        errors=change.errors,
        error_hash=change.error_hash,
        alone=after.alone or None,
        open_for=open_for(after),
        within_s=rules.within_s,
        cooldown_s=(after.open_until_ms - now_ms) / 1000 if after.state == "open" else rules.cooldown_s,
        open_until=time_from_ms(after.open_until_ms) if after.state == "open" else None,
        last_failure_at=time_from_ms(after.last_failure_ms) if after.last_failure_ms else None,
        last_success_at=time_from_ms(after.last_success_ms) if after.last_success_ms else None,
        version=after.version,
        at=time_from_ms(now_ms),
    )


def half_opened(key: BreakerKey, half_open: Breaker, rules: BreakerRules, now_ms: int) -> BreakerTransition:
    """Returns the event of a breaker that admitted a probe. Its id does not depend on the publisher."""
    before = replace(half_open, state="open", probe=None, probe_until_ms=0, version=half_open.version - 1)
    consecutive = consecutive_failures(before)
    errors = errors_within(before, rules, now_ms)
    of_another = "the probe that failed came from another key or tenant"
    cause = of_another if half_open.probed_by else "the cool-down has ended"
    change = BreakerChange(before, half_open, None, f"{cause}; one probe is admitted", consecutive, errors)
    event = transition(key, change, rules, now_ms)
    return event.model_copy(update={"transition_id": f"{key.name}#{half_open.version}@{half_open.open_until_ms}"})


def breaker_after(latest: BreakerTransition, sequence: int) -> Breaker:
    """Rebuilds a lost breaker from its latest transition, which is at `sequence` in the event log.

    The transition does not say who holds the probe of a half-open breaker: it is rebuilt as open and due for a probe,
    unless it waited for a call.
    """
    half_open = latest.to_state == "half_open"
    was_reset = latest.to_state == "closed" and latest.by is not None
    return Breaker(
        state="open" if half_open and not latest.waits else latest.to_state,
        waits=latest.waits,
        open_until_ms=0 if latest.open_until is None else ms_from_time(latest.open_until),
        openings=1 if half_open or latest.to_state == "open" else 0,
        version=latest.version,
        changed_ms=ms_from_time(latest.at),
        reason=latest.reason,
        alone=latest.alone or "",
        alone_name=latest.open_for or "",
        counts_from=latest.version,
        closed_at=sequence,
        total_failures=0 if was_reset else latest.total_failures,
        last_failure_ms=0 if latest.last_failure_at is None else ms_from_time(latest.last_failure_at),
        last_success_ms=0 if latest.last_success_at is None else ms_from_time(latest.last_success_at),
    )
