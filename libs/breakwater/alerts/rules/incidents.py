"""Changes of an incident: opened once, repeated, acknowledged, reminded of, resolved.

An incident's state is its newest alert. Every decision takes that alert and returns the next one, or None if nothing
changes. So a reader of ALERTS from its beginning knows every incident. Of two concurrent decisions, the stream refuses
the second one's alert.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import NamedTuple

from breakwater.alerts.contract import Alert, AlertChange, AlertEvent, IncidentStatus, Severity
from breakwater.alerts.rules.alert_rules import (
    ENDED_AT,
    EXPLAINING,
    SEVERITIES,
    began_with,
    highest_severity,
    severity_of,
)
from breakwater.alerts.rules.grouping import GROUP_INTERVAL_S
from breakwater.alerts.rules.signals import Firing, Resolved, Signal, ends_several
from breakwater.alerts.settings import Alerts, Reminders
from breakwater.kernel.formats import moment, sentence


@dataclass(frozen=True, slots=True)
class IncidentRules:
    """The rules for incidents, their escalation and their reminders.

    Attributes:
        on_events: the events that open incidents.
        quiet_s: the seconds within which a resolved problem that recurs reopens its incident.
        escalate: the events whose incidents stay pending until an operator acts.
        reminders: the intervals of reminders of pending incidents.
    """

    on_events: Collection[AlertEvent]
    quiet_s: float
    escalate: Collection[str]
    reminders: Reminders

    @classmethod
    def of(cls, alerts: Alerts) -> IncidentRules:
        """Returns the rules of the config."""
        return cls(alerts.on_events, alerts.quiet_s, alerts.escalate, alerts.reminders)

    @property
    def quiet(self) -> timedelta:
        """The time within which a resolved problem that recurs reopens its incident."""
        return timedelta(seconds=self.quiet_s)


RESOLVED_KEPT = 2_000
"""Resolved incidents that are kept by their key or id, so that memory stays flat. ALERTS and ClickHouse have all.

As many ends of incidents that may explain others are kept: what an alerter reads that was away for longer may be
reported, although it was explained.
"""

EXPLAINED_BEFORE = timedelta(seconds=GROUP_INTERVAL_S)
"""The time for which the signals of jobs' ends wait, at most, for an incident that explains them."""


class _OpenPeriod(NamedTuple):
    """A time for which an incident that may explain others was open; of one that was reopened, there are several.

    Attributes:
        since: its begin.
        alert: the last one before its end: how the incident was.
        until: its end; far away while it lasts.
    """

    since: datetime
    alert: Alert
    until: datetime = datetime.max


