"""Made-up storms: jobs at once on a plane that is a simulation, whose log and breakers disagree as real ones do.

Outcomes reach the log in one order and a breaker in another: a worker applies a failure a moment after the log has it,
a success with whatever it asks Redis next, and the breaker service reads both later.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from heapq import heappop, heappush
from itertools import count

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.admission import BreakerAnswer, admit
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, caller_of, consecutive_failures, observe
from breakwater.breakers.rules.failure_statistics import breaker_statistics
from breakwater.breakers.rules.observations import observation_of
from breakwater.breakers.rules.refusals import breaker_open
from breakwater.breakers.rules.transitions import half_opened, transition
from breakwater.calls.rules.classify import classification_of
from breakwater.calls.rules.retry import NextModel, Retry, after_failure, cause_after, failures_on
from breakwater.calls.rules.unanswered import why_unanswered
from breakwater.config import Config, parse_config
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution, Reason
from breakwater.jobs.rules.record import status_of, totals
from breakwater.kernel.types import time_from_ms
from breakwater.replay.rules.history import Changes, LoggedAttempt, RecordedJob, in_order
from tests.replay.storms import Storm

CONFIG = """
providers: {sim: {base_url: "http://127.0.0.1:9/v1"}}
models: {m: {provider: sim}, n: {provider: sim}}
agents:
  writer:
    model: m
    fallback_models: [n]
    retry: {max_attempts: 2, base_s: 0.05}
    breaker: {consecutive_failures: 3, errors: 8, within_s: 2, cooldown_s: 0.3}
