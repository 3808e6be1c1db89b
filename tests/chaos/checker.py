"""Checks a history of clients against all that the plane, its stores, its provider and its receiver have recorded.

A pure decision: `violations` reads an `Evidence`, and returns a sentence for each promise that was broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from breakwater.kernel.types import nano_from_usd

Outcome = Literal["accepted", "answered", "failed", "refused", "unknown"]


@dataclass(slots=True)
class Operation:
    """One request of a client, with the ends of all its tries.

    Attributes:
        number: of the operation.
        kind: how it was sent, such as `nats job` or `messages stream`.
        agent: which it names.
        prompt: the text that is sent.
        expected: the text of a right answer; None where there is no text.
        started_s: seconds since the beginning of the history.
        ended_s: likewise; None while it runs.
        outcome: `accepted` without an answer that its client waited for, `answered` with one, `failed` where an error
            came after it was accepted, `refused` before; `unknown` where no client can tell.
        tries: how often it was sent, with the same idempotency key.
        execution_ids: that its tries were told.
        texts: the answers that were read to their ends.
        status: the last HTTP status; None for NATS, and where none came.
    """

    number: int
    kind: str
    agent: str
    prompt: str
    expected: str | None
    started_s: float
    ended_s: float | None = None
    outcome: Outcome = "unknown"
    tries: int = 0
    execution_ids: set[str] = field(default_factory=set[str])
    texts: list[str] = field(default_factory=list[str])
    status: int | None = None


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """A call as the provider has counted it; `attempt_id` is the id that the plane sent with it."""

    attempt_id: str | None
    model: str
    cost_nano: int
    received_at: str = ""
    """RFC 3339, UTC."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of a breaker, by the HTTP API."""

    state: str
    version: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is left when all is quiet. Money in nano-dollars; records as they are on the wire.

    Attributes:
        operations: of the clients.
        executions: in EVENTS.
        attempts: in EVENTS.
        results: in RESULTS, by execution id.
        stored_executions: ids of the rows in ClickHouse.
        stored_attempts: likewise.
        calls: that the provider counted.
        sums: the spent money in each place that counts it.
        reserved_nano: what the budgets still hold back.
        caps_nano: the hard cap of each capped model of the provider.
        breakers: by agent and model, as the API tells.
        transitions: in EVENTS, in order.
        alerts: in ALERTS, in order.
        deliveries: webhook id and incident of each message that the receiver took.
        waiting: consumers and streams that are not empty, in words.
        ended_processes: services that ended by themselves.
    """

    operations: Sequence[Operation]
    executions: Sequence[Mapping[str, Any]]
    attempts: Sequence[Mapping[str, Any]]
    results: Mapping[str, Mapping[str, Any]]
    stored_executions: Sequence[str]
    stored_attempts: Sequence[str]
    calls: Sequence[ProviderCall]
    sums: Mapping[str, int]
    reserved_nano: int
    caps_nano: Mapping[str, int]
    breakers: Mapping[tuple[str, str], Breaker]
    transitions: Sequence[Mapping[str, Any]]
    alerts: Sequence[Mapping[str, Any]]
    deliveries: Sequence[tuple[str, str]]
    waiting: Sequence[str]
    ended_processes: Sequence[str] = ()


def violations(evidence: Evidence) -> list[str]:
    """The promises that were broken; empty where all were kept."""
    checks: tuple[Callable[[Evidence], Iterator[str]], ...] = (
        _operations,
        _records,
        _calls,
        _money,
        _breakers,
        _incidents,
        _quiet,
    )
    return [violation for check in checks for violation in check(evidence)]


def _operations(evidence: Evidence) -> Iterator[str]:
    """Whatever was accepted has one id, one record, one result; whoever read an answer to its end has the right one."""
    recorded = {record["execution_id"] for record in evidence.executions}
    for operation in evidence.operations:
        label = f"operation {operation.number} ({operation.kind})"
        if len(operation.execution_ids) > 1:
            yield f"{label} was told several executions: {sorted(operation.execution_ids)}"
        for execution_id in operation.execution_ids:
            if execution_id not in recorded:
                yield f"{label} was accepted as {execution_id}, which has no record"
            result = evidence.results.get(execution_id)
            if result is None:
                yield f"{label} was accepted as {execution_id}, which has no result"
            elif result["status"] == "succeeded" and operation.expected not in (None, result["output"]):
                yield f"{label} has the result {result['output']!r} instead of {operation.expected!r}"
        for text in operation.texts:
            if operation.expected is not None and text != operation.expected:
                yield f"{label} read {text!r} instead of {operation.expected!r}"


def _records(evidence: Evidence) -> Iterator[str]:
    """Each execution and each attempt is on record once, in the log and in ClickHouse alike."""
    logged_executions = [str(record["execution_id"]) for record in evidence.executions]
    logged_attempts = [str(attempt["attempt_id"]) for attempt in evidence.attempts]
    yield from _twice("executions in EVENTS", logged_executions)
    yield from _twice("attempts in EVENTS", logged_attempts)
    yield from _twice("executions in ClickHouse", evidence.stored_executions)
    yield from _twice("attempts in ClickHouse", evidence.stored_attempts)
    yield from _differ("executions", logged_executions, evidence.stored_executions)
    yield from _differ("attempts", logged_attempts, evidence.stored_attempts)
    unrecorded = evidence.results.keys() - set(logged_executions)
    if unrecorded:
        yield f"results without a record: {_sample(unrecorded)}"


def _calls(evidence: Evidence) -> Iterator[str]:
    """Every call is one attempt, and every attempt that succeeded is a call."""
    called = [call.attempt_id or "-" for call in evidence.calls]
    attempts = {str(attempt["attempt_id"]): attempt for attempt in evidence.attempts}
    for attempt_id in _repeated(called):
        times = ", ".join(call.received_at for call in evidence.calls if call.attempt_id == attempt_id)
        record = attempts.get(attempt_id, {})
        outcome = f"{record.get('outcome')} at {record.get('completed_at')}"
        yield f"attempt {attempt_id} was called more than once ({times}), and is recorded as {outcome}"
    without_attempt = set(called) - attempts.keys()
    if without_attempt:
        yield f"calls without an attempt: {_sample(without_attempt)}"
    invented = {
        attempt_id
        for attempt_id, attempt in attempts.items()
        if attempt["outcome"] == "success" and attempt_id not in set(called)
    }
    if invented:
        yield f"attempts that succeeded without a call: {_sample(invented)}"


def _money(evidence: Evidence) -> Iterator[str]:
    """All places have one sum; no call cost more than was recorded for it; caps held; nothing stays reserved."""
    if len(set(evidence.sums.values())) > 1:
        yield f"sums differ: {dict(evidence.sums)}"
    recorded = {str(attempt["attempt_id"]): attempt for attempt in evidence.attempts}
    spent: Counter[str] = Counter()
    for call in evidence.calls:
        spent[call.model] += call.cost_nano
        attempt = recorded.get(call.attempt_id or "-")
        if attempt is None or attempt["cost_basis"] == "unknown":
            continue
        cost_nano = nano_from_usd(attempt["cost"])
        is_wrong = cost_nano != call.cost_nano if attempt["cost_basis"] == "billed" else cost_nano < call.cost_nano
        if is_wrong:
            yield (
                f"attempt {call.attempt_id} cost {call.cost_nano} nano-dollars, and {cost_nano} "
                f"({attempt['cost_basis']}) are recorded"
            )
    for model, cap_nano in evidence.caps_nano.items():
        if spent[model] > cap_nano:
            yield f"{model} cost {spent[model]} nano-dollars, over its limit of {cap_nano}"
    if evidence.reserved_nano:
        yield f"{evidence.reserved_nano} nano-dollars stay reserved"


def _breakers(evidence: Evidence) -> Iterator[str]:
    """A breaker is in the state of its last transition, or half-open after an opening whose cool-down is over.

    Each version of it is one transition.

    Transitions are ordered by their versions: the worker whose call is a probe publishes that the breaker is half-open
    while it calls, and NATS may be away until after the end of the call.
    """
    latest: dict[tuple[str, str], Mapping[str, Any]] = {}
    by_version: dict[tuple[tuple[str, str], int], str] = {}
    for transition in evidence.transitions:
        key = (str(transition["agent"]), str(transition["model"]))
        version, change = transition["version"], f"{transition['from_state']} to {transition['to_state']}"
        first_change = by_version.setdefault((key, version), change)
        if first_change != change:
            yield f"breaker {key}: version {version} is {first_change}, and {change} at {transition['at']}"
        if key not in latest or version >= latest[key]["version"]:
            latest[key] = transition
    for key, transition in latest.items():
        breaker = evidence.breakers.get(key)
        if breaker is None:
            yield f"breaker {key} is lost; its last transition was to {transition['to_state']}"
        elif breaker.version != transition["version"] or breaker.state not in _shown_after(transition["to_state"]):
            yield (
                f"breaker {key} is {breaker.state} (version {breaker.version}); its last transition was to "
                f"{transition['to_state']} (version {transition['version']})"
            )


def _shown_after(state: str) -> set[str]:
    return {"open", "half_open"} if state == "open" else {state}


def _incidents(evidence: Evidence) -> Iterator[str]:
    """One problem is one open incident, and each incident that was opened has arrived, as one message for a change."""
    opened = Counter(alert["incident_id"] for alert in evidence.alerts if alert["change"] == "opened")
    yield from (f"incident {incident} was opened {count} times" for incident, count in opened.items() if count > 1)
    open_keys: dict[str, str] = {}
    for alert in evidence.alerts:
        incident = open_keys.get(alert["key"])
        if alert["status"] == "resolved":
            open_keys.pop(alert["key"], None)
        elif incident not in {None, alert["incident_id"]}:
            yield f"{alert['key']} has two incidents at a time: {incident} and {alert['incident_id']}"
        else:
            open_keys[alert["key"]] = alert["incident_id"]
    arrived = {incident for _, incident in evidence.deliveries}
    missing = opened.keys() - arrived
    if missing:
        yield f"incidents that nobody was told of: {_sample(missing)}"


def _quiet(evidence: Evidence) -> Iterator[str]:
    """Nothing waits, and no service has ended by itself."""
    yield from (f"not empty: {place}" for place in evidence.waiting)
    yield from (f"ended by itself: {name}" for name in evidence.ended_processes)


def _twice(label: str, ids: Iterable[str]) -> Iterator[str]:
    if repeated := _repeated(ids):
        yield f"{label}, more than once: {_sample(repeated)}"


def _repeated(ids: Iterable[str]) -> list[str]:
    return [repeated_id for repeated_id, count in Counter(ids).items() if count > 1]


def _differ(label: str, logged: Iterable[str], stored: Iterable[str]) -> Iterator[str]:
    logged_ids, stored_ids = set(logged), set(stored)
    if logged_ids - stored_ids:
        yield f"{label} that ClickHouse lacks: {_sample(logged_ids - stored_ids)}"
    if stored_ids - logged_ids:
        yield f"{label} that EVENTS lacks: {_sample(stored_ids - logged_ids)}"


def _sample(ids: Iterable[str]) -> str:
    """The first five, and how many there are."""
    ordered = sorted(ids)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(ordered[:5]) + more
