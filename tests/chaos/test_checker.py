"""The checker of histories: a right one passes, and each promise that is broken is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.chaos.checker import Breaker, Evidence, Operation, ProviderCall, violations


def operation(**changes: Any) -> Operation:
    values: dict[str, Any] = {
        "number": 1,
        "kind": "chat",
        "agent": "writer",
        "prompt": "yes or no?",
        "expected": "yes",
        "started_s": 0.0,
        "outcome": "answered",
        "execution_ids": {"op-1"},
        "texts": ["yes"],
    }
    return Operation(**values | changes)


def attempt(**changes: Any) -> dict[str, Any]:
    values = {"attempt_id": "op-1:1", "outcome": "success", "cost": "0.000042", "cost_basis": "billed"}
    return values | changes


def alert(**changes: Any) -> dict[str, Any]:
    values = {"incident_id": "inc_1", "key": "breaker_open/a/m", "change": "opened", "status": "firing"}
    return values | changes


def transition(**changes: Any) -> dict[str, Any]:
    at = "2026-11-28T12:00:00.000Z"
    states = {"from_state": "closed", "to_state": "open", "reason": "3 failures"}
    return {"agent": "writer", "model": "sim/m", "version": 1, "at": at, **states} | changes


PROBED = transition(from_state="open", to_state="half_open")
RIGHT = Evidence(
    operations=[operation()],
    executions=[{"execution_id": "op-1"}],
    attempts=[attempt()],
    results={"op-1": {"status": "succeeded", "output": "yes"}},
    stored_executions=["op-1"],
    stored_attempts=["op-1:1"],
    calls=[ProviderCall("op-1:1", "sim/m", 42_000)],
    sums={"attempts": 42_000, "Redis": 42_000},
    reserved_nano=0,
    caps_nano={"sim/m": 42_000},
    breakers={("writer", "sim/m"): Breaker("open", 1)},
    transitions=[transition()],
    alerts=[alert(), alert(change="resolved", status="resolved"), alert(incident_id="inc_2")],
    deliveries=[("msg_1", "inc_1"), ("msg_2", "inc_2")],
    waiting=[],
)
OPEN_AGAIN = [alert(), alert(change="repeated", incident_id="inc_2")]

BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("was accepted as op-2, which has no record", {"operations": [operation(execution_ids={"op-2"})]}),
    ("was accepted as op-1, which has no result", {"results": {}}),
    ("was told several executions", {"operations": [operation(execution_ids={"op-1", "op-2"})]}),
    ("read 'yesyes' instead of 'yes'", {"operations": [operation(texts=["yesyes"])]}),
    ("has the result 'no'", {"results": {"op-1": {"status": "succeeded", "output": "no"}}}),
    ("executions in EVENTS, more than once: op-1", {"executions": [{"execution_id": "op-1"}] * 2}),
    ("attempts in EVENTS, more than once: op-1:1", {"attempts": [attempt(), attempt()]}),
    ("executions in ClickHouse, more than once", {"stored_executions": ["op-1", "op-1"]}),
    ("attempts in ClickHouse, more than once", {"stored_attempts": ["op-1:1", "op-1:1"]}),
    ("executions that ClickHouse lacks: op-1", {"stored_executions": []}),
    ("attempts that EVENTS lacks: op-2:1", {"stored_attempts": ["op-1:1", "op-2:1"]}),
    ("results without a record: op-2", {"results": {**RIGHT.results, "op-2": {"status": "cancelled"}}}),
    ("calls without an attempt: op-1:2", {"calls": [*RIGHT.calls, ProviderCall("op-1:2", "sim/m", 0)]}),
    ("calls without an attempt: -", {"calls": [*RIGHT.calls, ProviderCall(None, "sim/m", 0)]}),
    ("attempt op-1:1 was called more than once", {"calls": [ProviderCall("op-1:1", "sim/m", 42_000)] * 2}),
    ("attempts that succeeded without a call: op-1:1", {"calls": []}),
    ("sums differ", {"sums": {"attempts": 42_000, "Redis": 0}}),
    ("cost 43000 nano-dollars, and 42000 (billed)", {"calls": [ProviderCall("op-1:1", "sim/m", 43_000)]}),
    (
        "cost 42000 nano-dollars, and 41000 (estimated)",
        {"attempts": [attempt(cost="0.000041", cost_basis="estimated")]},
    ),
    ("over its limit of 41999", {"caps_nano": {"sim/m": 41_999}}),
    ("1 nano-dollars stay reserved", {"reserved_nano": 1}),
    ("is lost; its last transition was to open", {"breakers": {}}),
    ("is closed (version 1)", {"breakers": {("writer", "sim/m"): Breaker("closed", 1)}}),
    ("version 1 is closed to open, and open to half_open", {"transitions": [transition(), PROBED]}),
    ("incident inc_1 was opened 2 times", {"alerts": [alert(), alert()]}),
    ("has two incidents at a time: inc_1 and inc_2", {"alerts": OPEN_AGAIN}),
    ("incidents that nobody was told of: inc_2", {"deliveries": [("msg_1", "inc_1")]}),
    ("not empty: JOBS/worker-writer", {"waiting": ["JOBS/worker-writer"]}),
    ("ended by itself: sink", {"ended_processes": ["sink"]}),
]


def test_a_history_in_which_all_promises_were_kept_passes() -> None:
    assert violations(RIGHT) == []
    cooled = {("writer", "sim/m"): Breaker("half_open", 1)}
    assert violations(replace(RIGHT, breakers=cooled)) == []


def test_an_estimate_may_be_more_than_the_provider_billed() -> None:
    assert violations(replace(RIGHT, attempts=[attempt(cost="1", cost_basis="estimated")])) == []


def test_each_broken_promise_is_named(subtests: Any) -> None:
    for sentence, changes in BROKEN:
        with subtests.test(sentence):
            broken = violations(replace(RIGHT, **changes))
            assert any(sentence in violation for violation in broken), broken
