"""Decides which of the waiting alerts a channel is sent next.

Channels are notified of incidents, not of every change: an incident's newest waiting alert replaces its older ones. A
recovery waits until it has lasted, unless the channel can update its messages. Alerts in quiet hours, or beyond the
channel's rate limit, wait and are sent in one digest. In a chat, what nobody needs to act on is a line of the next
digest, and the thresholds that a budget crosses within a minute are one message. Nothing is dropped without a reason:
an alert is sent, replaced by a newer one, part of a digest, or not meant for this channel.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from zoneinfo import ZoneInfo

from breakwater.alerts.contract import Alert, AlertDigest, HeldBack
from breakwater.alerts.rules.alert_rules import (
    SEVERITIES,
    UNDELIVERABLE,
    began_with,
    budget_period_of,
    concerned_agents,
    highest_severity,
    is_notice,
    route_matches,
    threshold_of,
)
from breakwater.alerts.settings import QuietHours, Route

ChannelMessage = Alert | AlertDigest

_NEWS = frozenset({"worsened", "reopened", "acknowledged", "reminded", "resolved"})
"""Changes that are worth a message once `opened` has been sent."""

UPDATE_EVERY = timedelta(seconds=60)
"""The least time between updates of a message of which only the count has changed."""


NOTICES_WAIT = timedelta(days=1)
"""The time after which notices are sent as a digest of their own."""
RISE = timedelta(minutes=1)
"""The time in which the thresholds that a budget crosses are one message."""


@dataclass(frozen=True, slots=True)
class WaitingAlert:
    """An alert that waits for a channel.

    Attributes:
        sequence: the sequence number of its message in ALERTS.
        alert: the alert.
        stored_at: the time at which ALERTS stored it; long after it happened if no alerter was running.
    """

    sequence: int
    alert: Alert
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class ChannelRules:
    """The rules that decide what a channel is sent.

    Attributes:
        route: the alerts that the channel is for.
        quiet_s: the seconds that a recovery must last before it is sent.
        on_events: the events that become notifications; None for all.
        every_change: True if the channel is sent every change.
        is_chat: True if people read its messages one by one, so that notices and low thresholds of budgets wait.
    """

    route: Route
    quiet_s: float
    on_events: Collection[str] | None = None
    every_change: bool = False
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class Next:
    """The decision on the waiting alerts.

    Attributes:
        skip: the sequences of alerts that need no message.
        message: the message to send now; None if there is none.
        covers: the sequences of the alerts that `message` covers.
        counts: True if `message` counts towards the rate limit; an update does not.
        at: if nothing is to be sent now, the time of the next message, unless another alert comes before; None if
            nothing waits.
    """

    skip: tuple[int, ...] = ()
    message: ChannelMessage | None = None
    covers: tuple[int, ...] = ()
    counts: bool = True
    at: datetime | None = None


def message_id(message: ChannelMessage) -> str:
    """Returns the unique id of a message, which is the same for every try."""
    return message.alert_id if isinstance(message, Alert) else message.digest_id


def next_message(
    waiting: Sequence[WaitingAlert],
    rules: ChannelRules,
    now: datetime,
    *,
    sent: Sequence[datetime] = (),
    updatable: Mapping[str, datetime] | None = None,
) -> Next:
    """Decides what a channel is sent next.

    Args:
        waiting: the waiting alerts, in the order of ALERTS.
        rules: the channel's rules.
        now: the current time.
        sent: the times of the latest messages that count towards the rate limit, the earliest first.
        updatable: the incidents whose message the channel can update, by their ids, with the time of the last update.
    """
    updatable = updatable or {}
    skip: list[int] = []
    due: list[_Candidate] = []
    quiet: list[_Candidate] = []
    updates: list[_Candidate] = []
    notices: list[_Candidate] = []
    rising: list[_Candidate] = []
    waits_until: list[datetime] = []
    by_incident: dict[str, list[WaitingAlert]] = {}
    for change in waiting:
        if route_matches(rules.route, change.alert):
            by_incident.setdefault(change.alert.incident_id, []).append(change)
        else:
            skip.append(change.sequence)
    for changes in by_incident.values():
        candidate = _Candidate(changes)
        changed_at = updatable.get(candidate.newest.incident_id)
        if changed_at is not None:
            # A rise is an update of its own, which people notice; what came after it waits for the next one.
            candidate = _Candidate(_until_rise(changes))
        skip += candidate.superseded
        if changed_at is not None:
            ready = candidate.update_ready(changed_at)
            updates.append(candidate) if ready <= now else waits_until.append(ready)
            continue
        if not rules.every_change and not candidate.news:
            skip += candidate.sequences
            continue
        ready = candidate.ready(rules, now)
        if ready > now:
            waits_until.append(ready)
            continue
        if not candidate.is_wanted(rules):
            skip += candidate.sequences
            continue
        ends = quiet_until(rules.route.quiet_hours, candidate.newest, now)
        if ends is not None:
            waits_until.append(ends)
            continue
        if rules.is_chat and is_notice(candidate.newest):
            notices.append(candidate)
            if (ready := candidate.stored_at + NOTICES_WAIT) > now:
                waits_until.append(ready)
            continue
        if rules.is_chat and candidate.may_rise and candidate.stored_at + RISE > now and not rules.every_change:
            rising.append(candidate)
            waits_until.append(candidate.stored_at + RISE)
            continue
        was_quiet = quiet_until(rules.route.quiet_hours, candidate.newest, candidate.newest.at) is not None
        (quiet if was_quiet else due).append(candidate)
    if rules.is_chat:
        due = _highest_thresholds(due, rising)
    chosen = _next_message(due, quiet, notices, rules, now, sent)
    if isinstance(chosen, datetime):
        waits_until.append(chosen)
        chosen = None
    if chosen is not None:
        message, covers = chosen
        return Next(tuple(skip), message, covers)
    if updates:
        # The most severe first.
        update = min(updates, key=_urgency)
        return Next(tuple(skip), update.newest, update.sequences, counts=False)
    return Next(tuple(skip), at=min(waits_until, default=None))


def quiet_until(hours: QuietHours | None, alert: Alert, at: datetime) -> datetime | None:
    """Returns the end of the quiet hours that hold back an alert; None if it is sent immediately."""
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
    # Around a change of the clocks, an hour that is missing or repeated may end before now: then it is over.
    return max(end, at + timedelta(seconds=1))


def _until_rise(changes: Sequence[WaitingAlert]) -> Sequence[WaitingAlert]:
    """Returns the changes up to the latest one that raised the severity; all of them if none did."""
    rises = [place for place, change in enumerate(changes, start=1) if change.alert.change == "worsened"]
    return changes[: rises[-1]] if rises else changes


class _Candidate:
    """The waiting alerts of one incident."""

    def __init__(self, changes: Sequence[WaitingAlert]) -> None:
        newest = max(changes, key=lambda change: change.alert.version)
        self.newest = newest.alert
        self.stored_at = newest.stored_at
        self._changes = frozenset(change.alert.change for change in changes)
        # The latest change of each kind is enough to know what happened; repetitions do not matter later.
        latest = {change.alert.change: change.sequence for change in changes if change.alert.change != "repeated"}
        needed = {newest.sequence, *latest.values()}
        self.sequences = tuple(change.sequence for change in changes if change.sequence in needed)
        self.superseded = tuple(change.sequence for change in changes if change.sequence not in needed)

    @property
    def may_rise(self) -> bool:
        """Returns True if it is a threshold below the limit, and nothing was sent about it yet."""
        of_budget = budget_period_of(self.newest) is not None
        return of_budget and self.unannounced and self.newest.status != "resolved" and threshold_of(self.newest) < 100

    def cover(self, lower: _Candidate) -> None:
        """Has the message of this candidate stand for that of a lower threshold, too."""
        self.sequences += lower.sequences

    @property
    def unannounced(self) -> bool:
        """Returns True if nothing was sent about the incident yet."""
        return "opened" in self._changes

    @property
    def news(self) -> bool:
        """Returns True if it is worth a message. An incident that was resolved and reopened in the meantime is not."""
        came_back = {"resolved", "reopened"} <= self._changes and self.newest.status != "resolved"
        return self.unannounced or bool(self._changes & (_NEWS - {"resolved", "reopened"} if came_back else _NEWS))

    def is_wanted(self, rules: ChannelRules) -> bool:
        """Returns True if the channel takes its current event, or its first event if nothing was sent yet."""
        if self.newest.key.startswith(UNDELIVERABLE):
            return True
        events = {self.newest.event, *((began_with(self.newest),) if self.unannounced else ())}
        return any(
            (rules.on_events is None or event in rules.on_events)
            and (rules.route.events is None or event in rules.route.events)
            for event in events
        )

    def ready(self, rules: ChannelRules, now: datetime) -> datetime:
        """Returns the earliest time to send it."""
        recovered = self.newest.status == "resolved" and self.newest.resolved_by is None
        if not recovered or rules.every_change:
            return now
        # Counted from the time at which it became known: a backlog may have recoveries that were undone long ago. The
        # time of its event counts for nothing while it lies ahead, as the clock of a machine may.
        known_since = self.stored_at if self.newest.at > now else max(self.newest.at, self.stored_at)
        return known_since + timedelta(seconds=rules.quiet_s)

    def update_ready(self, changed_at: datetime) -> datetime:
        """Returns the earliest time to update its message. Only a repetition can wait."""
        return changed_at + UPDATE_EVERY if self.newest.change == "repeated" else changed_at


def _urgency(candidate: _Candidate) -> tuple[int, int]:
    """Returns a sort key: the most severe first, and among equals the one that has waited longest."""
    return -_severity(candidate.newest), candidate.sequences[0]


def _highest_thresholds(due: Sequence[_Candidate], rising: Sequence[_Candidate]) -> list[_Candidate]:
    """Returns the candidates that are due, of the thresholds of each budget the highest only, which covers the others.

    Args:
        due: the candidates to send now.
        rising: thresholds that wait for higher ones. They are sent with a lower one that is due.
    """
    of_budgets: dict[tuple[str, bool], list[_Candidate]] = {}
    of_no_budget: list[_Candidate] = []
    for candidate in due:
        place = _budget_place(candidate)
        (of_no_budget if place is None else of_budgets.setdefault(place, [])).append(candidate)
    for candidate in rising:
        place = _budget_place(candidate)
        if place is not None and place in of_budgets:
            of_budgets[place].append(candidate)
    highest: list[_Candidate] = []
    for thresholds in of_budgets.values():
        top, *lower_thresholds = sorted(thresholds, key=lambda candidate: -threshold_of(candidate.newest))
        for lower in lower_thresholds:
            top.cover(lower)
        highest.append(top)
    return [*of_no_budget, *highest]


def _budget_place(candidate: _Candidate) -> tuple[str, bool] | None:
    budget = budget_period_of(candidate.newest)
    return None if budget is None else (budget, candidate.newest.status == "resolved")


def _next_message(
    now_due: list[_Candidate],
    quiet: list[_Candidate],
    notices: list[_Candidate],
    rules: ChannelRules,
    now: datetime,
    sent: Sequence[datetime],
) -> tuple[ChannelMessage, tuple[int, ...]] | datetime | None:
    """Returns the message and what it covers, or the time at which the rate limit admits one; None if none is due."""
    limit = rules.route.rate_limit
    candidates = quiet + now_due
    are_notices_due = any(notice.stored_at + NOTICES_WAIT <= now for notice in notices)
    if not candidates and not are_notices_due:
        return None
    free = max(len(candidates), 1)
    if limit is not None:
        window = timedelta(seconds=limit.within_s)
        recent = [at for at in sent if at > now - window]
        free = limit.messages - len(recent)
        if free <= 0:
            return recent[-limit.messages] + window
    candidates.sort(key=_urgency)
    if free == 1 and len(candidates) > 1:
        return _digest(candidates + notices, "rate_limit", now)
    if len(quiet) > 1:
        return _digest(quiet + notices, "quiet_hours", now)
    if not candidates:
        return _digest(notices, "notices", now)
    return candidates[0].newest, candidates[0].sequences


def _digest(
    candidates: Sequence[_Candidate], why: Literal["rate_limit", "quiet_hours", "notices"], now: datetime
) -> tuple[ChannelMessage, tuple[int, ...]]:
    alerts = [candidate.newest for candidate in sorted(candidates, key=lambda candidate: candidate.sequences[0])]
    names = "\n".join(alert.alert_id for alert in alerts)
    digest = AlertDigest(
        digest_id=f"digest_{hashlib.sha256(names.encode()).hexdigest()[:24]}",
        why=why,
        severity=SEVERITIES[max(map(_severity, alerts))],
        held_from=min(alert.at for alert in alerts),
        held_until=max(alert.at for alert in alerts),
        counts=dict(Counter(began_with(alert) for alert in alerts).most_common()),
        alerts=tuple(map(_held_back, alerts)),
        at=now,
    )
    return digest, tuple(sequence for candidate in candidates for sequence in candidate.sequences)


def _held_back(alert: Alert) -> HeldBack:
    fields: dict[str, Any] = {name: getattr(alert, name) for name in HeldBack.model_fields}
    agents = concerned_agents(alert)
    if len(agents) == 1:
        # Of a deployment that one agent calls, although the channels of all agents are sent it.
        fields["agent"] = agents[0]
    return HeldBack.model_validate(fields)


def _severity(alert: Alert) -> int:
    return SEVERITIES.index(highest_severity(alert))
