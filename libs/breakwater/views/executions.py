"""Runs, executions and their attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from breakwater.contracts.execution import Attempt, Execution, ExecutionSummary, RunSummary
from breakwater.policy.formats import failures_in_words, money
from breakwater.views.columns import Column, humanized
from breakwater.views.plans import basis

_ERROR_WIDTH = 60


def shortened(text: str) -> str:
    """The beginning of a text, in one line that fits into a table."""
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_WIDTH else line[: _ERROR_WIDTH - 1] + "…"


def _remarks(line: ExecutionSummary | RunSummary) -> str:
    said = ("dry run" if line.dry_run else None, line.reason, line.error_message)
    return shortened(": ".join(part for part in said if part))


COLUMNS: tuple[Column[ExecutionSummary], ...] = (
    Column("ended", lambda line: line.completed_at, "time", drop=3, sortable=False),
    Column("id", lambda line: line.execution_id, "execution", sortable=False),
    Column("agent", lambda line: line.agent, "agent", sortable=False),
    Column("status", lambda line: line.status, "state", sortable=False),
    Column("model", lambda line: line.model, drop=2, sortable=False),
    Column("tenant", lambda line: line.tenant, terminal=False, page=False),
    Column("task", lambda line: line.task_id, terminal=False, page=False),
    Column("plan", lambda line: line.plan_id, terminal=False, page=False),
    Column("run", lambda line: line.run_id, terminal=False, page=False),
    Column("attempts", lambda line: line.attempts_count, "count", name="attempts_count", drop=5),
    Column("tokens", lambda line: line.total_tokens, "count", name="total_tokens", terminal=False),
    Column("cost", lambda line: line.total_cost, "usd", name="total_cost", drop=1),
    Column("wasted_cost", lambda line: line.wasted_cost, "usd", terminal=False, page=False),
    Column("cost_basis", lambda line: line.cost_basis, terminal=False, page=False),
    Column("took", lambda line: line.duration_ms, "duration", name="duration_ms", drop=4),
    Column("reason", lambda line: line.reason, terminal=False, page=False),
    Column("error_kind", lambda line: line.error_kind, terminal=False, page=False),
    Column("reason", lambda line: line.error_message, words=_remarks, name="error", drop=6, sortable=False),
    Column("dry_run", lambda line: str(line.dry_run).lower(), terminal=False, page=False),
    Column("cache_hit", lambda line: str(line.cache_hit).lower(), terminal=False, page=False),
)


class Step(NamedTuple):
    """An execution of a run."""

    depth: int
    """The number of its ancestors in the run."""
    execution: ExecutionSummary


def in_tree(steps: Sequence[ExecutionSummary]) -> list[Step]:
    """The steps of a run, each followed by those that name it as their parent; others in the order given."""
    by_id = {one.execution_id: one for one in steps}
    below: dict[str | None, list[ExecutionSummary]] = {}
    for one in by_id.values():
        below.setdefault(one.parent_execution_id if one.parent_execution_id in by_id else None, []).append(one)
    placed: dict[str, Step] = {}
    # All of them once more, as jobs may name each other as parents.
    for root in (*below.get(None, ()), *by_id.values()):
        stack = [Step(0, root)]
        while stack:
            depth, one = stack.pop()
            if one.execution_id not in placed:
                placed[one.execution_id] = Step(depth, one)
                stack += [Step(depth + 1, child) for child in reversed(below.get(one.execution_id, ()))]
    return list(placed.values())


def _indented(step: Step) -> str:
    return "  " * step.depth + step.execution.execution_id


def _remarks_on_step(step: Step) -> str:
    return _remarks(step.execution)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


RUNS: tuple[Column[RunSummary], ...] = (
    Column("ended", lambda run: run.completed_at, "time", drop=3, sortable=False, terminal=False),
    Column("run", lambda run: run.run_id, "id", sortable=False),
    Column("agent", lambda run: _listed(run.agents), sortable=False),
    Column("status", lambda run: run.status, "state", sortable=False),
    Column("model", lambda run: _listed(run.models), sortable=False, terminal=False),
    Column("steps", lambda run: run.steps, "count", page=False),
    Column("attempts", lambda run: run.attempts_count, "count", name="attempts_count", terminal=False),
    Column("cost", lambda run: run.total_cost, "usd", name="total_cost"),
    Column("wasted", lambda run: run.wasted_cost, "usd", name="wasted_cost", drop=2),
    Column("started", lambda run: run.started_at, "time", drop=3, page=False),
    Column("took", lambda run: run.duration_ms, "duration", name="duration_ms", drop=4),
    Column("reason", lambda run: run.error_message, words=_remarks, name="error", drop=6, sortable=False),
)

STEPS: tuple[Column[Step], ...] = (
    Column("ended", lambda step: step.execution.completed_at, "time", terminal=False),
    Column("step", lambda step: step.execution.execution_id, words=_indented, name="run"),
    Column("agent", lambda step: step.execution.agent, "agent"),
    Column("status", lambda step: step.execution.status, "state"),
    Column("model", lambda step: step.execution.model, drop=5),
    Column("attempts", lambda step: step.execution.attempts_count, "count", name="attempts_count", terminal=False),
    Column("cost", lambda step: step.execution.total_cost, "usd", name="total_cost", drop=1),
    Column("wasted", lambda step: step.execution.wasted_cost, "usd", name="wasted_cost", drop=2),
    Column("took", lambda step: step.execution.duration_ms, "duration", name="duration_ms", drop=3),
    Column("reason", lambda step: step.execution.error_message, words=_remarks_on_step, name="error", drop=4),
)
"""On a page they are below those of `RUNS`."""


def _rate(attempt: Attempt | None) -> str | None:
    return None if attempt is None or attempt.tokens_per_s is None else f"{attempt.tokens_per_s:,.0f}"


def _attempt_error(attempt: Attempt) -> str | None:
    error = attempt.error
    if error is None:
        return None
    status = f" {error.status_code}" if error.status_code else ""
    return shortened(f"{error.kind}{status}: {error.message}")


ATTEMPTS: tuple[Column[Attempt], ...] = (
    Column("#", lambda one: one.number, "count"),
    Column("model", lambda one: one.model),
    Column("why", lambda one: one.cause, drop=4),
    Column("outcome", lambda one: one.outcome, "state"),
    Column("finish", lambda one: one.finish_reason, drop=6),
    Column("took", lambda one: one.duration_ms, "duration", drop=2),
    Column("first token", lambda one: one.first_token_ms, "duration", drop=7),
    Column("tokens/s", _rate, right=True, drop=8),
    Column("waited", lambda one: one.backoff_ms or None, "duration", drop=5),
    Column("cost", lambda one: "" if one.short_circuited else one.cost, "usd", drop=1),
    Column("error", _attempt_error, drop=3),
)


def answering(execution: Execution) -> Attempt | None:
    """The attempt that gave the answer; None if none did."""
    succeeded = execution.status == "succeeded" and not execution.cache_hit
    return next((one for one in reversed(execution.attempts) if succeeded and one.outcome == "success"), None)


def cost(one: Execution, written: Callable[[int | None], str] = money) -> str:
    """Its cost, and the remark behind it. `written`: the form of the amount."""
    return written(one.total_cost) + ("" if one.total_cost is None else basis(one.cost_basis))


def _wasted(one: Execution) -> str:
    if not one.wasted_cost:
        return ""
    dearest_first = sorted(one.wasted_by_cause.items(), key=lambda part: -part[1])
    causes = ", ".join(f"{humanized(cause)} {money(cost)}" for cause, cost in dearest_first if cost)
    return f"{money(one.wasted_cost)}{f' ({causes})' if causes else ''}"


def _cache(one: Execution) -> str:
    source = f" of {one.cached_from}" if one.cached_from else ""
    return f"answered from the cache{source}, nothing was called" if one.cache_hit else ""


def left_out(execution: Execution) -> list[str]:
    """Orphaned tool calls, turns that did not fit, and parameters that a model refuses, by the calls without them."""
    parts: list[str] = []
    for attempt in execution.attempts:
        if count := attempt.dropped_messages:
            parts.append(f"{count} message{'s' if count > 1 else ''} in attempt {attempt.number}")
        if attempt.dropped_params:
            parts.append(f"{', '.join(attempt.dropped_params)} in attempt {attempt.number}")
    return parts


def _usage_problems(one: Execution) -> str:
    """Reported usage that is not credible; the costs are estimated then."""
    return "; ".join(
        f"{attempt.usage_problem} in attempt {attempt.number}"
        for attempt in one.attempts
        if attempt.usage_problem is not None
    )


FACTS: tuple[Column[Execution], ...] = (
    Column("agent", lambda one: one.agent),
    Column("status", lambda one: one.status, "state"),
    Column("reason", lambda one: one.reason, "words"),
    Column("error", lambda one: one.error and f"{one.error.class_}: {one.error.message}"),
    Column("stopped", lambda one: one.statistics and failures_in_words(one.statistics), page=False),
    Column("requested model", lambda one: one.requested_model, terminal=False),
    Column("model", lambda one: one.chosen_model),
    Column("models to try", lambda one: " > ".join(one.fallback_chain)),
    Column("attempts", lambda one: one.attempts_count, "count", terminal=False),
    Column("input tokens", lambda one: one.input_tokens or None, "count"),
    Column("output tokens", lambda one: one.output_tokens or None, "count"),
    Column("cached tokens", lambda one: one.cached_tokens or None, "count"),
    Column("cost", cost),
    Column("wasted", _wasted),
    Column("cache", _cache),
    Column("left out", lambda one: ", ".join(left_out(one)), page=False),
    Column("finish reason", lambda one: one.finish_reason),
    Column("usage", _usage_problems, page=False),
    Column("queued", lambda one: one.queued_at, "time", page=False),
    Column(
        "queued for",
        lambda one: max((one.dispatched_at - one.queued_at).total_seconds() * 1000, 0),
        "duration",
        terminal=False,
    ),
    Column("took", lambda one: one.duration_ms, "duration"),
    Column("first token", lambda one: (best := answering(one)) and best.first_token_ms, "duration", terminal=False),
    Column("tokens/s", lambda one: _rate(answering(one)), terminal=False),
    Column("tenant", lambda one: one.tenant),
    Column("task", lambda one: one.task_id),
    Column("parent", lambda one: one.parent_execution_id, page=False),
    Column("plan", lambda one: one.plan_id, page=False),
    Column("dry run", lambda one: "yes" if one.dry_run else None, page=False),
    Column("config", lambda one: one.config_version),
    Column("answer", lambda one: one.output if isinstance(one.output, str) else None, page=False),
)
