"""What becomes of incidents: by events, by people, by the passing of time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from breakwater.alerts.contract import Alert, AlertEvent
from breakwater.alerts.rules.incidents import IncidentRules, acknowledge, decide, due, due_at, resolve
from breakwater.alerts.rules.signals import Firing, Resolved
from breakwater.alerts.settings import Reminders

AT = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
RULES = IncidentRules(get_args(AlertEvent), 600, ("guard_tripped",), Reminders(first_s=3600, max_s=10_000))


def after(**time: float) -> datetime:
    return AT + timedelta(**time)


def raised(source: str = "e1", at: datetime = AT, event: AlertEvent = "breaker_open", **more: Any) -> Firing:
    given: dict[str, Any] = {"key": f"{event}/writer/gpt", "title": "Breaker open", "text": "It is."}
    return Firing(event=event, source_id=source, at=at, **(given | more))


def over(source: str = "e2", at: datetime = AT, event: AlertEvent = "breaker_closed", **more: Any) -> Resolved:
    given: dict[str, Any] = {"key": "breaker_open/writer/gpt", "title": "Breaker closed", "text": "It is."}
    return Resolved(event=event, source_id=source, at=at, **(given | more))


def opened(**more: Any) -> Alert:
    alert = decide(raised(**more), None, RULES)
    assert alert is not None
    return alert


def then(alert: Alert | None) -> Alert:
    assert alert is not None
    return alert


def test_what_happens_first_opens_an_incident() -> None:
    alert = opened(agent="writer", model="gpt", payload={"errors": 3}, times=4)
    assert (alert.change, alert.status, alert.severity, alert.count, alert.version) == (
        "opened",
        "firing",
        "critical",
        4,
        1,
    )
    assert (alert.opened_at, alert.last_at, alert.at) == (AT, AT, AT)
    assert (alert.agent, alert.model, alert.payload) == ("writer", "gpt", {"errors": 3})
    assert alert.alert_id.isascii()
    assert alert.alert_id.replace("_", "").isalnum()


def test_the_same_event_again_says_nothing_new() -> None:
    assert decide(raised(), opened(), RULES) is None


def test_what_nobody_wants_to_be_notified_of_opens_nothing_and_its_end_is_no_news() -> None:
    rules = IncidentRules(("budget_soft_cap",), 600, (), Reminders())
    assert decide(raised(), None, rules) is None
    assert decide(over(), None, rules) is None


def test_an_event_that_is_heard_again_undoes_nobodys_decision() -> None:
    alert = then(resolve(opened(), "ann", None, after(minutes=2)))
    assert decide(raised(), alert, RULES) is None


def test_an_incident_keeps_the_way_to_people_that_it_was_opened_with() -> None:
    alert = opened(agent="writer", tenant="a")
    again = then(decide(raised("e3", agent="tagger", tenant="b"), alert, RULES))
    assert (again.agent, again.tenant) == ("writer", "a")


def test_it_happens_again_while_it_is_open_and_is_counted() -> None:
    alert = then(decide(raised("e3", after(minutes=5), text="Worse.", times=3), opened(), RULES))
    assert (alert.change, alert.count, alert.version, alert.text) == ("repeated", 4, 2, "Worse.")
    assert (alert.opened_at, alert.last_at) == (AT, after(minutes=5))
    assert alert.incident_id == opened().incident_id
    assert alert.alert_id != opened().alert_id


def test_the_opposite_event_resolves_it_once() -> None:
    alert = then(decide(over(at=after(minutes=1), reason="the probe succeeded"), opened(), RULES))
    assert (alert.change, alert.status, alert.event, alert.severity) == (
        "resolved",
        "resolved",
        "breaker_closed",
        "info",
    )
    assert (alert.resolved_at, alert.resolved_by, alert.reason) == (after(minutes=1), None, "the probe succeeded")
    # It stays known what it was.
    assert (alert.first_event, alert.highest_severity) == ("breaker_open", "critical")
    unknown = {"first_event": None, "highest_severity": None}
    of_an_earlier_version = opened().model_copy(update=unknown)
    assert then(decide(over(at=after(minutes=1), reason="the probe succeeded"), of_an_earlier_version, RULES)) == alert
    assert decide(over("e9", at=after(minutes=2)), alert, RULES) is None


def waiting(source: str = "w1", at: datetime = AT) -> Firing:
    lowered: dict[str, Any] = {"severity": "info", "ends_at": at + timedelta(hours=1), "times": 0}
    return raised(source, at, continues="unresolved", payload={"waits": True}, **lowered)


def test_the_incident_of_a_breaker_that_waits_for_a_call_falls_to_info_and_ends_by_itself_after_an_hour() -> None:
    waits = then(decide(waiting(at=after(minutes=1)), opened(), RULES))
    assert (waits.status, waits.severity, waits.highest_severity, waits.count) == ("firing", "info", "critical", 1)
    assert due(waits, after(minutes=60), RULES) is None
    ended = then(due(waits, after(minutes=61), RULES))
    assert (ended.status, ended.resolved_by, ended.reason) == ("resolved", None, "no call came to try the breaker")
    assert ended.text.endswith("It stays half-open, and the next call tries it. Nothing to do.")
    # It opens nothing, and undoes nobody's decision.
    assert decide(waiting(), None, RULES) is None
    assert decide(waiting("w2", after(minutes=2)), then(resolve(opened(), "ann", None, AT)), RULES) is None


def test_a_call_that_fails_then_makes_it_critical_again_or_is_a_new_incident() -> None:
    def failed(minutes: int) -> Firing:
        return raised("f1", after(minutes=minutes), continues="waiting")

    waits = then(decide(waiting(at=after(minutes=1)), opened(), RULES))
    again = then(decide(failed(5), waits, RULES))
    assert (again.change, again.severity, again.ends_at, again.incident_id) == (
        "repeated", "critical", None, waits.incident_id,
    )  # fmt: skip
    ended = then(due(waits, after(minutes=61), RULES))
    another = then(decide(failed(90), ended, RULES))
    assert (another.change, another.severity) == ("opened", "critical")
    assert another.incident_id != waits.incident_id
    # A probe that fails while traffic comes changes nothing, and neither does one after somebody has resolved it.
    assert decide(failed(5), opened(), RULES) is None
    assert decide(failed(5), then(resolve(waits, "ann", None, after(minutes=2))), RULES) is None


def test_what_comes_back_soon_is_the_same_incident_and_what_comes_back_later_is_another() -> None:
    resolved = then(decide(over(at=after(minutes=1)), opened(), RULES))
    soon = then(decide(raised("e3", after(minutes=11)), resolved, RULES))
    assert (soon.change, soon.status, soon.event, soon.severity) == ("reopened", "firing", "breaker_open", "critical")
    assert (soon.incident_id, soon.count, soon.resolved_at, soon.reason) == (opened().incident_id, 2, None, None)
    later = then(decide(raised("e3", after(minutes=11, seconds=1)), resolved, RULES))
    assert (later.change, later.count, later.version) == ("opened", 1, 1)
    assert later.incident_id != resolved.incident_id


def test_somebody_who_acknowledges_it_is_on_record_and_it_stays_acknowledged_when_it_repeats() -> None:
    alert = then(acknowledge(opened(), "ann", "on it", after(minutes=2)))
    assert (alert.change, alert.status, alert.acknowledged_by, alert.acknowledged_at, alert.reason) == (
        "acknowledged",
        "acknowledged",
        "ann",
        after(minutes=2),
        "on it",
    )
    assert acknowledge(alert, "bob", None, after(minutes=3)) is None
    again = then(decide(raised("e3", after(minutes=5)), alert, RULES))
    assert (again.change, again.status, again.acknowledged_by) == ("repeated", "acknowledged", "ann")


def test_an_open_incident_that_becomes_critical_is_worse_and_who_acknowledged_the_warning_is_asked_again() -> None:
    warning = then(acknowledge(opened(severity="warning"), "ann", None, after(minutes=1)))
    worse = then(decide(raised("e3", after(minutes=2)), warning, RULES))
    assert (worse.change, worse.status, worse.severity, worse.acknowledged_by) == (
        "worsened",
        "firing",
        "critical",
        None,
    )
    milder = then(decide(raised("e4", after(minutes=3), severity="warning"), worse, RULES))
    assert (milder.change, milder.severity, milder.highest_severity) == ("repeated", "warning", "critical")
    assert then(decide(raised("e5", after(minutes=4)), milder, RULES)).change == "worsened"


def test_what_comes_back_more_severe_than_it_was_is_worse() -> None:
    ended = then(decide(over(at=after(minutes=1)), opened(severity="warning"), RULES))
    assert then(decide(raised("e3", after(minutes=2)), ended, RULES)).change == "worsened"
    assert then(decide(raised("e3", after(minutes=2), severity="warning"), ended, RULES)).change == "reopened"


def test_who_acknowledged_it_is_asked_again_when_it_comes_back() -> None:
    acknowledged = then(acknowledge(opened(), "ann", None, after(minutes=2)))
    resolved = then(decide(over(at=after(minutes=3)), acknowledged, RULES))
    assert resolved.acknowledged_by == "ann"
    back = then(decide(raised("e5", after(minutes=5)), resolved, RULES))
    assert (back.status, back.acknowledged_by) == ("firing", None)


def test_an_operator_resolves_it() -> None:
    alert = then(resolve(opened(), "ann", "false alarm", after(minutes=2)))
    assert (alert.change, alert.status, alert.event, alert.resolved_by, alert.reason) == (
        "resolved",
        "resolved",
        "breaker_open",
        "ann",
        "false alarm",
    )
    # That somebody says so mends nothing.
    assert alert.text == (
        "It happened once, from 2026-11-21 10:00:00 UTC to 2026-11-21 10:02:00 UTC. "
        "What caused it may be so still: It is."
    )
    assert resolve(alert, "bob", None, after(minutes=3)) is None
    assert acknowledge(alert, "bob", None, after(minutes=3)) is None


def test_what_demands_a_person_waits_and_reminds_ever_less_often() -> None:
    alert = opened(event="guard_tripped")
    assert (alert.status, due_at(alert)) == ("pending", after(hours=1))
    assert due(alert, after(seconds=3599), RULES) is None
    first = then(due(alert, after(hours=1), RULES))
    assert (first.change, first.status, first.reminders) == ("reminded", "pending", 1)
    assert due_at(first) == after(hours=3)
    second = then(due(first, after(hours=3), RULES))
    assert due_at(second) == after(hours=3, seconds=10_000)
    acknowledged = then(acknowledge(second, "ann", None, after(hours=4)))
    assert due_at(acknowledged) is None
    assert due(acknowledged, after(days=9), RULES) is None


def test_what_demands_a_person_is_not_over_when_its_period_is() -> None:
    alert = opened(event="guard_tripped", ends_at=after(minutes=1))
    assert due(alert, after(minutes=2), RULES) is None
    seen = then(acknowledge(alert, "ann", None, after(minutes=3)))
    assert then(due(seen, after(minutes=3), RULES)).status == "resolved"


@pytest.mark.parametrize(
    ("event", "more", "reason"),
    [
        ("budget_soft_cap", {"ends_at": after(minutes=10)}, "the period has ended"),
        ("retries_exhausted", {"fades": True}, "it has not happened again since 2026-11-21 10:00:00 UTC"),
    ],
)
def test_it_is_over_by_itself(event: AlertEvent, more: dict[str, Any], reason: str) -> None:
    alert = opened(event=event, **more)
    assert due(alert, after(minutes=9), RULES) is None
    ended = then(due(alert, after(minutes=10), RULES))
    assert (ended.status, ended.resolved_by, ended.reason) == ("resolved", None, reason)
    assert due(ended, after(days=1), RULES) is None


def test_a_failure_that_happens_again_is_over_later() -> None:
    alert = opened(event="retries_exhausted", fades=True)
    again = then(decide(raised("e7", after(minutes=9), "retries_exhausted", fades=True), alert, RULES))
    assert due(again, after(minutes=10), RULES) is None
    assert then(due(again, after(minutes=19), RULES)).status == "resolved"


@settings(stateful_step_count=40)
class Incident(RuleBasedStateMachine):
    """One key, whatever happens to it: its incidents stay in order, and nobody is notified of the same thing twice."""

    sources = Bundle("sources")

    def __init__(self) -> None:
        super().__init__()
        self.now = AT
        self.number = 0
        self.reported: list[Alert] = []
        self.happened = 0

    @property
    def current(self) -> Alert | None:
        return self.reported[-1] if self.reported else None

    def apply(self, alert: Alert | None) -> None:
        if alert is not None:
            self.reported.append(alert)

    @rule(seconds=st.integers(0, 1000))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)
        if self.current is not None:
            self.apply(due(self.current, self.now, RULES))

    @rule(target=sources, times=st.integers(1, 5), event=st.just("guard_tripped"))
    def it_happens(self, times: int, event: AlertEvent) -> Firing:
        self.number += 1
        signal = raised(f"e{self.number}", self.now, event, times=times)
        self.apply(decide(signal, self.current, RULES))
        self.happened += times
        return signal

    @rule(signal=sources)
    def the_last_one_is_heard_again(self, signal: Firing) -> None:
        if self.current is not None and self.current.source_id == signal.source_id:
            assert decide(signal, self.current, RULES) is None

    @rule()
    def it_is_over(self) -> None:
        self.number += 1
        signal = over(f"e{self.number}", self.now, "guard_tripped", key="guard_tripped/writer/gpt", by="ann")
        self.apply(decide(signal, self.current, RULES))

    @rule(who=st.sampled_from(["ann", "bob"]), ends=st.booleans())
    def somebody_acts(self, who: str, ends: bool) -> None:
        if self.current is not None:
            self.apply((resolve if ends else acknowledge)(self.current, who, None, self.now))

    @invariant()
    def every_alert_is_another_one(self) -> None:
        assert len({alert.alert_id for alert in self.reported}) == len(self.reported)

    @invariant()
    def versions_follow_each_other(self) -> None:
        for before, alert in zip(self.reported, self.reported[1:], strict=False):
            if alert.incident_id == before.incident_id:
                assert alert.version == before.version + 1
                assert alert.change != "opened"
            else:
                assert (before.status, alert.change, alert.version) == ("resolved", "opened", 1)

    @invariant()
    def nothing_that_happened_is_uncounted(self) -> None:
        last = {alert.incident_id: alert.count for alert in self.reported}
        assert sum(last.values()) == self.happened

    @invariant()
    def only_what_is_pending_reminds_and_only_what_is_over_says_when(self) -> None:
        if (alert := self.current) is not None:
            assert (alert.remind_at is not None) == (alert.status == "pending")
            assert (alert.resolved_at is not None) == (alert.status == "resolved")
            assert alert.status != "acknowledged" or alert.acknowledged_by is not None


TestIncident = Incident.TestCase
