"""The tables, as data: one source for both `CREATE TABLE` and the column lists of inserts.

Every table is a ReplacingMergeTree whose sorting key holds the natural key of its rows, so that a row that arrives
twice is replaced. Two things follow. Everything is read with FINAL, as the replacing happens at some later merge. And
whatever partitions or sorts a table must never change for a key: rows are replaced within a partition only. Hence
`executions` by `completed_at` and `attempts` by `started_at`: both stand in the one record that the bus lets exactly
one writer publish. A job id that is used again after the bus forgot it ran again, and cost again: other times, so
another row, as it must be for the books. The small tables have no partition at all.

`event_sequence`, the message's place in its stream, is the version: of two rows with one key the later message stays.
It begins again at 1 when the stream is made anew; `stored_at`, by the NATS server's clock, tells which one it is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RETENTION_DAYS = 400
"""How long rows are kept: a whole year can be compared with the one before, month by month."""

_TIME = "DateTime64(3, 'UTC')"
_WORD = "LowCardinality(String)"
_WORD_OR_NULL = "LowCardinality(Nullable(String))"
_TEXT_OR_NULL = "Nullable(String)"
_MONEY_OR_NULL = "Nullable(Decimal(18, 9))"
_MONEY_BY_WORD = "Map(LowCardinality(String), Decimal(18, 9))"
_TIME_OR_NULL = f"Nullable({_TIME})"
_COUNT_OR_NULL = "Nullable(UInt64)"

_ERROR = {
    "error_kind": _WORD_OR_NULL,
    "error_class": _WORD_OR_NULL,
    "error_message": _TEXT_OR_NULL,
    "error_status_code": "Nullable(Int32)",
    "error_retryable": "Nullable(Bool)",
    "error_hash": _TEXT_OR_NULL,
    "error_user_message": _TEXT_OR_NULL,
}

# Long texts: several times smaller than with the default codec, at little cost in the writing.
_LONG_TEXTS = frozenset(
    {"output", "messages", "input", "metadata", "error_message", "error_user_message", "text", "payload"}
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Columns stand in the order in which rows hold their values."""

    name: str
    columns: Mapping[str, str]
    """Name and ClickHouse type."""
    order_by: tuple[str, ...]
    time: str
    """The column that says how old a row is."""
    monthly: bool = False
    """Partitioned by the month of `time`."""
    find_by: tuple[str, ...] = field(default=())
    """Ids that rows are looked up by, though the sorting key does not begin with them."""
    earlier: Mapping[str, str] = field(default_factory=dict[str, str])
    """Columns added later, with what they are in rows that were stored before, as SQL; others are NULL, 0 or empty."""

    def ddl(self) -> str:
        """The statement that creates the table where it is missing."""
        lines = [self._column(name) for name in self.columns]
        lines += [_index(name) for name in self.find_by]
        partition = f"PARTITION BY toYYYYMM({self.time}) " if self.monthly else ""
        # Whole partitions are dropped when all of it is too old; no part is rewritten to take single rows out.
        settings = " SETTINGS ttl_only_drop_parts = 1" if self.monthly else ""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.name} (\n  "
            + ",\n  ".join(lines)
            + f"\n) ENGINE = ReplacingMergeTree(event_sequence) {partition}ORDER BY ({', '.join(self.order_by)}) "
            + f"TTL toDateTime({self.time}) + INTERVAL {RETENTION_DAYS} DAY{settings}"
        )

    def add_column(self, name: str) -> str:
        """The statement that adds a column where it is missing, at its place."""
        before = list(self.columns)[: list(self.columns).index(name)]
        place = f"AFTER {before[-1]}" if before else "FIRST"
        return f"ALTER TABLE {self.name} ADD COLUMN IF NOT EXISTS {self._column(name)} {place}"

    def modify_column(self, name: str) -> str:
        """The statement that gives a column the type it has here; it changes nothing where it has it."""
        return f"ALTER TABLE {self.name} MODIFY COLUMN {self._column(name)}"

    def add_index(self, name: str) -> str:
        """The statement that adds the index of a column of `find_by` where it is missing.

        It serves rows stored from then on, and older ones as they are merged: until then those are read in full.
        """
        return f"ALTER TABLE {self.name} ADD {_index(name, 'IF NOT EXISTS ')}"

    def _column(self, name: str) -> str:
        default = f" DEFAULT {self.earlier[name]}" if name in self.earlier else ""
        return f"{name} {self.columns[name]}{default}{_codec(name)}"


def _index(column: str, where: str = "") -> str:
    return f"INDEX {where}by_{column} {column} TYPE bloom_filter(0.01) GRANULARITY 1"


def _codec(column: str) -> str:
    return " CODEC(ZSTD(1))" if column in _LONG_TEXTS else ""


