"""How amounts, durations and times are written for people, and how people write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from breakwater.cli.errors import wrong_usage

_NANO_PLACES = 9
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)")
_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def money(nano: int | None) -> str:
    """Nano-dollars, with no digit lost and none too many: `$0.000042`, `$12.50`; `unknown` for None."""
    return "unknown" if nano is None else dollars(Decimal(nano).scaleb(-_NANO_PLACES))


def dollars(usd: Decimal | str) -> str:
    """The same for a decimal amount in USD, as it is on the wire."""
    whole, _, places = f"{Decimal(usd):.{_NANO_PLACES}f}".partition(".")
    sign = "-" if whole.startswith("-") else ""
    return f"{sign}${int(whole.lstrip('-')):,}.{places.rstrip('0').ljust(2, '0')}"


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


def clock(moment: datetime, now: datetime) -> str:
    """A time of day as the person's own clock has it; with the date where that is not today's."""
    local, today = moment.astimezone(), now.astimezone().date()
    return local.strftime("%H:%M:%S" if local.date() == today else "%Y-%m-%d %H:%M:%S")


def since(text: str, now: datetime) -> datetime:
    """What `--since` means: `90s`, `10m`, `2h`, `7d`, or a time such as `2026-11-21T10:00Z`.

    Raises:
        CliError: it is neither.
    """
    if ago := _AGO.fullmatch(text.strip()):
        return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise wrong_usage(
            f"--since {text!r} is neither a duration nor a time", "Write it like 90s, 10m, 2h, 7d or 2026-11-21T10:00Z."
        ) from None
    return moment.astimezone(UTC)
