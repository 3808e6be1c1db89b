"""Runs every case of what providers were reported to answer, and prints what was expected of it and what was seen.

    python -m tests.reports                 all cases, by the rows of the tables
    python -m tests.reports quota tier      those whose names begin so
    python -m tests.reports --failed        only those that are not as expected
    python -m tests.reports --json          one line of JSON a case

The exit code is 1 where a case is not as expected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from itertools import groupby

from tests.reports.cases import CASES
from tests.reports.plane import Outcome, run_all
from tests.server_sources import embedded_servers

SHOWN = ("calls", "fallback", "kind", "class", "cost", "basis", "counted", "text")
"""What is always shown; the rest where it is not as expected."""


def line(outcome: Outcome) -> str:
    """A case in one line, and one more for each thing that is wrong."""
    seen, case = outcome.seen, outcome.case
    shown = "  ".join(f"{name} {_short(seen.get(name))}" for name in SHOWN)
    wrong = (
        f"\n       {name}: expected {_short(case.expected[name])}, seen {_short(seen.get(name))}"
        for name in outcome.wrong
    )
    return f"  {'BAD ' if outcome.wrong else 'ok  '} {case.name:<42} {shown}{''.join(wrong)}"


def _short(value: object) -> str:
    text = (
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else "-" if value is None else str(value)
    )
    return text if len(text) <= 90 else f"{text[:89]}…"


def as_json(outcome: Outcome) -> str:
    """A case with all that was expected and seen."""
    case = outcome.case
    about = {"row": case.row, "case": case.name, "dialect": case.dialect, "stream": case.stream}
    return json.dumps(about | {"wrong": outcome.wrong, "expected": case.expected, "seen": outcome.seen}, default=repr)


def outcomes(names: Sequence[str]) -> list[Outcome]:
    """Runs the cases on servers of their own."""
    chosen = [case for case in CASES if not names or case.name.startswith(tuple(names))]
    with embedded_servers() as (servers, directory):
        return asyncio.run(run_all(chosen, directory, servers.nats(), servers.redis()))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.reports", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    logging.disable()
    began = time.monotonic()
    found = outcomes(asked.names)
    shown = [outcome for outcome in found if outcome.wrong or not asked.failed]
    for row, group in groupby(shown, key=lambda outcome: outcome.case.row):
        if not asked.json:
            print(f"\n{row}")
        for outcome in group:
            print(as_json(outcome) if asked.json else line(outcome))
    wrong = sum(bool(outcome.wrong) for outcome in found)
    print(f"\n{len(found)} cases, {wrong} not as expected, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
