"""Columns of runs, executions and attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from breakwater.jobs.contract.execution import Attempt, Execution, ExecutionSummary, RunSummary
from breakwater.jobs.views.plans import basis
from breakwater.kernel.columns import Column, humanize
from breakwater.kernel.formats import money

_ERROR_WIDTH = 60


def shorten(text: str) -> str:
    """Shortens a text to one line that fits into a table."""
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_WIDTH else line[: _ERROR_WIDTH - 1] + "…"


def _remarks(summary: ExecutionSummary | RunSummary) -> str:
    remarks = ("dry run" if summary.dry_run else None, summary.reason, summary.error_message)
    return shorten(": ".join(remark for remark in remarks if remark))


COLUMNS: tuple[Column[ExecutionSummary], ...] = (
    Column("ended", lambda execution: execution.completed_at, "time", drop=2, sortable=False),
    Column(
        "id",
        lambda execution: execution.execution_id,
        "execution",
        display=lambda execution: execution.job_id,
        sortable=False,
        shortens=True,
    ),
    Column("job", lambda execution: execution.job_id, name="job_id", terminal=False, page=False),
    Column("agent", lambda execution: execution.agent, "agent", sortable=False),
    Column("status", lambda execution: execution.status, "state", sortable=False),
    Column("model", lambda execution: execution.model, drop=3, sortable=False),
    Column("key", lambda execution: execution.submitted_by, name="submitted_by", drop=7, page=False),
    Column("user", lambda execution: execution.user, terminal=False, page=False),
    Column("team", lambda execution: execution.team, terminal=False, page=False),
    Column("tenant", lambda execution: execution.tenant, terminal=False, page=False),
    Column("task", lambda execution: execution.task_id, terminal=False, page=False),
    Column("plan", lambda execution: execution.plan_id, terminal=False, page=False),
    Column("run", lambda execution: execution.run_id, terminal=False, page=False),
    Column("attempts", lambda execution: execution.attempts_count, "count", name="attempts_count", drop=5),
    Column(
        "tokens", lambda execution: execution.total_tokens, "count", name="total_tokens", terminal=False, page=False
    ),
    Column("cost", lambda execution: execution.total_cost, "usd", name="total_cost", drop=1),
    Column("wasted_cost", lambda execution: execution.wasted_cost, "usd", terminal=False, page=False),
    Column("cost_basis", lambda execution: execution.cost_basis, terminal=False, page=False),
    Column("took", lambda execution: execution.duration_ms, "duration", name="duration_ms", drop=4),
    Column("reason", lambda execution: execution.reason, terminal=False, page=False),
    Column("error_kind", lambda execution: execution.error_kind, terminal=False, page=False),
    Column(
        "reason", lambda execution: execution.error_message, display=_remarks, name="error", below=True, sortable=False
    ),
    Column("dry_run", lambda execution: str(execution.dry_run).lower(), terminal=False, page=False),
    Column("cache_hit", lambda execution: str(execution.cache_hit).lower(), terminal=False, page=False),
    Column("prompt_preview", lambda execution: execution.prompt_preview, terminal=False, page=False),
    Column("output_preview", lambda execution: execution.output_preview, terminal=False, page=False),
)


class Step(NamedTuple):
    """An execution of a run."""

    depth: int
    """The number of the execution's ancestors in the run."""
    execution: ExecutionSummary


def as_tree(steps: Sequence[ExecutionSummary]) -> list[Step]:
    """Arranges the steps of a run as a tree, each followed by its children; siblings keep their order."""
    by_id = {execution.execution_id: execution for execution in steps}
    children: dict[str | None, list[ExecutionSummary]] = {}
    for execution in by_id.values():
        parent = execution.parent_execution_id
        children.setdefault(parent if parent in by_id else None, []).append(execution)
    placed: dict[str, Step] = {}
    # All executions follow the roots: if jobs name each other as parents, no root reaches them.
    for root in (*children.get(None, ()), *by_id.values()):
        stack = [Step(0, root)]
        while stack:
            depth, execution = stack.pop()
            if execution.execution_id not in placed:
                placed[execution.execution_id] = Step(depth, execution)
                stack += [Step(depth + 1, child) for child in reversed(children.get(execution.execution_id, ()))]
    return list(placed.values())


