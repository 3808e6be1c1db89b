"""The severity of incidents, the routes that alerts take to channels, and the texts of templates."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

from breakwater.alerts.contract import Alert, AlertEvent, Severity
from breakwater.alerts.settings import ALERT_FIELDS, Route
from breakwater.kernel.formats import moment
from breakwater.limits.rules.scopes import WITHIN

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""The severities, in ascending order."""

SEVERITY_OF: Mapping[str, Severity] = {
    "breaker_open": "critical",
    "budget_soft_cap": "warning",
    "budget_hard_cap": "critical",
    "quota_exhausted": "critical",
    "deployment_failing": "critical",
    "agent_anomaly": "warning",
    "guard_soft_cap": "warning",
    "guard_tripped": "warning",
    "retries_exhausted": "warning",
    "job_dead_lettered": "warning",
    "config_applied": "info",
    "consumer_deleted": "critical",
    "storage_failing": "critical",
}
"""The severity of an incident, by its first event, unless its signal says another one. Its end is `info`."""

UNDELIVERABLE = "job_dead_lettered//undeliverable/"
"""The prefix of the keys of incidents of a failed channel; no agent's key begins with it."""


def severity_of(key: str) -> Severity:
    """Returns the severity of an incident, by its key. A channel that can't deliver is as severe as any incident."""
    return "critical" if key.startswith(UNDELIVERABLE) else SEVERITY_OF[key.partition("/")[0]]


ENDS: Mapping[str, AlertEvent] = {"breaker_open": "breaker_closed"}
"""The event of an incident's end, for incidents whose end has its own event."""


def began_with(alert: Alert) -> str:
    """Returns the event that an incident began with: `breaker_open`, also for a breaker that has closed."""
    return alert.first_event or alert.key.partition("/")[0]


def highest_severity(alert: Alert) -> Severity:
    """Returns the highest severity that an incident has had: a breaker that has closed was critical."""
    return alert.highest_severity or severity_of(alert.key)


def severity_now(alert: Alert) -> Severity:
    """Returns the severity that an incident has while it is unresolved, and the highest that it had once it is over."""
    return highest_severity(alert) if alert.status == "resolved" else alert.severity


def urgency(alert: Alert) -> tuple[bool, int, float]:
    """Returns the key by which incidents are listed.

    Unresolved ones are first, by severity and then by age, the oldest first. Resolved ones follow, the latest first.
    """
    opened_s = alert.opened_at.timestamp()
    if alert.status == "resolved":
        return True, 0, -opened_s
    return False, -SEVERITIES.index(alert.severity), opened_s


def is_notice(alert: Alert) -> bool:
    """Returns True if nobody needs to act on it.

    That is an applied config, the end of a warning by itself, the end of an incident that another one continues, and
    that of a breaker or a deployment which nobody calls any more.
    """
    if alert.event == "config_applied":
        return True
    if alert.status != "resolved" or alert.resolved_by is not None:
        return False
    if alert.source_id.startswith(ENDED_AT):
        return began_with(alert) in {"budget_soft_cap", "guard_soft_cap", "breaker_open", "deployment_failing"}
    return alert.reason == CONTINUED


ENDED_AT = "ended at"
"""The beginning of the `source_id` of an end that came with the time and not with an event."""


CONTINUED = "the breaker of the model has opened"
"""The reason for the end of a deployment's incident that goes on as the breaker's."""


EXPLAINING: frozenset[AlertEvent] = frozenset({"breaker_open", "deployment_failing"})
"""The events whose incidents may explain others."""


def budget_period_of(alert: Alert) -> str | None:
    """Returns the budget and the period of an incident, which all thresholds share; None if it is of no budget."""
    event, _, place = alert.key.partition("/")
    return place.rpartition("/")[0] if event in {"budget_soft_cap", "budget_hard_cap"} else None


def threshold_of(alert: Alert) -> int:
    """Returns the percentage of the limit that an incident of a budget is about."""
    return int(alert.key.rpartition("/")[2])


def agents_of(alert: Alert) -> tuple[str, ...]:
    """Returns the agents that the incident of a deployment has concerned so far, the most affected first."""
    agents = alert.payload.get("agents")
    return tuple(str(agent) for agent in agents) if isinstance(agents, list) else ()


def concerned_agents(alert: Alert) -> tuple[str, ...]:
    """Returns the agents that an incident concerns; `*` stands for all of them. Empty if it concerns none."""
    return agents_of(alert) or (() if alert.agent is None else (alert.agent,))


def budget_of(alert: Alert) -> str | None:
    """Returns the name of the budget that an incident is about, such as `agent:writer/daily`; None for other ones."""
    place = {name: alert.payload.get(name) for name in ("scope", "window", "agent", "tenant", "name", "within")}
    scope = place["scope"]
    if not began_with(alert).startswith("budget") or not isinstance(scope, str) or not isinstance(place["window"], str):
        return None
    if scope != "global":
        owner = place[scope if scope in ("agent", "tenant") else "name"]
        if not isinstance(owner, str):
            return None
        scope = f"{scope}:{owner}"
    within = "" if place["within"] is None else f"{WITHIN}{place['within']}"
    return f"{scope}{within}/{place['window']}"


def route_matches(route: Route, alert: Alert) -> bool:
    """Returns True if a route is for the incident of an alert, by the highest severity that it has had.

    Incidents of failed channels match every route.
    """
    if alert.key.startswith(UNDELIVERABLE):
        return True
    began = began_with(alert)
    return (
        (route.events is None or began in route.events or ENDS.get(began) in route.events)
        and (route.agents is None or alert.agent in route.agents or alert.agent == "*")
        and (route.tenants is None or alert.tenant in route.tenants)
        and (route.severity is None or SEVERITIES.index(highest_severity(alert)) >= SEVERITIES.index(route.severity))
    )


def fill(template: str, alert: Alert, link: str) -> str:
    """Fills in a template for an alert. `link` is empty if links are not set up.

    Raises:
        KeyError: the template has a name that is not in PLACEHOLDERS.
    """
    return Template(template).substitute(
        {name: getattr(alert, name) or "" for name in ALERT_FIELDS},
        count=f"{alert.count:,}",
        opened_at=moment(alert.opened_at),
        last_at=moment(alert.last_at),
        by=alert.resolved_by or alert.acknowledged_by or "",
        link=link,
    )
