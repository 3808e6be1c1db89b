"""Messages as rows, and rows as messages. Pure: the tables' columns on one side, the contract on the other.

Money is an exact Decimal made from integer nano-dollars; what is unknown is NULL. JSON is kept as text, as the bus had
it after redaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from breakwater.analytics.errors import Unstorable
from breakwater.contracts.alerts import Alert
from breakwater.contracts.events import BreakerTransition, BudgetEvent, GuardEvent
from breakwater.contracts.execution import Attempt, ErrorInfo, Execution
from breakwater.contracts.types import nano_from_usd

Row = tuple[object, ...]

_MONEY_DIGITS = 18
"""Of Decimal(18, 9): amounts below a thousand million dollars."""
_YEARS = range(1970, 2106)
"""What the expression that ages rows out can hold: ClickHouse wraps other times round instead of refusing them."""


def execution_row(record: Execution, sequence: int) -> Row:
    """A terminal record as a row of `executions`; `sequence` is its message's place in the stream.

    Raises:
        Unstorable: an amount or a time is out of range.
    """
    return (
        record.execution_id,
        record.agent,
        record.tenant,
        record.task_id,
        record.parent_execution_id,
        record.status,
        record.reason,
        record.requested_model,
        record.chosen_model,
        record.fallback_chain,
        record.attempts_count,
        record.input_tokens,
        record.output_tokens,
        record.cached_tokens,
        record.total_tokens,
        _money_or_null(record.total_cost),
        _money_or_null(record.wasted_cost),
        {cause: _money(nano) for cause, nano in record.wasted_by_cause.items()},
        *_by_cause(record.attempts),
        record.cost_basis,
        None if record.output is None else _json(record.output),
        *_error(record.error),
        None if record.messages is None else _json(record.messages),
        None if record.input is None else _json(record.input),
        _json(record.metadata),
        _time(record.queued_at),
        _time(record.dispatched_at),
        _time_or_null(record.started_at),
        _time(record.completed_at),
        record.duration_ms,
        record.cache_hit,
        record.cached_from,
        record.dry_run,
        sequence,
    )


def attempt_row(attempt: Attempt, sequence: int, stored_at: datetime) -> Row:
    """An attempt as a row of `attempts`; `stored_at` is when the stream took its message, by the NATS server's clock.

    Raises as `execution_row` does.
    """
    return (
        attempt.attempt_id,
        attempt.execution_id,
        attempt.agent,
        attempt.tenant,
        attempt.task_id,
        attempt.number,
        attempt.model,
        attempt.provider,
        _time(attempt.started_at),
        _time(attempt.completed_at),
        attempt.duration_ms,
        attempt.input_tokens,
        attempt.output_tokens,
        attempt.cached_tokens,
        attempt.reasoning_tokens,
        _money_or_null(attempt.cost),
        attempt.cost_basis,
        _money_or_null(attempt.reserved),
        _time_or_null(attempt.reserved_at),
        attempt.outcome,
        *_error(attempt.error),
        attempt.short_circuited,
        attempt.refused_by,
        attempt.counts_for_breaker,
        attempt.breaker_version,
        attempt.cause,
        attempt.backoff_ms,
        attempt.dropped_messages,
        _time(stored_at),
        sequence,
    )


def transition_row(transition: BreakerTransition, sequence: int) -> Row:
    """A breaker's change of state as a row of `breaker_transitions`. Raises as `execution_row` does."""
    return (
        transition.transition_id,
        transition.scope,
        transition.agent,
        transition.model,
        transition.from_state,
        transition.to_state,
        transition.rule,
        transition.reason,
        transition.by,
        transition.health,
        transition.consecutive_failures,
        transition.total_failures,
        transition.unique_errors,
        transition.errors,
        transition.error_hash,
        transition.within_s,
        transition.cooldown_s,
        _time_or_null(transition.open_until),
        _time_or_null(transition.last_failure_at),
        _time_or_null(transition.last_success_at),
        transition.version,
        _time(transition.at),
        sequence,
    )


def guard_row(event: GuardEvent, sequence: int) -> Row:
    """A task's stop, or its going on, as a row of `guard_events`. Raises as `execution_row` does."""
    return (
        event.event_id,
        event.kind,
        event.agent,
        event.tenant,
        event.task_id,
        event.execution_id,
        event.rule,
        event.reason,
        event.by,
        event.iterations,
        event.tokens,
        _money(event.cost),
        event.consecutive_failures,
        event.total_failures,
        event.unique_errors,
        _time(event.at),
        sequence,
    )


def budget_row(event: BudgetEvent, sequence: int) -> Row:
    """What happened to a budget, as a row of `budget_events`. Raises as `execution_row` does."""
    return (
        event.event_id,
        event.kind,
        event.scope,
        event.agent,
        event.tenant,
        event.window,
        event.period,
        event.threshold_percent,
        _money_or_null(event.limit),
        _money(event.total),
        _money_or_null(event.previous),
        _money_or_null(event.configured),
        event.enforcement,
        event.by,
        event.reason,
        _time_or_null(event.resets_at),
        _time(event.at),
        sequence,
    )


