"""The record of executions for commands, from ClickHouse or over the HTTP API, with the same results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import quote

from breakwater.client import ApiClient, ApiRefusedError, Form
from breakwater.client.commands import TIMEOUT_S, Api
from breakwater.jobs.contract.execution import (
    Execution,
    ExecutionList,
    ExecutionQuery,
    ExecutionSummary,
    RunList,
    RunSteps,
    RunSummary,
)
from breakwater.jobs.contract.tree import Tree
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.commands import connect, output
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.kernel.types import format_time
from breakwater.local.plane import CLICKHOUSE_VARIABLE, PlaneLocation
from breakwater.records.search import Filters, find_execution, search, search_runs, steps
from breakwater.records.tree import execution_tree

T = TypeVar("T")
PageT = TypeVar("PageT", ExecutionList, RunList)

MOST_IN_PAGE = 1_000
"""Limit of the API for one page."""


class RecordSource(Protocol):
    """A reader of the record."""

    async def executions(self, filters: Filters, limit: int) -> Sequence[ExecutionSummary]:
        """Returns the executions that match, latest first."""
        ...

    async def runs(self, filters: Filters, limit: int) -> Sequence[RunSummary]:
        """Returns the runs of which a step matches, latest first."""
        ...

    async def steps(self, run_id: str) -> Sequence[ExecutionSummary]:
        """Returns the steps of a run in the order in which they were queued; empty for an unknown run."""
        ...

    async def execution(self, execution_id: str) -> Execution | None:
        """Returns an execution with its attempts, decrypted if the key is available."""
        ...

    async def tree(self, execution_id: str) -> Tree | None:
        """Returns the tree that an execution belongs to."""
        ...


def ask_record(api: Api, question: Callable[[RecordSource], Awaitable[T]]) -> T:
    """Asks the source that the command's options and the environment select. Raises CliError."""
    if api.uses_http(CLICKHOUSE_VARIABLE):

        async def ask_api(client: ApiClient) -> T:
            return await question(ApiRecords(client))

        return api.ask(ask_api)
    plane = api.plane
    return connect.ask_clickhouse(plane.clickhouse_url, lambda analytics: question(ClickHouseRecords(analytics, plane)))


@dataclass(frozen=True, slots=True)
class ApiRecords:
    """The record over the HTTP API."""

    client: ApiClient

    async def executions(self, filters: Filters, limit: int) -> Sequence[ExecutionSummary]:
        """Reads as many pages as the limit needs."""
        return await self._pages(ExecutionList, "executions", filters, limit, lambda page: page.executions)

    async def runs(self, filters: Filters, limit: int) -> Sequence[RunSummary]:
        """Reads as many pages as the limit needs."""
        return await self._pages(RunList, "runs", filters, limit, lambda page: page.runs)

    async def steps(self, run_id: str) -> Sequence[ExecutionSummary]:
        """Reads one response."""
        run = await self._known(RunSteps, "runs", run_id)
        return () if run is None else run.steps

    async def execution(self, execution_id: str) -> Execution | None:
        """Reads one response; the plane decrypts it."""
        execution = await self._known(Execution, "executions", execution_id)
        if execution is not None and execution.encrypted is not None:
            output.note("its texts are not shown: the plane has no key for them", "yellow")
        return execution

    async def tree(self, execution_id: str) -> Tree | None:
        """Reads one response."""
        return await self._known(Tree, "trees", execution_id)

    async def _pages(
        self, form: Form[PageT], collection: str, filters: Filters, limit: int, lines: Callable[[PageT], Sequence[T]]
    ) -> list[T]:
        summaries: list[T] = []
        place: str | None = None
        while True:
            query = _query(filters, limit - len(summaries), place)
            page = await self.client.read(form, collection, query, timeout_s=TIMEOUT_S)
            summaries += lines(page)
            place = page.older
            if place is None or len(summaries) >= limit:
                return summaries

    async def _known(self, form: Form[T], collection: str, resource_id: str) -> T | None:
        try:
            path = f"{collection}/{quote(resource_id, safe='')}"
            return await self.client.read(form, path, timeout_s=TIMEOUT_S)
        except ApiRefusedError as error:
            if error.status == 404 and error.code.startswith("unknown_"):
                return None
            raise


def _query(filters: Filters, limit: int, after: str | None) -> dict[str, str | int | None]:
    """Returns the filters as parameters of the API, which have the same names."""
    names = (name for name in ExecutionQuery.model_fields if hasattr(filters, name))
    values = {name: getattr(filters, name) for name in names}
    since = None if filters.since is None else format_time(filters.since)
    until = None if filters.until is None else format_time(filters.until)
    page = {"since": since, "until": until, "after": after, "limit": min(limit, MOST_IN_PAGE)}
    return values | page | {"dry_runs": None if filters.dry_runs else "false"}


@dataclass(frozen=True, slots=True)
class ClickHouseRecords:
    """The record in ClickHouse."""

    analytics: Analytics
    plane: PlaneLocation

    async def executions(self, filters: Filters, limit: int) -> Sequence[ExecutionSummary]:
        """Searches the executions."""
        return (await search(self.analytics, filters, limit=limit)).lines

    async def runs(self, filters: Filters, limit: int) -> Sequence[RunSummary]:
        """Searches the runs."""
        return (await search_runs(self.analytics, filters, limit=limit)).lines

    async def steps(self, run_id: str) -> Sequence[ExecutionSummary]:
        """Reads the steps."""
        return await steps(self.analytics, run_id)

    async def execution(self, execution_id: str) -> Execution | None:
        """Reads the record, and decrypts it with the keys that the config names here."""
        execution = await find_execution(self.analytics, execution_id)
        if execution is None or execution.encrypted is None:
            return execution
        try:
            return self.plane.cipher().decrypt_record(execution)
        except (ConfigError, DecryptionError) as error:
            output.note(f"its texts are not shown: {error}", "yellow")
            return execution

    async def tree(self, execution_id: str) -> Tree | None:
        """Reads the tree level by level."""
        return await execution_tree(self.analytics, execution_id)
