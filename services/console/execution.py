"""One execution: what became of a job, attempt by attempt; or how far it is, live, while it is not over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from breakwater import background
from breakwater.analytics.queries import find_execution
from breakwater.analytics.tree import Tree, TreeNode, execution_tree
from breakwater.contracts.api import DeadLetterList
from breakwater.contracts.execution import Attempt, Execution, Progress
from services.console.auth import acting
from services.console.charts import Bar
from services.console.door import DoorError, Unreachable
from services.console.pages import HEADERS, Fetched, PageContext, fetched
from services.console.sessions import MOST_WATCHED, Session, session_of

TOO_MANY = f"{MOST_WATCHED} jobs are watched with this sign-in, which is the most; close one, and load this page again"
RECORDED_WITHIN_S = 30.0
"""A decided job is in ClickHouse within a second, if that is there."""
LOOK_EVERY_S = 0.5

_COLOURS = {"success": "good", "error": "bad", "worker_lost": "bad", "short_circuited": "warn"}


@dataclass(frozen=True, slots=True)
class Branch:
    """An execution in a tree as it is listed: with how deep it stands."""

    depth: int
    node: TreeNode


def routes(context: PageContext) -> list[Route]:
    """The addresses of these pages."""
    page = ExecutionPage(context)
    return [
        Route("/executions/{execution_id:path}", page.show, methods=["GET"]),
        Route("/watch/{execution_id:path}", page.watch, methods=["GET"]),
        Route("/replay/{execution_id:path}", page.replay, methods=["POST"]),
    ]


class ExecutionPage:
    """The page of one execution."""

    def __init__(self, context: PageContext) -> None:
        self._context = context

    async def show(self, request: Request) -> Response:
        """GET: 200 with the record, or with a job that is under way; 404."""
        session, execution_id = session_of(request), str(request.path_params["execution_id"])
        known, tree = await asyncio.gather(
            fetched(find_execution(self._context.analytics, execution_id)),
            fetched(execution_tree(self._context.analytics, execution_id)),
        )
        if known.value is None:
            return await self._not_recorded(request, session, execution_id, known)
        return self._context.pages.render(
            request,
            "execution.html",
            execution=known.value,
            bars=bars(known.value),
            family=_branches(tree.value),
            tree=tree,
            redacted=redacted(known.value, self._context.placeholder),
            left_out=left_out(known.value.attempts),
        )

    async def watch(self, request: Request) -> Response:
        """GET: the steps of a job as server-sent events, until it is recorded."""
        session, execution_id = session_of(request), str(request.path_params["execution_id"])
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        return StreamingResponse(self._steps(session, execution_id), 200, headers, "text/event-stream")

    async def replay(self, request: Request) -> Response:
        """POST: 303 to the new execution."""
        session, fields = await acting(request)
        execution_id = str(request.path_params["execution_id"])
        here = f"/executions/{quote(execution_id, safe='')}"
        try:
            dead_letter = await self._dead_letter(session, execution_id)
            if dead_letter is None:
                session.notify("There is no dead letter of this job any more: they are kept for 30 days.", "bad")
                return RedirectResponse(here, 303)
            body = {"dead_letters": [dead_letter], "why": fields.get("why") or None}
            told = await self._context.api.post(session.key, "dlq/replay", body)
        except DoorError as error:
            session.notify(f"It was not replayed: {error.message}", "bad")
            return RedirectResponse(here, 303)
        if told["skipped"]:
            session.notify(f"It can't be replayed: {told['skipped'][0]['why']}", "bad")
            return RedirectResponse(here, 303)
        if not told["replayed"]:
            session.notify("It was replayed before. The dead letter links to what became of it.")
            return RedirectResponse(f"/dead-letters/{dead_letter}", 303)
        session.notify(f"Replayed as a new job, with what was sent as {execution_id}.")
        return RedirectResponse(f"/executions/{quote(told['replayed'][0]['execution_id'], safe='')}", 303)

    async def _dead_letter(self, session: Session, execution_id: str) -> int | None:
        """The number of the last dead letter of a job. Raises DoorError: it can't be told now."""
        known = await fetched(find_execution(self._context.analytics, execution_id))
        if known.problem is not None:
            raise Unreachable(known.problem)
        record = known.value
        if record is None:
            return None
        # The dead letter is written before the record, by the same worker.
        since = (record.completed_at - timedelta(minutes=1)).isoformat()
        asked = {"execution_id": execution_id, "agent": record.agent, "since": since, "limit": 1}
        dead_letters = (await self._context.api.read(DeadLetterList, session.key, "dlq", asked)).dead_letters
        return dead_letters[0].dead_letter_id if dead_letters else None

    async def _not_recorded(
        self, request: Request, session: Session, execution_id: str, known: Fetched[Execution | None]
    ) -> Response:
        try:
            # Opened and closed again: whether it goes on is told by the status alone.
            async with self._context.api.stream(session.key, _progress(execution_id)):
                pass
        except Unreachable as error:
            return self._nothing(request, execution_id, 503, known.problem or error.message)
        except DoorError as error:
            if error.status != 404 or known.problem is not None:
                return self._nothing(request, execution_id, 503, known.problem or error.message)
            text = (
                f"No execution {execution_id!r} is recorded, and no such job is under way. Records are kept for as "
                "long as the config says (`clickhouse.retention_days`)."
            )
            return self._nothing(request, execution_id, 404, text)
        return self._context.pages.render(request, "execution_live.html", execution_id=execution_id)

    def _nothing(self, request: Request, execution_id: str, status: int, text: str) -> Response:
        return self._context.pages.plain(request, status, f"Execution {execution_id}", text)

    async def _steps(self, session: Session, execution_id: str) -> AsyncGenerator[bytes]:
        yield _event("restart", "")
        if session.watched >= MOST_WATCHED:
            yield _event("gone", TOO_MANY)
            return
        session.watched += 1
        try:
            async with self._context.api.stream(session.key, _progress(execution_id)) as lines:
                kind = ""
                while line := await self._line(lines):
                    name, _, value = line.decode().rstrip("\r\n").partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data" and kind == "progress":
                        step = Progress.model_validate_json(value)
                        html = self._context.pages.fragment("execution_step.html", step=step)
                        yield _event(
                            "step", orjson.dumps({"html": html, "state": step.state.replace("_", " ")}).decode()
                        )
                    elif name == "data" and kind == "decided":
                        yield await self._recorded(execution_id)
                        return
                    elif not name:
                        # A comment keeps the connection: passed on, so that a browser that went away is noticed.
                        yield b": \n\n"
        except DoorError as error:
            yield _event("gone", error.message)
        finally:
            session.watched -= 1

    async def _line(self, lines: aiohttp.StreamReader) -> bytes:
        """The next line; nothing where there is none, or where this process ends."""
        reading = asyncio.create_task(lines.readline())
        stopping = asyncio.create_task(self._context.stopping.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else b""
        finally:
            await background.stop(reading, stopping)

    async def _recorded(self, execution_id: str) -> bytes:
        """Waits until ClickHouse has the record."""
        until = time.monotonic() + RECORDED_WITHIN_S
        while time.monotonic() < until:
            if (await fetched(find_execution(self._context.analytics, execution_id))).value is not None:
                return _event("recorded", "")
            await asyncio.sleep(LOOK_EVERY_S)
        return _event("gone", "decided; its record is not in ClickHouse yet, load the page again")


def bars(execution: Execution) -> list[list[Bar]]:
    """A job as rows of stretches, in milliseconds from when it was queued: the wait for a worker, then attempts."""
    began = execution.queued_at

    def at(moment: datetime) -> float:
        return max((moment - began).total_seconds() * 1000, 0.0)

    rows = [[Bar(0, at(execution.dispatched_at), "wait", "waited for a worker")]]
    for attempt in execution.attempts:
        start = at(attempt.started_at)
        end = max(at(attempt.completed_at), start)
        text = f"{attempt.number}. {attempt.model}: {attempt.outcome.replace('_', ' ')}"
        row = [Bar(start, end, _COLOURS.get(attempt.outcome, "plain"), text)]
        if attempt.backoff_ms:
            row.insert(0, Bar(max(start - attempt.backoff_ms, 0), start, "wait", "waited before trying again"))
        rows.append(row)
    return rows


def redacted(execution: Execution, placeholder: str) -> list[tuple[str, int]]:
    """Where something was redacted, and how often."""
    places: list[tuple[str, Any]] = [
        (f"message {number}", message) for number, message in enumerate(execution.messages or [], 1)
    ]
    places += [("input", execution.input), ("answer", execution.output), ("metadata", execution.metadata)]
    if execution.error is not None:
        places.append(("error", execution.error.message))
    counted = [(name, _count(value, placeholder)) for name, value in places]
    return [(name, number) for name, number in counted if number]


def _count(value: JsonValue, placeholder: str) -> int:
    if isinstance(value, str):
        return value.count(placeholder)
    if isinstance(value, dict):
        return sum(_count(item, placeholder) for item in value.values())
    if isinstance(value, list):
        return sum(_count(item, placeholder) for item in value)
    return 0


def left_out(attempts: tuple[Attempt, ...]) -> list[str]:
    """What calls did without: orphaned tool calls, or turns that did not fit."""
    return [
        f"{one.dropped_messages} message{'s' if one.dropped_messages > 1 else ''} in attempt {one.number}"
        for one in attempts
        if one.dropped_messages
    ]


def _branches(tree: Tree | None) -> list[Branch]:
    """A tree from its root down, each below its parent; nothing for one who is all alone."""
    if tree is None or not (tree.root.children or tree.cut):
        return []
    listed: list[Branch] = []
    waiting = [Branch(0, tree.root)]
    while waiting:
        branch = waiting.pop()
        listed.append(branch)
        waiting += [Branch(branch.depth + 1, child) for child in reversed(branch.node.children)]
    return listed


def _progress(execution_id: str) -> str:
    return f"jobs/{quote(execution_id, safe='')}/progress"


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
