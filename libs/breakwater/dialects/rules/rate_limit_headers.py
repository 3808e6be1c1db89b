"""The rate limits of a caller, as the headers of OpenAI's and Anthropic's APIs have them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

_UNITS = ("requests", "tokens")


def openai_headers(limits: Mapping[str, Any] | None, now: datetime) -> dict[str, str]:
    """Returns `x-ratelimit-limit-requests` and so on: none without a limit.

    Args:
        limits: a `CallerLimits`, as JSON; None if no rate limit applied.
        now: the time, from which `reset` counts.
    """
    headers: dict[str, str] = {}
    for unit, allowance, resets_at in _allowances(limits, now):
        headers[f"x-ratelimit-limit-{unit}"] = str(allowance["limit"])
        headers[f"x-ratelimit-remaining-{unit}"] = str(allowance["remaining"])
        headers[f"x-ratelimit-reset-{unit}"] = duration_text(resets_at - now)
    return headers


def anthropic_headers(limits: Mapping[str, Any] | None, now: datetime) -> dict[str, str]:
    """Returns `anthropic-ratelimit-requests-limit` and so on, as `openai_headers` does."""
    headers: dict[str, str] = {}
    for unit, allowance, resets_at in _allowances(limits, now):
        # Anthropic's has whole seconds; one that is too early would promise what is not there yet.
        next_second = datetime.fromtimestamp(math.ceil(resets_at.timestamp()), UTC)
        headers[f"anthropic-ratelimit-{unit}-limit"] = str(allowance["limit"])
        headers[f"anthropic-ratelimit-{unit}-remaining"] = str(allowance["remaining"])
        headers[f"anthropic-ratelimit-{unit}-reset"] = f"{next_second:%Y-%m-%dT%H:%M:%SZ}"
    return headers


def _allowances(limits: Mapping[str, Any] | None, now: datetime) -> Iterator[tuple[str, Mapping[str, Any], datetime]]:
    for unit in _UNITS:
        allowance = cast(Mapping[str, Any] | None, (limits or {}).get(unit))
        if allowance is None:
            continue
        resets_at = datetime.fromisoformat(allowance["resets_at"])
        if resets_at > now:  # else the result is an old one, and its figures say nothing of this moment
            yield unit, allowance, resets_at


def duration_text(duration: timedelta) -> str:
    """Returns a duration as Go writes it, which OpenAI's header has: `17ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    ms = math.ceil(duration / timedelta(milliseconds=1))
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds
