"""Showing what became of a submitted job."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from typing import Any, cast

import typer

from breakwater.cli import formats, output
from breakwater.cli.errors import ExitCode

CLOCKS_DIFFER = timedelta(seconds=1)
"""The server's clock may be behind ours by so much, and a job is still no older than its submission."""


def show(result: dict[str, Any], *, as_json: bool) -> None:
    """Prints a result: the answer, then what it took. Ends the command where the job did not succeed."""
    succeeded = result["status"] == "succeeded"
    if as_json:
        output.json_document(result)
    elif succeeded:
        _answer(result)
        output.note(summary(result))
    else:
        _failure(result)
    if not succeeded:
        raise typer.Exit(ExitCode.JOB_FAILED)


def tell_if_recorded(result: dict[str, Any], submitted_at: datetime) -> None:
    """Says on stderr that an answer is the one of an earlier submission with the same job id.

    Args:
        result: as it came.
        submitted_at: when the job was sent, by this machine's clock.
    """
    queued_at = datetime.fromisoformat(result["queued_at"])
    if queued_at < submitted_at - CLOCKS_DIFFER:
        output.note(f"answered from its record: {result['execution_id']} was submitted at {result['queued_at']}")


def summary(result: dict[str, Any]) -> str:
    """What an execution took, in a line: model, attempts, tokens, cost, time."""
    count = result["attempts_count"]
    cost = result["total_cost"]
    parts = [
        result["chosen_model"] or result["requested_model"] or "no model",
        "dry run" if result["dry_run"] else "1 attempt" if count == 1 else f"{count} attempts",
        f"{result['total_tokens']} tokens" if result["total_tokens"] else "",
        "cost unknown" if cost is None else formats.dollars(cost),
        "estimated" if result["cost_basis"] == "estimated" else "",
        formats.duration(result["duration_ms"]),
        result["execution_id"],
    ]
    return " · ".join(part for part in parts if part)


def _answer(result: dict[str, Any]) -> None:
    answer: Any = result["output"]
    if result["dry_run"] and isinstance(answer, dict):
        planned = cast(list[dict[str, Any]], answer["models"])
        columns = [output.Column("model"), output.Column("provider"), output.Column("attempts at most", right=True)]
        columns.append(output.Column("worst cost of one", right=True))
        output.table(
            columns,
            [
                (
                    one["model"],
                    one["provider"] or "",
                    f"{one['max_attempts']}{f' + {corrections}' if (corrections := one['max_corrections']) else ''}",
                    "unknown" if one["worst_case_cost"] is None else formats.dollars(one["worst_case_cost"]),
                )
                for one in planned
            ],
        )
    elif isinstance(answer, str):
        output.write(answer)
    else:
        output.json_document(answer)


def _failure(result: dict[str, Any]) -> None:
    if isinstance(result["output"], str):
        output.write(result["output"])  # of an agent with `on_error: message`
    error = result["error"] or {}
    reason = result["reason"] or "error"
    said = error.get("message") or "no reason was given"
    sys.stderr.write(f"{result['status'].replace('_', '-')}: {reason}: {said}\n")
    for attempt in result["attempts"]:
        problem = attempt["error"] or {}
        status = problem.get("status_code")
        kind = f"{problem.get('kind', attempt['outcome'])}{f' {status}' if status else ''}"
        sys.stderr.write(
            f"  {attempt['number']}. {attempt['model']}: {kind}, {formats.duration(attempt['duration_ms'])}\n"
        )
    output.note(summary(result))


def accepted(job_id: str, *, waited_s: float, as_json: bool) -> None:
    """Prints the id of a job that is not decided yet. Ends the command with a code of its own after a wait."""
    if as_json:
        output.json_document({"job_id": job_id, "execution_id": job_id, "status": "accepted"})
    else:
        output.write(job_id)
    if waited_s:
        output.note(
            f"accepted, and not decided within {waited_s:g} s; `breakwater executions {job_id}` tells how it ends"
        )
        raise typer.Exit(ExitCode.UNDECIDED)
    output.note("accepted")
