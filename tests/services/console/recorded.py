"""What happened some minutes ago, stored where the console reads it."""

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.records import rows, schema
from tests.records.samples import attempt, attempt_row, execution
from tests.services.console.conftest import Console


def ended(execution_id: str, minutes_ago: float, *attempts: Attempt, **fields: Any) -> Execution:
    count = {"attempts": attempts, "attempts_count": len(attempts) or 1}
    return execution(execution_id, **({"completed_at": _ago(minutes_ago)} | count | fields))


def tried(execution_id: str, number: int, minutes_ago: float, **fields: Any) -> Attempt:
    return attempt(execution_id, number, **({"started_at": _ago(minutes_ago)} | fields))


def broken(message: str, kind: str = "server") -> ErrorInfo:
    return ErrorInfo.model_validate({"kind": kind, "class": "ServerError", "message": message, "hash": f"h-{message}"})


async def store(console: Console, *records: "Execution | Attempt") -> None:
    """Stores executions with their attempts, and attempts of executions that are not over."""
    executions = [one for one in records if isinstance(one, Execution)]
    attempts = [one for one in records if isinstance(one, Attempt)]
    attempts += [one for record in executions for one in record.attempts]
    await console.analytics.insert(
        schema.EXECUTIONS, [rows.execution_row(one, index) for index, one in enumerate(executions)]
    )
    await console.analytics.insert(schema.ATTEMPTS, [attempt_row(one, index) for index, one in enumerate(attempts)])


def _ago(minutes: float) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=minutes)
