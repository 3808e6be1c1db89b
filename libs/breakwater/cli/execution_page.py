"""`breakwater executions ID`: one execution, with every attempt it took."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from breakwater.cli import formats, output

if TYPE_CHECKING:
    from breakwater.contracts.execution import Attempt, Execution

_ERROR_WIDTH = 60


def show(execution: Execution) -> None:
    """Prints it for people: what is known of it, and its attempts as a table."""
    now = datetime.now(UTC)
    error = execution.error
    facts: list[tuple[str, output.Cell]] = [
        ("agent", execution.agent),
        ("status", output.state(execution.status)),
        ("reason", execution.reason or ""),
        ("error", "" if error is None else f"{error.class_}: {error.message}"),
        ("model", execution.chosen_model or ""),
        ("models to try", " > ".join(execution.fallback_chain)),
        ("tokens", f"{execution.input_tokens:,} in, {execution.output_tokens:,} out" if execution.total_tokens else ""),
        ("cost", _cost(execution)),
        ("wasted", _wasted(execution)),
        ("cache", _cache(execution)),
        ("left out", _left_out(execution)),
        ("queued", formats.clock(execution.queued_at, now)),
        ("took", formats.duration(execution.duration_ms)),
        ("tenant", execution.tenant or ""),
        ("task", execution.task_id or ""),
        ("parent", execution.parent_execution_id or ""),
        ("dry run", "yes" if execution.dry_run else ""),
        ("answer", execution.output if isinstance(execution.output, str) else ""),
    ]
    output.styled((execution.execution_id, "bold"))
    for name, value in facts:
        if value:
            output.styled((f"  {name:<14}", "dim"), value)
    if execution.attempts:
        output.write("")
        output.table(
            [
                output.Column("#", right=True),
                output.Column("model"),
                output.Column("why", drop=4),
                output.Column("outcome"),
                output.Column("took", right=True, drop=2),
                output.Column("waited", right=True, drop=5),
                output.Column("cost", right=True, drop=1),
                output.Column("error", drop=3),
            ],
            [_attempt(attempt) for attempt in execution.attempts],
        )


def _attempt(attempt: Attempt) -> tuple[output.Cell, ...]:
    error = attempt.error
    status = f" {error.status_code}" if error is not None and error.status_code else ""
    return (
        str(attempt.number),
        attempt.model,
        attempt.cause,
        output.state(attempt.outcome),
        formats.duration(attempt.duration_ms),
        formats.duration(attempt.backoff_ms) if attempt.backoff_ms else "",
        "" if attempt.short_circuited else formats.money(attempt.cost),
        "" if error is None else shortened(f"{error.kind}{status}: {error.message}"),
    )


def _cost(execution: Execution) -> str:
    if execution.total_cost is None:
        return "unknown"
    basis = "" if execution.cost_basis == "billed" else f" ({execution.cost_basis})"
    return f"{formats.money(execution.total_cost)}{basis}"


def _wasted(execution: Execution) -> str:
    if not execution.wasted_cost:
        return ""
    dearest_first = sorted(execution.wasted_by_cause.items(), key=lambda part: -part[1])
    causes = ", ".join(f"{cause.replace('_', ' ')} {formats.money(cost)}" for cause, cost in dearest_first if cost)
    return f"{formats.money(execution.wasted_cost)}{f' ({causes})' if causes else ''}"


def _cache(execution: Execution) -> str:
    if not execution.cache_hit:
        return ""
    source = f" of {execution.cached_from}" if execution.cached_from else ""
    return f"answered from the cache{source}, nothing was called"


def _left_out(execution: Execution) -> str:
    """What calls did without: orphaned tool calls, or turns that did not fit."""
    return ", ".join(
        f"{attempt.dropped_messages} message{'s' if attempt.dropped_messages > 1 else ''} in attempt {attempt.number}"
        for attempt in execution.attempts
        if attempt.dropped_messages
    )


def shortened(text: str) -> str:
    """The beginning of a text, in one line that fits into a table."""
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_WIDTH else line[: _ERROR_WIDTH - 1] + "…"