class Incidents:
    """The known incidents: the newest alert of each, and when those were open that may explain others."""

    def __init__(self) -> None:
        self._by_id: dict[str, Alert] = {}
        self._newest: dict[str, str] = {}  # the newest incident's id, by key
        self._unresolved: dict[str, Alert] = {}
        self._resolved: dict[str, None] = {}  # ids, the one that was resolved first in front
        self._periods: dict[str, _OpenPeriod] = {}  # those that last, by id
        self._past: list[_OpenPeriod] = []  # the one that ended first in front

    def take(self, alert: Alert) -> None:
        """Learns of the next alert, in the stream's order."""
        if began_with(alert) in EXPLAINING:
            self._take_period(alert)
        self._by_id[alert.incident_id] = alert
        self._newest[alert.key] = alert.incident_id
        self._resolved.pop(alert.incident_id, None)
        if alert.status != "resolved":
            self._unresolved[alert.incident_id] = alert
            return
        self._unresolved.pop(alert.incident_id, None)
        self._resolved[alert.incident_id] = None
        if len(self._resolved) > RESOLVED_KEPT:
            oldest = next(iter(self._resolved))
            del self._resolved[oldest]
            forgotten = self._by_id.pop(oldest)
            if self._newest.get(forgotten.key) == oldest:
                del self._newest[forgotten.key]

    def _take_period(self, alert: Alert) -> None:
        period = self._periods.pop(alert.incident_id, None)
        is_new = alert.change in {"reopened", "worsened"}  # what is worse concerns others than before
        is_over = alert.status == "resolved"
        if period is not None and (is_new or is_over):
            # An alerter that was away notices late that an incident has ended by itself.
            by_time = alert.ends_at if alert.source_id.startswith(ENDED_AT) else None
            insort(self._past, period._replace(until=by_time or alert.at), key=attrgetter("until"))
            if len(self._past) > RESOLVED_KEPT:
                del self._past[0]
            period = None
        if not is_over:
            since = period.since if period is not None else alert.at if is_new else alert.opened_at
            self._periods[alert.incident_id] = _OpenPeriod(since, alert)

    def explaining(self, at: datetime | None = None) -> list[Alert]:
        """Returns the incidents that may explain others, as they were when they were last open.

        Args:
            at: when what they may explain happened: those that were open then, or opened soon after, as the calls that
                open a breaker fail before it does. None for those that are open now.
        """
        if at is None:
            return [period.alert for period in self._periods.values()]
        past = self._past[bisect_left(self._past, at, key=attrgetter("until")) :]
        return [period.alert for period in (*past, *self._periods.values()) if period.since <= at + EXPLAINED_BEFORE]

    def of(self, key: str) -> Alert | None:
        """Returns the newest incident with a key; None if there is none."""
        incident_id = self._newest.get(key)
        return None if incident_id is None else self._by_id[incident_id]

    def get(self, incident_id: str) -> Alert | None:
        """Returns an incident by its id; None if it is unknown."""
        return self._by_id.get(incident_id)

    def unresolved(self) -> tuple[Alert, ...]:
        """Returns the unresolved incidents, in the order in which they were opened or opened again."""
        return tuple(self._unresolved.values())

    def all(self) -> tuple[Alert, ...]:
        """Returns all known incidents, in the order in which they were opened."""
        return tuple(self._by_id.values())

    def keys_of(self, signal: Signal) -> list[str]:
        """Returns the keys of the incidents that a signal is about: of a raised cap, those that are unresolved."""
        if not ends_several(signal):
            return [signal.key]
        return [alert.key for alert in self.unresolved() if signal.ends(alert.key)]


def decide(signal: Signal, current: Alert | None, rules: IncidentRules) -> Alert | None:
    """Returns the next alert of the incident that a signal belongs to.

    Args:
        signal: the signal of an event.
        current: the newest alert of the latest incident with the signal's key; None if there never was one.
        rules: the rules of the config.

    Returns:
        The next alert of the incident, or the first alert of a new incident. None if the signal changes nothing: it was
        handled before, or there is no incident to resolve.
    """
    if current is not None and current.last_event_id == signal.source_id:
        return None
    if isinstance(signal, Resolved):
        if current is None or current.status == "resolved":
            return None
        return _resolve(current, signal)
    if signal.event not in rules.on_events or not _continues(signal, current):
        return None
    resolved_at = None if current is None or current.status != "resolved" else current.resolved_at
    if current is None or (resolved_at is not None and signal.at - resolved_at > rules.quiet):
        return _open_incident(signal, rules)
    severity = _severity(signal)
    change = "reopened" if current.status == "resolved" else "repeated"
    if _is_worse(severity, current):
        change = "worsened"
    # Who looked after a mild problem need not have seen the severe one.
    is_open_anew = change != "repeated"
    status = _status(signal.event, rules) if is_open_anew else current.status
    # Events of one incident may arrive in another order than they occurred in.
    ends_at = _ends(signal, rules)
    if ends_at is not None and current.ends_at is not None:
        ends_at = max(ends_at, current.ends_at)
    return _next(
        current,
        change,
        signal.at,
        signal.source_id,
        status=status,
        # Agent, model and tenant stay those of the opening: they route the incident to its channels.
        event=signal.event,
        severity=severity,
        title=signal.title,
        text=signal.text,
        payload=signal.payload,
        last_event_id=signal.source_id,
        count=current.count + signal.times,
        last_at=max(current.last_at, signal.at),
        ends_at=ends_at,
        remind_at=_reminder(signal.at, 0, rules) if is_open_anew and status == "pending" else current.remind_at,
        reminders=0 if is_open_anew else current.reminders,
        **(_NOBODY if is_open_anew else {}),
    )


