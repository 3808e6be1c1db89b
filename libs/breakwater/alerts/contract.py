"""Alerts: every change of an incident, digests of alerts that were held back, and the bodies of webhooks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints

from breakwater.kernel.http.contract import OperatorRequest, PageLimit
from breakwater.kernel.types import NO_CONTROLS, Count, Event, Identifier, Message, ModelId, Timestamp

AlertEvent = Literal[
    "breaker_open",
    "breaker_closed",
    "budget_soft_cap",
    "budget_hard_cap",
    "quota_exhausted",
    "deployment_failing",
    "agent_anomaly",
    "guard_soft_cap",
    "guard_tripped",
    "retries_exhausted",
    "job_dead_lettered",
    "config_applied",
    "consumer_deleted",
    "storage_failing",
]
Severity = Literal["info", "warning", "critical"]
AlertChange = Literal["opened", "repeated", "worsened", "reopened", "acknowledged", "reminded", "resolved"]
IncidentStatus = Literal["firing", "pending", "acknowledged", "resolved"]


class Alert(Event):
    """An incident after one of its changes. The newest alert of an incident is its complete state."""

    alert_id: str = Field(description="Unique for this change; the `webhook-id`. Plain ASCII.")
    incident_id: str = Field(description="Shared by all changes of an incident. Plain ASCII.")
    key: str = Field(
        description="What the incident is about, such as `breaker_open/writer/openai%2Fgpt-4%2E1`. At "
        "most one incident per key is unresolved."
    )
    change: AlertChange = Field(
        description="`repeated`: occurred again while unresolved; `worsened`: occurred again with a higher severity, "
        "which ends an acknowledgement; `reopened`: occurred again soon after it was resolved."
    )
    status: IncidentStatus = Field(description="`pending`: waits for an operator to acknowledge or resolve it.")
    event: AlertEvent = Field(description="The event; `breaker_closed` when a breaker closed.")
    severity: Severity = Field(description="Current severity: `info` once a breaker has closed.")
    first_event: AlertEvent | None = Field(
        default=None, description="Event that opened the incident; null in alerts of earlier versions."
    )
    highest_severity: Severity | None = Field(
        default=None, description="Highest severity so far; null in alerts of earlier versions."
    )
    agent: Identifier | None = None
    model: ModelId | None = None
    tenant: Identifier | None = None
    title: str
    text: str = Field(description="What it means, and what to do.")
    payload: dict[str, JsonValue] = Field(description="Figures of the event that caused the alert.")
    count: Count = Field(description="Number of occurrences since the incident was opened.")
    version: Count = Field(description="Counts the changes of the incident, from 1.")
    opened_at: Timestamp
    last_at: Timestamp = Field(description="Time of the latest occurrence.")
    ends_at: Timestamp | None = Field(default=None, description="When it resolves automatically.")
    reminders: Count = Field(default=0, description="Number of reminders sent.")
    remind_at: Timestamp | None = Field(default=None, description="Time of the next reminder, while it is pending.")
    acknowledged_by: str | None = None
    acknowledged_at: Timestamp | None = None
    resolved_by: str | None = Field(default=None, description="Who resolved it; null if it resolved automatically.")
    resolved_at: Timestamp | None = None
    reason: str | None = Field(default=None, description="Reason given when it was acknowledged or resolved.")
    source_id: str = Field(
        description="`ce-id` of the event that caused this change, or the id of the operator action."
    )
    last_event_id: str = Field(default="", description="`ce-id` of the latest event of the incident.")
    at: Timestamp


class HeldBack(Event):
    """One incident of a digest."""

    alert_id: str
    incident_id: str
    key: str
    event: AlertEvent
    severity: Severity
    status: IncidentStatus
    agent: Identifier | None = None
    title: str
    count: Count
    opened_at: Timestamp


class AlertDigest(Event):
    """Alerts that a channel held back for its rate limit or quiet hours, in one message."""

    digest_id: str = Field(description="Unique; the `webhook-id`. Plain ASCII.")
    why: Literal["rate_limit", "quiet_hours", "notices"] = Field(description="`notices`: none of them needs an action.")
    severity: Severity = Field(description="Highest severity among them.")
    held_from: Timestamp = Field(description="Time of the earliest alert.")
    held_until: Timestamp = Field(description="Time of the latest alert.")
    counts: dict[str, Count] = Field(description="Number of incidents per event.")
    alerts: tuple[HeldBack, ...]
    at: Timestamp


class WebhookEnvelope(Event):
    """The body of a webhook, as Standard Webhooks recommends it. Its `webhook-id` is that of `data`."""

    type: AlertEvent | Literal["digest"] = Field(
        description="If it is `digest`, `data` is an AlertDigest, otherwise an Alert."
    )
    timestamp: Timestamp = Field(description="Time of the event: the `at` of `data`.")
    data: Alert | AlertDigest
    link: str | None = Field(
        default=None,
        description="Page to acknowledge or resolve the incident. Anyone with the link may do so. Absent "
        "unless links are configured.",
    )


class ChannelTest(Event):
    """The outcome of a test message to a channel."""

    channel: str
    delivered: bool
    error: str | None = Field(default=None, description="Reason why it was not delivered.")


class AlertQuery(Message):
    """A filter of incidents."""

    status: IncidentStatus | Literal["unresolved", "all"] = Field(
        default="unresolved", description="`unresolved` means every status except `resolved`."
    )
    event: AlertEvent | None = Field(
        default=None, description="The latest event of the incident, or its first: a breaker that closed was open."
    )
    agent: Identifier | None = Field(default=None, description="Filter by agent.")
    limit: PageLimit = 100


class AlertRequest(OperatorRequest):
    """An incident, and the reason for the action."""

    incident_id: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=NO_CONTROLS)] = Field(
        description="Incident id, or a unique prefix: `inc_` and at least 6 characters.",
        examples=["inc_3f9a1c07"],
    )


class AlertList(Event):
    """The current state of incidents, the most urgent first."""

    alerts: tuple[Alert, ...]
    more: bool = Field(description="True if there are more results than the limit.")
    channels: Count = Field(description="Number of channels in the config. With 0, alerts are not sent to anyone.")


class UnchangedAlert(Alert):
    """The incident, which was not changed: there was nothing to do, and nothing was published."""

    unchanged: Literal[True]


class ChannelRequest(Message):
    """A channel."""

    channel: Identifier = Field(description="Its name in `alerts.channels`.")


class UndeliveredQuery(Message):
    """A filter of undelivered alerts."""

    channel: Identifier | None = Field(default=None, description="Filter by channel.")
    limit: PageLimit = 100


class UndeliveredAlert(Event):
    """An alert that did not reach a channel."""

    dead_letter_id: Count = Field(description="Sequence number in the stream DLQ.")
    channel: str
    alert_id: str | None = Field(description="Id of the alert or digest; null if the stored message is unreadable.")
    title: str | None
    error: str = Field(description="Reason why delivery was given up.")
    at: Timestamp = Field(description="When delivery was given up.")
    replayed: bool = Field(description="True if it was sent again. If that failed too, there is another dead letter.")


class UndeliveredList(Event):
    """The undelivered alerts of the last thirty days, the latest first."""

    undelivered: tuple[UndeliveredAlert, ...]
    more: bool = Field(description="True if there are more results than the limit.")
    channels: Count = Field(description="Number of channels in the config. With 0, alerts are not sent to anyone.")


class ReplayAlertsRequest(Message):
    """The undelivered alerts to send again; without any field, all that were not sent again yet."""

    channel: Identifier | None = Field(default=None, description="Filter by channel.")
    dead_letter_id: int | None = Field(
        default=None, ge=1, description="Send only this one, even if it was sent again before."
    )
    after: int = Field(default=0, ge=0, description="Start after this one: `continue_after` of the previous response.")


class AlertReplays(Event):
    """The result of a request to send undelivered alerts again."""

    replayed: Count
    already: Count = Field(description="Skipped, because they were sent again before.")
    skipped: Count = Field(description="Skipped, because their channel is no longer in the config.")
    channels: dict[str, Count] = Field(description="Number of alerts that each channel sends again.")
    continue_after: int | None = Field(
        default=None, description="Pass this as `after` to continue. Null if there are no more."
    )
