"""What a query of a Grafana dashboard becomes before ClickHouse sees it: as Grafana and its ClickHouse plugin do it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

ALL = None
"""What stands for `All` in a variable."""

Chosen = Mapping[str, Sequence[str] | None]

_CONDITIONAL = "$__conditionalAll("


@dataclass(frozen=True, slots=True)
class Shown:
    """The time that a dashboard shows, and how long a panel's step is."""

    since: datetime
    until: datetime
    step_s: int

    def query(self, sql: str, chosen: Chosen) -> str:
        """The SQL that ClickHouse gets.

        Raises:
            ValueError: it has a macro, a variable or a way to write one that is not known here.
        """
        # In the browser, first what depends on `All`, then the variables; in the plugin's own process the macros.
        sql = self._macros(_variables(_conditions(sql, chosen), chosen))
        if "$" in sql or "[[" in sql:
            raise ValueError(f"something is left that Grafana would not put in: {sql}")
        return sql

    def _macros(self, sql: str) -> str:
        since, until = int(self.since.timestamp()), int(self.until.timestamp())
        since_ms, until_ms = (f"fromUnixTimestamp64Milli({at}000)" for at in (since, until))
        step = max(self.step_s, 1)
        macros: dict[str, Callable[[str], str]] = {
            "timeFilter": lambda of: f"{of} >= toDateTime({since}) AND {of} <= toDateTime({until})",
            "timeFilter_ms": lambda of: f"{of} >= {since_ms} AND {of} <= {until_ms}",
            "dateFilter": lambda of: f"{of} >= toDate('{self.since:%F}') AND {of} <= toDate('{self.until:%F}')",
            "timeInterval": lambda of: f"toStartOfInterval(toDateTime({of}), INTERVAL {step} second)",
            "fromTime": lambda _: f"toDateTime({since})",
            "toTime": lambda _: f"toDateTime({until})",
            "fromTime_ms": lambda _: since_ms,
            "toTime_ms": lambda _: until_ms,
            "interval_s": lambda _: str(step),
        }

        def put_in(found: re.Match[str]) -> str:
            name, argument = found[1], found[2]
            takes_column = name.startswith(("timeFilter", "dateFilter", "timeInterval"))
            if name not in macros or takes_column != (argument is not None):
                raise ValueError(f"{found[0]} is no macro that is known here")
            return macros[name](argument or "")

        return re.sub(r"\$__(\w+)(?:\((\w+)\))?", put_in, sql)


def _conditions(sql: str, chosen: Chosen) -> str:
    while (start := sql.rfind(_CONDITIONAL)) >= 0:
        condition, variable, end = _arguments(sql, start + len(_CONDITIONAL))
        found = re.fullmatch(r"\$(\w+)", variable.strip())
        if found is None or found[1] not in chosen:
            raise ValueError(f"{variable} is no variable of the dashboard, or not written humanize")
        sql = sql[:start] + ("1=1" if chosen[found[1]] is ALL else condition) + sql[end:]
    return sql


def _arguments(sql: str, start: int) -> tuple[str, str, int]:
    # The plugin counts brackets, and does not know quotes.
    depth, comma = 1, None
    for place in range(start, len(sql)):
        if sql[place] in "()":
            depth += 1 if sql[place] == "(" else -1
        if sql[place] == "," and depth == 1:
            if comma is not None:
                raise ValueError("$__conditionalAll takes two arguments")
            comma = place
        if depth == 0 and comma is not None:
            return sql[start:comma], sql[comma + 1 : place], place + 1
    raise ValueError("$__conditionalAll takes two arguments, in brackets that end")


def _variables(sql: str, chosen: Chosen) -> str:
    def quoted(found: re.Match[str]) -> str:
        values = chosen.get(found[1])
        if values is None:
            raise ValueError(f"{found[0]}: no variable of the dashboard, or `All` where it has no meaning")
        return ",".join("'" + one.replace("'", "\\'") + "'" for one in values)

    return re.sub(r"\$\{(\w+):singlequote\}", quoted, sql)