def _severity(signal: Firing) -> Severity:
    return signal.severity or severity_of(signal.key)


def _is_worse(severity: Severity, current: Alert) -> bool:
    """Returns True if a severity is higher than the one that people know an incident by.

    They know a breaker that waits for a call, or has closed, by the highest that it had.
    """
    is_at_rest = _waits(current) or current.status == "resolved"
    known_severity = highest_severity(current) if is_at_rest else current.severity
    return SEVERITIES.index(severity) > SEVERITIES.index(known_severity)


def _continues(signal: Firing, current: Alert | None) -> bool:
    """Returns False if a signal only continues an incident, and this is none of those."""
    match signal.continues:
        case None:
            return True
        case "unresolved":
            return current is not None and current.status != "resolved"
        case "waiting":
            return current is not None and _waits(current) and current.resolved_by is None


def _waits(alert: Alert) -> bool:
    """Returns True if an incident is that of a breaker which waits for a call."""
    return alert.payload.get("waits") is True


def acknowledge(current: Alert, by: str, reason: str | None, at: datetime) -> Alert | None:
    """Acknowledges an incident, which ends its reminders. None if it is already acknowledged or resolved."""
    if current.status not in {"firing", "pending"}:
        return None
    return _next(
        current,
        "acknowledged",
        at,
        f"acknowledged by {by}",
        status="acknowledged",
        acknowledged_by=by,
        acknowledged_at=at,
        remind_at=None,
        reason=reason,
    )


def resolve(current: Alert, by: str, reason: str | None, at: datetime) -> Alert | None:
    """Resolves an incident on behalf of an operator. None if it is already resolved."""
    if current.status == "resolved":
        return None
    # This does not remove the cause: a stopped task stays stopped.
    text = f"{_duration_sentence(current, at)} What caused it may be so still: {current.text}"
    return _over(current, at, f"resolved by {by}", by=by, reason=reason, text=text)


def due(current: Alert, now: datetime, rules: IncidentRules) -> Alert | None:
    """Returns the change of an incident that is due: it resolves by itself, or a reminder is sent. None if none is due.

    A pending incident only resolves by itself once an operator has acknowledged it.
    """
    if current.status == "resolved":
        return None
    if current.ends_at is not None and current.ends_at <= now and current.status != "pending":
        faded = current.event in _FADING
        reason = f"it has not happened again since {moment(current.last_at)}" if faded else "the period has ended"
        advice = " What caused it may be so still." if faded else ""
        if _waits(current):
            reason = "no call came to try the breaker"
            advice = " It stays half-open, and the next call tries it. Nothing to do."
        text = f"{_duration_sentence(current, current.last_at)} {sentence(reason)}{advice}"
        return _over(current, now, f"{ENDED_AT} {moment(current.ends_at)}", by=None, reason=reason, text=text)
    if current.status == "pending" and current.remind_at is not None and current.remind_at <= now:
        reminders = current.reminders + 1
        return _next(
            current,
            "reminded",
            now,
            f"reminder {reminders}",
            reminders=reminders,
            remind_at=_reminder(now, reminders, rules),
        )
    return None


def due_at(current: Alert) -> datetime | None:
    """Returns the earliest time at which `due` returns a change of an incident; None if there is none."""
    if current.status == "resolved":
        return None
    return current.remind_at if current.status == "pending" else current.ends_at


