"""The tables as data, for one server or a replicated cluster: source of `CREATE TABLE` and of the columns of inserts.

Every table is a ReplacingMergeTree whose sorting key holds the natural key of its rows, so that a row that arrives
twice is replaced. Two things follow. Everything is read with FINAL, as the replacing happens at some later merge. And
whatever partitions or sorts a table must never change for a key: rows are replaced within a partition only. Hence
`executions` by `completed_at` and `attempts` by `started_at`: both are in the one record that the bus lets exactly
one writer publish. A job id that is used again after the bus forgot it ran again, and cost again: other times, so
another row, as sums of money require. The small tables have no partition at all.

The two large ones are sorted by the hour first, and by the agent within it. Parts come in the order of time, so FINAL
has something to compare only where they meet, and what is old costs no more than without it. By the agent first, every
part overlaps with every other. Tables from before keep their order, and are right, but slower over long times.

`event_sequence`, the message's place in its stream, is the version: of two rows with one key the later message stays.
It begins again at 1 when the stream is recreated; `stored_at`, by the NATS server's clock, says which one it is of.

`erased_at` is when `breakwater erase` took the texts and the names out of a row. EVENTS does not have it any more.
"""

from __future__ import annotations

from breakwater.kernel.clickhouse.table import (
    COUNT_BY_WORD,
    COUNT_OR_NULL,
    MONEY,
    MONEY_BY_WORD,
    MONEY_OR_NULL,
    MONEY_SUM,
    TEXT_BY_WORD,
    TEXT_OR_NULL,
    TIME,
    TIME_OR_NULL,
    WORD,
    WORD_OR_NULL,
    Table,
)

_ERROR = {
    "error_kind": WORD_OR_NULL,
    "error_class": WORD_OR_NULL,
    "error_message": TEXT_OR_NULL,
    "error_status_code": "Nullable(Int32)",
    "error_retryable": "Nullable(Bool)",
    "error_hash": TEXT_OR_NULL,
    "error_user_message": TEXT_OR_NULL,
}

