"""Reads from the headers of a provider's answer what is left of its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from breakwater.calls.rules.delays import duration_s, number_in, until_rfc3339

DEFAULT_RESET_S = 60.0
"""When a limit is taken to be reset if no header says so: most are per minute."""


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

    def fits(self, tokens: int) -> bool:
        """Returns True if one more call with so many tokens is within the limit."""
        return self.remaining >= (tokens if self.counts_tokens else 1)

    @property
    def share(self) -> float:
        """The share that is left, from 0 to 1."""
        if not self.limit:
            return 1.0 if self.remaining else 0.0
        return min(1.0, self.remaining / self.limit)


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
