"""Decides what a channel is sent next, of all the alerts that wait for it.

Notifications are per incident, not per change: of the alerts that wait, the newest of an incident replaces the older
ones. A recovery waits until it has lasted, unless the channel can update its messages. What comes in quiet hours, or
faster than the channel's rate limit, waits and is sent in one digest. Nothing is dropped without a reason: an alert is
sent, replaced by a newer one, part of a digest, or not for this channel.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from breakwater.alerts.contract import Alert, AlertDigest, HeldBack
from breakwater.alerts.rules.alert_rules import SEVERITIES, UNDELIVERABLE, QuietHours, Route, began_with, severity_of

ChannelMessage = Alert | AlertDigest

_NEWS = frozenset({"reopened", "acknowledged", "reminded", "resolved"})
"""Changes that are worth a message where `opened` has been sent."""

UPDATE_EVERY = timedelta(seconds=60)
"""Least time between updates of a message of which nothing but its count has changed."""


@dataclass(frozen=True, slots=True)
class Held:
    """An alert that waits for a channel."""

    sequence: int
    """Sequence of the message in ALERTS; unique among them."""
    alert: Alert
    stored_at: datetime
    """Time at which ALERTS took it: long after it happened, where alerters were away."""


@dataclass(frozen=True, slots=True)
class ChannelRules:
    """A channel's rules, which decide what it is sent."""

    route: Route
    quiet_s: float
    """Time that a recovery must last before it is sent."""
    on_events: Collection[str] | None = None
    """The events that become notifications; None for all."""
    every_change: bool = False
    """True if the channel is sent every change."""


@dataclass(frozen=True, slots=True)
class Next:
    """Decision on the alerts that wait."""

    skip: tuple[int, ...] = ()
    """Sequences of alerts that need no message."""
    message: ChannelMessage | None = None
    """The message to send now."""
    covers: tuple[int, ...] = ()
    """Sequences of the alerts that `message` covers."""
    counts: bool = True
    """True if `message` counts for the rate limit: an update does not."""
    at: datetime | None = None
    """If nothing is to be sent now, the time when something will be, unless another alert comes before."""


def message_id(message: ChannelMessage) -> str:
    """The unique id of a message, the same for every try."""
    return message.alert_id if isinstance(message, Alert) else message.digest_id


def next_message(
    held: Sequence[Held],
    rules: ChannelRules,
    now: datetime,
    *,
    sent: Sequence[datetime] = (),
    updatable: Mapping[str, datetime] | None = None,
) -> Next:
    """Decides what a channel is sent next.

    Args:
        held: the alerts that wait, in the order of ALERTS.
        rules: of the channel.
        now: the time.
        sent: when the latest messages were sent that count for the rate limit, the earliest first.
        updatable: the incidents whose message the channel can change, by their ids, and when it was changed last.
    """
    updatable = updatable or {}
    skip: list[int] = []
    due: list[_Candidate] = []
    quiet: list[_Candidate] = []
    updates: list[_Candidate] = []
    later: list[datetime] = []
    by_incident: dict[str, list[Held]] = {}
    for one in held:
        if rules.route.takes(one.alert):
            by_incident.setdefault(one.alert.incident_id, []).append(one)
        else:
            skip.append(one.sequence)
    for changes in by_incident.values():
        candidate = _Candidate(changes)
        skip += candidate.superseded
        changed_at = updatable.get(candidate.newest.incident_id)
        if changed_at is not None:
            ready = candidate.update_ready(changed_at)
            updates.append(candidate) if ready <= now else later.append(ready)
            continue
        if not rules.every_change and not candidate.news:
            skip += candidate.sequences
            continue
        ready = candidate.ready(rules, now)
        if ready > now:
            later.append(ready)
            continue
        if not candidate.wanted(rules):
            skip += candidate.sequences
            continue
        ends = quiet_until(rules.route.quiet_hours, candidate.newest, now)
        if ends is not None:
            later.append(ends)
            continue
        was_quiet = quiet_until(rules.route.quiet_hours, candidate.newest, candidate.newest.at) is not None
        (quiet if was_quiet else due).append(candidate)
    chosen = _chosen(due, quiet, rules, now, sent)
    if isinstance(chosen, datetime):
        later.append(chosen)
        chosen = None
    if chosen is not None:
        message, covers = chosen
        return Next(tuple(skip), message, covers)
    if updates:
        # The most severe first.
        update = min(updates, key=_urgency)
        return Next(tuple(skip), update.newest, update.sequences, counts=False)
    return Next(tuple(skip), at=min(later, default=None))


