"""Messages as rows, and rows as messages. Pure: the tables' columns on one side, the contract on the other.

Money is an exact Decimal made from integer nano-dollars; what is unknown is NULL. JSON is kept as text, as the bus had
it after redaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from pydantic_core import from_json, to_json

from breakwater.analytics.errors import Unstorable
from breakwater.analytics.schema import (
    ALERTS,
    ATTEMPTS,
    AUDIT,
    BREAKER_TRANSITIONS,
    BUDGET_EVENTS,
    EXECUTIONS,
    GUARD_EVENTS,
    TABLES,
)
from breakwater.analytics.table import MONEY, MONEY_BY_WORD, MONEY_OR_NULL, TIME, TIME_OR_NULL, Table
from breakwater.contracts.alerts import Alert
from breakwater.contracts.audit import AuditEvent
from breakwater.contracts.events import BreakerTransition, BudgetEvent, GuardEvent
from breakwater.contracts.execution import Attempt, ErrorInfo, Execution
from breakwater.contracts.types import nano_from_usd
from breakwater.policy.alert_rules import began_with, highest_severity

Row = tuple[object, ...]

_ERROR_FIELDS = {
    f"error_{field.rstrip('_')}": field
    for field in ("kind", "class_", "message", "status_code", "retryable", "hash", "user_message")
}
"""By their columns."""
_BUDGET_AMOUNTS = ("limit", "total", "previous", "configured")
_MONEY_DIGITS = 18
"""Of Decimal(18, 9): amounts below a thousand million dollars."""
_YEARS = range(1970, 2106)
"""What the expression that ages rows out can hold: ClickHouse wraps other times round instead of refusing them."""


def execution_row(record: Execution, sequence: int) -> Row:
    """A terminal record as a row of `executions`; `sequence` is its message's place in the stream.

    Raises:
        Unstorable: an amount or a time is out of range.
    """
    calls, costs = _by_cause(record.attempts)
    return _row(
        EXECUTIONS,
        record,
        sequence,
        calls_by_cause=calls,
        cost_by_cause=costs,
        output=_json_or_null(record.output),
        statistics=None if record.statistics is None else record.statistics.model_dump_json(),
        messages=_json_or_null(record.messages),
        input=_json_or_null(record.input),
        params=_json_or_null(record.params),
        metadata=_json(record.metadata),
        **_error(record.error),
    )


def attempt_row(attempt: Attempt, sequence: int, stored_at: datetime) -> Row:
    """An attempt as a row of `attempts`; `stored_at` is when the stream took its message, by the NATS server's clock.

    Raises as `execution_row` does.
    """
    return _row(ATTEMPTS, attempt, sequence, stored_at=_time(stored_at), **_error(attempt.error))


def transition_row(transition: BreakerTransition, sequence: int) -> Row:
    """A breaker's change of state as a row of `breaker_transitions`. Raises as `execution_row` does."""
    return _row(BREAKER_TRANSITIONS, transition, sequence)


def guard_row(event: GuardEvent, sequence: int) -> Row:
    """A task's trip or reset as a row of `guard_events`. Raises as `execution_row` does."""
    return _row(GUARD_EVENTS, event, sequence)


def budget_row(event: BudgetEvent, sequence: int) -> Row:
    """What happened to a budget, as a row of `budget_events`. Raises as `execution_row` does."""
    amounts = {f"{name}_cost": _money_or_null(getattr(event, name)) for name in _BUDGET_AMOUNTS}
    return _row(BUDGET_EVENTS, event, sequence, **amounts)


def alert_row(alert: Alert, sequence: int) -> Row:
    """A change of an incident as a row of `alerts`. Raises as `execution_row` does."""
    began, worst = began_with(alert), highest_severity(alert)
    return _row(ALERTS, alert, sequence, payload=_json(alert.payload), first_event=began, highest_severity=worst)


def audit_row(event: AuditEvent, sequence: int) -> Row:
    """A person's action as a row of `audit`. Raises as `execution_row` does."""
    return _row(AUDIT, event, sequence, details=_json(event.details))


