"""The rules of breakers, guards and rate limits in a few words, for a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from breakwater.cli import formats
from breakwater.cli.formats import counted

if TYPE_CHECKING:
    from breakwater.policy.breaker_rules import BreakerRules
    from breakwater.policy.guard import ConfidenceRules, GuardRules
    from breakwater.policy.rate_limit import RateLimit

_SHARED = {"agent_model": "", "model": ", per model for all agents", "provider": ", per provider for all agents"}


def breaker(rules: BreakerRules | None) -> str:
    """When it opens, for how long, and whose calls count: `3 in a row, or 5 alike in 60 s; open 60 s`."""
    if rules is None:
        return "off"
    windowed: list[str] = []
    if rules.same_error is not None:
        windowed.append(f"{rules.same_error} alike")
    if rules.errors is not None:
        windowed.append(counted(rules.errors, "error"))
    if rules.failure_rate is not None:
        windowed.append(f"{rules.failure_rate:.0%} of {rules.minimum_calls:,} or more")
    opens = [f"{rules.consecutive_failures} in a row"] if rules.consecutive_failures is not None else []
    if windowed:
        opens.append(f"{' or '.join(windowed)} in {rules.within_s:g} s")
    longest = (
        f"-{rules.max_cooldown_s:g}" if rules.cooldown_growth > 1 and rules.max_cooldown_s > rules.cooldown_s else ""
    )
    preset = f"{rules.preset}: " if rules.preset is not None else ""
    return f"{preset}{', or '.join(opens)}; open {rules.cooldown_s:g}{longest} s{_SHARED[rules.scope]}"


def guard(rules: GuardRules | None) -> str:
    """What a task may do: `10 iterations, 200,000 tokens, $10.00, 3 failures in a row, 5 alike`."""
    if rules is None:
        return "off"
    limits: list[str] = []
    if rules.max_iterations is not None:
        limits.append(counted(rules.max_iterations, "iteration"))
    if rules.max_tokens is not None:
        limits.append(counted(rules.max_tokens, "token"))
    if rules.max_cost_usd is not None:
        limits.append(formats.money(rules.max_cost_usd))
    if rules.consecutive_failures is not None:
        limits.append(f"{counted(rules.consecutive_failures, 'failure')} in a row")
    if rules.same_error is not None:
        limits.append(f"{rules.same_error:,} alike")
    if rules.confidence is not None:
        limits.append(_confidence(rules.confidence))
    return ", ".join(limits) or "no limit"


def rate_limit(limit: RateLimit | None) -> str:
    """How much may be asked, and what happens beyond: `60 requests/min, 4 at once, then waits`."""
    if limit is None:
        return "none"
    limits: list[str] = []
    if limit.requests_per_minute is not None:
        limits.append(f"{counted(limit.requests_per_minute, 'request')}/min")
    if limit.tokens_per_minute is not None:
        limits.append(f"{counted(limit.tokens_per_minute, 'token')}/min")
    if limit.concurrent_calls is not None:
        limits.append(f"{counted(limit.concurrent_calls, 'call')} at once")
    return f"{', '.join(limits)}, then {'waits' if limit.on_exceeded == 'wait' else 'the next model'}"


def _confidence(rules: ConfidenceRules) -> str:
    how = [f"below {rules.floor:g}"] if rules.floor is not None else []
    how += ["falling"] if rules.falling else []
    return f"{rules.field} {' or '.join(how)} in {rules.answers} answers"