def quiet_until(hours: QuietHours | None, alert: Alert, at: datetime) -> datetime | None:
    """End of the quiet hours that hold back an alert at this time; None where it is sent immediately."""
    if hours is None or (hours.but is not None and _severity(alert) >= SEVERITIES.index(hours.but)):
        return None
    local = at.astimezone(ZoneInfo(hours.timezone))
    clock = local.time()
    if hours.start < hours.end:
        if not hours.start <= clock < hours.end:
            return None
        day = local.date()
    else:
        if hours.end <= clock < hours.start:
            return None
        day = local.date() + timedelta(days=1 if clock >= hours.start else 0)
    end = datetime.combine(day, hours.end, tzinfo=ZoneInfo(hours.timezone))
    # An hour that does not exist, or exists twice, may end before now: then it is over.
    return max(end, at + timedelta(seconds=1))


class _Candidate:
    """The waiting alerts of one incident."""

    def __init__(self, changes: Sequence[Held]) -> None:
        newest = max(changes, key=lambda one: one.alert.version)
        self.newest = newest.alert
        self._known_since = max(newest.alert.at, newest.stored_at)
        self._changes = frozenset(one.alert.change for one in changes)
        # Of each kind of change the latest is enough to know what happened; a repetition says nothing about later.
        latest = {one.alert.change: one.sequence for one in changes if one.alert.change != "repeated"}
        kept = {newest.sequence, *latest.values()}
        self.sequences = tuple(one.sequence for one in changes if one.sequence in kept)
        self.superseded = tuple(one.sequence for one in changes if one.sequence not in kept)

    @property
    def unannounced(self) -> bool:
        """True if nothing was sent of the incident yet."""
        return "opened" in self._changes

    @property
    def news(self) -> bool:
        """True if it is worth a message. One that was resolved and reopened before either was sent is not."""
        came_back = {"resolved", "reopened"} <= self._changes and self.newest.status != "resolved"
        return self.unannounced or bool(self._changes & (_NEWS - {"resolved", "reopened"} if came_back else _NEWS))

    def wanted(self, rules: ChannelRules) -> bool:
        """True if the channel takes its current event, or the one it began with where nothing was sent yet."""
        if self.newest.key.startswith(UNDELIVERABLE):
            return True
        events = {self.newest.event, *((began_with(self.newest),) if self.unannounced else ())}
        return any(
            (rules.on_events is None or event in rules.on_events)
            and (rules.route.events is None or event in rules.route.events)
            for event in events
        )

    def ready(self, rules: ChannelRules, now: datetime) -> datetime:
        """Earliest time for it to be sent."""
        recovered = self.newest.status == "resolved" and self.newest.resolved_by is None
        if not recovered or rules.every_change:
            return now
        # Counted from when it was known here: otherwise a backlog would send recoveries that were undone long ago.
        return self._known_since + timedelta(seconds=rules.quiet_s)

    def update_ready(self, changed_at: datetime) -> datetime:
        """Earliest time for its message to be changed. Only a repetition can wait."""
        return changed_at + UPDATE_EVERY if self.newest.change == "repeated" else changed_at


def _urgency(one: _Candidate) -> tuple[int, int]:
    """The worst first; of equals the one that waits longest."""
    return -_severity(one.newest), one.sequences[0]


def _chosen(
    now_due: list[_Candidate],
    quiet: list[_Candidate],
    rules: ChannelRules,
    now: datetime,
    sent: Sequence[datetime],
) -> tuple[ChannelMessage, tuple[int, ...]] | datetime | None:
    """The message, and what it covers; or when the rate limit lets one pass; or None where nothing waits."""
    limit = rules.route.rate_limit
    candidates = quiet + now_due
    if not candidates:
        return None
    free = len(candidates)
    if limit is not None:
        window = timedelta(seconds=limit.within_s)
        recent = [at for at in sent if at > now - window]
        free = limit.messages - len(recent)
        if free <= 0:
            return recent[-limit.messages] + window
    candidates.sort(key=_urgency)
    if free == 1 and len(candidates) > 1:
        return _digest(candidates, "rate_limit", now)
    if len(quiet) > 1:
        return _digest(quiet, "quiet_hours", now)
    return candidates[0].newest, candidates[0].sequences


def _digest(
    candidates: Sequence[_Candidate], why: Literal["rate_limit", "quiet_hours"], now: datetime
) -> tuple[ChannelMessage, tuple[int, ...]]:
    alerts = [one.newest for one in sorted(candidates, key=lambda one: one.sequences[0])]
    names = "\n".join(alert.alert_id for alert in alerts)
    digest = AlertDigest(
        digest_id=f"digest_{hashlib.sha256(names.encode()).hexdigest()[:24]}",
        why=why,
        severity=SEVERITIES[max(map(_severity, alerts))],
        held_from=min(alert.at for alert in alerts),
        held_until=max(alert.at for alert in alerts),
        counts=dict(Counter(began_with(alert) for alert in alerts).most_common()),
        alerts=tuple(
            HeldBack.model_validate({name: getattr(alert, name) for name in HeldBack.model_fields}) for alert in alerts
        ),
        at=now,
    )
    return digest, tuple(sequence for one in candidates for sequence in one.sequences)


def _severity(alert: Alert) -> int:
    return SEVERITIES.index(severity_of(alert.key))
