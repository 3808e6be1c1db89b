"""The rest of the limits of a deployment: its provider's, by the headers of answers, and our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf

from breakwater.calls.rules.delays import duration_s, number_in, until_rfc3339

DEFAULT_RESET_S = 60.0
"""When a limit is taken to be reset if no header says so: most are per minute."""

LOW_HEADROOM = 0.1
"""With less left of one of its limits, a deployment is called after the others, even for a session that it has."""

USED_UP = 0.01
"""With less left of one of them, it is spared by all workers."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The rest of one limit.

    Attributes:
        counts_tokens: True for a limit on tokens, False for one on requests.
        remaining: what is left.
        limit: all that there is; None if no header says it.
        reset_s: the seconds until there is all again.
    """

    counts_tokens: bool
    remaining: float
    limit: float | None
    reset_s: float

    def less(self, tokens: int) -> Quota:
        """Returns what is left after one more call with at most so many tokens, until an answer says it exactly."""
        used = tokens if self.counts_tokens else 1
        return Quota(self.counts_tokens, max(0.0, self.remaining - used), self.limit, self.reset_s)

    def after(self, age_s: float) -> float:
        """Returns what is left some seconds later: limits fill up evenly. An unknown one is there again in the end."""
        if age_s >= self.reset_s:
            return inf if self.limit is None else self.limit
        if self.limit is None:
            return self.remaining
        return self.remaining + max(0.0, self.limit - self.remaining) * age_s / self.reset_s

    def share_of(self, left: float) -> float:
        """Returns the share that is left, from 0 to 1."""
        if not self.limit:
            return 1.0 if left else 0.0
        return min(1.0, left / self.limit)


def room_in(quotas: Iterable[Quota], tokens: int, age_s: float) -> tuple[float, bool]:
    """Returns the least share that is left of some limits, and whether one more call with so many tokens fits them.

    Args:
        quotas: the limits.
        tokens: the most tokens that the call can use.
        age_s: the seconds since they were read.
    """
    least = 1.0
    fits = True
    for quota in quotas:
        left = quota.after(age_s)
        least = min(least, quota.share_of(left))
        fits = fits and left >= (tokens if quota.counts_tokens else 1)
    return least, fits


def used_up_s(quotas: Iterable[Quota]) -> float:
    """Returns the seconds until there is some room again in limits that are all but used up; 0 if none is."""
    return max((_refilled_s(quota) for quota in quotas if quota.share_of(quota.remaining) < USED_UP), default=0.0)


def _refilled_s(quota: Quota) -> float:
    if not quota.limit:
        return quota.reset_s
    return quota.reset_s * (LOW_HEADROOM * quota.limit - quota.remaining) / (quota.limit - quota.remaining)


def quotas(headers: Mapping[str, str], now: datetime) -> tuple[Quota, ...]:
    """Returns what is left of each limit that the headers state, as OpenAI and Anthropic write them.

    Args:
        headers: the answer's headers, by lower-case names.
        now: the current time, for resets that are a moment.
    """
    return tuple(_quotas(headers, now))


def _quotas(headers: Mapping[str, str], now: datetime) -> Iterator[Quota]:
    for unit in ("requests", "tokens"):
        remaining = number_in(headers.get(f"x-ratelimit-remaining-{unit}", ""))
        if remaining is not None:
            reset_s = duration_s(headers.get(f"x-ratelimit-reset-{unit}", ""))
            yield _quota(unit, remaining, headers.get(f"x-ratelimit-limit-{unit}", ""), reset_s)
    for unit in ("requests", "tokens", "input-tokens", "output-tokens"):
        remaining = number_in(headers.get(f"anthropic-ratelimit-{unit}-remaining", ""))
        if remaining is not None:
            reset_s = until_rfc3339(headers.get(f"anthropic-ratelimit-{unit}-reset", ""), now)
            yield _quota(unit, remaining, headers.get(f"anthropic-ratelimit-{unit}-limit", ""), reset_s)


def _quota(unit: str, remaining: float, limit: str, reset_s: float | None) -> Quota:
    return Quota(
        unit != "requests", remaining, number_in(limit), DEFAULT_RESET_S if reset_s is None else max(reset_s, 0.001)
    )
