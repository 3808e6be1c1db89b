"""The table and the row of each kind of message. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.identity.contract import AuditEvent
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.contract.plans import PlanChange
from breakwater.jobs.store.records import problem_of
from breakwater.kernel.clickhouse.errors import UnstorableError
from breakwater.kernel.clickhouse.table import Table
from breakwater.kernel.nats.subjects import decode_token
from breakwater.kernel.types import Event
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.records import rows, schema
from breakwater.records.rows import StoredRow

_Row = Callable[[Any, int, datetime], StoredRow]


def _timeless(row: Callable[[Any, int], StoredRow]) -> _Row:
    """Adapts the row of a kind that has no column for the time of storing."""
    return lambda event, sequence, _stored_at: row(event, sequence)


_KINDS: Mapping[str, tuple[Table, type[Event], _Row]] = {
    "attempts": (schema.ATTEMPTS, Attempt, rows.attempt_row),
    "executions": (schema.EXECUTIONS, Execution, _timeless(rows.execution_row)),
    "breakers": (schema.BREAKER_TRANSITIONS, BreakerTransition, _timeless(rows.transition_row)),
    "shadow-breakers": (schema.BREAKER_TRANSITIONS, BreakerTransition, _timeless(rows.transition_row)),
    "guards": (schema.GUARD_EVENTS, GuardEvent, _timeless(rows.guard_row)),
    "budgets": (schema.BUDGET_EVENTS, BudgetEvent, _timeless(rows.budget_row)),
    "shadow-budgets": (schema.BUDGET_EVENTS, BudgetEvent, _timeless(rows.budget_row)),
    "limits": (schema.LIMIT_EVENTS, LimitEvent, _timeless(rows.limit_row)),
    "plans": (schema.PLAN_CHANGES, PlanChange, _timeless(rows.plan_row)),
    "alerts": (schema.ALERTS, Alert, _timeless(rows.alert_row)),
    "audit": (schema.AUDIT, AuditEvent, _timeless(rows.audit_row)),
}
"""The table, the type and the row of each kind of message."""


def read(
    subject: str, data: bytes, headers: Mapping[str, str], sequence: int, stored_at: datetime
) -> tuple[Table, StoredRow]:
    """A message as a row, with the table where it belongs.

    Args:
        subject: such as `bw.attempts.<agent>.<execution>.<n>`; its second token is the kind.
        data: the message as it is on the bus.
        headers: its headers.
        sequence: its place in the stream.
        stored_at: when the stream took it, by the NATS server's clock.

    Raises:
        UnstorableError: the kind has no table, the message is not of its kind, is a record that does not count
            (`jobs.store.records`), or a value fits no column.
    """
    kind = _KINDS.get(_token(subject, 1))
    if kind is None:
        raise UnstorableError(f"no table stores messages of {subject}")
    table, model, row = kind
    try:
        event = model.model_validate_json(data)
        problem = problem_of(event, subject, headers) if isinstance(event, Attempt | Execution) else None
        if problem is not None:
            raise UnstorableError(problem)
        return table, row(event, sequence, stored_at)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        first = problems[0]
        path = ".".join(str(part) for part in first["loc"])
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        where = f" at {path}" if path else ""
        raise UnstorableError(f"is not a {model.__name__}{where}: {first['msg']}{more}") from error


def agent_of(subject: str) -> str | None:
    """The agent that a subject names, for the dead letter; None if the kind has none."""
    if _token(subject, 1) not in ("attempts", "executions", "breakers", "shadow-breakers", "guards"):
        return None
    return decode_token(_token(subject, 2)) or None


def execution_of(subject: str) -> str | None:
    """The execution that a subject names, for the dead letter; None if the kind has none."""
    if _token(subject, 1) not in ("attempts", "executions"):
        return None
    return decode_token(_token(subject, 3)) or None


def _token(subject: str, index: int) -> str:
    tokens = subject.split(".")
    return tokens[index] if index < len(tokens) else ""
