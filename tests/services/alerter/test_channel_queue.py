"""The decisions about one channel's alerts, without a bus and without a receiver."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from breakwater.alerts.channels.channel import SendError
from breakwater.alerts.rules.alert_rules import UNDELIVERABLE
from breakwater.alerts.rules.outbox import ChannelRules
from breakwater.alerts.settings import Route
from breakwater.services.alerter.channel_queue import ChannelQueue, ComposedMessage, Schedule
from tests.alerts.test_outbox import alert

NOW = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
SCHEDULE = Schedule(first_s=1.0, max_s=60.0, give_up_s=100.0, tries_if_permanent=2)


def delivery(sequence: int) -> Any:
    return SimpleNamespace(sequence=sequence, published_at=NOW, stream="ALERTS", subject="bw.alerts.breaker_open")


def queue_of(**route: Any) -> ChannelQueue:
    channel = cast("Any", SimpleNamespace(name="ops", interval_s=0.5, updates=False))
    rules = ChannelRules(Route.model_validate({"rate_limit": "off"} | route), 0.0)
    return ChannelQueue(channel, rules, SCHEDULE)


def composed_of(queue: ChannelQueue, name: str = "a", sequence: int = 1) -> ComposedMessage:
    assert queue.add(alert(name), delivery(sequence))
    composed, skipped = queue.compose(NOW)
    assert composed is not None
    assert skipped == []
    return composed


def test_a_failure_of_the_receiver_pauses_the_channel_until_the_message_is_too_old() -> None:
    queue = queue_of()
    composed = composed_of(queue)
    assert queue.note_failure(composed, SendError("503"), 10.0) == "retry"
    assert (queue.pause_s(10.0), queue.due(10.9), queue.due(11.0)) == (1.0, None, composed)
    assert queue.note_failure(composed, SendError("429", retry_after_s=7.0), 11.0) == "retry"
    assert (queue.pause_s(11.0), composed.not_before) == (7.0, 18.0)
    assert queue.note_failure(composed, SendError("503"), 110.0) == "give up"


def test_a_refusal_of_a_message_pauses_that_message_alone() -> None:
    queue = queue_of()
    composed = composed_of(queue)
    assert queue.note_failure(composed, SendError("400", permanent=True), 10.0) == "retry"
    assert (queue.pause_s(10.0), queue.due(10.5), queue.due(14.0)) == (0.5, None, composed)
    assert queue.note_failure(composed, SendError("400", permanent=True), 14.0) == "give up"


def test_a_channel_that_wants_no_more_is_disabled_by_the_first_failure() -> None:
    queue = queue_of()
    assert queue.note_failure(composed_of(queue), SendError("410", permanent=True, disables=True), 10.0) == "disable"


def test_an_incident_has_one_message_on_its_way_and_a_delivered_alert_is_known() -> None:
    queue = queue_of()
    composed = composed_of(queue)
    assert queue.add(alert("a", "acknowledged", 2), delivery(2))
    assert queue.compose(NOW) == (None, [])
    assert queue.held == 2
    queue.note_delivery(composed, composed.message, NOW, 10.0)
    assert not queue.add(alert("a"), delivery(1))
    following, _ = queue.compose(NOW)
    assert following is not None
    assert list(following.deliveries) == ["alert_a_2"]


def test_a_replay_is_not_held_and_waits_for_the_rate_limit() -> None:
    queue = queue_of(rate_limit={"messages": 1, "within_s": 600})
    queue.replay(delivery(1), alert("old"))
    assert (queue.held, queue.has_replays, queue.due(0.0)) == (0, True, None)
    replay = queue.due_replay(NOW, 0.0)
    assert replay is not None
    queue.note_delivery(replay, replay.message, NOW, 0.0)
    queue.replay(delivery(2), alert("other"))
    assert queue.due_replay(NOW, 0.0) is None


@pytest.mark.parametrize(("replay", "about"), [(False, alert("a").key), (True, UNDELIVERABLE)])
def test_a_dead_letter_says_which_incident_was_not_delivered(replay: bool, about: str) -> None:
    composed = ComposedMessage(alert("a"), {"alert_a_1": delivery(7)}, replay=replay, failures=3)
    dead_letter = composed.dead_letter("ops", "no answer", NOW)
    assert (dead_letter.sequence, dead_letter.error) == (7, "ops: no answer (tried 3 times)")
    assert dead_letter.headers["Breakwater-Incident"] == about