def _indent(step: Step) -> str:
    return "  " * step.depth + step.execution.job_id


def _remarks_on_step(step: Step) -> str:
    return _remarks(step.execution)


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


RUNS: tuple[Column[RunSummary], ...] = (
    Column("ended", lambda run: run.completed_at, "time", drop=3, sortable=False, terminal=False),
    Column("run", lambda run: run.run_id, "id", sortable=False, shortens=True),
    Column("agent", lambda run: _list_names(run.agents), sortable=False),
    Column("status", lambda run: run.status, "state", sortable=False),
    Column("model", lambda run: _list_names(run.models), sortable=False, terminal=False),
    Column("steps", lambda run: run.steps, "count", page=False),
    Column("attempts", lambda run: run.attempts_count, "count", name="attempts_count", terminal=False),
    Column("tokens", lambda run: run.total_tokens, "count", name="total_tokens", terminal=False, page=False),
    Column("cost", lambda run: run.total_cost, "usd", name="total_cost"),
    Column("wasted", lambda run: run.wasted_cost, "usd", name="wasted_cost", drop=2),
    Column("started", lambda run: run.started_at, "time", drop=3, page=False),
    Column("took", lambda run: run.duration_ms, "duration", name="duration_ms", drop=4),
    Column("reason", lambda run: run.error_message, display=_remarks, name="error", below=True, sortable=False),
)

STEPS: tuple[Column[Step], ...] = (
    Column("ended", lambda step: step.execution.completed_at, "time", terminal=False),
    Column("step", lambda step: step.execution.execution_id, display=_indent, name="run"),
    Column("agent", lambda step: step.execution.agent, "agent"),
    Column("status", lambda step: step.execution.status, "state"),
    Column("model", lambda step: step.execution.model, drop=5),
    Column("attempts", lambda step: step.execution.attempts_count, "count", name="attempts_count", terminal=False),
    Column("cost", lambda step: step.execution.total_cost, "usd", name="total_cost", drop=1),
    Column("wasted", lambda step: step.execution.wasted_cost, "usd", name="wasted_cost", drop=2),
    Column("took", lambda step: step.execution.duration_ms, "duration", name="duration_ms", drop=3),
    Column("reason", lambda step: step.execution.error_message, display=_remarks_on_step, name="error", drop=4),
)
"""The columns of a run's steps. A page aligns them with those of `RUNS`."""


def _rate(attempt: Attempt | None) -> str | None:
    return None if attempt is None or attempt.tokens_per_s is None else f"{attempt.tokens_per_s:,.0f}"


def _attempt_error(attempt: Attempt) -> str | None:
    error = attempt.error
    if error is None:
        return None
    status = f" {error.status_code}" if error.status_code else ""
    return shorten(f"{error.kind}{status}: {error.message}")


ATTEMPTS: tuple[Column[Attempt], ...] = (
    Column("#", lambda attempt: attempt.number, "count"),
    Column("model", lambda attempt: attempt.model),
    Column("deployment", lambda attempt: attempt.deployment, drop=9),
    Column("why", lambda attempt: attempt.cause, drop=4),
    Column("outcome", lambda attempt: attempt.outcome, "state"),
    Column("finish", lambda attempt: attempt.finish_reason, drop=6),
    Column("took", lambda attempt: attempt.duration_ms, "duration", drop=2),
    Column("first token", lambda attempt: attempt.first_token_ms, "duration", drop=7),
    Column("tokens/s", _rate, align_right=True, drop=8),
    Column("waited", lambda attempt: attempt.backoff_ms or None, "duration", drop=5),
    Column("cost", lambda attempt: "" if attempt.short_circuited else attempt.cost, "usd", drop=1),
    Column("error", _attempt_error, drop=3),
)


def answering_attempt(execution: Execution) -> Attempt | None:
    """The attempt that gave the answer; None if none did."""
    if execution.status != "succeeded" or execution.cache_hit:
        return None
    return next((attempt for attempt in reversed(execution.attempts) if attempt.outcome == "success"), None)


def cost(execution: Execution, format_amount: Callable[[int | None], str] = money) -> str:
    """Writes an execution's cost, followed by its basis if it was not billed.

    Args:
        execution: the execution.
        format_amount: writes the amount, in nano-dollars; None is an unknown amount.
    """
    return format_amount(execution.total_cost) + ("" if execution.total_cost is None else basis(execution.cost_basis))