_NOBODY: dict[str, object] = {
    "acknowledged_by": None,
    "acknowledged_at": None,
    "resolved_by": None,
    "resolved_at": None,
    "reason": None,
}
_FADING = frozenset(
    {
        "retries_exhausted",
        "job_dead_lettered",
        "deployment_failing",
        "agent_anomaly",
        "guard_soft_cap",
        "consumer_deleted",
        "storage_failing",
    }
)


def _open_incident(signal: Firing, rules: IncidentRules) -> Alert:
    incident_id = "inc_" + _digest(signal.key, signal.source_id)[:24]
    over = signal.done_by is not None
    status = "resolved" if over else _status(signal.event, rules)
    return Alert(
        alert_id=_alert_id(incident_id, 1),
        incident_id=incident_id,
        key=signal.key,
        change="opened",
        status=status,
        event=signal.event,
        severity=_severity(signal),
        first_event=signal.event,
        highest_severity=_severity(signal),
        agent=signal.agent,
        model=signal.model,
        tenant=signal.tenant,
        title=signal.title,
        text=signal.text,
        payload=signal.payload,
        count=signal.times,
        version=1,
        opened_at=signal.began_at or signal.at,
        last_at=signal.at,
        ends_at=_ends(signal, rules),
        remind_at=_reminder(signal.at, 0, rules) if status == "pending" else None,
        resolved_by=signal.done_by,
        resolved_at=signal.at if over else None,
        source_id=signal.source_id,
        last_event_id=signal.source_id,
        at=signal.at,
    )


def _resolve(current: Alert, signal: Resolved) -> Alert:
    return _over(
        current,
        signal.at,
        signal.source_id,
        by=signal.by,
        reason=signal.reason,
        event=signal.event,
        severity="info" if signal.event == "breaker_closed" else current.severity,
        title=signal.title,
        text=signal.text,
        payload=signal.payload,
        last_event_id=signal.source_id,
    )


def _duration_sentence(current: Alert, until: datetime) -> str:
    times = "once" if current.count == 1 else f"{current.count:,} times"
    return f"It happened {times}, from {moment(current.opened_at)} to {moment(max(until, current.last_at))}."


def _over(
    current: Alert, at: datetime, source_id: str, *, by: str | None, reason: str | None, **changed: object
) -> Alert:
    return _next(
        current,
        "resolved",
        at,
        source_id,
        status="resolved",
        resolved_by=by,
        resolved_at=at,
        remind_at=None,
        reason=reason,
        **changed,
    )


def _next(current: Alert, change: AlertChange, at: datetime, source_id: str, **changed: object) -> Alert:
    version = current.version + 1
    severities = highest_severity(current), changed.get("severity", current.severity)
    fixed = {
        # Incidents that an earlier version opened have neither of these two.
        "first_event": began_with(current),
        "highest_severity": max(severities, key=SEVERITIES.index),
        "alert_id": _alert_id(current.incident_id, version),
        "change": change,
        "version": version,
        "source_id": source_id,
        "at": at,
    }
    return current.model_copy(update={**fixed, **changed})


def _status(event: AlertEvent, rules: IncidentRules) -> IncidentStatus:
    return "pending" if event in rules.escalate else "firing"


def _ends(signal: Firing, rules: IncidentRules) -> datetime | None:
    return signal.at + rules.quiet if signal.fades else signal.ends_at


def _reminder(since: datetime, reminders: int, rules: IncidentRules) -> datetime:
    # The exponent is bounded, because 2.0 ** 2000 overflows.
    wait_s = min(rules.reminders.first_s * 2.0 ** min(reminders, 40), rules.reminders.max_s)
    return since + timedelta(seconds=wait_s)


def _alert_id(incident_id: str, version: int) -> str:
    return f"alert_{incident_id.removeprefix('inc_')}_{version}"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