def alert_row(alert: Alert, sequence: int) -> Row:
    """A change of an incident as a row of `alerts`. Raises as `execution_row` does."""
    return (
        alert.alert_id,
        alert.incident_id,
        alert.key,
        alert.change,
        alert.status,
        alert.event,
        alert.severity,
        alert.agent,
        alert.model,
        alert.tenant,
        alert.title,
        alert.text,
        _json(alert.payload),
        alert.count,
        alert.version,
        _time(alert.opened_at),
        _time(alert.last_at),
        _time_or_null(alert.ends_at),
        alert.reminders,
        alert.acknowledged_by,
        _time_or_null(alert.acknowledged_at),
        alert.resolved_by,
        _time_or_null(alert.resolved_at),
        alert.reason,
        alert.source_id,
        _time(alert.at),
        sequence,
    )


def execution_of(row: Mapping[str, Any], attempts: Iterable[Attempt] = ()) -> Execution:
    """The terminal record that a row of `executions` was made from, with the attempts given."""
    return Execution.model_validate(
        {
            **in_nano(row, "total_cost", "wasted_cost"),
            "wasted_by_cause": {cause: nano_from_usd(cost) for cause, cost in row["wasted_by_cause"].items()},
            "output": None if row["output"] is None else from_json(row["output"]),
            "messages": None if row["messages"] is None else from_json(row["messages"]),
            "input": None if row["input"] is None else from_json(row["input"]),
            "metadata": from_json(row["metadata"]),
            "error": _error_of(row),
            "attempts": tuple(attempts),
        }
    )


def attempt_of(row: Mapping[str, Any]) -> Attempt:
    """The attempt that a row of `attempts` was made from."""
    return Attempt.model_validate({**in_nano(row, "cost", "reserved"), "error": _error_of(row)})


def budget_of(row: Mapping[str, Any]) -> BudgetEvent:
    """The event that a row of `budget_events` was made from."""
    amounts = {"limit": row["limit_cost"], "total": row["total_cost"], "previous": row["previous_cost"]}
    amounts["configured"] = row["configured_cost"]
    return BudgetEvent.model_validate({**row, **amounts})


def nano_or_none(amount: Decimal | None) -> int | None:
    """An amount that ClickHouse gave, in nano-dollars."""
    return None if amount is None else nano_from_usd(amount)


def in_nano(row: Mapping[str, Any], *amounts: str) -> dict[str, Any]:
    """A row that ClickHouse gave, with some of its amounts in nano-dollars."""
    return {**row, **{name: nano_or_none(row[name]) for name in amounts}}


def _by_cause(attempts: Iterable[Attempt]) -> Row:
    """How many calls there were of each cause, and the known part of what they cost.

    Whether retrying helped is asked of months: the attempts of each execution would be looked for among millions.
    """
    calls: dict[str, int] = {}
    costs: dict[str, int] = {}
    for attempt in attempts:
        if not attempt.short_circuited:
            calls[attempt.cause] = calls.get(attempt.cause, 0) + 1
            if attempt.cost:
                costs[attempt.cause] = costs.get(attempt.cause, 0) + attempt.cost
    return calls, {cause: _money(nano) for cause, nano in costs.items()}


def _error(error: ErrorInfo | None) -> Row:
    if error is None:
        return (None,) * 7
    return (
        error.kind,
        error.class_,
        error.message,
        error.status_code,
        error.retryable,
        error.hash,
        error.user_message,
    )


def _error_of(row: Mapping[str, Any]) -> ErrorInfo | None:
    if row["error_kind"] is None:
        return None
    names = ("kind", "class", "message", "status_code", "retryable", "hash", "user_message")
    return ErrorInfo.model_validate({name: row[f"error_{name}"] for name in names})


def _money_or_null(nano: int | None) -> Decimal | None:
    return None if nano is None else _money(nano)


def _money(nano: int) -> Decimal:
    # Neither the driver nor ClickHouse refuses more digits than the type has: they would be stored as something else.
    if abs(nano) >= 10**_MONEY_DIGITS:
        raise Unstorable(f"an amount of {nano} nano-dollars is beyond what a column of money holds")
    return Decimal(nano).scaleb(-9)


def _time_or_null(moment: datetime | None) -> datetime | None:
    return None if moment is None else _time(moment)


def _time(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise Unstorable(f"the time {moment.isoformat()} has no offset from UTC")
    if moment.year not in _YEARS:
        raise Unstorable(f"the time {moment.isoformat()} is out of range")
    return moment


def _json(value: JsonValue | Mapping[str, JsonValue] | list[dict[str, JsonValue]]) -> str:
    return to_json(value, inf_nan_mode="null").decode()
