"""The rows of a data subject in ClickHouse. Money, tokens, times and counts stay; texts and names go.

The statements contain neither the user's name nor the tenant's, as ClickHouse keeps the text of mutations: they compare
hashes, whose key is drawn for each erasure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from secrets import randbits
from typing import Any

import orjson

from breakwater.erasure.rules import (
    CHOSEN_IDS,
    KEYS,
    DataSubject,
    Key,
    chosen_ids,
    goes,
    keys_in,
    mentions,
    with_plane_ids,
)
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import PLAIN, Layout
from breakwater.kernel.types import format_time
from breakwater.records.schema import (
    ALERTS,
    ATTEMPTS,
    AUDIT,
    BUDGET_EVENTS,
    CLOSED_SPEND,
    EXECUTIONS,
    GUARD_EVENTS,
    PLAN_CHANGES,
)
from breakwater.records.texts import ERASED, ERROR_MESSAGE, TEXTS, emptying

_EXECUTION_COLUMNS = (*TEXTS, "user", "task_id", "parent_job_id", "plan_id")
_EXECUTION_CHANGES = {
    "error_message": ERROR_MESSAGE,
    "metadata": "'{}'",
    # The ids that callers choose may name a person. Those of the plane are hashes of them, where the caller has a key.
    "job_id": "execution_id",
    "task_id": "ifNull(task_key, '')",
    "parent_job_id": "ifNull(parent_execution_id, '')",
    "plan_id": "ifNull(plan_key, '')",
    "run_id": "concat(ifNull(concat(tenant, '/'), ''), ifNull(task_key, execution_id))",
}

_ATTEMPT_COLUMNS = ("error_user_message", "user", "task_id")
_ATTEMPT_CHANGES = {"error_message": ERROR_MESSAGE, "job_id": "execution_id", "task_id": "ifNull(task_key, '')"}

_ALERT_CHANGES = {
    **dict.fromkeys(("title", "text"), f"'{ERASED}'"),
    "key": f"concat(splitByChar('/', key)[1], '/{ERASED}')",
    "payload": "'{}'",
}

_REPLACED = {
    GUARD_EVENTS.name: (
        "event_id",
        "task_key",
        {"task_id": "task_key", "reason": f"'{ERASED}'"},
        "task_id != task_key",
    ),
    PLAN_CHANGES.name: (
        "change_id",
        "plan_key",
        {"plan_id": "plan_key", "job_id": "execution_id", "correlation_id": "NULL", "reason": f"'{ERASED}'"},
        "(plan_id != plan_key OR ifNull(job_id != execution_id, false))",
    ),
}
"""Tables that are sorted by ids of callers, so that rows can't be changed: the column that identifies a row, the one of
the task or the plan, the new values of a copy, and the condition of rows that have ids of callers."""

_ACCEPTED = "queued_at"
"""By this time of executions it is decided what is erased: they may end later."""

_SETTINGS = "SETTINGS mutations_sync = 2"
"""A statement returns when all replicas have done it."""

AT_ONCE = 2_000
NEEDLES = 200
"""The most texts of one query; ClickHouse takes 255."""


@dataclass(slots=True)
class ErasableRows:
    """The rows of a data subject."""

    ids: set[str] = field(default_factory=set[str])
    """The executions that were accepted before the erasure began."""
    job_ids: set[str] = field(default_factory=set[str])
    rows: dict[str, int] = field(default_factory=dict[str, int])
    """By table."""
    alert_ids: list[str] = field(default_factory=list[str])
    keys: set[Key] = field(default_factory=set[Key])
    """The tasks and plans of their executions, as the plane knows them."""
    shared: set[Key] = field(default_factory=set[Key])
    """Those of them that have executions of others, too."""
    chosen: dict[str, str] = field(default_factory=dict[str, str])
    """The ids of jobs, tasks and plans that callers chose, with those of the plane."""
    actions: dict[str, str] = field(default_factory=dict[str, str])
    """The new parameters of operators' actions, by the keyed hashes of the old ones."""
    hashes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By table, the keyed hashes of rows that are replaced."""


class SubjectRows:
    """Finds and erases rows. All methods raise AnalyticsUnavailableError, QueryError."""

    def __init__(self, analytics: Analytics, subject: DataSubject, until: datetime, layout: Layout = PLAIN) -> None:
        """Takes the time of the erasure: jobs that were accepted later are left as they are."""
        self._analytics = analytics
        self._subject = subject
        self._until = _time_in_sql(until)
        self._ended_later = set[str]()
        """Those of their executions that were accepted before that time, and ended after it."""
        self._layout = layout
        self._key = f"toUInt64({randbits(63)}), toUInt64({randbits(63)})"
        self._hashes: dict[str, str] = {}

    async def find(self) -> ErasableRows:
        """Returns the rows that are to be erased, without alerts, which need the ids of all jobs."""
        for kind, name in (("user", self._subject.user), ("tenant", self._subject.tenant)):
            for text in () if name is None else (name, f"{kind}:{name}"):
                sql = f"SELECT hex(sipHash128Keyed(({self._key}), {{text:String}}))"
                self._hashes[text] = str((await self._analytics.query(sql, {"text": text})).rows[0][0])
        erasable = ErasableRows()
        sql = (
            "SELECT execution_id, job_id, task_key, task_id, plan_key, plan_id, "  # noqa: S608  of constants and hashes
            f"completed_at > {self._until} AS ended_later FROM executions FINAL WHERE {self._is_own(_ACCEPTED)}"
        )
        for record in await self._analytics.read(dict[str, Any], sql):
            erasable.ids.add(record["execution_id"])
            erasable.job_ids.add(record["job_id"])
            erasable.keys.update(keys_in(record))
            erasable.chosen.update(chosen_ids(record))
            if record["ended_later"]:
                self._ended_later.add(record["execution_id"])
        for name in KEYS:
            own_keys = f"SELECT {name} FROM executions FINAL WHERE {self._is_own(_ACCEPTED)}"  # noqa: S608
            sql = (
                f"SELECT DISTINCT {name} FROM executions FINAL WHERE {name} IN ({own_keys}) AND erased_at IS NULL "  # noqa: S608
                f"AND NOT ({self._is_own(_ACCEPTED)})"
            )
            erasable.shared.update((name, row[0]) for row in (await self._analytics.query(sql)).rows)
        erasable.rows["executions"] = len(erasable.ids)
        for table, condition in self._conditions():
            if table != "executions":
                sql = f"SELECT count() FROM {table} WHERE {condition}"  # noqa: S608  of constants and hashes
                erasable.rows[table] = int((await self._analytics.query(sql)).rows[0][0])
        for table, (row_id, key, _, has_chosen) in _REPLACED.items():
            of_job, of_key = (
                f"{column} IN (SELECT {column} FROM executions FINAL WHERE {self._is_own(_ACCEPTED)})"  # noqa: S608
                for column in ("execution_id", key)
            )
            sql = (
                f"SELECT {self._hash_of(row_id)}, {key}, ifNull({of_job}, false) AS of_job FROM {table} FINAL "  # noqa: S608
                f"WHERE {has_chosen} AND (of_job OR {of_key})"
            )
            erasable.hashes[table] = [
                row_hash
                for row_hash, value, of_job in (await self._analytics.query(sql)).rows
                if goes(key, of_job=of_job, shared=(key, value) in erasable.shared)
            ]
            erasable.rows[table] = len(erasable.hashes[table])
        return erasable

    async def find_alerts(self, erasable: ErasableRows, names: Collection[str]) -> None:
        """Adds the alerts that name the user, or one of the jobs."""
        sql = "SELECT alert_id, key, title, text, payload, reason FROM alerts FINAL WHERE text != {erased:String}"
        for alert_id, key, title, text, payload, reason in (await self._analytics.query(sql, {"erased": ERASED})).rows:
            if mentions([key, title, text, orjson.loads(payload), reason], names, self._subject):
                erasable.alert_ids.append(alert_id)
        erasable.rows["alerts"] = len(erasable.alert_ids)

    async def find_actions(self, erasable: ErasableRows) -> None:
        """Adds the actions of operators that name a job, a task or a plan as its caller does."""
        has_chosen = " OR ".join(f"JSONHas(details, '{name}')" for name in CHOSEN_IDS)
        # Also what was begun, and that its outcome is about to replace.
        sql = f"SELECT audit_id, details, {self._hash_of('details')} FROM audit WHERE {has_chosen}"  # noqa: S608
        actions: set[str] = set()
        for audit_id, details, details_hash in (await self._analytics.query(sql)).rows:
            if (renamed := with_plane_ids(orjson.loads(details), erasable.ids, erasable.chosen)) is not None:
                erasable.actions[details_hash] = orjson.dumps(renamed).decode()
                actions.add(audit_id)
        erasable.rows[AUDIT.name] = len(actions)

    async def erase(self, erasable: ErasableRows, at: datetime) -> None:
        """Erases the rows. The executions come last: as long as they name the user, the erasure can be repeated."""
        moment = _time_in_sql(at)
        now_erased = f"erased_at = {moment}"
        for start in range(0, len(erasable.alert_ids), AT_ONCE):
            ids = ", ".join(_quoted(alert_id) for alert_id in erasable.alert_ids[start : start + AT_ONCE])
            alerts = f"alert_id IN ({ids})"
            await self._alter(ALERTS.name, emptying(("reason",), _ALERT_CHANGES, alerts, alerts))
        for table, hashes in erasable.hashes.items():
            await self._replace(table, hashes)
        await self._replace_actions(erasable.actions)
        for table, condition in self._conditions():
            if not erasable.rows.get(table):
                continue
            match table:
                case "budget_events":
                    clauses = f"DELETE WHERE {condition}"
                case "closed_spend":
                    clauses = emptying(("user",), {}, condition, "user = ''")
                case "attempts":
                    changes = {**_ATTEMPT_CHANGES, "erased_at": moment}
                    clauses = emptying(_ATTEMPT_COLUMNS, changes, condition, now_erased)
                case _:
                    changes = {**_EXECUTION_CHANGES, "erased_at": moment}
                    clauses = emptying(_EXECUTION_COLUMNS, changes, condition, now_erased)
            await self._alter(table, clauses)

    async def _replace(self, table: str, hashes: Sequence[str]) -> None:
        """Puts copies without ids of callers in place of rows. A second time, the copies replace each other."""
        row_id, _, changes, has_chosen = _REPLACED[table]
        replaced = ", ".join(f"{value} AS {column}" for column, value in changes.items())
        for start in range(0, len(hashes), AT_ONCE):
            part = ", ".join(_quoted(hashed) for hashed in hashes[start : start + AT_ONCE])
            condition = f"{self._hash_of(row_id)} IN ({part}) AND {has_chosen}"
            # The new values have the names of their columns, which must not be meant in the condition.
            rows = f"SELECT * FROM {table} FINAL WHERE {condition}"  # noqa: S608  of constants and hashes
            await self._analytics.execute(f"INSERT INTO {table} SELECT * REPLACE ({replaced}) FROM ({rows})")  # noqa: S608
            await self._alter(table, f"DELETE WHERE {condition}")

    async def _replace_actions(self, actions: Mapping[str, str]) -> None:
        """Does the same with actions, whose new parameters no mutation is to name."""
        for start in range(0, len(actions), NEEDLES):
            part = dict([*actions.items()][start : start + NEEDLES])
            of_details = self._hash_of("details")
            condition = f"{of_details} IN ({', '.join(map(_quoted, part))})"
            renamed = f"transform({of_details}, {{old:Array(String)}}, {{new:Array(String)}}, details) AS details"
            copies = f"SELECT * REPLACE ({renamed}) FROM (SELECT * FROM audit WHERE {condition})"  # noqa: S608
            await self._analytics.execute(f"INSERT INTO audit {copies}", {"old": [*part], "new": [*part.values()]})
            await self._alter(AUDIT.name, f"DELETE WHERE {condition}")

    async def texts(self, limit: int) -> dict[str, list[str]]:
        """The stored texts of the newest executions that `find` has found, as JSON or as they are, by execution."""
        sql = (
            "SELECT execution_id, [ifNull(messages, ''), ifNull(input, ''), ifNull(output, '')], encrypted "  # noqa: S608
            f"FROM executions FINAL WHERE {self._is_own(_ACCEPTED)} ORDER BY completed_at DESC LIMIT {limit:d}"
        )
        rows = (await self._analytics.query(sql)).rows
        return {row[0]: [*row[1], *([row[2]] if row[2] else [])] for row in rows}

    async def used_by_others(self, texts: Sequence[str]) -> set[str]:
        """Returns the texts and ids that jobs of others have, too, so that they say nothing of this data subject."""
        used: set[str] = set()
        of_job = "concat_ws('\\n', ifNull(messages, ''), ifNull(input, ''), ifNull(output, ''))"
        for start in range(0, len(texts), NEEDLES):
            part = texts[start : start + NEEDLES]
            sql = (
                "SELECT sumForEach(arrayMap("  # noqa: S608  of constants and hashes
                "(place, text) -> place > 0 OR has([job_id, ifNull(task_id, ''), ifNull(plan_id, '')], text), "
                f"multiSearchAllPositions({of_job}, {{texts:Array(String)}}), {{texts:Array(String)}})) "
                f"FROM executions WHERE NOT ({self._is_own(_ACCEPTED)})"
            )
            [(counts,)] = (await self._analytics.query(sql, {"texts": part})).rows
            used.update(text for text, count in zip(part, counts or [0] * len(part), strict=True) if count)
        return used

    def _conditions(self) -> Iterator[tuple[str, str]]:
        """The rows of each table, in the order in which they are erased."""
        # An attempt does not tell when its job was accepted.
        yield ATTEMPTS.name, self._is_own("completed_at", or_of=self._ended_later)
        if self._subject.user is not None:
            yield BUDGET_EVENTS.name, self._is_of_their_limit(self._subject.user)
        yield CLOSED_SPEND.name, f"user IS NOT NULL AND {self._is_own()}"
        yield EXECUTIONS.name, self._is_own(_ACCEPTED)

    def _is_of_their_limit(self, user: str) -> str:
        """The condition of the events that `DataSubject.has_scope` is true of."""
        of_user = f"scope = 'user' AND {self._equals('name', user)}"
        within_user = self._equals("within", f"user:{user}")
        if self._subject.tenant is not None:
            of_user += f" AND {self._equals('within', f'tenant:{self._subject.tenant}')}"
            within_user += f" AND scope = 'tenant' AND {self._equals('tenant', self._subject.tenant)}"
        return f"({of_user} OR {within_user})"

    def _is_own(self, time: str | None = None, *, or_of: Collection[str] = ()) -> str:
        """The condition of their rows, with a time only of those until the erasure, or of some executions."""
        conditions = [
            self._equals(column, name)
            for column, name in (("user", self._subject.user), ("tenant", self._subject.tenant))
            if name is not None
        ]
        if self._subject.user is None and time is not None:
            conditions.append("erased_at IS NULL")  # the tenant's name stays
        if time is not None:
            of_executions = f" OR execution_id IN ({', '.join(map(_quoted, sorted(or_of)))})" if or_of else ""
            conditions.append(f"({time} <= {self._until}{of_executions})")
        return " AND ".join(conditions)

    def _equals(self, column: str, name: str) -> str:
        return f"{self._hash_of(column)} = '{self._hashes[name]}'"

    def _hash_of(self, column: str) -> str:
        return f"hex(sipHash128Keyed(({self._key}), ifNull(toString({column}), '')))"

    async def _alter(self, table: str, clauses: str) -> None:
        await self._analytics.execute(f"ALTER TABLE {table}{self._layout.on_cluster} {clauses} {_SETTINGS}")


def _time_in_sql(moment: datetime) -> str:
    return f"toDateTime64('{format_time(moment)[:-1].replace('T', ' ')}', 3, 'UTC')"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def json_or_text(stored: str) -> Any:
    """A stored text as JSON, if it is."""
    try:
        return orjson.loads(stored)
    except ValueError:
        return stored
