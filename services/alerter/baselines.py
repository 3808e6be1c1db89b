"""Figures of every agent, learned from its executions: its baseline and anomalies, and its cut-off answers."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from statistics import median

import structlog

from breakwater.contracts.execution import Execution, Reason
from breakwater.contracts.types import ms_from_time
from breakwater.policy.alert_rules import AnomalyRules
from breakwater.policy.anomaly import AnomalyChange, Baseline, Measure, Minute, judge, lapse, signals
from breakwater.policy.signals import Firing, Signal, cut_off

GRACE = timedelta(seconds=30)
"""The time for which a minute waits for its last executions. Later ones count for the next minute that is open."""
CAUGHT_UP = timedelta(seconds=60)
"""After so long without an execution there is no backlog, and minutes end by the clock. Before that they end by the
newest execution: otherwise all of a backlog would count for the present minute."""
SAVE_EVERY = timedelta(minutes=5)
MAX_AGENTS = 2_000
LAST_ANSWERS, FEWEST_ANSWERS = 50, 10
"""Answers by which `CutOffAnswers` judges an agent."""
MAX_DURATIONS = 256
"""Of one minute, of which the median is taken; its error is then 8 % of how much they differ."""

_FAILURES: frozenset[Reason | None] = frozenset({"error", "timeout", "worker_lost", None})
"""Other reasons are refusals, or about no job: they end immediately, and would look like fast calls."""


class _Sample:
    """Some of a minute's times, spread evenly over it."""

    __slots__ = ("_kept", "_stride", "count")

    def __init__(self) -> None:
        self.count = 0
        self._kept = array("q")
        self._stride = 1

    def add(self, ms: int) -> None:
        if self.count % self._stride == 0:
            self._kept.append(ms)
            if len(self._kept) == MAX_DURATIONS:
                self._kept, self._stride = self._kept[::2], self._stride * 2
        self.count += 1

    def median(self) -> float | None:
        return float(median(self._kept)) if self._kept else None


class _Counts:
    """One agent's minute, while it is open."""

    __slots__ = ("cost", "durations", "failures", "first_tokens")

    def __init__(self) -> None:
        self.failures = 0
        self.cost: int | None = None
        self.durations = _Sample()
        self.first_tokens = _Sample()

    def add(self, execution: Execution) -> None:
        failed = execution.status == "dead_lettered" and execution.reason in _FAILURES
        called = failed or execution.status == "succeeded"
        # Cancelled jobs have spent money, too. But the zero of a refusal must not make the baseline zero.
        if execution.total_cost is not None and (called or execution.total_cost):
            self.cost = (self.cost or 0) + execution.total_cost
        for attempt in execution.attempts:
            if attempt.first_token_ms is not None:
                self.first_tokens.add(attempt.first_token_ms)
        if called:
            self.durations.add(execution.duration_ms)
            self.failures += failed

    def minute(self, number: int) -> Minute:
        calls, streams = self.durations, self.first_tokens
        return Minute(number, calls.count, self.failures, self.cost, calls.median(), streams.count, streams.median())


class _Agent:
    __slots__ = ("anomalies", "baseline", "changed", "saved_anomalies", "saved_at")

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.changed = False
        self.saved_at: datetime | None = None
        self.anomalies: frozenset[Measure] = baseline.anomalies()
        self.saved_anomalies = self.anomalies


