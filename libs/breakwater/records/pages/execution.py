"""The page of an execution: its record with all attempts, or the live progress of a running job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import aiohttp
import orjson
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from breakwater.alerts.rules.links import trace_url
from breakwater.client import ApiError, ApiKeyRefusedError, ApiRefusedError
from breakwater.identity.pages.operator_actions import act, back_to, read_action, reason_of
from breakwater.identity.pages.rendering import HEADERS, PageContext, PagePart, fetch_part
from breakwater.identity.pages.sessions import MAX_WATCHED, Session, session_of
from breakwater.jobs.contract.dead_letters import DeadLetterList, DeadLetterReplays
from breakwater.jobs.contract.execution import Execution, Progress
from breakwater.jobs.contract.submission import CancelledJob
from breakwater.kernel.pages.words import humanize, segment
from breakwater.kernel.process import background
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.records.pages.comparison import compare
from breakwater.records.pages.messages import bare_json, conversation
from breakwater.records.pages.waterfall import waterfall
from breakwater.records.search import Cursor, Filters, find_execution, search
from breakwater.records.tree import Tree, TreeNode, execution_tree
from breakwater.records.views.executions import answering_attempt, dropped_parts

TOO_MANY = f"you are watching {MAX_WATCHED} jobs, which is the limit; close one of their pages and reload this one"
RECORD_TIMEOUT_S = 30.0
"""Seconds to wait for the record of an ended job. If ClickHouse is available, it has it within a second."""
CHECK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Branch:
    """A row of a tree of executions."""

    depth: int
    node: TreeNode


LINK = None
"""Lists of executions link to these pages."""


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    page = ExecutionPage(context)
    return [
        Route("/executions/{execution_id:path}", page.show, methods=["GET"]),
        Route("/compare", page.compare, methods=["GET"]),
        Route("/watch/{execution_id:path}", page.watch, methods=["GET"]),
        Route("/replay/{execution_id:path}", page.replay, methods=["POST"]),
        Route("/cancel/{execution_id:path}", page.cancel, methods=["POST"]),
    ]


class ExecutionPage:
    """The handlers of the page of an execution."""

    def __init__(self, context: PageContext) -> None:
        self._context = context

    async def show(self, request: Request) -> Response:
        """GET: 200 with the record or with a running job; 404."""
        execution_id = str(request.path_params["execution_id"])
        fetched_execution, tree = await asyncio.gather(
            fetch_part(self._find(execution_id)), fetch_part(execution_tree(self._context.analytics, execution_id))
        )
        if fetched_execution.value is None:
            return await self._not_recorded(request, execution_id, fetched_execution)
        execution = fetched_execution.value
        raw = "raw" in request.query_params
        return self._context.pages.render(
            request,
            "execution.html",
            **facts(execution, self._context.placeholder),
            trace=trace_url(self._context.trace_template, execution.trace_id),
            raw=execution.model_dump(mode="json", by_alias=True) if raw else None,
            # Runs in a thread, because other pages must not wait for long texts.
            conversation=None if raw else await asyncio.to_thread(conversation, execution),
            branches=_branches(tree.value),
            ancestors=_ancestors(tree.value),
            tree=tree,
        )

    async def compare(self, request: Request) -> Response:
        """GET: 200 with the executions `a` and `b`; without `a`, with the agent's execution before `b`; 404."""
        ids = [request.query_params.get(name, "").strip() for name in ("a", "b")]
        fetched_a, fetched_b = await asyncio.gather(*(fetch_part(self._find(execution_id)) for execution_id in ids))
        if fetched_b.value is not None and not ids[0]:
            fetched_a = await fetch_part(self._previous(fetched_b.value))
        a = fetched_a.value
        b = fetched_b.value
        parts = (fetched_a, fetched_b)
        problems = [part.problem for part in parts if part.problem]
        missing = [
            execution_id
            for execution_id, part in zip(ids, parts, strict=True)
            if execution_id and part.value is None and not part.problem
        ]
        return self._context.pages.render(
            request,
            "comparison.html",
            status=200 if a and b else 503 if problems else 404,
            ids=ids,
            a=a,
            b=b,
            problem=next(iter(problems), None),
            missing=missing,
            comparison=await asyncio.to_thread(compare, a, b) if a and b else None,
        )

    async def _find(self, execution_id: str) -> Execution | None:
        """Finds a record, and decrypts its texts if the console has their key."""
        execution = await find_execution(self._context.analytics, execution_id) if execution_id else None
        with suppress(DecryptionError):
            return None if execution is None else self._context.cipher.decrypt_record(execution)
        return execution

    async def _previous(self, execution: Execution) -> Execution | None:
        """Finds the agent's execution that ended before this one."""
        cursor = Cursor(execution.completed_at, execution.execution_id)
        page = await search(self._context.analytics, Filters(agent=execution.agent), after=cursor, limit=1)
        return await self._find(page.lines[0].execution_id) if page.lines else None

    async def watch(self, request: Request) -> Response:
        """GET: the steps of a job as server-sent events, until it is recorded."""
        session = session_of(request)
        execution_id = str(request.path_params["execution_id"])
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._steps(session, execution_id), 200, headers, "text/event-stream")

    async def replay(self, request: Request) -> Response:
        """POST: 303 to the new execution."""
        session, fields = await read_action(request)
        execution_id = str(request.path_params["execution_id"])
        execution_page = f"/executions/{segment(execution_id)}"
        dead_letter_id = await fetch_part(self._dead_letter(session, execution_id))
        if dead_letter_id.problem is not None or dead_letter_id.value is None:
            problem = dead_letter_id.problem or "this job no longer has a dead letter: they are kept for 30 days"
            session.notify(f"The job was not replayed: {problem}", "bad")
            return back_to(execution_page)
        body = {"dead_letters": [dead_letter_id.value], "why": reason_of(fields, "why")}
        replays = await act(session, DeadLetterReplays, "dlq/replay", body)
        if replays is None:
            return back_to(execution_page)
        if replays.skipped:
            session.notify(f"The job can't be replayed: {replays.skipped[0].why}", "bad")
            return back_to(execution_page)
        if not replays.replayed:
            session.notify("The job was replayed before. Its dead letter links to the new execution.")
            return back_to(f"/dead-letters/{dead_letter_id.value}")
        session.notify(f"Replayed {execution_id} as a new job.")
        return back_to(f"/executions/{segment(replays.replayed[0].execution_id)}")

    async def cancel(self, request: Request) -> Response:
        """POST: 303 to the job's page, which shows how it ends."""
        session, fields = await read_action(request)
        execution_id = str(request.path_params["execution_id"])
        path = f"jobs/{segment(execution_id)}/cancel"
        cancelled = await act(session, CancelledJob, path, {"reason": reason_of(fields)})
        if cancelled is not None and cancelled.status == "cancelling":
            session.notify("The job is being cancelled. It makes no further call.")
        elif cancelled is not None and cancelled.status != "cancelled":
            session.notify(f"The job had already ended: {humanize(cancelled.status)}.", "bad")
        return back_to(f"/executions/{segment(execution_id)}")

    async def _dead_letter(self, session: Session, execution_id: str) -> int | None:
        """Finds the id of a job's last dead letter; None if there is none."""
        record = await find_execution(self._context.analytics, execution_id)
        if record is None:
            return None
        # The worker writes a dead letter just before the record.
        since = (record.completed_at - timedelta(minutes=1)).isoformat()
        query = {"execution_id": record.execution_id, "agent": record.agent, "since": since, "state": "all"}
        dead_letters = (await session.api.read(DeadLetterList, "dlq", query)).dead_letters
        # The list also has jobs of other callers whose own id is this execution's.
        own_dead_letters = (letter for letter in dead_letters if letter.execution_id == record.execution_id)
        return next((letter.dead_letter_id for letter in own_dead_letters), None)

    async def _not_recorded(
        self, request: Request, execution_id: str, fetched_execution: PagePart[Execution | None]
    ) -> Response:
        """Answers with the page of the running job; otherwise with 404, or with 503 if that is unknown."""
        pages = self._context.pages
        title = f"Execution {execution_id}"
        try:
            # Closes the stream immediately, because its status alone says whether the job is running.
            async with session_of(request).api.open_stream(_progress(execution_id)):
                pass
        except ApiKeyRefusedError:
            raise
        except ApiError as error:
            if fetched_execution.problem is None and isinstance(error, ApiRefusedError) and error.status == 404:
                text = (
                    f"No execution {execution_id!r} is recorded, and no such job is running. Records are kept for as "
                    "long as the config says (`clickhouse.retention_days`)."
                )
                return pages.plain(request, 404, title, text)
            return pages.plain(request, 503, title, fetched_execution.problem or error.message)
        return pages.render(request, "execution_live.html", execution_id=execution_id)

    async def _steps(self, session: Session, execution_id: str) -> AsyncGenerator[bytes]:
        yield _event("restart", "")
        if session.cached.watched >= MAX_WATCHED:
            yield _event("stopped", TOO_MANY)
            return
        session.cached.watched += 1
        try:
            async with session.api.open_stream(_progress(execution_id)) as lines:
                kind = ""
                while line := await self._line(lines):
                    name, _, value = line.decode().rstrip("\r\n").partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data" and kind == "progress":
                        step = Progress.model_validate_json(value)
                        html = self._context.pages.fragment("execution_step.html", step=step)
                        yield _event("step", orjson.dumps({"html": html, "state": humanize(step.state)}).decode())
                    elif name == "data" and kind == "decided":
                        yield await self._await_record(execution_id)
                        return
                    elif not name:
                        # Passes on a comment that keeps the connection alive, so that a closed browser is noticed.
                        yield b": \n\n"
        except ApiError as error:
            yield _event("stopped", error.message)
        finally:
            session.cached.watched -= 1

    async def _line(self, lines: aiohttp.StreamReader) -> bytes:
        """Reads the next line; empty at the end of the stream, and when this process ends."""
        reading = asyncio.create_task(lines.readline())
        stopping = asyncio.create_task(self._context.stopping.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else b""
        finally:
            await background.stop(reading, stopping)

    async def _await_record(self, execution_id: str) -> bytes:
        """Waits until ClickHouse has the record. Returns the event that ends the stream."""
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while time.monotonic() < deadline:
            if (await fetch_part(find_execution(self._context.analytics, execution_id))).value is not None:
                return _event("recorded", "")
            await asyncio.sleep(CHECK_EVERY_S)
        return _event("stopped", "ended; its record is not in ClickHouse yet, reload the page")


def facts(execution: Execution, placeholder: str) -> dict[str, Any]:
    """The values of the page that follow from the record alone. `placeholder` is the replacement of redacted text."""
    return {
        "execution": execution,
        "waterfall": waterfall(execution),
        "answering_attempt": answering_attempt(execution),
        "params": None if execution.params is None else bare_json(execution.params),
        "metadata": bare_json(execution.metadata),
        "redacted": redacted_places(execution, placeholder),
        "dropped_parts": dropped_parts(execution),
    }


def redacted_places(execution: Execution, placeholder: str) -> list[tuple[str, int]]:
    """Counts redacted texts. Returns the places that have any, each with their number."""
    places: list[tuple[str, Any]] = [
        (f"message {number}", message) for number, message in enumerate(execution.messages or [], 1)
    ]
    places += [("input", execution.input), ("response", execution.output), ("metadata", execution.metadata)]
    places.append(("error", execution.error and execution.error.message))
    counts = [(name, _count(value, placeholder)) for name, value in places]
    return [(name, number) for name, number in counts if number]


def _count(value: JsonValue, placeholder: str) -> int:
    match value:
        case str():
            return value.count(placeholder)
        case dict() | list():
            items = value.values() if isinstance(value, dict) else value
            return sum(_count(item, placeholder) for item in items)
        case _:
            return 0


def _branches(tree: Tree | None) -> list[Branch]:
    """The nodes of a tree from the root down, each after its parent; empty for a single node."""
    if tree is None or not (tree.root.children or tree.cut):
        return []
    branches: list[Branch] = []
    stack = [Branch(0, tree.root)]
    while stack:
        branch = stack.pop()
        branches.append(branch)
        stack += [Branch(branch.depth + 1, child) for child in reversed(branch.node.children)]
    return branches


def _ancestors(tree: Tree | None) -> list[tuple[str, str]]:
    """The ancestors of the tree's requested execution, from the root down: the id of the job, and its execution's."""
    path: list[tuple[str, str]] = []
    for branch in _branches(tree):
        node = branch.node
        job_id = node.execution_id if node.execution is None else node.execution.job_id
        path = [*path[: branch.depth], (job_id, node.execution_id)]
        if tree is not None and node.execution_id == tree.execution_id:
            return path[:-1]
    return []


def _progress(execution_id: str) -> str:
    return f"jobs/{segment(execution_id)}/progress"


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
