"""What a channel is told next, of all the alerts that wait for it.

People are told of an incident, not of each change of it: of what waits, the newest alert of an incident speaks for the
older ones. A recovery waits until it has lasted, unless the channel can change what it has said. What comes in quiet
hours, or faster than the channel's rate limit, waits and is told in one digest. Nothing is dropped without a reason: an
alert is told, told by a newer one, part of a digest, or not for this channel.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo

from breakwater.contracts.alerts import Alert, AlertDigest, HeldBack
from breakwater.policy.alert_rules import SEVERITIES, SEVERITY_OF, QuietHours, Route, began_with

Message = Alert | AlertDigest

_NEWS = frozenset({"reopened", "acknowledged", "reminded", "resolved"})
"""Changes that are worth a message where `opened` has been told."""


@dataclass(frozen=True, slots=True)
class Held:
    """An alert that waits for a channel."""

    sequence: int
    """Of the message in ALERTS; it tells the alerts apart."""
    alert: Alert
    stored_at: datetime
    """When ALERTS took it: long after it happened, where alerters were away."""


@dataclass(frozen=True, slots=True)
class ChannelRules:
    """What decides on what a channel is told."""

    route: Route
    quiet_s: float
    """How long a recovery must last before it is told."""
    on_events: Collection[str] | None = None
    """What people want to be told of at all; None for everything."""
    every_change: bool = False
    """Whether the channel can change what it has said."""


@dataclass(frozen=True, slots=True)
class Next:
    """What to do with what waits."""

    skip: tuple[int, ...] = ()
    """Sequences of alerts that need no message."""
    tell: Message | None = None
    covers: tuple[int, ...] = ()
    """Sequences of the alerts of which `tell` tells."""
    counts: bool = True
    """Whether `tell` counts for the rate limit: a message that is only changed does not."""
    at: datetime | None = None
    """Where there is nothing to tell now: when there will be, if nothing comes before."""


def message_id(message: Message) -> str:
    """What tells a message from others: the same at every try."""
    return message.alert_id if isinstance(message, Alert) else message.digest_id


def next_message(
    held: Sequence[Held],
    rules: ChannelRules,
    now: datetime,
    *,
    sent: Sequence[datetime] = (),
    posted: Collection[str] = (),
) -> Next:
    """Decides what a channel is told next.

    Args:
        held: the alerts that wait, in the order of ALERTS.
        rules: of the channel.
        now: the time.
        sent: when the latest messages were sent that count for the rate limit, the earliest first.
        posted: ids of the incidents whose message the channel can change.
    """
    skip: list[int] = []
    now_due: list[_Candidate] = []
    quiet: list[_Candidate] = []
    later: list[datetime] = []
    for changes in _by_incident(one for one in held if _taken(one, rules, skip)):
        candidate = _Candidate(changes)
        if candidate.newest.incident_id in posted:
            return Next(tuple(skip), candidate.newest, candidate.sequences, counts=False)
        if not rules.every_change and not candidate.news:
            skip += candidate.sequences
            continue
        ready = candidate.ready(rules)
        if ready > now:
            later.append(ready)
            continue
        ends = quiet_until(rules.route.quiet_hours, candidate.newest, now)
        if ends is not None:
            later.append(ends)
            continue
        (quiet if _was_quiet(rules.route.quiet_hours, candidate.newest) else now_due).append(candidate)
    chosen = _chosen(now_due, quiet, rules, now, sent)
    if isinstance(chosen, datetime):
        later.append(chosen)
        chosen = None
    if chosen is None:
        return Next(tuple(skip), at=min(later, default=None))
    tell, covers = chosen
    return Next(tuple(skip), tell, covers)


def quiet_until(hours: QuietHours | None, alert: Alert, at: datetime) -> datetime | None:
    """When the quiet hours end in which an alert would be told at this time; None where it is told at once."""
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
    """What waits of one incident."""

    def __init__(self, changes: Sequence[Held]) -> None:
        self.sequences = tuple(one.sequence for one in changes)
        newest = max(changes, key=lambda one: one.alert.version)
        self.newest = newest.alert
        self._known_since = max(newest.alert.at, newest.stored_at)
        self._changes = frozenset(one.alert.change for one in changes)

    @property
    def unheard(self) -> bool:
        """Whether nobody was told of the incident at all."""
        return "opened" in self._changes

    @property
    def news(self) -> bool:
        """Whether it is worth a message. What was over and came back before anybody was told is none."""
        came_back = {"resolved", "reopened"} <= self._changes and self.newest.status != "resolved"
        return self.unheard or bool(self._changes & (_NEWS - {"resolved", "reopened"} if came_back else _NEWS))

    def ready(self, rules: ChannelRules) -> datetime:
        """From when on it may be told."""
        recovered = self.newest.status == "resolved" and self.newest.resolved_by is None
        if not recovered or rules.every_change:
            return self.newest.at
        # From when on we know of it: else of a backlog every recovery would be told that has long been undone.
        return self._known_since + timedelta(seconds=rules.quiet_s)


def _taken(one: Held, rules: ChannelRules, skip: list[int]) -> bool:
    wanted = rules.every_change or rules.on_events is None or one.alert.event in rules.on_events
    if wanted and rules.route.takes(one.alert, every_change=rules.every_change):
        return True
    skip.append(one.sequence)
    return False


def _by_incident(held: Iterable[Held]) -> Iterable[list[Held]]:
    groups: dict[str, list[Held]] = {}
    for one in held:
        groups.setdefault(one.alert.incident_id, []).append(one)
    return groups.values()


def _chosen(
    now_due: list[_Candidate],
    quiet: list[_Candidate],
    rules: ChannelRules,
    now: datetime,
    sent: Sequence[datetime],
) -> tuple[Message, tuple[int, ...]] | datetime | None:
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
    # The worst first; of equals the one that waits longest.
    candidates.sort(key=lambda one: (-_severity(one.newest), one.sequences[0]))
    if free == 1 and len(candidates) > 1:
        return _digest(candidates, "rate_limit", now)
    if len(quiet) > 1:
        return _digest(quiet, "quiet_hours", now)
    return candidates[0].newest, candidates[0].sequences


def _digest(
    candidates: Sequence[_Candidate], why: Literal["rate_limit", "quiet_hours"], now: datetime
) -> tuple[Message, tuple[int, ...]]:
    alerts = [one.newest for one in sorted(candidates, key=lambda one: one.sequences[0])]
    names = "\n".join(alert.alert_id for alert in alerts)
    digest = AlertDigest(
        digest_id=f"digest_{hashlib.sha256(names.encode()).hexdigest()[:24]}",
        why=why,
        held_from=min(alert.at for alert in alerts),
        held_until=max(alert.at for alert in alerts),
        counts=dict(Counter(began_with(alert) for alert in alerts).most_common()),
        alerts=tuple(
            HeldBack(
                alert_id=alert.alert_id,
                incident_id=alert.incident_id,
                event=alert.event,
                severity=alert.severity,
                status=alert.status,
                agent=alert.agent,
                title=alert.title,
                count=alert.count,
                opened_at=alert.opened_at,
            )
            for alert in alerts
        ),
        at=now,
    )
    return digest, tuple(sequence for one in candidates for sequence in one.sequences)


def _severity(alert: Alert) -> int:
    return SEVERITIES.index(SEVERITY_OF[began_with(alert)])


def _was_quiet(hours: QuietHours | None, alert: Alert) -> bool:
    return quiet_until(hours, alert, alert.at) is not None