EXECUTIONS = Table(
    "executions",
    {
        "execution_id": "String",
        "job_id": "String",
        "agent": WORD,
        "tenant": WORD_OR_NULL,
        "task_id": TEXT_OR_NULL,
        "task_key": TEXT_OR_NULL,
        "parent_execution_id": TEXT_OR_NULL,
        "parent_job_id": TEXT_OR_NULL,
        "plan_id": TEXT_OR_NULL,
        "plan_key": TEXT_OR_NULL,
        "run_id": "String",
        "status": WORD,
        "reason": WORD_OR_NULL,
        "requested_model": WORD_OR_NULL,
        "chosen_model": WORD_OR_NULL,
        "fallback_chain": "Array(String)",
        "own_rules": "Array(String)",
        "attempts_count": "UInt32",
        "input_tokens": "UInt64",
        "output_tokens": "UInt64",
        "cached_tokens": "UInt64",
        "total_tokens": "UInt64",
        "total_cost": MONEY_OR_NULL,
        "wasted_cost": MONEY_OR_NULL,
        "wasted_by_cause": MONEY_BY_WORD,
        "calls_by_cause": COUNT_BY_WORD,
        "cost_by_cause": MONEY_BY_WORD,
        "cost_basis": WORD,
        "requested_model_cost": MONEY_OR_NULL,
        "output": TEXT_OR_NULL,
        "finish_reason": WORD_OR_NULL,
        **_ERROR,
        "statistics": TEXT_OR_NULL,
        "messages": TEXT_OR_NULL,
        "input": TEXT_OR_NULL,
        "params": TEXT_OR_NULL,
        "metadata": "String",
        "queued_at": TIME,
        "dispatched_at": TIME,
        "started_at": TIME_OR_NULL,
        "completed_at": TIME,
        "duration_ms": "UInt64",
        "task_counted_at": TIME_OR_NULL,
        "cache_hit": "Bool",
        "cached_from": TEXT_OR_NULL,
        "dry_run": "Bool",
        "config_version": WORD_OR_NULL,
        "trace_id": TEXT_OR_NULL,
        "submitted_by": WORD_OR_NULL,
        "user": TEXT_OR_NULL,
        "team": WORD_OR_NULL,
        "prompt_preview": TEXT_OR_NULL,
        "output_preview": TEXT_OR_NULL,
        "encrypted": TEXT_OR_NULL,
        "erased_at": TIME_OR_NULL,
        "event_sequence": "UInt64",
    },
    # As `jobs.rules.runs` has it, without sessions and traces, which were not recorded.
    defaults={
        "run_id": "concat(ifNull(concat(tenant, '/'), ''), ifNull(task_id, execution_id))",
        # The ids of callers were those of the plane.
        "job_id": "execution_id",
        "task_key": "task_id",
        "parent_job_id": "parent_execution_id",
        "plan_key": "plan_id",
    },
    computed={
        "encryption_key": (WORD_OR_NULL, "substring(encrypted, 6, 8)"),
        # As in `Execution`.
        "is_answered_by_model": (
            "Bool",
            "status = 'succeeded' AND chosen_model IS NOT NULL AND NOT cache_hit AND NOT dry_run",
        ),
        "fell_back": ("Bool", "is_answered_by_model AND ifNull(chosen_model != requested_model, true)"),
        "fallback_cost": (
            MONEY_OR_NULL,
            "if(fell_back AND cost_basis != 'unknown' AND requested_model_cost > 0, "
            "total_cost - ifNull(wasted_cost, 0), NULL)",
        ),
    },
    order_by=("toStartOfHour(completed_at)", "agent", "completed_at", "execution_id"),
    time="completed_at",
    monthly=True,
    find_by=("execution_id", "job_id", "parent_execution_id", "plan_key", "run_id"),
    # For what is asked by its minute or its day, as views are: the key has hours only.
    ranges={"completed_at": "completed_at"},
)

ATTEMPTS = Table(
    "attempts",
    {
        "attempt_id": "String",
        "execution_id": "String",
        "job_id": "String",
        "agent": WORD,
        "tenant": WORD_OR_NULL,
        "task_id": TEXT_OR_NULL,
        "task_key": TEXT_OR_NULL,
        "submitted_by": WORD_OR_NULL,
        "user": TEXT_OR_NULL,
        "team": WORD_OR_NULL,
        "caller": WORD_OR_NULL,
        "cost_tags": TEXT_BY_WORD,
        "number": "UInt32",
        "model": WORD,
        "provider": WORD,
        "deployment": WORD_OR_NULL,
        "provider_key": WORD_OR_NULL,
        "started_at": TIME,
        "completed_at": TIME,
        "duration_ms": "UInt64",
        "input_tokens": COUNT_OR_NULL,
        "output_tokens": COUNT_OR_NULL,
        "cached_tokens": COUNT_OR_NULL,
        "reasoning_tokens": COUNT_OR_NULL,
        "usage_problem": TEXT_OR_NULL,
        "finish_reason": WORD_OR_NULL,
        "first_token_ms": COUNT_OR_NULL,
        "chunks": COUNT_OR_NULL,
        "cost": MONEY_OR_NULL,
        "cost_basis": WORD,
        "reserved": MONEY_OR_NULL,
        "reserved_tokens": COUNT_OR_NULL,
        "reserved_at": TIME_OR_NULL,
        "task_asked_at": TIME_OR_NULL,
        "outcome": WORD,
        **_ERROR,
        "short_circuited": "Bool",
        "refused_by": WORD_OR_NULL,
        "counts_for_breaker": "Bool",
        "breaker_version": COUNT_OR_NULL,
        "cause": WORD,
        "backoff_ms": "UInt64",
        "dropped_messages": "UInt32",
        "dropped_params": "Array(String)",
        "stored_at": TIME,
        "erased_at": TIME_OR_NULL,
        "event_sequence": "UInt64",
    },
    defaults={"job_id": "execution_id", "task_key": "task_id"},
    order_by=("toStartOfHour(started_at)", "agent", "started_at", "attempt_id"),
    time="started_at",
    monthly=True,
    find_by=("execution_id",),
    # As above; and the moment that a call is charged at: which hour, day and month of a budget it counts in.
    ranges={"started_at": "started_at", "charged_at": "ifNull(reserved_at, started_at)"},
    computed={
        # As `Attempt.tokens_per_s`.
        "tokens_per_s": (
            "Nullable(Float64)",
            "if(outcome = 'success' AND chunks > 1 AND output_tokens > 1 AND duration_ms > first_token_ms, "
            "(output_tokens - 1) * 1000 / (duration_ms - first_token_ms), NULL)",
        ),
    },
)

