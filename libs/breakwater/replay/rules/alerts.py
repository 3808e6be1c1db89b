"""The incidents of a replay, decided on by the rules of the alerter.

The alerter looks every second for what is due, and hears of a job a moment after its end. Which signals of an incident
are recorded together is therefore chance, which is taken from the record while it fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.alert_rules import CONTINUED, ENDED_AT, UNDELIVERABLE, began_with
from breakwater.alerts.rules.deployments import continued_by_breaker, is_explained, may_be_explained
from breakwater.alerts.rules.grouping import SignalGroup, SignalGroups
from breakwater.alerts.rules.incidents import (
    IncidentRules,
    Incidents,
    acknowledge,
    decide,
    due,
    due_at,
    resolve,
)
from breakwater.alerts.rules.job_ends import JobEnds
from breakwater.alerts.rules.signals import MEASURES_OF_JOBS, Firing, Signal, signals_of
from breakwater.alerts.settings import Alerts
from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetEvent, GuardEvent

LOOK_MS = 1_000
"""The interval at which the alerter looks at its groups, and at which one that is not as recorded is looked at here."""

LATE_MS = 3_000
"""The time from the moment at which a group is due to its alert, at most: jobs are fetched in batches, and then looked
at."""

VERY_LATE_MS = 20_000
"""The same on a machine that is busy, if the record has such an alert."""

_REPLAYED = frozenset(
    {
        "breaker_open",
        "budget_soft_cap",
        "budget_hard_cap",
        "guard_tripped",
        "guard_soft_cap",
        "deployment_failing",
        "quota_exhausted",
        "retries_exhausted",
        "job_dead_lettered",
        "agent_anomaly",
    }
)


def is_of_person(alert: Alert) -> bool:
    """Returns True if a person changed an incident, or looked after all of its dead letters, and no event did."""
    if alert.resolved_by is None:
        return alert.change == "acknowledged"
    return alert.source_id.startswith(("resolved by ", f"{alert.incident_id}/"))


def is_replayed(alert: Alert) -> bool:
    """Returns True if an alert follows from breakers, limits, tasks or ends of jobs, and from nothing else.

    Others follow from dead letters without a job, from statistics of minutes, or from the plane itself.
    """
    begun_by = began_with(alert)
    if begun_by not in _REPLAYED or is_of_person(alert):
        return False
    if begun_by == "agent_anomaly":
        return alert.payload.get("measure") in MEASURES_OF_JOBS
    return begun_by != "job_dead_lettered" or not (alert.key.startswith(UNDELIVERABLE) or "stream" in alert.payload)


class ReplayedAlerts:
    """All incidents of a replay."""

    def __init__(
        self,
        alerts: Alerts,
        recorded: Iterable[Alert],
        publish: Callable[[Alert], None],
        at: Callable[[int, Callable[[int], None]], None],
    ) -> None:
        """Creates it.

        Args:
            alerts: the settings of the policy.
            recorded: the alerts of that time, in their order.
            publish: is called with each alert of the replay.
            at: has a function called at a time, in milliseconds since the epoch.
        """
        self._rules = IncidentRules.of(alerts)
        self._publish = publish
        self._at = at
        self._incidents = Incidents()
        self._ends = JobEnds(alerts, self._incidents.of)
        self._groups = SignalGroups[None]()
        recorded = list(recorded)
        self._recorded = _of_jobs(recorded)
        self._occurred: dict[str, list[int]] = defaultdict(list)
        """The times of what happened in recorded incidents, by their keys."""
        for alert in recorded:
            self._occurred[alert.key].append(ms_from_time(alert.last_at))
        self.unexplained_then = 0
        """The number of groups with an alert, although an incident explains them that the alerter did not know then."""

    def add_event(self, event: BreakerTransition | GuardEvent | BudgetEvent) -> None:
        """Applies the signals of an event, immediately."""
        for signal in signals_of(event):
            self._apply(signal)
            for end in continued_by_breaker(signal, self._incidents.explaining()):
                self._apply(end)

    def add_end(self, execution: Execution, now_ms: int) -> None:
        """Adds the signals of a job's end to those that wait."""
        for signal in self._ends.signals(execution):
            if signal.event not in self._rules.on_events:
                continue
            waiting = self._groups.of(signal.key)
            if waiting is not None:
                self._look(waiting, now_ms)  # it may have been recorded before this one came
            is_new = self._groups.of(signal.key) is None
            group = self._groups.add(signal, None, now_ms / 1000)
            if is_new:
                self._at(self._due_ms(group), partial(self._look_again, group))

    def act(self, alert: Alert) -> None:
        """Repeats what a person did to an incident."""
        current = self._incidents.of(alert.key)
        if current is None:
            return
        if alert.change == "acknowledged":
            self._keep(acknowledge(current, alert.acknowledged_by or "", alert.reason, alert.at))
        else:
            self._keep(resolve(current, alert.resolved_by or "", alert.reason, alert.at))

    def _apply(self, signal: Signal) -> None:
        for key in self._incidents.keys_of(signal):
            self._change_due(key, ms_from_time(signal.at))
            self._keep(decide(signal, self._incidents.of(key), self._rules))

    def _change_due(self, key: str, now_ms: int) -> None:
        """Resolves an incident whose time is over, unless it may have happened again, or reminds of it."""
        now = time_from_ms(now_ms)
        may_continue = self._groups.of(key) is not None
        current = self._incidents.of(key)
        while current is not None and (at := due_at(current)) is not None and at <= now:
            if may_continue and current.status != "pending":
                return
            current = due(current, at, self._rules)
            self._keep(current)

    def _keep(self, alert: Alert | None) -> None:
        if alert is None:
            return
        self._incidents.take(alert)
        self._publish(alert)
        if (at := due_at(alert)) is not None:
            self._at(ms_from_time(at), partial(self._change_due, alert.key))

    def finish(self) -> None:
        """Records the groups that the record has, although nothing comes any more."""
        for group in self._groups.due(math.inf):
            self._look(group, self._due_ms(group))

    # Groups

    def _due_ms(self, group: SignalGroup[None]) -> int:
        return round(self._groups.due_s(group) * 1000)

    def _look_again(self, group: SignalGroup[None], now_ms: int) -> None:
        """Looks at a group until it is recorded."""
        if self._groups.of(group.signal.key) is group and not self._look(group, now_ms):
            self._at(max(now_ms + LOOK_MS, self._due_ms(group)), partial(self._look_again, group))

    def _look(self, group: SignalGroup[None], now_ms: int) -> bool:
        """Records a group, if it is due, and as the record has it or late. Returns True if it waits no more."""
        signal = group.signal
        key = signal.key
        due_ms = self._due_ms(group)
        if now_ms < due_ms:
            return False
        self._change_due(key, now_ms)
        alert = decide(signal, self._incidents.of(key), self._rules)
        recorded = self._recorded_group(key, signal, due_ms + VERY_LATE_MS)
        is_recorded = recorded is not None and alert is not None and alert.source_id == recorded.source_id
        if may_be_explained(signal) and is_explained(signal, self._incidents.explaining):
            if is_recorded and is_explained(signal, self._recorded_explaining):
                self.unexplained_then += 1
            else:
                alert = None
                is_recorded = False
        if recorded is None:
            is_over = alert is None or now_ms >= due_ms + (LATE_MS if key in self._recorded else LOOK_MS)
        else:
            is_full = isinstance(signal, Firing) and signal.times >= recorded.times
            is_over = is_recorded or (alert is None and is_full) or now_ms >= due_ms + VERY_LATE_MS
        if not is_over:
            return False
        self._keep(alert)
        self._groups.end(group, now_ms / 1000)
        self._change_due(key, now_ms)
        return True

    def _recorded_explaining(self, at: datetime) -> list[Alert]:
        return list(filter(self._is_recorded, self._incidents.explaining(at)))

    def _is_recorded(self, incident: Alert) -> bool:
        """Returns True if the record has what happened last in an incident, at about that time."""
        at_ms = ms_from_time(incident.last_at)
        return any(abs(other_ms - at_ms) <= VERY_LATE_MS for other_ms in self._occurred.get(incident.key, ()))

    def _recorded_group(self, key: str, signal: Signal, until_ms: int) -> _RecordedGroup | None:
        """Returns the group with which the record has an incident next; None if it has none until a time."""
        of_key = self._recorded.get(key, ())
        place = bisect_left(of_key, ms_from_time(signal.at), key=lambda group: group.at_ms)
        return of_key[place] if place < len(of_key) and of_key[place].at_ms <= until_ms else None


class _RecordedGroup(NamedTuple):
    """A recorded alert of a group: its time and event, those of its last signal, and how many signals it had."""

    at_ms: int
    source_id: str
    times: int


def _of_jobs(alerts: Iterable[Alert]) -> Mapping[str, Sequence[_RecordedGroup]]:
    """Returns the recorded alerts of groups, in order, by the keys of their incidents."""
    by_key: dict[str, list[_RecordedGroup]] = defaultdict(list)
    counted: Counter[str] = Counter()
    for alert in alerts:
        times = alert.count - counted[alert.incident_id]
        counted[alert.incident_id] = alert.count
        with_time = alert.change == "reminded" or alert.source_id.startswith(ENDED_AT)
        if not (with_time or is_of_person(alert) or alert.reason == CONTINUED):
            by_key[alert.key].append(_RecordedGroup(ms_from_time(alert.at), alert.source_id, times))
    for of_key in by_key.values():
        of_key.sort()
    return by_key
