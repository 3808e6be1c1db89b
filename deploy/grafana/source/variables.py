"""What a person chooses at the top of a dashboard, and what it means in SQL."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

from deploy.grafana.source.panels import SOURCE, Json


@dataclass(frozen=True, slots=True)
class Variable:
    """What a person chooses at the top: any number of values, or one."""

    name: str
    label: str
    description: str
    condition: str
    """What panels ask for by `<name>` in their SQL: nothing where all are chosen."""
    sql: str
    """Gives the values: one column."""
    several: bool = True

    def json(self) -> Json:
        """As it stands in the dashboard."""
        sql = dedent(self.sql).strip()
        chosen = {"text": ["All"], "value": ["$__all"]} if self.several else {}
        return {
            "name": self.name,
            "label": self.label,
            "description": self.description,
            "type": "query",
            "datasource": SOURCE,
            "definition": sql,
            "query": {"editorType": "sql", "rawSql": sql, "refId": self.name},
            "refresh": 2,  # whenever the time range changes
            "sort": 0,
            "regex": "",
            "multi": self.several,
            "includeAll": self.several,
            "current": chosen,
            "options": [],
            "hide": 0,
            "skipUrlSync": False,
        }


# Names are listed without FINAL: a row that is there twice names nobody else. Each list holds for the time range.
AGENTS = Variable(
    "agent",
    "Agent",
    "Whose jobs; all, or any number of them.",
    "$__conditionalAll(agent IN (${agent:singlequote}), $agent)",
    """
    SELECT DISTINCT agent
    FROM attempts
    WHERE $__timeFilter_ms(started_at)
    ORDER BY agent
    """,
)
ONE_AGENT = Variable("agent", "Agent", "Whose jobs.", "agent = ${agent:singlequote}", AGENTS.sql, several=False)
TENANTS = Variable(
    "tenant",
    "Tenant",
    "Whose calls; those without a tenant count as “no tenant”.",
    "$__conditionalAll(ifNull(tenant, 'no tenant') IN (${tenant:singlequote}), $tenant)",
    """
    SELECT DISTINCT ifNull(tenant, 'no tenant') AS name
    FROM attempts
    WHERE $__timeFilter_ms(started_at)
    ORDER BY name
    """,
)
MODELS = Variable(
    "model",
    "Model",
    "Which model was called.",
    "$__conditionalAll(model IN (${model:singlequote}), $model)",
    """
    SELECT DISTINCT model
    FROM attempts
    WHERE $__timeFilter_ms(started_at)
    ORDER BY model
    """,
)
