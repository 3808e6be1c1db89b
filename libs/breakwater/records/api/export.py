"""`/api/v1/export`: records as a file for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from breakwater.identity.operations import CLICKHOUSE_UNAVAILABLE, operation
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError
from breakwater.kernel.http.parsing import read_query
from breakwater.kernel.http.problems import RequestError, not_read
from breakwater.kernel.validation import FieldError
from breakwater.records.api.executions import ask_clickhouse
from breakwater.records.api.query import Analyst
from breakwater.records.api.streamed_rows import MAX_AT_ONCE, StreamedRows
from breakwater.records.contract import EXPORTED_ROWS, LONGEST_S, ExportQuery
from breakwater.records.rows import EXPORT_SETTINGS, export_statement, exported_rows

_CONTENT_TYPES = {"parquet": "application/vnd.apache.parquet", "jsonl": "application/x-ndjson"}


@dataclass(frozen=True, slots=True)
class ExportRoutes:
    """Files of records."""

    analyst: Analyst

    @operation(
        "GET",
        "/api/v1/export",
        tag="query",
        summary="Export executions or attempts",
        description="Each record once, in no particular order, without a limit, as `breakwater executions export` "
        "writes it. The header `Breakwater-Rows` has the number of records when the export began. If the export fails "
        "after its beginning, the connection breaks. It counts as one of the statements that run at a time.",
        query=ExportQuery,
        results={200: ("The file.", str)},
        content_type="application/octet-stream",
        errors={
            422: "A parameter is wrong (`invalid_query`).",
            501: "This plane exports nothing, as it has no user of ClickHouse for it (`no_analyst`).",
            503: f"{CLICKHOUSE_UNAVAILABLE} Or this process already runs {MAX_AT_ONCE} statements "
            "(`too_many_statements`).",
        },
    )
    async def export_records(self, request: Request) -> Response:
        """Streams the file. Raises RequestError: a parameter is wrong, or ClickHouse is unavailable."""
        query = read_query(request, ExportQuery)
        if query.status is not None and query.records != "executions":
            message = "status: applies only to executions; attempts have an `outcome`"
            raise RequestError(422, "invalid_query", message, [FieldError("status", "applies only to executions")])
        until = query.until or datetime.now(UTC)
        rows, parameters = exported_rows(
            query.records, since=query.since, until=until, agent=query.agent, status=query.status
        )
        settings = {
            **EXPORT_SETTINGS[query.format],
            "cancel_http_readonly_queries_on_client_close": 1,
            "max_execution_time": int(LONGEST_S),
        }
        try:
            analytics = await self.analyst.connect()
            count_sql = f"SELECT count() FROM {rows}"  # noqa: S608  parameters hold what people give
            ((total,),) = (await ask_clickhouse(analytics.query(count_sql, parameters))).rows
        except AnalyticsUnavailableError as error:
            raise not_read(error) from error
        statement = export_statement(query.records, query.format, rows)
        return StreamedRows(
            request,
            self.analyst.running,
            lambda: analytics.raw_stream(statement, parameters, settings),
            content_type=_CONTENT_TYPES[query.format],
            limit_s=LONGEST_S,
            headers={EXPORTED_ROWS: str(total)},
        )
