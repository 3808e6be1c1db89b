"""Messages as rows, rows as messages, rows as files. Pure: the tables' columns on one side, the contract on the other.

Money is an exact Decimal made from integer nano-dollars; what is unknown is NULL. JSON is kept as text, as the bus had
it after redaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any

from pydantic_core import from_json, to_json

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.alert_rules import began_with, highest_severity
from breakwater.breakers.contract import BreakerTransition
from breakwater.calls.rules.refusals import for_operators
from breakwater.identity.contract import AuditEvent
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.jobs.contract.plans import PlanChange
from breakwater.jobs.rules.previews import preview, prompt_in
from breakwater.jobs.rules.runs import run_id
from breakwater.kernel.clickhouse.errors import UnstorableError
from breakwater.kernel.clickhouse.table import MONEY, MONEY_BY_WORD, MONEY_OR_NULL, TIME, TIME_OR_NULL, Table
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.records.contract import ExportedRecords, ExportFormat
from breakwater.records.schema import (
    ALERTS,
    ATTEMPTS,
    AUDIT,
    BREAKER_TRANSITIONS,
    BUDGET_EVENTS,
    EXECUTIONS,
    GUARD_EVENTS,
    LIMIT_EVENTS,
    PLAN_CHANGES,
    TABLES,
)

StoredRow = tuple[object, ...]

_Reader = Callable[[Any], StoredRow]
_Conversion = Callable[[Any], object]

_ERROR_FIELDS = {
    f"error_{field.rstrip('_')}": field
    for field in ("kind", "class_", "message", "status_code", "retryable", "hash", "user_message")
}
"""By their columns."""
JSON_COLUMNS = ("output", "statistics", "messages", "input", "params", "metadata")
"""Of executions: they hold JSON as text."""
_LIMIT_TEXTS = ("before", "after", "raised")
_BUDGET_AMOUNTS = ("limit", "total", "previous", "configured")
_MONEY_DIGITS = 18
"""Of Decimal(18, 9): amounts below a thousand million dollars."""
_YEARS = range(1970, 2106)
"""Years that the expression that ages rows out can hold: ClickHouse wraps others round instead of refusing them."""


def execution_row(record: Execution, sequence: int) -> StoredRow:
    """A terminal record as a row of `executions`; `sequence` is its message's place in the stream.

    Raises:
        UnstorableError: an amount or a time is out of range.
    """
    calls, costs = _by_cause(record.attempts)
    return _row(
        EXECUTIONS,
        record,
        sequence,
        calls_by_cause=calls,
        cost_by_cause=costs,
        prompt_preview=preview(prompt_in({"messages": record.messages, "input": record.input})),  # pyright: ignore[reportArgumentType]  # JSON
        output_preview=preview(record.output),
        run_id=record.run_id or run_id(record.tenant, record.task_key or record.execution_id),
        erased_at=None,
        **_error(record.error),
    )


def attempt_row(attempt: Attempt, sequence: int, stored_at: datetime) -> StoredRow:
    """An attempt as a row of `attempts`; `stored_at` is when the stream took its message, by the NATS server's clock.

    Raises as `execution_row` does.
    """
    return _row(ATTEMPTS, attempt, sequence, stored_at=_time(stored_at), erased_at=None, **_error(attempt.error))


def transition_row(transition: BreakerTransition, sequence: int) -> StoredRow:
    """A breaker's change of state as a row of `breaker_transitions`. Raises as `execution_row` does."""
    return _row(BREAKER_TRANSITIONS, transition, sequence)


def guard_row(event: GuardEvent, sequence: int) -> StoredRow:
    """A task's trip or reset as a row of `guard_events`. Raises as `execution_row` does."""
    return _row(GUARD_EVENTS, event, sequence)


def budget_row(event: BudgetEvent, sequence: int) -> StoredRow:
    """A budget's event as a row of `budget_events`. Raises as `execution_row` does."""
    amounts = {f"{name}_cost": _money_or_null(getattr(event, name)) for name in _BUDGET_AMOUNTS}
    return _row(BUDGET_EVENTS, event, sequence, **amounts)


def plan_row(change: PlanChange, sequence: int) -> StoredRow:
    """A plan's change of state as a row of `plan_changes`. Raises as `execution_row` does."""
    return _row(PLAN_CHANGES, change, sequence)


def limit_row(event: LimitEvent, sequence: int) -> StoredRow:
    """A change of a limit as a row of `limit_events`. Raises as `execution_row` does."""
    texts = {name: None if (part := getattr(event, name)) is None else part.model_dump_json() for name in _LIMIT_TEXTS}
    return _row(LIMIT_EVENTS, event, sequence, **texts)


