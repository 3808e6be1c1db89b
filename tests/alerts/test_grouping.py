"""Signals that come with every job wait for each other."""

from __future__ import annotations

from datetime import UTC, datetime

from breakwater.alerts.rules.grouping import GROUP_INTERVAL_S, GROUP_WAIT_S, SignalGroups
from breakwater.alerts.rules.signals import Firing, Resolved, Signal

AT = datetime(2026, 11, 30, tzinfo=UTC)


def failure(key: str = "retries_exhausted/writer/error") -> Firing:
    return Firing(key, "retries_exhausted", "Retries exhausted", "", "e1", AT)


def end(key: str = "retries_exhausted/writer/error") -> Resolved:
    return Resolved(key, "retries_exhausted", "It works", "", "e2", AT)


def due_s(groups: SignalGroups[str], signal: Signal, now_s: float) -> float:
    return groups.due_s(groups.add(signal, "event", now_s))


def test_the_first_signal_waits_and_all_that_come_meanwhile_are_one() -> None:
    groups = SignalGroups[str]()
    group = groups.add(failure(), "first", 100.0)
    assert groups.add(failure(), "second", 101.0) is group
    groups.add(failure("retries_exhausted/other/error"), "third", 101.0)
    assert groups.due(100 + GROUP_WAIT_S - 0.1) == []
    assert groups.due(100 + GROUP_WAIT_S) == [group]
    assert isinstance(group.signal, Firing)
    assert (group.signal.times, group.sources, len(groups)) == (2, ["first", "second"], 2)


def test_what_was_just_recorded_waits_longer_but_not_its_end() -> None:
    groups = SignalGroups[str]()
    groups.end(groups.add(failure(), "first", 0.0), 2.0)
    assert due_s(groups, failure(), 3.0) == 2 + GROUP_INTERVAL_S
    assert due_s(groups, end(), 4.0) == 3 + GROUP_WAIT_S
    groups.end(groups.add(failure("retries_exhausted/other/error"), "other", 20.0), 20.0)
    assert due_s(groups, failure(), 21.0) == 3 + GROUP_WAIT_S


def test_the_last_signal_is_how_it_is_now() -> None:
    groups = SignalGroups[str]()
    group = groups.add(failure(), "first", 0.0)
    assert groups.add(end(), "second", 0.5).signal == end()
    assert groups.add(failure(), "third", 0.6).signal == failure()
    assert groups.of(group.signal.key) is group
