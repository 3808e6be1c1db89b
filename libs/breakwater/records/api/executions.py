"""`/api/v1/executions` and `/api/v1/runs`: the record of jobs in ClickHouse, in pages, and single executions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from breakwater.identity.operations import CLICKHOUSE_UNAVAILABLE, ApiRequest, operation
from breakwater.jobs.contract.execution import Execution, ExecutionList, ExecutionQuery, RunList, RunSteps
from breakwater.jobs.contract.tree import Tree
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.security.encryption import Cipher, DecryptionError
from breakwater.kernel.types import Message
from breakwater.kernel.validation import FieldError
from breakwater.records.search import Cursor, Filters, find_execution, search, search_runs, steps
from breakwater.records.tree import execution_tree

ANSWER_WITHIN_S = 20.0

_OF_PAGES = ("after", "before", "limit")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExecutionRoutes:
    """The record of executions, for people."""

    analytics: Analytics
    cipher: Cipher

    @operation(
        "GET",
        "/api/v1/executions",
        tag="executions",
        summary="Executions",
        description="The latest first, by when they ended; in the list about a second after that. `older` and `newer` "
        "of a page are cursors: sent as `after` or `before`, with the same other parameters, they give the next page "
        "in that direction. A cursor is a place between two executions and stays right whatever is recorded later; it "
        "never expires, and gives no rights. What is recorded late is missing in pages that were read before.",
        result="A page of the executions that match.",
        errors={503: CLICKHOUSE_UNAVAILABLE},
    )
    async def list_executions(self, request: ApiRequest[ExecutionQuery]) -> ExecutionList:
        """Lists a page of the executions that match. Raises RequestError: 422, a cursor is invalid."""
        filters, place = _filters_and_place(request.input)
        page = await ask_clickhouse(search(self.analytics, filters, **place, limit=request.input.limit))
        return ExecutionList(
            executions=page.lines,
            older=page.older and page.older.text,
            newer=page.newer and page.newer.text,
        )

    @operation(
        "GET",
        "/api/v1/runs",
        tag="executions",
        summary="Runs",
        description="A run is the executions of one task, session or trace, or of one tree of parents; an execution "
        "without any of these is a run of its own. A run is listed if one of its steps matches, once, at the last that "
        "does; its figures are of all its steps that have ended. `GET /api/v1/runs/{run_id}` lists the steps: their "
        "`parent_execution_id` makes the tree. `older` and `newer` are as in `GET /api/v1/executions`.",
        result="A page of the runs of which a step matches.",
        errors={503: CLICKHOUSE_UNAVAILABLE},
    )
    async def list_runs(self, request: ApiRequest[ExecutionQuery]) -> RunList:
        """Lists a page of the runs of which a step matches. Raises RequestError: 422, a cursor is invalid."""
        filters, place = _filters_and_place(request.input)
        page = await ask_clickhouse(search_runs(self.analytics, filters, **place, limit=request.input.limit))
        return RunList(runs=page.lines, older=page.older and page.older.text, newer=page.newer and page.newer.text)

    @operation(
        "GET",
        "/api/v1/runs/{run_id}",
        tag="executions",
        summary="The steps of a run",
        result="Its steps that have ended.",
        errors={404: "No step of it is recorded (`unknown_run`).", 503: CLICKHOUSE_UNAVAILABLE},
    )
    async def show_run(self, request: ApiRequest[Message]) -> RunSteps:
        """Shows the steps of a run. Raises RequestError: 404."""
        run_id = request.path["run_id"]
        run_steps = await ask_clickhouse(steps(self.analytics, run_id))
        if not run_steps:
            raise RequestError(404, "unknown_run", f"there is no run {run_id!r}; /api/v1/runs lists runs")
        return RunSteps(steps=run_steps)

    @operation(
        "GET",
        "/api/v1/trees/{execution_id}",
        tag="executions",
        summary="The tree of executions that one belongs to",
        description="An execution is below the one that its job names as `parent_execution_id`. The tree has all of "
        "them, from the root down, with their costs: at most 1,000 executions on 50 levels, those nearest to the root "
        "first.",
        result="The tree.",
        errors={
            404: "The id is neither recorded nor named as a parent (`unknown_execution`).",
            503: CLICKHOUSE_UNAVAILABLE,
        },
    )
    async def show_tree(self, request: ApiRequest[Message]) -> Tree:
        """Shows the tree that an execution belongs to. Raises RequestError: 404."""
        execution_id = request.path["execution_id"]
        tree = await ask_clickhouse(execution_tree(self.analytics, execution_id))
        if tree is None:
            raise _unknown_execution(execution_id)
        return tree

    @operation(
        "GET",
        "/api/v1/executions/{execution_id}",
        tag="executions",
        summary="One execution, with its attempts",
        description="Its record, redacted. With encrypted texts whose key is missing, `encrypted` is in their place. "
        "`ETag` is a digest of the body.",
        headers={"If-None-Match": "The `ETag` of the body that you have."},
        result="The record.",
        etag=True,
        errors={404: "It is not recorded (`unknown_execution`).", 503: CLICKHOUSE_UNAVAILABLE},
    )
    async def show_execution(self, request: ApiRequest[Message]) -> Execution:
        """Shows the record of an execution, with its attempts. Raises RequestError: 404."""
        execution_id = request.path["execution_id"]
        execution = await ask_clickhouse(find_execution(self.analytics, execution_id))
        if execution is None:
            raise _unknown_execution(execution_id)
        # Without the key, the record is shown with tokens in place of its encrypted texts.
        with suppress(DecryptionError):
            execution = self.cipher.decrypt_record(execution)
        return execution


def _unknown_execution(execution_id: str) -> RequestError:
    message = (
        f"no execution {execution_id!r} is recorded: a record is there about a second after the job has ended, "
        "for as long as the config says (clickhouse.retention_days); /api/v1/jobs knows of one that is running"
    )
    return RequestError(404, "unknown_execution", message)


def _filters_and_place(query: ExecutionQuery) -> tuple[Filters, dict[str, Cursor | None]]:
    """Returns the filters and the cursors of a page. Raises RequestError: 422, a cursor is invalid."""
    filters = {name: getattr(query, name) for name in ExecutionQuery.model_fields if name not in _OF_PAGES}
    return Filters(**filters), {name: _cursor(name, getattr(query, name)) for name in ("after", "before")}


def _cursor(name: str, text: str | None) -> Cursor | None:
    try:
        return None if text is None else Cursor.parse(text)
    except ValueError as error:
        raise RequestError(
            422, "invalid_query", f"{name}: {error}", [FieldError(path=name, message=str(error))]
        ) from None


async def ask_clickhouse(query: Awaitable[T]) -> T:
    """Awaits a query, up to `ANSWER_WITHIN_S`.

    Raises:
        AnalyticsUnavailableError: ClickHouse is down or late, or has refused the query.
    """
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await query
    except TimeoutError as error:
        message = f"ClickHouse did not answer within {ANSWER_WITHIN_S:g} s; ask for less, such as a shorter time"
        raise AnalyticsUnavailableError(message) from error
    except QueryError as error:
        message = f"ClickHouse refused the query: {error.message}; `breakwater setup` brings its tables up to date"
        raise AnalyticsUnavailableError(message) from error