def execution_of(row: Mapping[str, Any], attempts: Iterable[Attempt] = ()) -> Execution:
    """The terminal record that a row of `executions` was made from, with the attempts given."""
    return Execution.model_validate(
        {
            **in_nano(row, "total_cost", "wasted_cost"),
            "wasted_by_cause": {cause: nano_from_usd(cost) for cause, cost in row["wasted_by_cause"].items()},
            "output": None if row["output"] is None else from_json(row["output"]),
            "statistics": None if row["statistics"] is None else from_json(row["statistics"]),
            "messages": None if row["messages"] is None else from_json(row["messages"]),
            "input": None if row["input"] is None else from_json(row["input"]),
            "params": None if row["params"] is None else from_json(row["params"]),
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
    return BudgetEvent.model_validate({**row, **{name: row[f"{name}_cost"] for name in _BUDGET_AMOUNTS}})


def nano_or_none(amount: Decimal | None) -> int | None:
    """An amount that ClickHouse gave, in nano-dollars."""
    return None if amount is None else nano_from_usd(amount)


def in_nano(row: Mapping[str, Any], *amounts: str) -> dict[str, Any]:
    """A row that ClickHouse gave, with some of its amounts in nano-dollars."""
    return {**row, **{name: nano_or_none(row[name]) for name in amounts}}


def _row(table: Table, message: object, sequence: int, **given: object) -> Row:
    """A message as a row: each column is given, or the field of its name, converted as its type asks."""
    given["event_sequence"] = sequence
    return tuple(
        given[name] if name in given else getattr(message, name) if convert is None else convert(getattr(message, name))
        for name, convert in _COLUMNS[table.name]
    )


def _by_cause(attempts: Iterable[Attempt]) -> tuple[Mapping[str, int], Mapping[str, Decimal]]:
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
    return calls, _money_by_word(costs)


def _error(error: ErrorInfo | None) -> dict[str, object]:
    if error is not None and error.figures is not None:
        error = error.model_copy(update={"message": f"{error.message}: {error.figures}"})
    return {column: None if error is None else getattr(error, field) for column, field in _ERROR_FIELDS.items()}


def _error_of(row: Mapping[str, Any]) -> ErrorInfo | None:
    if row["error_kind"] is None:
        return None
    return ErrorInfo.model_validate({field: row[column] for column, field in _ERROR_FIELDS.items()})


def _money_or_null(nano: int | None) -> Decimal | None:
    return None if nano is None else _money(nano)


def _money(nano: int) -> Decimal:
    # Neither the driver nor ClickHouse refuses more digits than the type has: they would be stored as something else.
    if abs(nano) >= 10**_MONEY_DIGITS:
        raise Unstorable(f"an amount of {nano} nano-dollars is beyond what a column of money holds")
    return Decimal(nano).scaleb(-9)


def _money_by_word(amounts: Mapping[str, int]) -> Mapping[str, Decimal]:
    return {word: _money(nano) for word, nano in amounts.items()}


def _time_or_null(moment: datetime | None) -> datetime | None:
    return None if moment is None else _time(moment)


def _time(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise Unstorable(f"the time {moment.isoformat()} has no offset from UTC")
    if moment.year not in _YEARS:
        raise Unstorable(f"the time {moment.isoformat()} is out of range")
    return moment


def _json(value: object) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def _json_or_null(value: object) -> str | None:
    return None if value is None else _json(value)


_CONVERTED: Mapping[str, Callable[[Any], object]] = {
    MONEY: _money,
    MONEY_OR_NULL: _money_or_null,
    MONEY_BY_WORD: _money_by_word,
    TIME: _time,
    TIME_OR_NULL: _time_or_null,
}
"""How fields become values, by the type of their column; others are stored as they are."""
_COLUMNS = {
    table.name: tuple((name, _CONVERTED.get(type_)) for name, type_ in table.columns.items()) for table in TABLES
}