class Baselines:
    """The figures of every agent. In memory, bounded, without I/O; for one caller, which sees all executions."""

    def __init__(self, rules: AnomalyRules, most_agents: int = MAX_AGENTS) -> None:
        self._rules = rules
        self._most_agents = most_agents
        self._agents: dict[str, _Agent] = {}
        """In the order of their latest executions."""
        self._open: dict[int, dict[str, _Counts]] = {}
        """By minute and agent."""
        self._closed = -1
        """The latest minute that takes no more executions."""
        self._newest: datetime | None = None
        """End of the newest execution."""
        self._heard_at: datetime | None = None
        """Time of the last call of `add`."""

    def add(self, execution: Execution, now: datetime) -> None:
        """Counts one, in the minute in which it ended.

        In a later one where that is closed, and in the present one where a worker's clock is ahead of `now`.
        """
        self._heard_at = now
        ended = min(execution.completed_at, now)
        if self._newest is None or ended > self._newest:
            self._newest = ended
        if execution.dry_run or execution.cache_hit:
            return
        name = execution.agent
        # Taken out and put in again, it is the last.
        self._agents[name] = self._agents.pop(name, None) or _Agent(Baseline())
        self._forget_oldest()
        minute = self._open.setdefault(max(_minute_of(ended), self._closed + 1), {})
        counts = minute.get(name)
        if counts is None:
            counts = minute[name] = _Counts()
        counts.add(execution)

    def close(self, now: datetime) -> tuple[Signal, ...]:
        """Judges the minutes that are over.

        Call it after every batch of executions and, where none come, every few seconds; but not while there is no
        connection to hear them by, as silence then says nothing.
        """
        if self._heard_at is None:
            self._heard_at = now
        until = now if now - self._heard_at >= CAUGHT_UP else self._newest
        if until is None:
            return ()
        closed = _minute_of(min(until, now) - GRACE) - 1
        if closed <= self._closed:
            return ()
        self._closed = closed
        found: list[Signal] = []
        for number in sorted(number for number in self._open if number <= self._closed):
            for name, counts in self._open.pop(number).items():
                agent = self._agents[name]
                found += _take(name, agent, *judge(agent.baseline, counts.minute(number), self._rules))
        for name, agent in self._agents.items():
            if agent.anomalies:
                found += _take(name, agent, *lapse(agent.baseline, closed))
        return tuple(found)

    def anomalies(self, agent: str) -> frozenset[Measure]:
        """The measures of an agent with an anomaly that was announced and lasts."""
        known = self._agents.get(agent)
        return frozenset() if known is None else known.anomalies

    def changed(self, now: datetime) -> Mapping[str, bytes]:
        """The figures that are to be saved, by agent; the next call takes them for saved.

        Each agent's figures every five minutes at most, but immediately when an anomaly began or ended: restored
        figures must have every anomaly that was announced, or its end would not be.
        """
        due: dict[str, bytes] = {}
        for name, agent in self._agents.items():
            if not agent.changed:
                continue
            waited = agent.saved_at is None or now - agent.saved_at >= SAVE_EVERY
            if waited or agent.anomalies != agent.saved_anomalies:
                due[name] = agent.baseline.to_json()
                agent.changed, agent.saved_at, agent.saved_anomalies = False, now, agent.anomalies
        return due

    def restore(self, agent: str, data: bytes) -> None:
        """Takes up the saved figures of an agent. Unreadable ones are dropped, and learning restarts."""
        baseline = Baseline.from_json(data)
        if baseline is None:
            structlog.get_logger().warning("baseline_unreadable", agent=agent, bytes=len(data))
            return
        self._agents[agent] = _Agent(baseline)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while len(self._agents) > self._most_agents:
            # One with an anomaly is forgotten last: its end would not be announced.
            calm = (name for name, agent in self._agents.items() if not agent.anomalies)
            name = next(calm, next(iter(self._agents)))
            del self._agents[name]
            for minute in self._open.values():
                minute.pop(name, None)


def _take(name: str, agent: _Agent, baseline: Baseline, verdicts: tuple[AnomalyChange, ...]) -> tuple[Signal, ...]:
    if baseline is not agent.baseline:
        agent.baseline, agent.changed, agent.anomalies = baseline, True, baseline.anomalies()
    return signals(name, verdicts)


def _minute_of(moment: datetime) -> int:
    return ms_from_time(moment) // 60_000


class CutOffAnswers:
    """The latest answers of every agent, for warnings of agents whose answers are often cut off by their output limit.

    In memory, bounded; a new alerter learns them again.

    Args:
        share: the share of cut-off answers from which on there is a warning; None for never.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._agents: dict[str, deque[bool]] = {}
        """True for each answer that was cut off, by agent; in the order of the agents' latest answers."""

    def add(self, execution: Execution) -> tuple[Firing, ...]:
        """Counts an answer. Returns a signal if it was cut off, as is a large share."""
        if self._share is None or execution.finish_reason is None or execution.cache_hit:
            return ()
        is_cut = execution.finish_reason == "length"
        answers = self._agents.pop(execution.agent, None) or deque(maxlen=LAST_ANSWERS)
        self._agents[execution.agent] = answers
        if len(self._agents) > MAX_AGENTS:
            del self._agents[next(iter(self._agents))]
        answers.append(is_cut)
        cut = sum(answers)
        frequent = len(answers) >= FEWEST_ANSWERS and cut >= self._share * len(answers)
        return (cut_off(execution, cut, len(answers)),) if is_cut and frequent else ()
