"""What a channel is sent next."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.alerts.contract import Alert, AlertChange, AlertDigest, IncidentStatus
from breakwater.alerts.rules.alert_rules import CONTINUED
from breakwater.alerts.rules.outbox import ChannelRules, Next, WaitingAlert, message_id, next_message, quiet_until
from breakwater.alerts.settings import MessageLimit, QuietHours, Route
from tests.tables import each_row

AT = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
QUIET_S = 600.0

STATUS: dict[AlertChange, IncidentStatus] = {
    "opened": "firing",
    "repeated": "firing",
    "worsened": "firing",
    "reopened": "firing",
    "acknowledged": "acknowledged",
    "reminded": "pending",
    "resolved": "resolved",
}


def alert(incident: str = "a", change: AlertChange = "opened", version: int = 1, **more: Any) -> Alert:
    given: dict[str, Any] = {
        "alert_id": f"alert_{incident}_{version}",
        "incident_id": f"inc_{incident}",
        "key": f"breaker_open/writer/{incident}",
        "change": change,
        "status": STATUS[change],
        "event": "breaker_closed" if change == "resolved" else "breaker_open",
        "severity": "critical",
        "agent": "writer",
        "title": f"Breaker open: {incident}",
        "text": "It is.",
        "payload": {},
        "count": 1,
        "version": version,
        "opened_at": AT,
        "last_at": AT,
        "resolved_at": AT if change == "resolved" else None,
        "source_id": "e",
        "at": AT,
    }
    return Alert.model_validate(given | more)


def held(*alerts: Alert) -> list[WaitingAlert]:
    return [WaitingAlert(sequence, one, one.at) for sequence, one in enumerate(alerts, start=1)]


def rules(every_change: bool = False, is_chat: bool = False, **route: Any) -> ChannelRules:
    given = Route.model_validate({"rate_limit": "off"} | route)
    return ChannelRules(given, QUIET_S, every_change=every_change, is_chat=is_chat)


def changes(*given: AlertChange, **more: Any) -> list[WaitingAlert]:
    return held(*(alert("a", change, version, **more) for version, change in enumerate(given, start=1)))


def message_of(decided: Next) -> str | None:
    return None if decided.message is None else message_id(decided.message)


def test_an_incident_that_opens_is_reported_at_once() -> None:
    decided = next_message(changes("opened"), rules(), AT)
    assert (message_of(decided), decided.covers, decided.skip, decided.counts) == ("alert_a_1", (1,), (), True)


def test_nothing_to_tell_of_nothing() -> None:
    assert next_message([], rules(), AT) == Next()


@pytest.mark.parametrize(
    ("waiting", "newest"),
    [
        (("opened", "repeated"), "alert_a_2"),
        (("opened", "repeated", "acknowledged"), "alert_a_3"),
        (("opened", "resolved", "reopened"), "alert_a_3"),
    ],
)
def test_the_newest_alert_of_an_incident_speaks_for_the_older_ones(
    waiting: tuple[AlertChange, ...], newest: str
) -> None:
    decided = next_message(changes(*waiting), rules(), AT)
    assert message_of(decided) == newest
    assert sorted(decided.covers + decided.skip) == list(range(1, len(waiting) + 1))


def later(*waiting: AlertChange) -> list[WaitingAlert]:
    """Changes of an incident whose opening was sent."""
    return held(*(alert("a", change, version) for version, change in enumerate(waiting, start=2)))


@each_row(
    ("waiting", "message", "skipped"),
    [
        (("repeated",), None, 1),
        (("repeated", "repeated"), None, 2),
        (("acknowledged",), "alert_a_2", 0),
        (("acknowledged", "repeated"), "alert_a_3", 0),
        (("reminded",), "alert_a_2", 0),
        (("reopened",), "alert_a_2", 0),
        # People believe that it is open, and it is.
        (("resolved", "reopened"), None, 2),
        (("resolved", "reopened", "repeated"), None, 3),
        (("worsened",), "alert_a_2", 0),
        (("worsened", "repeated"), "alert_a_3", 0),
        (("resolved", "worsened"), "alert_a_3", 0),
        (("resolved", "reopened", "acknowledged"), "alert_a_4", 0),
    ],
)
def test_of_an_incident_that_was_reported_only_news_are(
    waiting: tuple[AlertChange, ...], message: str | None, skipped: int
) -> None:
    decided = next_message(later(*waiting), rules(), AT)
    assert (message_of(decided), len(decided.skip)) == (message, skipped)


def test_a_digest_names_the_one_agent_that_a_deployment_fails_for() -> None:
    of_deployment = {"key": "deployment_failing/openai/x", "event": "deployment_failing", "agent": "*"}
    alerts = [
        alert("a", **of_deployment, payload={"agents": ["reader"]}),
        alert("b", **of_deployment, payload={"agents": ["reader", "writer"]}),
    ]
    decided = next_message(held(*alerts), rules(rate_limit={"messages": 1, "within_s": 60}), AT)
    assert isinstance(decided.message, AlertDigest)
    assert [one.agent for one in decided.message.alerts] == ["reader", "*"]


def test_a_channel_for_critical_incidents_is_sent_a_warning_once_it_has_become_critical() -> None:
    warning = alert("a", "opened", 1, severity="warning", highest_severity="warning")
    worse = alert("a", "worsened", 2, highest_severity="critical")
    assert next_message(held(warning), rules(severity="critical"), AT).skip == (1,)
    assert message_of(next_message(held(worse), rules(severity="critical"), AT)) == "alert_a_2"
    night = rules(quiet_hours={"start": "09:00", "end": "11:00", "but": "critical"})
    assert next_message(held(warning), night, AT).message is None
    assert message_of(next_message(held(warning, worse), night, AT)) == "alert_a_2"


def test_a_message_that_is_kept_up_to_date_shows_a_rise_at_once_and_what_came_after_it_later() -> None:
    bot = rules(every_change=True)
    waiting = later("repeated", "worsened", "repeated")
    decided = next_message(waiting, bot, AT, updatable={"inc_a": AT})
    assert (message_of(decided), decided.covers, decided.skip) == ("alert_a_3", (2,), (1,))
    rest = next_message(waiting[2:], bot, AT, updatable={"inc_a": AT})
    assert (rest.message, rest.at) == (None, AT + timedelta(minutes=1))


def test_a_recovery_waits_until_it_has_lasted() -> None:
    waiting = later("resolved")
    early = next_message(waiting, rules(), AT + timedelta(seconds=QUIET_S - 1))
    assert (early.message, early.skip, early.at) == (None, (), AT + timedelta(seconds=QUIET_S))
    assert message_of(next_message(waiting, rules(), AT + timedelta(seconds=QUIET_S))) == "alert_a_2"


def test_what_was_over_before_anybody_was_notified_is_reported_when_it_has_lasted() -> None:
    assert next_message(changes("opened", "resolved"), rules(), AT).message is None
    lasted = next_message(changes("opened", "resolved"), rules(), AT + timedelta(seconds=QUIET_S))
    assert (message_of(lasted), lasted.covers) == ("alert_a_2", (1, 2))


def test_a_recovery_of_a_backlog_must_last_from_when_it_is_known() -> None:
    [recovered] = later("resolved")
    late = WaitingAlert(recovered.sequence, recovered.alert, AT + timedelta(hours=2))
    early = next_message([late], rules(), AT + timedelta(hours=2))
    assert (early.message, early.at) == (None, AT + timedelta(hours=2, seconds=QUIET_S))


def test_a_recovery_whose_time_lies_ahead_waits_no_longer_than_any_other() -> None:
    ahead = WaitingAlert(1, alert("a", "resolved", 2, at=AT + timedelta(hours=1)), AT)
    assert next_message([ahead], rules(), AT).at == AT + timedelta(seconds=QUIET_S)
    assert message_of(next_message([ahead], rules(), AT + timedelta(seconds=QUIET_S))) == "alert_a_2"


def test_what_a_person_resolved_is_reported_at_once() -> None:
    assert message_of(next_message(held(alert("a", "resolved", 2, resolved_by="ann")), rules(), AT)) == "alert_a_2"


def test_a_channel_that_keeps_its_messages_up_to_date_hears_every_change_without_delay_and_without_limit() -> None:
    bot = rules(every_change=True, rate_limit={"messages": 1})
    for change in ("repeated", "reopened", "acknowledged", "resolved"):
        decided = next_message(later(change), bot, AT, sent=[AT], updatable={"inc_a": AT - timedelta(minutes=1)})
        assert (message_of(decided), decided.counts) == ("alert_a_2", False)
    # Where there is nothing to change it would be a new message, for which the limit holds.
    assert next_message(later("repeated"), bot, AT, sent=[AT]).message is None


@each_row(
    ("route", "more", "takes"),
    [
        ({"events": ["breaker_open"]}, {}, True),
        ({"events": ["budget_soft_cap"]}, {}, False),
        ({"agents": ["writer"]}, {}, True),
        ({"agents": ["tagger"]}, {}, False),
        ({"agents": ["tagger"]}, {"agent": "*"}, True),
        ({"agents": ["tagger"]}, {"agent": None}, False),
        ({"tenants": ["acme"]}, {"tenant": "acme"}, True),
        ({"tenants": ["acme"]}, {}, False),
        ({"severity": "critical"}, {}, True),
        ({"severity": "critical"}, {"key": "budget_soft_cap/x", "event": "budget_soft_cap"}, False),
        ({"severity": "warning"}, {"key": "budget_soft_cap/x", "event": "budget_soft_cap"}, True),
    ],
)
def test_a_channel_receives_what_is_routed_to_it(route: dict[str, Any], more: dict[str, Any], takes: bool) -> None:
    decided = next_message(changes("opened", **more), rules(**route), AT)
    assert ((decided.message is not None), decided.skip) == (takes, () if takes else (1,))


def test_recoveries_go_where_they_are_wanted() -> None:
    recovered = held(alert("a", "resolved", 2, resolved_by="ann"))
    assert next_message(recovered, rules(events=["breaker_open"]), AT).skip == (1,)
    assert next_message(recovered, rules(events=["breaker_closed"]), AT).message is not None
    # A message that says "firing" is changed all the same.
    bot = rules(every_change=True, events=["breaker_open"])
    assert next_message(recovered, bot, AT, updatable={"inc_a": AT}).message is not None
    nobody = ChannelRules(Route(rate_limit=None), QUIET_S, on_events=("breaker_open",))
    assert next_message(recovered, nobody, AT).skip == (1,)


def test_beyond_the_rate_limit_the_last_message_is_a_digest_of_all_the_others() -> None:
    limited = rules(rate_limit={"messages": 3, "within_s": 300})
    waiting = held(*(alert(f"i{number}") for number in range(10)))
    first = next_message(waiting, limited, AT)
    assert message_of(first) == "alert_i0_1"
    last = next_message(waiting[2:], limited, AT, sent=[AT, AT])
    assert isinstance(last.message, AlertDigest)
    assert (last.message.why, last.message.counts, last.covers) == (
        "rate_limit",
        {"breaker_open": 8},
        tuple(range(3, 11)),
    )
    assert [one.title for one in last.message.alerts] == [f"Breaker open: i{number}" for number in range(2, 10)]
    none = next_message(waiting, limited, AT + timedelta(seconds=10), sent=[AT, AT, AT])
    assert (none.message, none.at) == (None, AT + timedelta(seconds=300))
    free = next_message(waiting[:1], limited, AT + timedelta(seconds=300), sent=[AT, AT, AT])
    assert message_of(free) == "alert_i0_1"


def test_the_worst_comes_first() -> None:
    mild = alert("mild", key="budget_soft_cap/x", event="budget_soft_cap")
    assert message_of(next_message(held(mild, alert("bad")), rules(), AT)) == "alert_bad_1"


def test_a_breaker_that_flaps_is_one_message_also_where_recoveries_are_not_wanted() -> None:
    # Whoever takes only `breaker_open` hears of it once, and of no recovery that did not last.
    for wanted in (rules(events=["breaker_open"]), ChannelRules(Route(rate_limit=None), QUIET_S, ("breaker_open",))):
        resolved = next_message(later("resolved"), wanted, AT)
        assert (resolved.message, resolved.skip) == (None, ())
        assert next_message(later("resolved", "reopened"), wanted, AT).skip == (1, 2)
        lasted = next_message(later("resolved"), wanted, AT + timedelta(seconds=QUIET_S))
        assert (lasted.message, lasted.skip) == (None, (1,))
    only_recoveries = rules(events=["breaker_closed"])
    assert next_message(changes("opened"), only_recoveries, AT).skip == (1,)
    assert next_message(later("resolved"), only_recoveries, AT + timedelta(seconds=QUIET_S)).message is not None


def test_what_is_held_back_of_one_incident_does_not_grow() -> None:
    night = at("2026-11-21T23:00:00+00:00")
    mild: dict[str, Any] = {"key": "budget_soft_cap/x", "event": "budget_soft_cap", "at": night}
    waiting = held(
        alert("a", "opened", 1, **mild), *(alert("a", "repeated", version, **mild) for version in range(2, 1002))
    )
    decided = next_message(waiting, rules(quiet_hours=NIGHT.model_dump()), night)
    assert (decided.message, len(decided.skip)) == (None, 999)
    assert not {1, 1001} & set(decided.skip)


def test_what_nobody_has_heard_of_comes_before_what_is_only_changed() -> None:
    bot = rules(every_change=True)
    updatable = dict.fromkeys(("inc_a", "inc_b"), AT - timedelta(hours=1))
    waiting = held(alert("a", "repeated", 2), alert("b", "resolved", 2), alert("new"))
    assert message_of(next_message(waiting, bot, AT, updatable=updatable)) == "alert_new_1"
    # That it happened again changes a message once a minute, and all else at once.
    updatable = dict.fromkeys(("inc_a", "inc_b"), AT)
    decided = next_message(waiting[:2], bot, AT, updatable=updatable)
    assert message_of(decided) == "alert_b_2"
    assert next_message(waiting[:1], bot, AT, updatable=updatable).at == AT + timedelta(minutes=1)


def test_that_alerts_do_not_arrive_is_reported_on_every_channel() -> None:
    dead = alert(key="job_dead_lettered//undeliverable/ops", event="job_dead_lettered", agent=None)
    for route in ({"severity": "critical"}, {"agents": ["tagger"]}, {"events": ["breaker_open"]}):
        assert message_of(next_message(held(dead), rules(**route), AT)) == "alert_a_1"


def test_a_clock_that_is_ahead_delays_nothing() -> None:
    early = alert("a", at=AT + timedelta(minutes=10))
    assert message_of(next_message(held(early), rules(), AT)) == "alert_a_1"


NIGHT = QuietHours.model_validate({"start": "22:00", "end": "07:00", "timezone": "Europe/Berlin"})


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@each_row(
    ("now", "until"),
    [
        ("2026-11-21T20:59:59+00:00", None),
        ("2026-11-21T21:00:00+00:00", "2026-11-22T06:00:00+00:00"),
        ("2026-11-22T05:59:59+00:00", "2026-11-22T06:00:00+00:00"),
        ("2026-11-22T06:00:00+00:00", None),
        # Clocks change in that night: it is an hour shorter, or longer.
        ("2026-03-28T21:30:00+00:00", "2026-03-29T05:00:00+00:00"),
        ("2026-10-24T20:30:00+00:00", "2026-10-25T06:00:00+00:00"),
    ],
)
def test_quiet_hours_end_in_the_morning_of_their_time_zone(now: str, until: str | None) -> None:
    mild = alert(key="budget_soft_cap/x", event="budget_soft_cap")
    found = quiet_until(NIGHT, mild, at(now))
    assert found == (None if until is None else at(until))
    assert quiet_until(NIGHT, alert(), at(now)) is None  # critical


def test_what_came_in_quiet_hours_is_one_digest_in_the_morning() -> None:
    night, morning = at("2026-11-21T23:00:00+00:00"), at("2026-11-22T06:00:00+00:00")
    mild = [
        alert(f"m{number}", key=f"budget_soft_cap/{number}", event="budget_soft_cap", at=night) for number in range(3)
    ]
    quiet = rules(quiet_hours=NIGHT.model_dump())
    asleep = next_message(held(*mild), quiet, night)
    assert (asleep.message, asleep.at) == (None, morning)
    awake = next_message(held(*mild), quiet, morning)
    assert isinstance(awake.message, AlertDigest)
    assert (awake.message.why, len(awake.message.alerts), awake.covers) == ("quiet_hours", 3, (1, 2, 3))
    assert message_of(next_message(held(*mild, alert("bad", at=night)), quiet, night)) == "alert_bad_1"
    assert message_of(next_message(held(mild[0]), quiet, morning)) == "alert_m0_1"


CHANGES: Sequence[AlertChange] = ("repeated", "worsened", "reopened", "acknowledged", "reminded", "resolved")


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(CHANGES)), max_size=40),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_everything_that_waits_is_reported_or_skipped_in_the_end_and_the_limit_holds(
    given_changes: list[tuple[int, AlertChange]], messages: int, every_change: bool, quiet: bool
) -> None:
    versions: dict[int, int] = {}
    waiting: list[WaitingAlert] = []
    for sequence, (incident, change) in enumerate(given_changes, start=1):
        versions[incident] = versions.get(incident, 0) + 1
        real = "opened" if versions[incident] == 1 else change
        moment = AT + timedelta(seconds=sequence)
        waiting.append(
            WaitingAlert(
                sequence, alert(f"i{incident}", real, versions[incident], key="budget_soft_cap/x", at=moment), moment
            )
        )
    hours = {"start": "09:00", "end": "11:00"} if quiet else None
    channel = ChannelRules(
        Route.model_validate({"rate_limit": {"messages": messages, "within_s": 60}, "quiet_hours": hours}),
        QUIET_S,
        every_change=every_change,
    )
    now, sent, updatable = AT + timedelta(minutes=1), list[datetime](), dict[str, datetime]()
    heard: dict[str, Alert | None] = {}
    opened = {one.alert.incident_id for one in waiting}
    left = {one.sequence: one for one in waiting}
    for _ in range(500):
        decided = next_message(list(left.values()), channel, now, sent=sent, updatable=updatable)
        for sequence in (*decided.skip, *decided.covers):
            del left[sequence]
        match decided.message:
            case None:
                if decided.at is None:
                    break
                assert decided.at > now
                now = decided.at
                continue
            case Alert() as one:
                heard[one.incident_id] = one
                if every_change:
                    updatable[one.incident_id] = now
            case AlertDigest() as digest:
                assert len(digest.alerts) > 1
                assert sum(digest.counts.values()) == len(digest.alerts)
                heard |= dict.fromkeys((one.incident_id for one in digest.alerts), None)
        if decided.counts:
            sent.append(now)
        assert len([moment for moment in sent if moment > now - timedelta(seconds=60)]) <= messages
    assert left == {}
    assert set(heard) == opened


def test_the_limit_of_a_channel_is_on_unless_it_is_switched_off() -> None:
    assert Route().rate_limit == MessageLimit(messages=10, within_s=300)


# --- Chats -----------------------------------------------------------------------------------------------------------

CHAT = rules(is_chat=True)
DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)


def applied(name: str = "config") -> Alert:
    more: dict[str, Any] = {"status": "resolved", "resolved_by": "ann", "agent": None, "severity": "info"}
    return alert(name, key=f"config_applied/{name}", event="config_applied", first_event="config_applied", **more)


def test_a_config_that_is_applied_is_no_message_and_a_line_of_the_next_digest() -> None:
    alone = next_message(held(applied()), CHAT, AT)
    assert (alone.message, alone.skip, alone.at) == (None, (), AT + DAY)
    beside = next_message(held(applied(), alert("bad")), CHAT, AT)
    assert (message_of(beside), beside.covers) == ("alert_bad_1", (2,))
    limited = rules(is_chat=True, rate_limit={"messages": 1, "within_s": 300})
    digest = next_message(held(applied(), alert("bad"), alert("worse")), limited, AT)
    assert isinstance(digest.message, AlertDigest)
    assert (digest.message.why, len(digest.message.alerts), digest.covers) == ("rate_limit", 3, (2, 3, 1))


def test_notices_that_no_digest_takes_are_sent_together_after_a_day() -> None:
    day_after = next_message(held(applied(), applied("later")), CHAT, AT + DAY)
    assert isinstance(day_after.message, AlertDigest)
    assert (day_after.message.why, day_after.message.counts) == ("notices", {"config_applied": 2})
    assert day_after.covers == (1, 2)
    full = rules(is_chat=True, rate_limit={"messages": 1, "within_s": 300})
    waits = next_message(held(applied()), full, AT + DAY, sent=[AT + DAY - SECOND])
    assert (waits.message, waits.at) == (None, AT + DAY - SECOND + timedelta(seconds=300))


def ended(event: str, **more: Any) -> WaitingAlert:
    key = f"{event}/global//daily/2026-11-21/80"
    given = {"key": key, "event": event, "first_event": event, "source_id": "ended at 2026-11-21 10:00:00 UTC"}
    return WaitingAlert(1, alert("a", "resolved", 2, **(given | more)), AT)


@each_row(
    ("waiting", "is_message"),
    [
        (ended("budget_soft_cap"), False),
        (ended("budget_soft_cap", resolved_by="ann"), True),  # a person has raised the cap
        (ended("guard_soft_cap"), False),
        (ended("budget_hard_cap"), True),  # calls are admitted again
        (ended("quota_exhausted"), True),
        (ended("deployment_failing"), False),  # nobody has called it for two hours
        (ended("deployment_failing", source_id="e1:1/answered"), True),
        (ended("deployment_failing", source_id="writer/m#1/continues", reason=CONTINUED), False),
        (ended("breaker_open"), False),  # it waits for a call that does not come
        (ended("breaker_open", source_id="writer/m#2"), True),
    ],
)
def test_the_end_of_a_warning_by_itself_is_no_message_and_other_ends_are(
    waiting: WaitingAlert, is_message: bool
) -> None:
    lasted = AT + timedelta(seconds=QUIET_S)
    assert (next_message([waiting], CHAT, lasted).message is not None) is is_message
    assert next_message([waiting], rules(), lasted).message is not None, "a program is told of each"


def crossed(percent: int, after_s: float = 0, budget: str = "global//daily/2026-11-21", **more: Any) -> WaitingAlert:
    event = "budget_hard_cap" if percent == 100 else "budget_soft_cap"
    at = AT + timedelta(seconds=after_s)
    named = {"key": f"{event}/{budget}/{percent}", "event": event, "first_event": event, "agent": None}
    return WaitingAlert(percent, alert(f"{budget}-{percent}", at=at, opened_at=at, last_at=at, **named, **more), at)


def test_half_and_most_of_a_cap_and_the_cap_within_a_minute_are_one_message_with_the_highest() -> None:
    steps = [crossed(50), crossed(80, 20), crossed(100, 50)]
    for number in (1, 2):
        waits = next_message(steps[:number], CHAT, AT + 50 * SECOND)
        assert (waits.message, waits.skip, waits.at) == (None, (), AT + 60 * SECOND)
    cap = next_message(steps, CHAT, AT + 50 * SECOND)
    assert isinstance(cap.message, Alert)
    assert (cap.message.key, sorted(cap.covers)) == ("budget_hard_cap/global//daily/2026-11-21/100", [50, 80, 100])


def test_a_threshold_is_sent_after_a_minute_with_the_highest_that_was_crossed_meanwhile() -> None:
    risen = next_message([crossed(50), crossed(80, 59)], CHAT, AT + 60 * SECOND)
    assert isinstance(risen.message, Alert)
    assert (risen.message.key.rpartition("/")[2], sorted(risen.covers)) == ("80", [50, 80])
    later = next_message([crossed(80, 59)], CHAT, AT + 60 * SECOND)
    assert (later.message, later.at) == (None, AT + 119 * SECOND)
    of_two = next_message([crossed(50), crossed(80, budget="agent/a/daily/2026-11-21")], CHAT, AT + 60 * SECOND)
    assert len(of_two.covers) == 1, "budgets rise each by itself"


def test_programs_and_chats_that_can_edit_wait_for_no_higher_threshold() -> None:
    for told in (rules(), rules(every_change=True), rules(is_chat=True, every_change=True)):
        assert message_of(next_message([crossed(50)], told, AT)) is not None


def test_the_ends_of_all_thresholds_of_a_budget_are_one_message() -> None:
    over = [
        WaitingAlert(percent, crossed(percent).alert.model_copy(update=end), AT)
        for percent in (50, 100)
        for end in ({"change": "resolved", "status": "resolved", "resolved_by": "ann", "version": 2},)
    ]
    raised = next_message(over, CHAT, AT)
    assert isinstance(raised.message, Alert)
    assert (raised.message.key.rpartition("/")[2], sorted(raised.covers)) == ("100", [50, 100])
