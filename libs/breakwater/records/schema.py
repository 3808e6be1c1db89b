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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RETENTION_DAYS = 400
"""Days that rows are kept unless the config says otherwise: any month can be compared with that of the year before."""

TIME = "DateTime64(3, 'UTC')"
WORD = "LowCardinality(String)"
WORD_OR_NULL = "LowCardinality(Nullable(String))"
TEXT_OR_NULL = "Nullable(String)"
MONEY = "Decimal(18, 9)"
MONEY_OR_NULL = f"Nullable({MONEY})"
MONEY_BY_WORD = f"Map(LowCardinality(String), {MONEY})"
TEXT_BY_WORD = "Map(LowCardinality(String), String)"
COUNT_BY_WORD = "Map(LowCardinality(String), UInt32)"
TIME_OR_NULL = f"Nullable({TIME})"
COUNT_OR_NULL = "Nullable(UInt64)"

_LONG_TEXTS = ("output", "messages", "input", "encrypted")

# Whole partitions are dropped when all of it is too old; no part is rewritten to take single rows out, nor when the
# retention is changed.
_MONTHLY = "ttl_only_drop_parts = 1, materialize_ttl_recalculate_only = 1"


@dataclass(frozen=True, slots=True)
class Layout:
    """Place and retention of the tables. All statements of a database are made with the same layout."""

    cluster: str | None = None
    """The replicated cluster that every statement is for, as the server's config names it; None for one server. Each
    server identifies itself by its macros `shard` and `replica`."""
    retention_days: Mapping[str, int] = field(default_factory=dict[str, int])
    """By table; others keep rows for `RETENTION_DAYS`."""

    @property
    def on_cluster(self) -> str:
        """Clause that follows the name of the object that a statement makes or changes."""
        return "" if self.cluster is None else f" ON CLUSTER '{self.cluster}'"

    def engine(self, version: str) -> str:
        """Engine of a table whose rows are replaced by those of a higher version."""
        if self.cluster is None:
            return f"ReplacingMergeTree({version})"
        # Without the table's UUID, so that a server which joins later finds the rows that are there.
        path = "/clickhouse/tables/{shard}/{database}/{table}"
        return f"ReplicatedReplacingMergeTree('{path}', '{{replica}}', {version})"