BREAKER_TRANSITIONS = Table(
    "breaker_transitions",
    {
        "transition_id": "String",
        "scope": WORD,
        "agent": WORD,
        "model": WORD,
        "from_state": WORD,
        "to_state": WORD,
        "rule": WORD_OR_NULL,
        "reason": "String",
        "by": TEXT_OR_NULL,
        "health": WORD_OR_NULL,
        "consecutive_failures": "UInt32",
        "total_failures": COUNT_OR_NULL,
        "unique_errors": COUNT_OR_NULL,
        "errors": "UInt32",
        "error_hash": TEXT_OR_NULL,
        "within_s": "Nullable(Float64)",
        "cooldown_s": "Float64",
        "open_until": TIME_OR_NULL,
        "last_failure_at": TIME_OR_NULL,
        "last_success_at": TIME_OR_NULL,
        "version": "UInt64",
        "shadow": "Bool",
        "refused": COUNT_OR_NULL,
        "at": TIME,
        "event_sequence": "UInt64",
    },
    order_by=("agent", "model", "transition_id"),
    time="at",
)

GUARD_EVENTS = Table(
    "guard_events",
    {
        "event_id": "String",
        "kind": WORD,
        "agent": WORD,
        "tenant": WORD_OR_NULL,
        "task_id": "String",
        "task_key": "String",
        "execution_id": TEXT_OR_NULL,
        "rule": WORD_OR_NULL,
        "reason": "String",
        "by": TEXT_OR_NULL,
        "iterations": "UInt64",
        "tokens": "UInt64",
        "cost": MONEY,
        "consecutive_failures": "UInt32",
        "total_failures": "UInt32",
        "unique_errors": "UInt32",
        "at": TIME,
        "event_sequence": "UInt64",
    },
    defaults={"task_key": "task_id"},
    order_by=("task_id", "event_id"),
    time="at",
)

BUDGET_EVENTS = Table(
    "budget_events",
    {
        "event_id": "String",
        "kind": WORD,
        "scope": WORD,
        "agent": WORD_OR_NULL,
        "tenant": WORD_OR_NULL,
        "name": WORD_OR_NULL,
        "within": WORD_OR_NULL,
        "window": WORD,
        "period": "String",
        "threshold_percent": "Nullable(UInt32)",
        "limit_cost": MONEY_OR_NULL,
        "total_cost": MONEY,
        "previous_cost": MONEY_OR_NULL,
        "configured_cost": MONEY_OR_NULL,
        "enforcement": WORD,
        "by": TEXT_OR_NULL,
        "reason": TEXT_OR_NULL,
        "resets_at": TIME_OR_NULL,
        "shadow": "Bool",
        "refused": COUNT_OR_NULL,
        "at": TIME,
        "event_sequence": "UInt64",
    },
    order_by=("event_id",),
    time="at",
)

