"""Amounts, durations, times, tables and texts of others as people read them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import ROUND_DOWN, Decimal
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


def money_text(nano: int) -> str:
    """Nano-dollars for people: cents from one dollar up, below it two figures that count: `$4.00`, `$0.0015`.

    Cut off, not rounded: a text never shows more than was spent.
    """
    amount = Decimal(nano).scaleb(-_NANO_PLACES)
    places = 2 if nano == 0 or abs(amount) >= 1 else min(9, max(2, 1 - amount.adjusted()))
    shown = f"{abs(amount).quantize(Decimal(1).scaleb(-places), ROUND_DOWN):,f}"
    whole, _, decimals = shown.partition(".")
    return f"{'-' if nano < 0 else ''}${whole}.{decimals.rstrip('0').ljust(2, '0')}"


def moment(at: datetime) -> str:
    """A time for people: `2026-11-21 10:00:00 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def sentence(words: str) -> str:
    """Words as one sentence."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def failures_in_words(statistics: FailureStatistics) -> str:
    """The reason for a stop, and its failures: `3 consecutive failures (5 in all, 2 different errors)`."""
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
"""Characters that terminals obey, that turn the direction of writing, or that UTF-8 can't write."""


def visible(text: str) -> str:
    """A text that a model, a tenant or an error may have supplied, with what does not show as escapes of JSON."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Beginnings that spreadsheets take for a formula, and would carry out; also in full width, as in Japanese."""


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> str:
    """A heading and rows; None is an empty cell.

    Texts that a spreadsheet would take for a formula get an apostrophe in front, as programs choose names of tenants
    and tags. Numbers, and amounts as `usd_from_nano` writes them, stay as they are.
    """
    return csv_lines([columns, *([csv_cell(value) for value in row] for row in rows)])


def csv_lines(rows: Iterable[Sequence[str | int]]) -> str:
    """Rows of cells that are written as they are."""
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue()


def no_formula(text: str) -> str:
    """A text that a spreadsheet takes for no formula: one that begins like one gets an apostrophe in front."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def csv_cell(value: str | int | None) -> str | int:
    """A cell as `csv_text` writes it."""
    if not isinstance(value, str):
        return "" if value is None else value
    return value if _is_number(value) else no_formula(value)


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdecimal() and not text.startswith("--")


def words(text: str) -> frozenset[str]:
    """The words of a table that is written as a text."""
    return frozenset(text.split())
