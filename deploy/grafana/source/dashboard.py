"""A dashboard in Grafana's classic model: its variables, its links to the others, and its panels laid out in rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deploy.grafana.source.panels import SOURCE, GrafanaPanel, Json, target
from deploy.grafana.source.variables import Variable

SCHEMA_VERSION = 42
TITLES = {
    "overview": "Breakwater: overview",
    "spend": "Breakwater: spend and waste",
    "reliability": "Breakwater: reliability",
    "agent": "Breakwater: one agent",
}


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One of them. Panels stand in rows, 24 columns wide, from left to right; those of a row are equally high."""

    name: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[GrafanaPanel, ...], ...]
    since: str = "now-24h"
    refresh: str = "1m"
    incidents: str = ""
    """SQL of the incidents that are drawn over all charts; nothing for none."""

    def json(self) -> Json:
        """As a file that Grafana imports or provisions."""
        conditions = {one.name: one.condition for one in self.variables}
        drawn = [_annotation(target(self.incidents, conditions, over_time=False))] if self.incidents else []
        return {
            "uid": uid(self.name),
            "title": TITLES[self.name],
            "description": self.description,
            "tags": ["breakwater"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,  # one crosshair for all charts
            "time": {"from": self.since, "to": "now"},
            "timezone": "",
            "refresh": self.refresh,
            "links": [_link(name) for name in TITLES if name != self.name],
            "annotations": {"list": [_BUILT_IN, *drawn]},
            "templating": {"list": [_DATA_SOURCE, *(one.json() for one in self.variables)]},
            "panels": list(_laid_out(self.rows, conditions)),
        }


def uid(name: str) -> str:
    """What a dashboard is called in addresses."""
    return f"breakwater-{name}"


def _laid_out(rows: Iterable[tuple[GrafanaPanel, ...]], conditions: Mapping[str, str]) -> Iterable[Json]:
    y, number = 0, 0
    for row in rows:
        x, height = 0, max(one.height for one in row)
        for one in row:
            number += 1
            yield {"id": number, "gridPos": {"x": x, "y": y, "w": one.width, "h": height}, **one.json(conditions)}
            x += one.width
        y += height


def _link(to: str) -> Json:
    # The dashboard of one agent keeps its own: of the others' choice it could take only one.
    kept = "${datasource:queryparam}" if to == "agent" else "${datasource:queryparam}&${agent:queryparam}"
    return {
        "type": "link",
        "title": TITLES[to].removeprefix("Breakwater: ").capitalize(),
        "tooltip": f"To “{TITLES[to]}”, for the same time",
        "icon": "dashboard",
        "url": f"/d/{uid(to)}?{kept}",
        "keepTime": True,
        "includeVars": False,
        "asDropdown": False,
        "targetBlank": False,
        "tags": [],
    }


def _annotation(query: Json) -> Json:
    return {
        "name": "Incidents",
        "datasource": SOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "target": query,
    }


_BUILT_IN = {
    "name": "Annotations & Alerts",
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "type": "dashboard",
}
_DATA_SOURCE = {
    "name": "datasource",
    "label": "ClickHouse",
    "description": "The data source whose default database is Breakwater's.",
    "type": "datasource",
    "query": "grafana-clickhouse-datasource",
    "refresh": 1,
    "regex": "",
    "multi": False,
    "includeAll": False,
    "current": {},
    "options": [],
    "hide": 0,
    "skipUrlSync": False,
}
