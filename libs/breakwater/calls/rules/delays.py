"""Reads how long a provider asks to be left alone, from the headers and the body of its error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, tzinfo
from email.utils import parsedate_to_datetime
from typing import Any

MAX_DELAY_S = 31 * 86_400.0
"""Limits are set by the month at most; a longer number of seconds is, say, a moment since the epoch."""

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
    """Seconds to wait before the next call, as the provider says; None where it says nothing that can be read.

    What it says most exactly counts: a wait in milliseconds, `Retry-After`, a delay in the body, and at last when
    the limits that are used up are reset, of which the longest counts. A moment that has passed is a wait of 0.

    Args:
        headers: of the answer, names in lower case.
        now: for headers that name a moment.
        in_body: the delay that the error's body names, in seconds.
    """
    for name in ("retry-after-ms", "x-ms-retry-after-ms"):
        delay = _sane(_number(headers.get(name, "")), unit_s=1e-3)
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
    """Seconds until the last of the limits that are used up is reset; None where no header says so."""
    return max(_resets(headers, now), default=None)


def duration_s(text: str) -> float | None:
    """Reads a duration as Go and protobuf write it, such as `1h2m3.5s`, `6m0s`, `20ms` or `37s`, into seconds.

    A bare number is seconds, as some gateways send it. None for anything else.
    """
    text = text.strip()
    if len(text) > _MAX_TEXT:
        return None
    number = _number(text)
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
    """The delay in a sentence such as `Please try again in 6.2s` or `Please retry after 6 seconds.`; else None."""
    found = _SPOKEN.search(text)
    if found is None:
        return None
    unit = found[2].lower().rstrip(".")
    return duration_s(found[1] + _WORDS.get(unit.removesuffix("s"), unit))


def moment_in(said: Any, zone: tzinfo = UTC) -> datetime | None:
    """Time at which a limit is reset: from seconds or milliseconds since the epoch, or a sentence; else None.

    Args:
        said: such as 1772180859, or `You will regain access on 2026-04-01 at 00:00 UTC.`
        zone: of a moment that names none.
    """
    if isinstance(said, int | float):
        return _since_epoch(float(said))
    found = _MOMENT.search(said) if isinstance(said, str) and _AGAIN.search(said) else None
    if found is None:
        return None
    offset = "+00:00" if (found[3] or "").upper() in {"Z", "UTC", "GMT"} else found[3] or ""
    try:
        moment = datetime.fromisoformat(f"{found[1]}T{found[2] or '00:00'}{offset}")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=zone)


def _since_epoch(number: float) -> datetime | None:
    seconds = number / 1000 if number >= _EPOCH_MS else number
    return datetime.fromtimestamp(seconds, UTC) if _EPOCH_S <= seconds < _EPOCH_MS / 100 else None


def _number(text: str) -> float | None:
    text = text.strip()
    return float(text) if len(text) <= _MAX_TEXT and _NUMBER.fullmatch(text) else None


def _sane(number: float | None, unit_s: float = 1.0) -> float | None:
    # False for what is not a number, too.
    return number * unit_s if number is not None and 0 <= number * unit_s <= MAX_DELAY_S else None


def _until(moment: datetime, now: datetime) -> float | None:
    return min(max(0.0, (moment - now).total_seconds()), MAX_DELAY_S)


def _retry_after(text: str, now: datetime) -> float | None:
    text = text.strip()
    number = _number(text)
    if number is not None or not text or len(text) > _MAX_TEXT:
        return _sane(number)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None  # the parser raises each of these on some text that is no date
    return _until(moment if moment.tzinfo else moment.replace(tzinfo=UTC), now)


def _resets(headers: Mapping[str, str], now: datetime) -> list[float]:
    """Seconds until each limit that is used up is reset. The others are not what the call was refused for."""
    delays: list[float | None] = []
    for limit in _OPENAI_LIMITS:
        if _number(headers.get(f"x-ratelimit-remaining-{limit}", "")) == 0:
            delays.append(duration_s(headers.get(f"x-ratelimit-reset-{limit}", "")))
    for limit in _ANTHROPIC_LIMITS:
        if _number(headers.get(f"anthropic-ratelimit-{limit}-remaining", "")) == 0:
            delays.append(_until_rfc3339(headers.get(f"anthropic-ratelimit-{limit}-reset", ""), now))
    if _number(headers.get("x-ratelimit-remaining", "0")) == 0:
        for text in (headers.get(name, "") for name in _RESETS):
            # Some send a moment, as seconds or milliseconds since the epoch, and some a duration.
            moment = _since_epoch(_number(text) or 0.0)
            delays.append(duration_s(text) if moment is None else _until(moment, now))
    return [delay for delay in delays if delay is not None]


def _until_rfc3339(text: str, now: datetime) -> float | None:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return _until(moment, now) if moment.tzinfo else None