"""
BEGIN_MS = 1_795_000_000_000
ERROR = ErrorInfo(kind="server", class_="ServerError", message="500", retryable=True, hash="0badc0de")
_Process = Generator[float, None, None]
"""What goes on beside others. It yields how long it waits, in milliseconds."""


def config() -> Config:
    return parse_config(CONFIG)


@dataclass(slots=True)
class _Plane:
    rng: random.Random
    now: float = BEGIN_MS
    breakers: dict[BreakerKey, Breaker] = field(default_factory=dict[BreakerKey, Breaker])
    log: list[LoggedAttempt] = field(default_factory=list[LoggedAttempt])
    jobs: list[RecordedJob] = field(default_factory=list[RecordedJob])
    transitions: list[BreakerTransition] = field(default_factory=list[BreakerTransition])
    under_way: int = 0
    _waiting: list[tuple[float, int, _Process]] = field(default_factory=list[tuple[float, int, _Process]])
    _ties: count[int] = field(default_factory=count)

    def start(self, process: _Process, delay_ms: float = 0.0) -> None:
        heappush(self._waiting, (self.now + delay_ms, next(self._ties), process))

    def run(self) -> None:
        while self._waiting:
            self.now, _, process = heappop(self._waiting)
            delay_ms = next(process, None)
            if delay_ms is not None:
                self.start(process, delay_ms)

    @property
    def now_ms(self) -> int:
        return int(self.now)

    @property
    def at(self) -> datetime:
        return time_from_ms(self.now_ms)


def storm(seed: int, jobs: int = 60, at_once: int = 6) -> Storm:
    """What the streams hold of a storm."""
    plane = _Plane(random.Random(seed))
    numbers = iter(range(jobs))
    for _ in range(at_once):
        plane.start(_worker(plane, numbers), plane.rng.uniform(0, 20))
    plane.under_way = at_once
    plane.start(_service(plane))
    plane.run()
    return in_order(plane.jobs), Changes(plane.transitions)


def _worker(plane: _Plane, numbers: Iterator[int]) -> _Process:
    for number in numbers:
        yield from _job(plane, number)
    plane.under_way -= 1


def _service(plane: _Plane) -> _Process:
    """The breaker service: all outcomes of the log, in order, a while after."""
    read = 0
    while plane.under_way or read < len(plane.log):
        yield plane.rng.uniform(100, 250)
        for logged in plane.log[read:]:
            _apply(plane, logged, logged.at_ms)
        read = len(plane.log)


def _apply(plane: _Plane, logged: LoggedAttempt, at_ms: int) -> None:
    attempt = logged.attempt
    rules = _RULES
    key = BreakerKey.of(rules.scope, attempt.agent, attempt.unit, attempt.provider)
    breaker = plane.breakers.get(key, Breaker())
    observation = observation_of(logged.sequence, at_ms, attempt)
    plane.breakers[key], change = observe(breaker, observation, rules, plane.now_ms, plane.rng.random())
    if change is not None:
        plane.transitions.append(transition(key, change, rules, plane.now_ms))


def _record(plane: _Plane, attempts: list[LoggedAttempt], attempt: Attempt, asked_ms: int) -> _Process:
    """Publishes an attempt, and applies it as its worker does: a failure at once, a success when it may."""
    yield plane.rng.uniform(0.3, 2)
    logged = LoggedAttempt(len(plane.log) + 1, plane.now_ms, asked_ms, attempt)
    plane.log.append(logged)
    attempts.append(logged)
    yield plane.rng.uniform(0.3, 3)
    if attempt.outcome == "success" and attempt.cause != "probe":
        plane.start(_note(plane, logged), plane.rng.choice([0, 1, 5, 60]))
        return
    yield plane.rng.uniform(0.3, 2)
    _apply(plane, logged, 2**53)


def _note(plane: _Plane, logged: LoggedAttempt) -> _Process:
    _apply(plane, logged, 2**53)
    yield 0.0


def _job(plane: _Plane, number: int) -> _Process:
    execution_id = f"j{number}"
    names = {"execution_id": execution_id, "job_id": execution_id, "agent": "writer"}
    queued_at = plane.at
    chain = [*_CHAIN]
    logged: list[LoggedAttempt] = []
    stop: Reason | None = "error"
    backoff_ms = 0
    while True:
        attempts = [each.attempt for each in logged]
        attempt_id = f"{execution_id}:{len(logged) + 1}"
        fields = names | {
            "attempt_id": attempt_id, "number": len(logged) + 1, "model": chain[0], "provider": "sim",
            "cause": cause_after(attempts, chain[0], None),
        }  # fmt: skip
        waited_ms = 0.0
        while True:
            yield plane.rng.uniform(0.3, 2)
            key = BreakerKey("writer", chain[0])
            admission, breaker = _admission(plane, key, attempt_id)
            asked_ms = plane.now_ms
            if admission.admitted or not admission.is_probe or len(chain) > 1 or waited_ms >= 2000:
                break
            delay_ms = 100 * (1 + plane.rng.random())
            waited_ms += delay_ms
            yield delay_ms
        fields["backoff_ms"] = backoff_ms + round(waited_ms)
        yield plane.rng.uniform(0.2, 1)
        if not admission.admitted:
            fields |= _refusal(plane, key, admission, breaker)
            yield from _record(plane, logged, Attempt.model_validate(fields), plane.now_ms)
            chain.pop(0)
            if not chain:
                stop = "breaker_open"
                break
            continue
        started_at = plane.at
        duration_ms = plane.rng.randint(3, 60)
        yield duration_ms
        fails = plane.rng.random() < (0.55 if chain[0] == "m" else 0.2)
        attempt = Attempt.model_validate(
            fields | {
                "started_at": started_at, "completed_at": plane.at, "duration_ms": duration_ms, "cost": 0,
                "cause": "probe" if admission.is_probe else fields["cause"], "reserved_at": time_from_ms(asked_ms),
                "outcome": "error" if fails else "success", "error": ERROR if fails else None,
                "counts_for_breaker": fails, "breaker_version": admission.version,
            }
        )  # fmt: skip
        if not fails:
            yield from _record(plane, logged, attempt, asked_ms)
            stop = None
            break
        step = after_failure(
            classification_of(attempt, attempt.completed_at), policy=_RETRY, is_last_model=len(chain) == 1,
            failures=failures_on(attempt.model, [*attempts, attempt]), remaining_s=100, jitter=plane.rng.random(),
        )  # fmt: skip
        if isinstance(step, Retry):
            attempt = attempt.model_copy(update={"tried_again": True})
        yield from _record(plane, logged, attempt, asked_ms)
        backoff_ms = 0
        if isinstance(step, Retry):
            backoff_ms = round(step.delay_s * 1000)
            yield backoff_ms
        elif isinstance(step, NextModel):
            chain.pop(0)
        else:
            break
    plane.jobs.append(_ended(plane, names, queued_at, stop, logged))


def _admission(plane: _Plane, key: BreakerKey, attempt_id: str) -> tuple[BreakerAnswer, Breaker]:
    before = plane.breakers.get(key, Breaker())
    plane.breakers[key], answer = admit(before, attempt_id, plane.now_ms, 220_000, caller_of(None, None))
    if answer.became_half_open:
        plane.transitions.append(half_opened(key, plane.breakers[key], _RULES, plane.now_ms))
    return answer, before


def _refusal(plane: _Plane, key: BreakerKey, answer: BreakerAnswer, breaker: Breaker) -> dict[str, object]:
    statistics = breaker_statistics(
        breaker.reason,
        consecutive_failures=consecutive_failures(breaker),
        total_failures=breaker.total_failures,
        unique_errors=len(breaker.errors_seen),
    )
    return {
        "started_at": plane.at, "completed_at": plane.at, "duration_ms": 0, "outcome": "short_circuited",
        "short_circuited": True, "error": breaker_open(key, breaker.reason, state=None), "statistics": statistics,
        "refused_reason": "breaker_open", "cost": 0, "cost_basis": "none",
    }  # fmt: skip


def _ended(
    plane: _Plane, names: dict[str, str], queued_at: datetime, stop: Reason | None, logged: list[LoggedAttempt]
) -> RecordedJob:
    attempts = tuple(each.attempt for each in logged)
    reason, error = (None, None) if stop is None else why_unanswered(attempts, stop)
    record = Execution.model_validate(
        names | {
            "status": status_of(reason), "reason": reason, "error": error, "requested_model": _CHAIN[0],
            "chosen_model": attempts[-1].model if reason is None else None, "fallback_chain": _CHAIN,
            "total_cost": totals(attempts, answered=reason is None).total_cost, "queued_at": queued_at,
            "dispatched_at": queued_at, "completed_at": plane.at, "duration_ms": 1,
        }
    )  # fmt: skip
    return RecordedJob(record, tuple(logged))


_AGENT = config().agents["writer"]
_CHAIN = _AGENT.chain
_RETRY = _AGENT.retry
assert _AGENT.breaker is not None
_RULES = _AGENT.breaker