PLAIN = Layout()


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Its columns are in the order in which rows hold their values."""

    name: str
    columns: Mapping[str, str]
    """Name and ClickHouse type."""
    order_by: tuple[str, ...]
    time: str
    """The column that gives a row's age."""
    monthly: bool = False
    """Partitioned by the month of `time`."""
    find_by: tuple[str, ...] = field(default=())
    """Ids that rows are looked up by, though the sorting key does not begin with them."""
    ranges: Mapping[str, str] = field(default_factory=dict[str, str])
    """Expressions that ranges of rows are read by, though the sorting key lacks them, by the name of their index."""
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    """SQL for the value of a column in rows that were stored before it was added."""
    computed: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Columns that are not stored but follow from others when they are read: their types, and the SQL."""

    def ddl(self, layout: Layout = PLAIN) -> str:
        """The statement that creates the table where it is missing."""
        lines = [*map(self._column, (*self.columns, *self.computed))]
        lines += [f"INDEX by_{name} {name} TYPE bloom_filter(0.01) GRANULARITY 1" for name in self.find_by]
        lines += [f"INDEX by_{name} {sql} TYPE minmax GRANULARITY 1" for name, sql in self.ranges.items()]
        partition = f"PARTITION BY toYYYYMM({self.time}) " if self.monthly else ""
        settings = f" SETTINGS {_MONTHLY}" if self.monthly else ""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.name}{layout.on_cluster} (\n  "
            + ",\n  ".join(lines)
            + f"\n) ENGINE = {layout.engine('event_sequence')} {partition}ORDER BY ({', '.join(self.order_by)}) "
            + f"TTL {self._ttl(layout)}{settings}"
        )

    def add_column(self, name: str, layout: Layout = PLAIN) -> str:
        """The statement that adds a column where it is missing, at its place."""
        added = f"ALTER TABLE {self.name}{layout.on_cluster} ADD COLUMN IF NOT EXISTS {self._column(name)}"
        if name in self.computed:
            return added
        before = list(self.columns)[: list(self.columns).index(name)]
        return f"{added} {f'AFTER {before[-1]}' if before else 'FIRST'}"

    def modify_ttl(self, layout: Layout) -> str:
        """The statement that makes the table keep its rows for as long as the layout says."""
        return f"ALTER TABLE {self.name}{layout.on_cluster} MODIFY TTL {self._ttl(layout)}"

    def days(self, layout: Layout) -> int:
        """Days that rows are kept."""
        return layout.retention_days.get(self.name, RETENTION_DAYS)

    def _ttl(self, layout: Layout) -> str:
        return f"toDateTime({self.time}) + INTERVAL {self.days(layout)} DAY"

    def _column(self, name: str) -> str:
        if name in self.computed:
            kind, expression = self.computed[name]
            return f"{name} {kind} ALIAS {expression}"
        default = f" DEFAULT {self.defaults[name]}" if name in self.defaults else ""
        return f"{name} {self.columns[name]}{default} CODEC({self._codec(name)})"

    def _codec(self, name: str) -> str:
        """The smallest on rows of a busy plane, measured by `python -m bench.storage`."""
        kind = self.columns[name].removeprefix("Nullable(").removesuffix(")")
        if name in _LONG_TEXTS:
            return "ZSTD(3)"
        if name == "event_sequence":
            return "Delta, ZSTD(1)"  # it grows from row to row
        if kind in ("UInt32", "UInt64", "Int32"):
            return "T64, ZSTD(1)"
        if self.columns[name] in (MONEY, MONEY_OR_NULL):
            return "GCD, T64, ZSTD(1)"  # amounts are so many tokens times a price
        return "ZSTD(1)"


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
        "agent": WORD,
        "tenant": WORD_OR_NULL,
        "task_id": TEXT_OR_NULL,
        "parent_execution_id": TEXT_OR_NULL,
        "plan_id": TEXT_OR_NULL,
        "run_id": "String",
        "status": WORD,
        "reason": WORD_OR_NULL,
        "requested_model": WORD_OR_NULL,
        "chosen_model": WORD_OR_NULL,
        "fallback_chain": "Array(String)",
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
        "cache_hit": "Bool",
        "cached_from": TEXT_OR_NULL,
        "dry_run": "Bool",
        "config_version": WORD_OR_NULL,
        "trace_id": TEXT_OR_NULL,
        "encrypted": TEXT_OR_NULL,
        "event_sequence": "UInt64",
    },
    # As `jobs.rules.runs` has it, without sessions and traces, which were not recorded.
    defaults={"run_id": "concat(ifNull(concat(tenant, '/'), ''), ifNull(task_id, execution_id))"},
    computed={"encryption_key": (WORD_OR_NULL, "substring(encrypted, 6, 8)")},
    order_by=("toStartOfHour(completed_at)", "agent", "completed_at", "execution_id"),
    time="completed_at",
    monthly=True,
    find_by=("execution_id", "parent_execution_id", "plan_id", "run_id"),
    # For what is asked by its minute or its day, as views are: the key has hours only.
    ranges={"completed_at": "completed_at"},
)

ATTEMPTS = Table(
    "attempts",
    {
        "attempt_id": "String",
        "execution_id": "String",
        "agent": WORD,
        "tenant": WORD_OR_NULL,
        "task_id": TEXT_OR_NULL,
        "submitted_by": WORD_OR_NULL,
        "cost_tags": TEXT_BY_WORD,
        "number": "UInt32",
        "model": WORD,
        "provider": WORD,
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
        "reserved_at": TIME_OR_NULL,
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
        "event_sequence": "UInt64",
    },
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
        "from_state": WORD_OR_NULL,
        "to_state": WORD,
        "reason": "String",
        "execution_id": TEXT_OR_NULL,
        "tenant": WORD_OR_NULL,
        "owner": TEXT_OR_NULL,
        "correlation_id": TEXT_OR_NULL,
        "version": "UInt64",
        "at": TIME,
        "event_sequence": "UInt64",
    },
    order_by=("plan_id", "change_id"),
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

TABLES = (EXECUTIONS, ATTEMPTS, BREAKER_TRANSITIONS, GUARD_EVENTS, BUDGET_EVENTS, PLAN_CHANGES, ALERTS, AUDIT)