def alert_row(alert: Alert, sequence: int) -> StoredRow:
    """A change of an incident as a row of `alerts`. Raises as `execution_row` does."""
    return _row(
        ALERTS,
        alert,
        sequence,
        payload=_json(alert.payload),
        first_event=began_with(alert),
        highest_severity=highest_severity(alert),
    )


def audit_row(event: AuditEvent, sequence: int) -> StoredRow:
    """A person's action as a row of `audit`. Raises as `execution_row` does."""
    return _row(AUDIT, event, sequence, details=_json(event.details))


def execution_of(*, attempts: Iterable[Attempt] = (), **row: Any) -> Execution:
    """The terminal record that a row of `executions` was made from, with the attempts given."""
    texts = {name: None if row[name] is None else from_json(row[name]) for name in JSON_COLUMNS}
    return Execution.model_validate({**row, **texts, "error": _error_of(row), "attempts": tuple(attempts)})


def attempt_of(**row: Any) -> Attempt:
    """The attempt that a row of `attempts` was made from."""
    return Attempt.model_validate({**row, "error": _error_of(row)})


def budget_of(**row: Any) -> BudgetEvent:
    """The event that a row of `budget_events` was made from."""
    return BudgetEvent.model_validate({**row, **{name: row[f"{name}_cost"] for name in _BUDGET_AMOUNTS}})


def limit_event_of(**row: Any) -> LimitEvent:
    """The change that a row of `limit_events` was made from."""
    return LimitEvent.model_validate({**row, **{name: from_json(row[name]) for name in _LIMIT_TEXTS if row[name]}})


def alert_of(**row: Any) -> Alert:
    """The change of an incident that a row of `alerts` was made from."""
    return Alert.model_validate({**row, "payload": from_json(row["payload"])})


def audit_event_of(**row: Any) -> AuditEvent:
    """The action that a row of `audit` was made from."""
    return AuditEvent.model_validate({**row, "details": from_json(row["details"])})


def _row(table: Table, message: object, sequence: int, **values: object) -> StoredRow:
    """A message as a row: the values of its columns, from `values` or converted from the message's fields."""
    values["event_sequence"] = sequence
    fields_of, conversions, in_order = _reading(table.name, tuple(values))
    fields = [*fields_of(message)]
    for place, convert in conversions:
        if (value := fields[place]) is not None:
            fields[place] = convert(value)
    return in_order((*fields, *values.values()))


@cache
def _reading(table: str, values: tuple[str, ...]) -> tuple[_Reader, tuple[tuple[int, _Conversion], ...], _Reader]:
    """Prepares the rows of a table in which these columns are not fields of the message.

    Returns:
        What reads the fields; the conversions of some of them, by their place; and what puts the fields, with the
        values behind them, in the order of the columns.
    """
    columns = _COLUMNS[table]
    fields = [name for name in columns if name not in values]
    conversions = tuple((place, convert) for place, name in enumerate(fields) if (convert := columns[name]) is not None)
    place_of = {name: place for place, name in enumerate((*fields, *values))}
    return attrgetter(*fields), conversions, itemgetter(*(place_of[name] for name in columns))


def _by_cause(attempts: Iterable[Attempt]) -> tuple[Mapping[str, int], Mapping[str, Decimal]]:
    """The number of calls of each cause, and the known part of their cost.

    Kept with the execution, as the success of retries is asked of months: its attempts would be looked for among
    millions.
    """
    calls: dict[str, int] = {}
    costs: dict[str, int] = {}
    for attempt in attempts:
        if not attempt.short_circuited:
            calls[attempt.cause] = calls.get(attempt.cause, 0) + 1
            if attempt.cost:
                costs[attempt.cause] = costs.get(attempt.cause, 0) + attempt.cost
    return calls, _money_by_word(costs)


_NO_ERROR: Mapping[str, object] = dict.fromkeys(_ERROR_FIELDS)


def _error(error: ErrorInfo | None) -> Mapping[str, object]:
    if error is None:
        return _NO_ERROR
    if error.figures is not None:
        error = error.model_copy(update={"message": for_operators(error)})
    return {column: getattr(error, field) for column, field in _ERROR_FIELDS.items()}


def _error_of(row: Mapping[str, Any]) -> ErrorInfo | None:
    if row["error_kind"] is None:
        return None
    return ErrorInfo.model_validate({field: row[column] for column, field in _ERROR_FIELDS.items()})


