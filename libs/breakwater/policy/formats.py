"""How amounts, durations and texts of others are written for people."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from breakwater.contracts.execution import FailureStatistics

_NANO_PLACES = 9


def money(nano: int | None) -> str:
    """Nano-dollars, with no digit lost and none too many: `$0.000042`, `$12.50`; `unknown` for None."""
    return "unknown" if nano is None else dollars(Decimal(nano).scaleb(-_NANO_PLACES))


def dollars(usd: Decimal | str) -> str:
    """The same for a decimal amount in USD, as it is on the wire."""
    whole, _, places = f"{Decimal(usd):.{_NANO_PLACES}f}".partition(".")
    sign = "-" if whole.startswith("-") else ""
    return f"{sign}${int(whole.lstrip('-')):,}.{places.rstrip('0').ljust(2, '0')}"


def failures_in_words(statistics: FailureStatistics) -> str:
    """Why something was stopped, and for which failures: `3 consecutive failures (5 in all, 2 different errors)`."""
    total, different = statistics.total_failures, counted(statistics.unique_errors, "different error")
    return f"{statistics.reason} ({f'{total:,} in all, {different}' if total else 'no failures'})"


def counted(number: int, what: str) -> str:
    """`1 token`, `200,000 tokens`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(ms: float | None) -> str:
    """Milliseconds as `850 ms`, `1.2 s`, `2 min 05 s` or `3 h 20 min`; empty for None."""
    if ms is None:
        return ""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    seconds = ms / 1_000
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


_CONTROLS = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal obeys instead of showing it, what turns the direction of writing, and what UTF-8 can't write."""


def visible(text: str) -> str:
    """A text that a model, a tenant or an error may have supplied, with what does not show as escapes of JSON."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
