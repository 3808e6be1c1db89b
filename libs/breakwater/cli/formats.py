"""Amounts, durations and times, as they are written for people and by people."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import typer

from breakwater.cli.errors import wrong_usage
from breakwater.cli.output import clock
from breakwater.policy.formats import at_least, counted, duration, exact_money, failures_in_words, money, typed_money

__all__ = [
    "at_least",
    "clock",
    "counted",
    "duration",
    "exact",
    "exact_money",
    "failures_in_words",
    "money",
    "program",
    "since",
    "usd",
]

_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)")
_UNITS = {"s": "seconds", "m": "minutes", "min": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def program() -> str:
    """`breakwater`, as it can be typed in another shell here: by its path, where that shell would not find this one."""
    own = Path(sys.executable).with_name("breakwater")
    if not own.exists() or ((found := shutil.which("breakwater")) and Path(found).samefile(own)):
        return "breakwater"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def exact(nano: int | None) -> str | None:
    """An amount as programs get it: a decimal string; None where it is not known."""
    from breakwater.contracts.types import usd_from_nano

    return None if nano is None else usd_from_nano(nano)


def usd(given: str) -> str:
    """An amount that an option gives, as a config has it: exact, in quotes where YAML would read another number."""
    from breakwater.contracts.types import nano_from_usd

    try:
        nano = nano_from_usd(given.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if nano <= 0:
        raise typer.BadParameter(f"{given} is not an amount above 0")
    text = typed_money(nano)
    return text if nano_from_usd(str(float(text))) == nano else f'"{text}"'


def since(text: str, now: datetime, option: str = "--since") -> datetime:
    """The time that `--since`, or another such option, names: `90s`, `10m`, `2h`, `7d`, or `2026-11-21T10:00Z`.

    Raises:
        CliError: it is neither.
    """
    if ago := _AGO.fullmatch(text.strip()):
        return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise wrong_usage(
            f"{option} {text!r} is neither a duration nor a time",
            "Write it like 90s, 10m, 2h, 7d or 2026-11-21T10:00Z.",
        ) from None
    return moment.astimezone(UTC)
