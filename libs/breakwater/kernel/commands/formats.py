"""Formatting and parsing of amounts, durations and times."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from datetime import UTC, datetime, time, timedelta
from pathlib import Path

import typer

from breakwater.kernel.commands.errors import usage_error
from breakwater.kernel.commands.output import clock
from breakwater.kernel.formats import at_least, duration, exact_money, money, quantity, typed_money

__all__ = [
    "ahead",
    "at_least",
    "breakwater_command",
    "clock",
    "duration",
    "exact",
    "exact_money",
    "money",
    "quantity",
    "since",
    "usd",
]

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)")
_TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}")
_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def breakwater_command() -> str:
    """The command to type in another shell: `breakwater`, or this program's path if the shell would not find it."""
    own_path = Path(sys.executable).with_name("breakwater")
    if not own_path.exists():
        return "breakwater"
    found_by_shell = shutil.which("breakwater")
    if found_by_shell and Path(found_by_shell).samefile(own_path):
        return "breakwater"
    directory = Path.cwd()
    return shlex.quote(str(own_path.relative_to(directory) if own_path.is_relative_to(directory) else own_path))


def exact(nano: int | None) -> str | None:
    """Writes an amount for programs, as a decimal string in USD; None if it is unknown."""
    from breakwater.kernel.types import usd_from_nano

    return None if nano is None else usd_from_nano(nano)


def usd(text: str) -> str:
    """Parses an option's amount. Returns it as YAML for a config: in quotes if YAML would round it."""
    from breakwater.kernel.types import nano_from_usd

    try:
        nano = nano_from_usd(text.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if nano <= 0:
        raise typer.BadParameter(f"{text} is not an amount above 0")
    typed = typed_money(nano)
    return typed if nano_from_usd(str(float(typed))) == nano else f'"{typed}"'


def ahead(text: str, now: datetime, option: str) -> datetime:
    """Parses the time of an option that looks ahead, in the terminal's time zone unless the text names another.

    It is a duration (`90s`, `10m`, `2h`, `7d`), a time of day (`18:00`, today or, if that is over, tomorrow), a date or
    `tomorrow`, which begin at midnight, or a time with its date (`2026-11-21T10:00Z`).

    Raises:
        CliError: if the text is none of these.
    """
    word = text.strip()
    try:
        if length := _AGO.fullmatch(word):
            return now + _length(length)
        local = now.astimezone().replace(tzinfo=None)
        if word == "tomorrow":
            moment = datetime.combine(local.date() + timedelta(days=1), time())
        elif _TIME_OF_DAY.fullmatch(word):
            moment = datetime.combine(local.date(), time.fromisoformat(word.rjust(5, "0")))
            moment += timedelta(days=int(moment <= local))
        else:
            moment = datetime.fromisoformat(word)
        return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise usage_error(
            f"{option} {text!r} is no time ahead",
            "Write it like 10m, 2h, 7d, 18:00, tomorrow, 2026-12-01 or 2026-11-21T10:00Z.",
        ) from None


def since(text: str, now: datetime, option: str = "--since") -> datetime:
    """Parses the time of `--since` or a similar option: `90s`, `10m`, `2h`, `7d`, or `2026-11-21T10:00Z`.

    Raises:
        CliError: if the text is neither a duration nor a time, or one before the year 1.
    """
    try:
        if ago := _AGO.fullmatch(text.strip()):
            return now - _length(ago)
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise usage_error(
            f"{option} {text!r} is neither a duration nor a time",
            "Write it like 90s, 10m, 2h, 7d or 2026-11-21T10:00Z.",
        ) from None


def _length(match: re.Match[str]) -> timedelta:
    return timedelta(**{_UNITS[match[2]]: float(match[1])})