EXECUTIONS = Table(
    "executions",
    {
        "execution_id": "String",
        "agent": _WORD,
        "tenant": _WORD_OR_NULL,
        "task_id": _TEXT_OR_NULL,
        "parent_execution_id": _TEXT_OR_NULL,
        "status": _WORD,
        "reason": _WORD_OR_NULL,
        "requested_model": _WORD_OR_NULL,
        "chosen_model": _WORD_OR_NULL,
        "fallback_chain": "Array(String)",
        "attempts_count": "UInt32",
        "input_tokens": "UInt64",
        "output_tokens": "UInt64",
        "cached_tokens": "UInt64",
        "total_tokens": "UInt64",
        "total_cost": _MONEY_OR_NULL,
        "wasted_cost": _MONEY_OR_NULL,
        "wasted_by_cause": _MONEY_BY_WORD,
        "cost_basis": _WORD,
        "output": _TEXT_OR_NULL,
        **_ERROR,
        "messages": _TEXT_OR_NULL,
        "input": _TEXT_OR_NULL,
        "metadata": "String",
        "queued_at": _TIME,
        "dispatched_at": _TIME,
        "started_at": _TIME_OR_NULL,
        "completed_at": _TIME,
        "duration_ms": "UInt64",
        "cache_hit": "Bool",
        "cached_from": _TEXT_OR_NULL,
        "dry_run": "Bool",
        "event_sequence": "UInt64",
    },
    order_by=("agent", "completed_at", "execution_id"),
    time="completed_at",
    monthly=True,
    find_by=("execution_id", "parent_execution_id"),
)

ATTEMPTS = Table(
    "attempts",
    {
        "attempt_id": "String",
        "execution_id": "String",
        "agent": _WORD,
        "tenant": _WORD_OR_NULL,
        "task_id": _TEXT_OR_NULL,
        "number": "UInt32",
        "model": _WORD,
        "provider": _WORD,
        "started_at": _TIME,
        "completed_at": _TIME,
        "duration_ms": "UInt64",
        "input_tokens": _COUNT_OR_NULL,
        "output_tokens": _COUNT_OR_NULL,
        "cached_tokens": _COUNT_OR_NULL,
        "reasoning_tokens": _COUNT_OR_NULL,
        "cost": _MONEY_OR_NULL,
        "cost_basis": _WORD,
        "reserved": _MONEY_OR_NULL,
        "reserved_at": _TIME_OR_NULL,
        "outcome": _WORD,
        **_ERROR,
        "short_circuited": "Bool",
        "refused_by": _WORD_OR_NULL,
        "counts_for_breaker": "Bool",
        "breaker_version": _COUNT_OR_NULL,
        "cause": _WORD,
        "backoff_ms": "UInt64",
        "dropped_messages": "UInt32",
        "stored_at": _TIME,
        "event_sequence": "UInt64",
    },
    order_by=("agent", "started_at", "attempt_id"),
    time="started_at",
    monthly=True,
    find_by=("execution_id",),
    # An attempt is published when it is over. That is by another clock, a worker's, but as near as can be told now.
    earlier={"stored_at": "completed_at"},
)

BREAKER_TRANSITIONS = Table(
    "breaker_transitions",
    {
        "transition_id": "String",
        "scope": _WORD,
        "agent": _WORD,
        "model": _WORD,
        "from_state": _WORD,
        "to_state": _WORD,
        "rule": _WORD_OR_NULL,
        "reason": "String",
        "by": _TEXT_OR_NULL,
        "health": _WORD_OR_NULL,
        "consecutive_failures": "UInt32",
        "total_failures": _COUNT_OR_NULL,
        "unique_errors": _COUNT_OR_NULL,
        "errors": "UInt32",
        "error_hash": _TEXT_OR_NULL,
        "within_s": "Nullable(Float64)",
        "cooldown_s": "Float64",
        "open_until": _TIME_OR_NULL,
        "last_failure_at": _TIME_OR_NULL,
        "last_success_at": _TIME_OR_NULL,
        "version": "UInt64",
        "at": _TIME,
        "event_sequence": "UInt64",
    },
    order_by=("agent", "model", "transition_id"),
    time="at",
    # Before they could be shared, each was one agent's on one model.
    earlier={"scope": "'agent_model'"},
)

GUARD_EVENTS = Table(
    "guard_events",
    {
        "event_id": "String",
        "kind": _WORD,
        "agent": _WORD,
        "tenant": _WORD_OR_NULL,
        "task_id": "String",
        "execution_id": _TEXT_OR_NULL,
        "rule": _WORD_OR_NULL,
        "reason": "String",
        "by": _TEXT_OR_NULL,
        "iterations": "UInt64",
        "tokens": "UInt64",
        "cost": "Decimal(18, 9)",
        "consecutive_failures": "UInt32",
        "total_failures": "UInt32",
        "unique_errors": "UInt32",
        "at": _TIME,
        "event_sequence": "UInt64",
    },
    order_by=("task_id", "event_id"),
    time="at",
)

BUDGET_EVENTS = Table(
    "budget_events",
    {
        "event_id": "String",
        "kind": _WORD,
        "scope": _WORD,
        "agent": _WORD_OR_NULL,
        "tenant": _WORD_OR_NULL,
        "window": _WORD,
        "period": "String",
        "threshold_percent": "Nullable(UInt32)",
        "limit_cost": _MONEY_OR_NULL,
        "total_cost": "Decimal(18, 9)",
        "previous_cost": _MONEY_OR_NULL,
        "configured_cost": _MONEY_OR_NULL,
        "enforcement": _WORD,
        "by": _TEXT_OR_NULL,
        "reason": _TEXT_OR_NULL,
        "resets_at": _TIME_OR_NULL,
        "at": _TIME,
        "event_sequence": "UInt64",
    },
    order_by=("event_id",),
    time="at",
)

ALERTS = Table(
    "alerts",
    {
        "alert_id": "String",
        "incident_id": "String",
        "key": "String",
        "change": _WORD,
        "status": _WORD,
        "event": _WORD,
        "severity": _WORD,
        "agent": _WORD_OR_NULL,
        "model": _WORD_OR_NULL,
        "tenant": _WORD_OR_NULL,
        "title": "String",
        "text": "String",
        "payload": "String",
        "count": "UInt64",
        "version": "UInt64",
        "opened_at": _TIME,
        "last_at": _TIME,
        "ends_at": _TIME_OR_NULL,
        "reminders": "UInt64",
        "acknowledged_by": _TEXT_OR_NULL,
        "acknowledged_at": _TIME_OR_NULL,
        "resolved_by": _TEXT_OR_NULL,
        "resolved_at": _TIME_OR_NULL,
        "reason": _TEXT_OR_NULL,
        "source_id": "String",
        "at": _TIME,
        "event_sequence": "UInt64",
    },
    order_by=("alert_id",),
    time="at",
    # Before there were incidents, each alert stood alone. What it was of was not told: its key is empty.
    earlier={
        "incident_id": "alert_id",
        "change": "'opened'",
        "status": "'open'",
        "count": "1",
        "version": "1",
        "opened_at": "at",
        "last_at": "at",
    },
)

TABLES = (EXECUTIONS, ATTEMPTS, BREAKER_TRANSITIONS, GUARD_EVENTS, BUDGET_EVENTS, ALERTS)

EXECUTIONS_PER_MINUTE = """
CREATE OR REPLACE VIEW executions_per_minute AS
SELECT
    agent,
    toStartOfMinute(completed_at) AS minute,
    count() AS executions,
    countIf(status = 'succeeded') AS succeeded,
    countIf(status = 'dead_lettered') AS dead_lettered,
    sum(attempts_count) AS attempts,
    sum(total_tokens) AS tokens,
    sum(total_cost) AS cost,
    sum(wasted_cost) AS wasted_cost,
    countIf(cost_basis = 'unknown') AS executions_of_unknown_cost,
    avg(duration_ms) AS average_duration_ms
FROM executions FINAL
WHERE NOT dry_run
GROUP BY agent, minute
"""
"""A view over FINAL, and not a table that a materialized view adds to: that one sees every insert and not the rows that
stay, so a batch that the bus delivers twice would count twice, in executions and in dollars. Computing it when asked
costs a read of the asked minutes only, as `minute` follows from the sorting key."""

INCIDENTS = """
CREATE OR REPLACE VIEW incidents AS
SELECT
    incident_id,
    key,
    event,
    severity,
    status,
    change,
    agent,
    model,
    tenant,
    title,
    text,
    payload,
    count,
    version,
    reminders,
    opened_at,
    last_at,
    ends_at,
    acknowledged_by,
    acknowledged_at,
    resolved_by,
    resolved_at,
    reason,
    at AS changed_at,
    dateDiff('millisecond', opened_at, resolved_at) AS duration_ms,
    dateDiff(
        'millisecond', opened_at, min(acknowledged_at) OVER (PARTITION BY incident_id)
    ) AS time_to_acknowledge_ms
FROM alerts FINAL
WHERE key != ''
ORDER BY incident_id, version DESC
LIMIT 1 BY incident_id
"""
"""What is known of each incident: its newest change. An incident that was reopened was acknowledged when it was for the
first time; it has no duration until it is resolved again. Alerts from before there were incidents are left out: nothing
tells whether what they were of is over.

Not `argMax` of each column: it passes over NULL, and would give a reopened incident the end that it had before."""

VIEWS = {"executions_per_minute": EXECUTIONS_PER_MINUTE, "incidents": INCIDENTS}
