"""Reads from the headers and the body of a provider's error how long to wait before the next call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, tzinfo
from email.utils import parsedate_to_datetime
from typing import Any

MAX_DELAY_S = 31 * 86_400.0
"""The longest plausible delay: limits last a month at most. More seconds are, for example, a time since the epoch."""

_MAX_TEXT = 100
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+")
_PART = re.compile(rf"({_NUMBER.pattern})(ns|us|µs|μs|ms|s|m|h|d)")
_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_WORDS = {"millisecond": "ms", "second": "s", "minute": "m", "hour": "h", "day": "d"}
_SPOKEN = re.compile(
    r"\b(?:(?:try again|retry|resets?|available(?: again)?) (?:in|after)|wait(?: for)?) ([0-9.]+) ?([0-9.a-zµμ]+)", re.I
)
_AGAIN = re.compile(r"\b(?:resets?|renews?|regain|again|retry|until)\b|重置", re.I)
_MOMENT = re.compile(
    r"\b(\d{4}-\d\d-\d\d)(?:(?:T| | at )(\d\d:\d\d(?::\d\d)?)(?:\.\d+)?)? ?(Z|UTC|GMT|[+-]\d\d:?\d\d)?", re.I
)
_EPOCH_S = 1e9
_EPOCH_MS = 1e12

_OPENAI_LIMITS = ("requests", "tokens")
_RESETS = ("x-ratelimit-reset", "ratelimit-reset", "anthropic-ratelimit-unified-reset")
_ANTHROPIC_LIMITS = ("requests", "tokens", "input-tokens", "output-tokens")


def retry_after_s(headers: Mapping[str, str], now: datetime, in_body: float | None = None) -> float | None:
    """Returns the seconds to wait before the next call, as the provider states them; None if it states none.

    The most exact statement counts: a wait in milliseconds, then `Retry-After`, then a delay in the body, and finally
    the last reset of the exhausted limits. A moment that has passed is a wait of 0.

    Args:
        headers: the answer's headers, with names in lower case.
        now: the current time, for headers that state a moment.
        in_body: the delay that the error's body states, in seconds.
    """
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        delay = _sane(number_in(headers.get(name, "")), unit_s=1e-3)
        if delay is not None:
            return delay
    delay = _retry_after(headers.get("retry-after", ""), now)
    if delay is not None:
        return delay
    delay = _sane(in_body)
    if delay is not None:
        return delay
    return latest_reset_s(headers, now)


def latest_reset_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Returns the seconds until the last of the exhausted limits is reset; None if no header states it."""
    return max(_resets(headers, now), default=None)


def duration_s(text: str) -> float | None:
    """Reads a duration as Go and protobuf write it, such as `1h2m3.5s`, `6m0s`, `20ms` or `37s`, in seconds.

    A bare number counts as seconds, because some gateways send it. None for anything else.
    """
    text = text.strip()
    if len(text) > _MAX_TEXT:
        return None
    number = number_in(text)
    if number is not None:
        return _sane(number)
    total = 0.0
    position = 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        total += float(part[1]) * _UNIT_S[part[2]]
        position = part.end()
    return _sane(total) if position else None


def spoken_delay_s(text: str) -> float | None:
    """Returns the delay in a sentence such as `Please try again in 6.2s` or `Retry after 6 seconds.`; or None."""
    match = _SPOKEN.search(text)
    if match is None:
        return None
    unit = match[2].lower().rstrip(".")
    return duration_s(match[1] + _WORDS.get(unit.removesuffix("s"), unit))


def moment_in(statement: Any, zone: tzinfo = UTC) -> datetime | None:
    """Returns the time at which a limit is reset, from a time since the epoch or a sentence; None if it has none.

    Args:
        statement: seconds or milliseconds, such as 1772180859, or a sentence, such as `You will regain access on
            2026-04-01 at 00:00 UTC.`
        zone: the time zone of a moment without one.
    """
    if isinstance(statement, int | float):
        return _since_epoch(float(statement))
    match = _MOMENT.search(statement) if isinstance(statement, str) and _AGAIN.search(statement) else None
    if match is None:
        return None
    offset = "+00:00" if (match[3] or "").upper() in {"Z", "UTC", "GMT"} else match[3] or ""
    try:
        moment = datetime.fromisoformat(f"{match[1]}T{match[2] or '00:00'}{offset}")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=zone)


def _since_epoch(number: float) -> datetime | None:
    seconds = number / 1000 if number >= _EPOCH_MS else number
    return datetime.fromtimestamp(seconds, UTC) if _EPOCH_S <= seconds < _EPOCH_MS / 100 else None


def number_in(text: str) -> float | None:
    """Reads a decimal number; None for anything else."""
    if text.isdecimal() and text.isascii() and len(text) <= _MAX_TEXT:
        return float(text)  # most are, and each answer has some
    text = text.strip()
    return float(text) if len(text) <= _MAX_TEXT and _NUMBER.fullmatch(text) else None


def _sane(number: float | None, unit_s: float = 1.0) -> float | None:
    # The comparison is also False for NaN.
    return number * unit_s if number is not None and 0 <= number * unit_s <= MAX_DELAY_S else None


def _until(moment: datetime, now: datetime) -> float | None:
    return min(max(0.0, (moment - now).total_seconds()), MAX_DELAY_S)


def _retry_after(text: str, now: datetime) -> float | None:
    text = text.strip()
    number = number_in(text)
    if number is not None or not text or len(text) > _MAX_TEXT:
        return _sane(number)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None  # the parser raises each of these on some text that is no date
    return _until(moment if moment.tzinfo else moment.replace(tzinfo=UTC), now)


def _resets(headers: Mapping[str, str], now: datetime) -> list[float]:
    """Returns the seconds until each exhausted limit is reset. The other limits did not refuse the call."""
    delays: list[float | None] = []
    for limit in _OPENAI_LIMITS:
        if number_in(headers.get(f"x-ratelimit-remaining-{limit}", "")) == 0:
            delays.append(duration_s(headers.get(f"x-ratelimit-reset-{limit}", "")))
    for limit in _ANTHROPIC_LIMITS:
        if number_in(headers.get(f"anthropic-ratelimit-{limit}-remaining", "")) == 0:
            delays.append(until_rfc3339(headers.get(f"anthropic-ratelimit-{limit}-reset", ""), now))
    if number_in(headers.get("x-ratelimit-remaining", "0")) == 0:
        for text in (headers.get(name, "") for name in _RESETS):
            # Some send a moment, as seconds or milliseconds since the epoch, and some a duration.
            moment = _since_epoch(number_in(text) or 0.0)
            delays.append(duration_s(text) if moment is None else _until(moment, now))
    return [delay for delay in delays if delay is not None]


def until_rfc3339(text: str, now: datetime) -> float | None:
    """Returns the seconds until a moment such as `2026-11-21T10:00:00Z`; None for anything else."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return _until(moment, now) if moment.tzinfo else None
