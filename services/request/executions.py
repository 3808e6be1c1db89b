"""`/api/v1/executions`: what became of jobs, from ClickHouse: page by page, and one with its attempts."""

from __future__ import annotations

from contextlib import suppress

from breakwater.analytics.client import Analytics
from breakwater.analytics.search import Cursor, Filters, find_execution, search
from breakwater.contracts.execution import Execution, ExecutionList, ExecutionQuery
from breakwater.contracts.types import Message
from breakwater.contracts.validation import FieldError
from breakwater.encryption import Cipher, Undecryptable
from services.request.clickhouse import answered
from services.request.problems import Problem
from services.request.routing import ApiRequest

_OF_PAGES = ("after", "before", "limit")


class ExecutionRoutes:
    """What may be asked of the record of executions."""

    def __init__(self, analytics: Analytics, cipher: Cipher) -> None:
        self._analytics = analytics
        self._cipher = cipher

    async def show(self, asked: ApiRequest[ExecutionQuery]) -> ExecutionList:
        """A page of those that match. Raises Problem: 422 for what is no cursor."""
        query = asked.form
        given = {name: getattr(query, name) for name in ExecutionQuery.model_fields if name not in _OF_PAGES}
        after, before = _cursor("after", query.after), _cursor("before", query.before)
        page = await answered(search(self._analytics, Filters(**given), after=after, before=before, limit=query.limit))
        return ExecutionList(
            executions=page.lines,
            older=page.older and page.older.text,
            newer=page.newer and page.newer.text,
        )

    async def show_one(self, asked: ApiRequest[Message]) -> Execution:
        """The record of an execution, with its attempts. Raises Problem: 404."""
        execution_id = asked.path["execution_id"]
        found = await answered(find_execution(self._analytics, execution_id))
        if found is None:
            message = (
                f"no execution {execution_id!r} is recorded: a record is there about a second after the job has ended, "
                "for as long as the config says (clickhouse.retention_days); /api/v1/jobs knows of one that is running"
            )
            raise Problem(404, "unknown_execution", message)
        # Without its key the record is shown all the same, with the token in place of the texts.
        with suppress(Undecryptable):
            found = self._cipher.decrypt_record(found)
        return found


def _cursor(name: str, text: str | None) -> Cursor | None:
    try:
        return None if text is None else Cursor.parse(text)
    except ValueError as error:
        raise Problem(422, "invalid_query", f"{name}: {error}", [FieldError(path=name, message=str(error))]) from None