PLAN_CHANGES = Table(
    "plan_changes",
    {
        "change_id": "String",
        "plan_id": "String",
        "plan_key": "String",
        "from_state": WORD_OR_NULL,
        "to_state": WORD,
        "reason": "String",
        "execution_id": TEXT_OR_NULL,
        "job_id": TEXT_OR_NULL,
        "tenant": WORD_OR_NULL,
        "owner": TEXT_OR_NULL,
        "correlation_id": TEXT_OR_NULL,
        "version": "UInt64",
        "at": TIME,
        "event_sequence": "UInt64",
    },
    defaults={"plan_key": "plan_id", "job_id": "execution_id"},
    order_by=("plan_id", "change_id"),
    time="at",
    find_by=("plan_key",),
)

LIMIT_EVENTS = Table(
    "limit_events",
    {
        "event_id": "String",
        "kind": WORD,
        "limit_id": "String",
        "scope": "String",
        "before": TEXT_OR_NULL,
        "after": TEXT_OR_NULL,
        "raised": TEXT_OR_NULL,
        "by": "String",
        "reason": TEXT_OR_NULL,
        "at": TIME,
        "event_sequence": "UInt64",
    },
    order_by=("limit_id", "event_id"),
    time="at",
)

ALERTS = Table(
    "alerts",
    {
        "alert_id": "String",
        "incident_id": "String",
        "key": "String",
        "change": WORD,
        "status": WORD,
        "event": WORD,
        "severity": WORD,
        "first_event": WORD,
        "highest_severity": WORD,
        "agent": WORD_OR_NULL,
        "model": WORD_OR_NULL,
        "tenant": WORD_OR_NULL,
        "title": "String",
        "text": "String",
        "payload": "String",
        "count": "UInt64",
        "version": "UInt64",
        "opened_at": TIME,
        "last_at": TIME,
        "ends_at": TIME_OR_NULL,
        "reminders": "UInt64",
        "acknowledged_by": TEXT_OR_NULL,
        "acknowledged_at": TIME_OR_NULL,
        "resolved_by": TEXT_OR_NULL,
        "resolved_at": TIME_OR_NULL,
        "reason": TEXT_OR_NULL,
        "source_id": "String",
        "at": TIME,
        "event_sequence": "UInt64",
    },
    order_by=("alert_id",),
    time="at",
)

AUDIT = Table(
    "audit",
    {
        "audit_id": "String",
        "action": WORD,
        "outcome": WORD,
        "by": "String",
        "actor": WORD,
        "actor_id": TEXT_OR_NULL,
        "details": "String",
        "reason": TEXT_OR_NULL,
        "error": TEXT_OR_NULL,
        "at": TIME,
        "event_sequence": "UInt64",
    },
    # What was begun is replaced by its outcome.
    order_by=("at", "audit_id"),
    time="at",
)

CLOSED_SPEND = Table(
    "closed_spend",
    {
        "until": TIME,
        "names": "String",
        "agent": WORD,
        "tenant": WORD_OR_NULL,
        "model": WORD,
        "deployment": WORD_OR_NULL,
        "provider": WORD,
        "submitted_by": WORD_OR_NULL,
        "user": TEXT_OR_NULL,
        "team": WORD_OR_NULL,
        "cost_tags": TEXT_BY_WORD,
        "spent": MONEY_SUM,
        "calls": "UInt64",
        "unpriced": "UInt64",
        "gauged": "UInt64",
        "foreseen": MONEY_SUM,
        "measured": MONEY_SUM,
        "exceeded": "UInt64",
        "tokens": "UInt64",
        "event_sequence": "UInt64",
    },
    order_by=("until", "names"),
    time="until",
    kept_days=10_000,
)
"""The sums over the calls of past months, up to a moment and from the one before it on, by all names of a call.

Totals need them when `attempts` has forgotten the calls. `names` is a hash; `event_sequence` is when a row was made.
"""

TABLES = (
    EXECUTIONS,
    ATTEMPTS,
    BREAKER_TRANSITIONS,
    GUARD_EVENTS,
    BUDGET_EVENTS,
    PLAN_CHANGES,
    LIMIT_EVENTS,
    ALERTS,
    AUDIT,
)