def _waste_text(execution: Execution) -> str:
    if not execution.wasted_cost:
        return ""
    dearest_first = sorted(execution.wasted_by_cause.items(), key=lambda cause_and_cost: -cause_and_cost[1])
    causes = ", ".join(f"{humanize(cause)} {money(wasted)}" for cause, wasted in dearest_first if wasted)
    return f"{money(execution.wasted_cost)}{f' ({causes})' if causes else ''}"


def _cache(execution: Execution) -> str:
    source = f" of {execution.cached_from}" if execution.cached_from else ""
    return f"answered from the cache{source}, nothing was called" if execution.cache_hit else ""


def dropped_parts(execution: Execution) -> list[str]:
    """Lists what attempts left out of the request: orphaned tool calls, turns that did not fit, refused parameters."""
    parts: list[str] = []
    for attempt in execution.attempts:
        if count := attempt.dropped_messages:
            parts.append(f"{count} message{'s' if count > 1 else ''} in attempt {attempt.number}")
        if attempt.dropped_params:
            parts.append(f"{', '.join(attempt.dropped_params)} in attempt {attempt.number}")
    return parts


def _usage_problems(execution: Execution) -> str:
    """Lists attempts whose reported usage is not credible, so that their costs are estimates."""
    return "; ".join(
        f"{attempt.usage_problem} in attempt {attempt.number}"
        for attempt in execution.attempts
        if attempt.usage_problem is not None
    )


FACTS: tuple[Column[Execution], ...] = (
    Column(
        "execution",
        lambda execution: None if execution.execution_id == execution.job_id else execution.execution_id,
    ),
    Column("agent", lambda execution: execution.agent),
    Column("submitted by", lambda execution: execution.submitted_by),
    Column("user", lambda execution: execution.user),
    Column("team", lambda execution: execution.team),
    Column("status", lambda execution: execution.status, "state"),
    Column("reason", lambda execution: execution.reason, "words"),
    Column("error", lambda execution: execution.error and f"{execution.error.class_}: {execution.error.message}"),
    Column("stopped", lambda execution: execution.statistics and execution.statistics.in_words(), page=False),
    Column("requested model", lambda execution: execution.requested_model, terminal=False),
    Column("model", lambda execution: execution.chosen_model),
    Column("models to try", lambda execution: " > ".join(execution.fallback_chain)),
    Column("rules of its own", lambda execution: ", ".join(execution.own_rules)),
    Column("attempts", lambda execution: execution.attempts_count, "count", terminal=False),
    Column("input tokens", lambda execution: execution.input_tokens or None, "count"),
    Column("output tokens", lambda execution: execution.output_tokens or None, "count"),
    Column("cached tokens", lambda execution: execution.cached_tokens or None, "count"),
    Column("cost", cost),
    Column("wasted", _waste_text),
    Column("cache", _cache),
    Column("left out", lambda execution: ", ".join(dropped_parts(execution)), page=False),
    Column("finish reason", lambda execution: execution.finish_reason),
    Column("usage", _usage_problems, page=False),
    Column("queued", lambda execution: execution.queued_at, "time", page=False),
    Column(
        "queued for",
        lambda execution: max((execution.dispatched_at - execution.queued_at).total_seconds() * 1000, 0),
        "duration",
        terminal=False,
    ),
    Column("took", lambda execution: execution.duration_ms, "duration"),
    Column(
        "first token",
        lambda execution: (attempt := answering_attempt(execution)) and attempt.first_token_ms,
        "duration",
        terminal=False,
    ),
    Column("tokens/s", lambda execution: _rate(answering_attempt(execution)), terminal=False),
    Column("tenant", lambda execution: execution.tenant),
    Column("task", lambda execution: execution.task_id),
    Column("parent", lambda execution: execution.parent_job_id or execution.parent_execution_id, page=False),
    Column("plan", lambda execution: execution.plan_id, page=False),
    Column("dry run", lambda execution: "yes" if execution.dry_run else None, page=False),
    Column("config", lambda execution: execution.config_version),
    Column("answer", lambda execution: execution.output if isinstance(execution.output, str) else None, page=False),
)
