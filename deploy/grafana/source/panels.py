"""The kinds of panels: a figure, a chart over time, a table. Each has a title, a description, a unit and its SQL.

In SQL, `<agent>` stands for the condition that the dashboard's variable of this name makes, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any, ClassVar, Literal

Json = dict[str, Any]

PLUGIN = "grafana-clickhouse-datasource"
SOURCE = {"type": PLUGIN, "uid": "${datasource}"}

GOOD, SO_SO, BAD, PLAIN = "green", "orange", "red", "text"

Steps = tuple[tuple[float, str], ...]
"""From which value on which colour; below the first it is the colour of `GrafanaPanel.below`."""


def target(sql: str, conditions: Mapping[str, str], *, over_time: bool) -> Json:
    """A query as the plugin keeps it.

    Args:
        sql: with variables' names in angle brackets.
        conditions: what each of them asks for, by its name.
        over_time: the plugin makes a series of each value of a text column.
    """
    text = dedent(sql).strip()
    for name, condition in conditions.items():
        text = text.replace(f"<{name}>", condition)
    return {
        "refId": "A",
        "datasource": SOURCE,
        "editorType": "sql",
        "queryType": "timeseries" if over_time else "table",
        "format": 0 if over_time else 1,
        "rawSql": text,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GrafanaPanel:
    """What all kinds have."""

    kind: ClassVar[str]
    over_time: ClassVar[bool] = False

    title: str
    description: str
    sql: str
    unit: str = "short"
    width: int
    height: int
    below: str = PLAIN
    steps: Steps = ()

    def json(self, conditions: Mapping[str, str]) -> Json:
        """The panel, without its place; for `conditions` see `target`."""
        return {
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": self._options(),
            "targets": [target(self.sql, conditions, over_time=self.over_time)],
            **self._limits(),
        }

    def _defaults(self) -> Json:
        steps = [{"color": self.below, "value": None}, *({"color": to, "value": at} for at, to in self.steps)]
        return {
            "unit": self.unit,
            "color": {"mode": "thresholds"},
            "thresholds": {"mode": "absolute", "steps": steps},
        }

    def _overrides(self) -> list[Json]:
        return []

    def _options(self) -> Json:
        raise NotImplementedError

    def _limits(self) -> Json:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure(GrafanaPanel):
    """One number: the first of the one row that the SQL gives."""

    kind = "stat"

    width: int = 3
    height: int = 4

    # The base class by name: with slots, `super()` knows the class from before they were added.
    def _defaults(self) -> Json:
        return {**GrafanaPanel._defaults(self), "noValue": "none"}

    def _options(self) -> Json:
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "value",
            "wideLayout": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart(GrafanaPanel):
    """Values over time, by `time` and, with `by`, by a text column of that name."""

    kind = "timeseries"
    over_time = True

    width: int = 12
    height: int = 8
    by: str = ""
    draw: Literal["line", "bars"] = "line"
    """Bars stand on each other, and are of amounts that add up."""
    colors: dict[str, str] = field(default_factory=dict[str, str])
    """By the series' names."""
    least_step: str = "1m"
    """The rows' own, below which there is nothing to see."""
    most: float | None = None
    """Where the axis ends; by itself if None."""

    def _defaults(self) -> Json:
        bars = self.draw == "bars"
        return {
            **GrafanaPanel._defaults(self),
            "color": {"mode": "palette-classic"},
            "min": 0,
            **({} if self.most is None else {"max": self.most}),
            **({"displayName": f"${{__field.labels.{self.by}}}"} if self.by else {}),
            "custom": {
                "drawStyle": self.draw,
                "lineWidth": 1,
                "fillOpacity": 80 if bars else 5,
                "showPoints": "never" if bars else "auto",
                "pointSize": 4,
                "spanNulls": False,
                "stacking": {"mode": "normal" if bars else "none", "group": "A"},
            },
        }

    def _overrides(self) -> list[Json]:
        return [_of(name, color={"mode": "fixed", "fixedColor": color}) for name, color in self.colors.items()]

    def _options(self) -> Json:
        return {
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }

    def _limits(self) -> Json:
        return {"interval": self.least_step, "maxDataPoints": 120}


def figure(source: str, value: str, **panel: Any) -> Figure:
    """A figure. `value` is an expression with its name; otherwise as `chart`."""
    return Figure(sql=f"SELECT {value}\n{source}", **panel)


def chart(source: str, *values: str, by: str = "", at: str = "minute", **panel: Any) -> Chart:
    """A chart of values, summed up by time.

    Args:
        source: SQL from `FROM` to the end of `WHERE`.
        values: what is drawn: expressions with their names.
        by: a text column, each value of which is drawn by itself.
        at: the column with the time.
        panel: fields of `Chart`.
    """
    columns = [f"$__timeInterval({at}) AS time", *([by] if by else []), *values]
    keys = f"time, {by}" if by else "time"
    sql = "SELECT\n    " + ",\n    ".join(columns) + f"\n{source}\nGROUP BY {keys}\nORDER BY {keys}"
    return Chart(sql=sql, by=by, **panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(GrafanaPanel):
    """A table."""

    kind = "table"

    width: int = 24
    height: int = 9
    units: dict[str, str] = field(default_factory=dict[str, str])
    """By column."""
    widths: dict[str, int] = field(default_factory=dict[str, int])
    """In pixels, by column."""
    coloured: dict[str, Steps] = field(default_factory=dict[str, Steps])
    """Thresholds, by column."""
    agents_linked: bool = False
    """The column `agent` leads to that agent's dashboard."""

    def _overrides(self) -> list[Json]:
        found = [_of(name, unit=unit) for name, unit in self.units.items()]
        found += [_of(name, **{"custom.width": pixels}) for name, pixels in self.widths.items()]
        for name, steps in self.coloured.items():
            marks = [{"color": self.below, "value": None}, *({"color": to, "value": at} for at, to in steps)]
            cell = {"type": "color-text"}
            found.append(_of(name, thresholds={"mode": "absolute", "steps": marks}, **{"custom.cellOptions": cell}))
        return [*found, _of("agent", links=[_TO_AGENT])] if self.agents_linked else found

    def _options(self) -> Json:
        return {"showHeader": True, "cellHeight": "sm"}


_TO_AGENT = {
    "title": "This agent",
    "url": "/d/breakwater-agent?${datasource:queryparam}&var-agent=${__value.raw:percentencode}&${__url_time_range}",
    "targetBlank": False,
}


def _of(column: str, **properties: object) -> Json:
    return {
        "matcher": {"id": "byName", "options": column},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }
