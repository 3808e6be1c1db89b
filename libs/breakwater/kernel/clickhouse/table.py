"""A table of ClickHouse as data: its columns, its keys, and the statement that creates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TIME = "DateTime64(3, 'UTC')"
WORD = "LowCardinality(String)"
WORD_OR_NULL = "LowCardinality(Nullable(String))"
TEXT_OR_NULL = "Nullable(String)"
MONEY = "Decimal(18, 9)"
MONEY_OR_NULL = f"Nullable({MONEY})"
MONEY_SUM = "Decimal(38, 9)"
MONEY_BY_WORD = f"Map(LowCardinality(String), {MONEY})"
TEXT_BY_WORD = "Map(LowCardinality(String), String)"
COUNT_BY_WORD = "Map(LowCardinality(String), UInt32)"
TIME_OR_NULL = f"Nullable({TIME})"
COUNT_OR_NULL = "Nullable(UInt64)"

RETENTION_DAYS = 400
"""The days that rows are kept unless the config says otherwise: any month can be compared with that a year before."""

_LONG_TEXTS = ("output", "messages", "input", "encrypted")

# Whole partitions are dropped when all of it is too old; no part is rewritten to take single rows out, nor when the
# retention is changed.
_MONTHLY = "ttl_only_drop_parts = 1, materialize_ttl_recalculate_only = 1"


@dataclass(frozen=True, slots=True)
class Layout:
    """The place and the retention of the tables. All statements of a database are made with the same layout."""

    cluster: str | None = None
    """The replicated cluster that every statement is for, as the server's config names it; None for one server. Each
    server identifies itself by its macros `shard` and `replica`."""
    retention_days: Mapping[str, int] = field(default_factory=dict[str, int])
    """By table; others keep rows for their `kept_days`."""

    @property
    def on_cluster(self) -> str:
        """The clause that follows the name of the object that a statement makes or changes."""
        return "" if self.cluster is None else f" ON CLUSTER '{self.cluster}'"

    def engine(self, version: str) -> str:
        """The engine of a table whose rows are replaced by those of a higher version."""
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
    """A name and its type in ClickHouse."""
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
    kept_days: int = RETENTION_DAYS
    """The days that rows are kept unless the config says otherwise."""

    def ddl(self, layout: Layout = PLAIN) -> str:
        """The statement that creates the table where it is missing."""
        lines = [*map(self._column, (*self.columns, *self.computed))]
        lines += [f"INDEX {self._index(name)}" for name in self.indexes]
        partition = f"PARTITION BY toYYYYMM({self.time}) " if self.monthly else ""
        settings = f" SETTINGS {_MONTHLY}" if self.monthly else ""
        return (
            f"CREATE TABLE IF NOT EXISTS {self.name}{layout.on_cluster} (\n  "
            + ",\n  ".join(lines)
            + f"\n) ENGINE = {layout.engine('event_sequence')} {partition}ORDER BY ({', '.join(self.order_by)}) "
            + f"TTL {self._ttl(layout)}{settings}"
        )

    def alter(self, layout: Layout, *changes: str) -> str:
        """The statement that makes changes of the table."""
        return f"ALTER TABLE {self.name}{layout.on_cluster} {', '.join(changes)}"

    def add_column(self, name: str) -> str:
        """The change that adds a column where it is missing, at its place."""
        added = f"ADD COLUMN IF NOT EXISTS {self._column(name)}"
        if name in self.computed:
            return added
        before = list(self.columns)[: list(self.columns).index(name)]
        return f"{added} {f'AFTER {before[-1]}' if before else 'FIRST'}"

    @property
    def indexes(self) -> tuple[str, ...]:
        """The names of the indexes, without their prefix `by_`."""
        return (*self.find_by, *self.ranges)

    def add_index(self, name: str) -> str:
        """The change that adds an index where it is missing, for rows that are stored from then on."""
        return f"ADD INDEX IF NOT EXISTS {self._index(name)}"

    def build_index(self, name: str, layout: Layout) -> str:
        """The statement that builds an index for the rows that are stored already, in the background."""
        return self.alter(layout, f"MATERIALIZE INDEX by_{name}")

    def modify_ttl(self, layout: Layout) -> str:
        """The statement that makes the table keep its rows for as long as the layout says."""
        return self.alter(layout, f"MODIFY TTL {self._ttl(layout)}")

    def days(self, layout: Layout) -> int:
        """The days that rows are kept."""
        return layout.retention_days.get(self.name, self.kept_days)

    def _ttl(self, layout: Layout) -> str:
        return f"toDateTime({self.time}) + INTERVAL {self.days(layout)} DAY"

    def _index(self, name: str) -> str:
        if name in self.ranges:
            return f"by_{name} {self.ranges[name]} TYPE minmax GRANULARITY 1"
        return f"by_{name} {name} TYPE bloom_filter(0.01) GRANULARITY 1"

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
