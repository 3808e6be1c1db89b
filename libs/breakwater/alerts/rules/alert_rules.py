"""The settings of alerts: anomalies, reminders, the routes to channels, and templates of texts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import time
from string import Template
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from breakwater.alerts.contract import Alert, AlertEvent, Severity
from breakwater.kernel.formats import moment
from breakwater.kernel.types import Identifier, Message, Off, UsdAmount

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""The severities, in ascending order."""

SEVERITY_OF: Mapping[str, Severity] = {
    "breaker_open": "critical",
    "budget_soft_cap": "warning",
    "budget_hard_cap": "critical",
    "quota_exhausted": "critical",
    "agent_anomaly": "warning",
    "guard_soft_cap": "warning",
    "guard_tripped": "warning",
    "retries_exhausted": "warning",
    "job_dead_lettered": "warning",
    "config_applied": "info",
    "consumer_deleted": "critical",
}
"""The severity of an incident, by its first event. Its end is `info`."""

UNDELIVERABLE = "job_dead_lettered//undeliverable/"
"""The prefix of the keys of incidents of a failed channel; no agent's key begins with it."""


def severity_of(key: str) -> Severity:
    """Return the severity of an incident, by its key. A channel that can't deliver is as severe as any incident."""
    return "critical" if key.startswith(UNDELIVERABLE) else SEVERITY_OF[key.partition("/")[0]]


ENDS: Mapping[str, AlertEvent] = {"breaker_open": "breaker_closed"}
"""The event of an incident's end, for incidents whose end has its own event."""


def began_with(alert: Alert) -> str:
    """Return the event that an incident began with: `breaker_open`, also for a breaker that has closed."""
    return alert.first_event or alert.key.partition("/")[0]


def highest_severity(alert: Alert) -> Severity:
    """Return the highest severity that an incident has had: a breaker that has closed was critical."""
    return alert.highest_severity or severity_of(alert.key)


class Reminders(Message):
    """Reminders of incidents that wait for an operator: a `repeat_interval` that doubles with each one."""

    first_s: float = Field(
        default=3600,
        ge=1,
        le=604_800,
        description="Time until the first reminder; doubled for each further one.",
    )
    max_s: float = Field(default=86_400, ge=1, le=604_800, description="Longest time between reminders.")


class AnomalyRules(Message):
    """Rules for a minute of an agent, or a single execution, to be an anomaly."""

    deviations: Annotated[Annotated[float, Field(ge=3, le=100)] | None, Off] = Field(
        default=6.0, description="Number of typical deviations above the baseline that count as an anomaly, or `off`."
    )
    minimum_minutes: int = Field(
        default=30, ge=5, le=10_000, description="Minutes with calls that the baseline needs first."
    )
    minimum_calls: int = Field(default=10, ge=1, le=1_000_000, description="Minutes with fewer calls are ignored.")
    sustained_minutes: int = Field(
        default=3, ge=1, le=60, description="Consecutive minutes that must deviate, or be back at the baseline."
    )
    execution_cost_usd: UsdAmount | None = Field(
        default=None, description="An execution that costs more is an anomaly."
    )
    execution_duration_s: float | None = Field(
        default=None, gt=0, description="An execution that takes longer is an anomaly."
    )
    cut_off_share: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Off] = Field(
        default=0.2,
        description=(
            "Share of an agent's last 50 answers (at least 10) truncated by the output limit "
            "(`finish_reason: length`) that counts as an anomaly, or `off`."
        ),
    )


class QuietHours(Message):
    """Hours in which a channel holds back alerts, which are sent as one digest afterwards."""

    start: time = Field(description="Such as `22:00`.")
    end: time = Field(description="Such as `07:00`; on the next day if earlier than `start`.")
    timezone: str = "UTC"
    but: Severity | None = Field(
        default="critical", description="Alerts of at least this severity are sent immediately."
    )

    @field_validator("start", "end", mode="before")
    @classmethod
    def _in_quotes(cls, setting: object) -> object:
        # Without quotes YAML reads 22:00 as the number 1320.
        if not isinstance(setting, str | time):
            raise ValueError("write the time in quotes, such as '22:00'")  # noqa: TRY004  pydantic reads ValueErrors
        return setting

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"{name!r} is not a time zone; write it like 'Europe/Berlin' or 'UTC'") from error
        return name

    @model_validator(mode="after")
    def _some_time(self) -> QuietHours:
        if self.start == self.end:
            raise ValueError("start and end are the same time")
        return self


class MessageLimit(Message):
    """Limit on the messages to a channel; further ones become one digest."""

    messages: int = Field(default=10, ge=1, le=10_000)
    within_s: float = Field(default=300, gt=0, le=86_400)


class Route(Message):
    """Alerts that a channel is for, and times. What is left out restricts nothing."""

    events: tuple[AlertEvent, ...] | None = None
    agents: tuple[Identifier, ...] | None = Field(
        default=None,
        description="Filter by agents; incidents of a shared breaker (`*`) belong to every agent.",
    )
    tenants: tuple[Identifier, ...] | None = Field(default=None, description="Filter by tenants.")
    severity: Severity | None = Field(default=None, description="Minimum severity.")
    quiet_hours: QuietHours | None = None
    rate_limit: Annotated[MessageLimit | None, Off] = Field(
        default=MessageLimit(),
        description=("Maximum number of messages; alerts beyond it are sent together as a digest. Or `off`."),
    )

    def takes(self, alert: Alert) -> bool:
        """Return True if the channel is for the incident of an alert, whatever has changed about it.

        Incidents of failed channels go to every channel.
        """
        if alert.key.startswith(UNDELIVERABLE):
            return True
        began = began_with(alert)
        return (
            (self.events is None or began in self.events or ENDS.get(began) in self.events)
            and (self.agents is None or alert.agent in self.agents or alert.agent == "*")
            and (self.tenants is None or alert.tenant in self.tenants)
            and (self.severity is None or SEVERITIES.index(severity_of(alert.key)) >= SEVERITIES.index(self.severity))
        )


Demanding = Literal["guard_tripped", "budget_hard_cap"]
"""The events that can stay pending until an operator acts."""

_PLAIN = ("title", "text", "event", "severity", "status", "change", "agent", "model", "tenant", "incident_id", "reason")
PLACEHOLDERS = (*_PLAIN, "count", "opened_at", "last_at", "by", "link")
"""The names for `${…}` in a template. Fields that an alert lacks are empty."""


def fill(template: str, alert: Alert, link: str) -> str:
    """Fill in a template for an alert. `link` is empty if links are not set up.

    Raises:
        KeyError: the template has a name that is not in PLACEHOLDERS.
    """
    return Template(template).substitute(
        {name: getattr(alert, name) or "" for name in _PLAIN},
        count=f"{alert.count:,}",
        opened_at=moment(alert.opened_at),
        last_at=moment(alert.last_at),
        by=alert.resolved_by or alert.acknowledged_by or "",
        link=link,
    )
