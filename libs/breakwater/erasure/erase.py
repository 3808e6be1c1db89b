"""An erasure: takes the texts and the names of a data subject out of all stores.

Killed at any moment, it is completed by running it again: ClickHouse's executions come last, and by them all else is
found. Nothing is erased while one of the jobs has not ended: it would write its texts again. What is written while it
waits for the last claims is found by looking again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pydantic import JsonValue

from breakwater.erasure.contract import ErasureReport
from breakwater.erasure.messages import ErasableMessages, NotHandledError, SubjectMessages
from breakwater.erasure.rules import DataSubject
from breakwater.erasure.store import SubjectKeys
from breakwater.erasure.tables import ErasableRows, SubjectRows
from breakwater.erasure.waiting import comes_true
from breakwater.identity.audit import Actor, AuditLog
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import PLAIN, Layout
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.formats import quantity
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.redis.connection import Redis

WAIT_S = 90.0
"""The longest wait for services to handle what is to be deleted, and for claims, which outlast their jobs by 60 s."""

MOST_FINDS = 10
"""The most looks for what was written meanwhile. One or two are enough, but for alerts that come all the time."""

ACTION = "erase"


class UnfinishedJobsError(BreakwaterError):
    """Some of the jobs have not ended."""

    command_code = "unfinished_jobs"


@dataclass(slots=True)
class ErasableData:
    """The messages, rows and keys of a data subject."""

    messages: ErasableMessages
    rows: ErasableRows
    answers: list[str] = field(default_factory=list[str])
    notices: list[str] = field(default_factory=list[str])
    noted_ids: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    counters: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def stores(self) -> dict[str, int]:
        """The numbers of messages, rows and keys, without zeros."""
        counts = {
            **{stream.value: len(sequences) for stream, sequences in sorted(self.messages.sequences.items())},
            **self.rows.rows,
            "cached answers": len(self.answers),
            "notices": len(self.notices),
            "noted ids": len(self.noted_ids),
            "counters": len(self.counters),
        }
        return {store: count for store, count in counts.items() if count}


class Eraser:
    """Erases what is stored of a data subject: all jobs that were accepted up to a moment, whenever they ended."""

    def __init__(
        self,
        connection: ClientGetter,
        redis: Redis,
        analytics: Analytics,
        audit: AuditLog,
        subject: DataSubject,
        now: datetime,
        *,
        layout: Layout = PLAIN,
        wait_s: float = WAIT_S,
    ) -> None:
        self.subject = subject
        self.messages = SubjectMessages(connection, subject, now)
        self.keys = SubjectKeys(redis, subject)
        self.rows = SubjectRows(analytics, subject, now, layout)
        self._audit = audit
        self._now = now
        self._wait_s = wait_s

    async def find(self) -> ErasableData:
        """Finds everything.

        Raises BusUnavailableError, StateUnavailableError, AnalyticsUnavailableError, QueryError.
        """
        rows = await self.rows.find()
        messages = await self.messages.find(rows)
        await self.rows.find_alerts(rows, messages.names)
        await self.rows.find_actions(rows)
        answers = await self.keys.answers(messages.ids)
        notices = await self.keys.dry_runs(messages.ids)
        noted_ids = await self.keys.noted_ids(messages.ids, messages.keys, messages.shared)
        return ErasableData(messages, rows, answers, notices, noted_ids, await self.keys.counters())

    def report(self, data: ErasableData, *, dry_run: bool, remaining: tuple[str, ...] = ()) -> ErasureReport:
        """Returns the report of an erasure."""
        return ErasureReport(
            digest=self.subject.digest,
            dry_run=dry_run,
            at=self._now,
            jobs=len(data.messages.ids),
            unfinished=len(data.messages.unfinished),
            stores=data.stores,
            remaining=remaining,
        )

    async def erase(self, data: ErasableData, actor: Actor, step: Callable[[str], None]) -> ErasureReport:
        """Erases what was found, and what has come since.

        Args:
            data: what `find` has returned.
            actor: the person, for the audit log.
            step: is called with what begins.

        Raises:
            UnfinishedJobsError: nothing was erased.
            NotHandledError: a service is behind, and nothing was erased.
            NoStreamError: `setup` was not run, and nothing was erased.
            BusError: the audit log is full, and nothing was erased.
            BusUnavailableError, StateUnavailableError, AnalyticsUnavailableError, QueryError: repeat it.
        """
        await self.messages.require_fillers()
        step("waiting until the services have handled everything")
        data = await self._complete(data)
        counts: dict[str, JsonValue] = {**data.stores}
        details: dict[str, JsonValue] = {
            "subject": self.subject.digest,
            "jobs": len(data.messages.ids),
            "stores": counts,
        }
        async with self._audit.action(ACTION, actor, details, None):
            step("deleting messages")
            await self.messages.delete(data.messages)
            full = await self.messages.rewrite_files()
            step("deleting keys of Redis")
            await self.keys.delete([*data.answers, *data.notices], [*data.noted_ids, *data.counters])
            unwritten = await self.keys.rewrite_files(self._wait_s)
            step("changing rows of ClickHouse")
            await self.rows.erase(data.rows, self._now)
            # A comparison that has read the rows before would count them again in Redis.
            await self.keys.refuse_repairs()
            await self.keys.delete([], await self.keys.counters())
        later = len(data.messages.later)
        by = f"{self._now + timedelta(minutes=10):%H:%M} UTC"
        remaining = [
            f"NATS: files lose what had been acknowledged or had expired by {by}, or where more than half of a file is "
            "still needed, when less is",
            *(f"{stream}: it is too full to begin another file; erase again when it is not" for stream in full),
            *(() if unwritten is None else (unwritten,)),
            f"ClickHouse: replaced files are removed from disk by {by}",
            *((f"{quantity(later, 'job')} accepted after it began: erase again",) if later else ()),
        ]
        return self.report(data, dry_run=False, remaining=tuple(remaining))

    async def _complete(self, data: ErasableData) -> ErasableData:
        """Waits until nobody can still write for the jobs, and finds what was written meanwhile."""
        for _ in range(MOST_FINDS):
            if unfinished := len(data.messages.unfinished):
                raise UnfinishedJobsError(f"{unfinished} of the jobs have not ended: cancel them, or wait")
            await self.messages.wait_until_handled(data.messages, self._wait_s)
            await self._wait_for_claims(data.messages.ids)
            again = await self.find()
            if not again.messages.unfinished and again.messages.was_awaited_with(data.messages):
                return again
            data = again
        raise NotHandledError("more of the jobs end all the time")

    async def _wait_for_claims(self, ids: Collection[str]) -> None:
        """Waits until no worker can still write for an ended job."""
        claimed = 0

        async def are_free() -> bool:
            nonlocal claimed
            claimed = await self.keys.claimed(ids)
            return not claimed

        if not await comes_true(are_free, self._wait_s):
            raise NotHandledError(f"{claimed} of the jobs are still claimed by workers")
