"""Formats amounts, durations, times, tables and foreign texts for people."""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal


def money(amount: int | str | None) -> str:
    """Formats an amount: to the cent from one dollar up, below that to three significant digits, half to even.

    `$1,204.20`, `$0.00475`, `$0.25`, `$0.00`; `unknown` for None.

    Args:
        amount: nano-dollars, or a string of USD as on the wire.
    """
    if amount is None:
        return "unknown"
    usd = _usd(amount)
    rounded = _round(usd)
    # A rounded amount keeps its zeros, which count: `$0.0390`.
    return _format(rounded, keep_zeros=rounded != usd)


def exact_money(amount: int | str | None) -> str:
    """Formats an amount with all its digits: `$1,204.204999`."""
    return "unknown" if amount is None else _format(_usd(amount))


def moneys(*amounts: int) -> tuple[str, ...]:
    """Formats amounts that a text compares: rounded, or exact if different amounts would look equal."""
    texts = tuple(map(money, amounts))
    different = len({text.rstrip("0") for text in texts}) == len(set(amounts))
    return texts if different else tuple(map(exact_money, amounts))


def beyond(spent: int, amount: int, limit: int) -> tuple[str, ...]:
    """Formats what is spent, an amount and the limit that it exceeds: rounded, or exact if it would seem to fit."""
    rounded_spent, rounded_amount, rounded_limit = (_round(_usd(nano)) for nano in (spent, amount, limit))
    seems_to_fit = rounded_spent + rounded_amount <= rounded_limit
    return tuple(map(exact_money if seems_to_fit else money, (spent, amount, limit)))


def typed_money(nano: int) -> str:
    """Formats an amount for a command or a config: `1204.204999`."""
    return exact_money(nano).replace("$", "").replace(",", "")


def at_least(nano: int | None, unknown: int) -> str:
    """Formats an amount, with a `+` after it if it lacks calls of unknown cost."""
    return money(nano) + ("+" if unknown and nano is not None else "")


def _usd(amount: int | str) -> Decimal:
    return Decimal(amount) if isinstance(amount, str) else Decimal(amount).scaleb(-9)


def _round(usd: Decimal) -> Decimal:
    rounded = round(usd, 2 if not usd or abs(usd) >= 1 else 2 - usd.adjusted())
    return round(rounded, 2) if abs(rounded) >= 1 else rounded


def _format(usd: Decimal, *, keep_zeros: bool = False) -> str:
    dollars, _, cents = f"{abs(usd):,f}".partition(".")
    return f"{'-' if usd < 0 else ''}${dollars}.{(cents if keep_zeros else cents.rstrip('0')).ljust(2, '0')}"


def percent(share: float | None) -> str:
    """Formats a share from 0 to 1: `98.2 %`; `–` for None."""
    if share is None:
        return "–"
    text = f"{share * 100:.1f}"
    # Less than all must not look like all.
    if text == "100.0" and share < 1:
        return "99.9 %"
    return f"{text.removesuffix('.0')} %"


def moment(at: datetime) -> str:
    """Formats a time: `2026-11-21 10:00:00 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def sentence(words: str) -> str:
    """Writes words as a sentence, with a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def quantity(number: int, noun: str) -> str:
    """Formats a number of things: `1 token`, `200,000 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(ms: float | None) -> str:
    """Formats milliseconds as `850 ms`, `1.2 s`, `2 min 05 s` or `3 h 20 min`; empty for None."""
    if ms is None:
        return ""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    seconds = ms / 1_000
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


_CONTROLS = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that terminals obey, that turn the direction of writing, or that UTF-8 can't write."""


def visible(text: str) -> str:
    """Escapes the invisible characters of a foreign text, which a model, a tenant or an error may have supplied."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Beginnings of a formula, which spreadsheets would run; also in full width, as in Japanese."""


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> str:
    """Writes a heading and rows as CSV; None is an empty cell.

    Texts that a spreadsheet would run as a formula get an apostrophe in front, because programs choose the names of
    tenants and tags. Numbers, and amounts from `usd_from_nano`, stay unchanged.
    """
    return csv_lines([columns, *([csv_cell(value) for value in row] for row in rows)])


def csv_lines(rows: Iterable[Sequence[str | int]]) -> str:
    """Writes rows as CSV, with their cells unchanged."""
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue()


def no_formula(text: str) -> str:
    """Puts an apostrophe in front of a text that a spreadsheet would run as a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def csv_cell(value: str | int | None) -> str | int:
    """Returns a cell as `csv_text` writes it."""
    if not isinstance(value, str):
        return "" if value is None else value
    return value if _is_number(value) else no_formula(value)


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdecimal() and not text.startswith("--")


def words(text: str) -> frozenset[str]:
    """Splits a table of words that is written as a text."""
    return frozenset(text.split())


def join_figures(message: str, figures: str | None) -> str:
    """Joins the message of an error and its figures, if it has any."""
    return message if not figures else f"{message}. {figures}"


def hint(mistyped: str, candidates: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` if a candidate is similar, else `; known: …` with all candidates."""
    names = list(candidates)
    close = difflib.get_close_matches(mistyped, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {listing(names)}" if names else ""


def listing(names: Iterable[str]) -> str:
    """Returns names in alphabetical order, separated by commas."""
    return ", ".join(sorted(names))