def _money(nano: int) -> Decimal:
    # Neither the driver nor ClickHouse refuses more digits than the type has: they would be stored as something else.
    if abs(nano) >= 10**_MONEY_DIGITS:
        raise UnstorableError(f"an amount of {nano} nano-dollars exceeds the range of a money column")
    return Decimal(nano).scaleb(-9)


def _money_by_word(amounts: Mapping[str, int]) -> Mapping[str, Decimal]:
    return {word: _money(nano) for word, nano in amounts.items()}


def _time(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise UnstorableError(f"the time {moment.isoformat()} has no offset from UTC")
    if moment.year not in _YEARS:
        raise UnstorableError(f"the time {moment.isoformat()} is out of range")
    return moment


def _json(value: object) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def _money_or_null(nano: int | None) -> Decimal | None:
    return None if nano is None else _money(nano)


_CONVERSIONS: Mapping[str, _Conversion] = {
    MONEY: _money,
    MONEY_OR_NULL: _money,
    MONEY_BY_WORD: _money_by_word,
    TIME: _time,
    TIME_OR_NULL: _time,
}
"""Conversions of fields that are not None, by the type of their column; others are stored as they are."""

_COLUMNS: Mapping[str, Mapping[str, _Conversion | None]] = {
    table.name: {
        name: _json if table is EXECUTIONS and name in JSON_COLUMNS else _CONVERSIONS.get(kind)
        for name, kind in table.columns.items()
    }
    for table in TABLES
}


# Rows as files, which ClickHouse writes: every row once (FINAL), in no fixed order, as sorting millions of them would
# take the server's memory.
_JSONL_SETTINGS: Mapping[str, object] = {
    # As on the wire: a decimal string in USD with nine places, and times as RFC 3339 in UTC.
    "output_format_json_quote_decimals": 1,
    "output_format_decimal_trailing_zeros": 1,
    "date_time_output_format": "iso",
    "output_format_json_quote_64bit_integers": 0,
    "output_format_json_escape_forward_slashes": 0,
    # Numbers that JSON has no word for become null.
    "output_format_json_quote_denormals": 0,
}

_PARQUET_SETTINGS: Mapping[str, object] = {
    "output_format_parquet_compression_method": "zstd",
    "output_format_parquet_string_as_string": 1,
    # The default would buffer a million rows of every column.
    "output_format_parquet_row_group_size": 100_000,
}

_EXPORTED_TABLES: Mapping[ExportedRecords, Table] = {"executions": EXECUTIONS, "attempts": ATTEMPTS}
"""A table's `time` is when an execution ended, and when an attempt began."""

EXPORT_SETTINGS: Mapping[ExportFormat, Mapping[str, object]] = {"parquet": _PARQUET_SETTINGS, "jsonl": _JSONL_SETTINGS}


def exported_rows(
    records: ExportedRecords, *, since: datetime | None, until: datetime, agent: str | None, status: str | None
) -> tuple[str, dict[str, object]]:
    """The SQL behind FROM that selects the rows, and its parameters. `since` is included, `until` is not."""
    table = _EXPORTED_TABLES[records]
    conditions = {
        "until": f"{table.time} < {{until:DateTime64(3, 'UTC')}}",
        "since": f"{table.time} >= {{since:DateTime64(3, 'UTC')}}",
        "agent": "agent = {agent:String}",
        "status": "status = {status:String}",
    }
    bounds: dict[str, object] = {"until": until, "since": since, "agent": agent, "status": status}
    parameters = {name: value for name, value in bounds.items() if value is not None}
    return f"{table.name} FINAL WHERE {' AND '.join(conditions[name] for name in parameters)}", parameters


def export_statement(records: ExportedRecords, form: ExportFormat, rows: str) -> str:
    """The statement that writes the rows of `exported_rows` as a file."""
    columns = _EXPORTED_TABLES[records].columns
    if form == "parquet":
        return f"SELECT {', '.join(columns)} FROM {rows} FORMAT Parquet"  # noqa: S608  made of constants
    # Not written by JSONEachRow, which would turn columns of JSON into strings that hold JSON.
    members = ", ',', ".join(f"'\"{name}\":', {_json_member(name)}" for name in columns)
    return f"SELECT concat('{{', {members}, '}}') FROM {rows} FORMAT TSVRaw"  # noqa: S608


def _json_member(column: str) -> str:
    written = f"ifNull(toJSONString({column}), 'null')"
    # Invalid JSON, which another program may have stored, must not break the line.
    return f"if(isValidJSON({column}), {column}, {written})" if column in JSON_COLUMNS else written
