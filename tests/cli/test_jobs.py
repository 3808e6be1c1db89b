"""`breakwater jobs`, against a stub of the HTTP interface."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from breakwater.kernel.commands.errors import ExitCode
from tests.api_documents import current_job
from tests.cli.api_stub import KEY, Stub, problem
from tests.cli.conftest import Run, Terminal, in_thread
from tests.forked_commands import start_command
from tests.helpers import until

COUNTS = {"running": 1, "waiting": 1, "in_progress": 2, "parked": 0, "queued": 10_000}


def page(*jobs: dict[str, Any], after: str | None = None, counts: Any = COUNTS) -> dict[str, Any]:
    return {"jobs": list(jobs), "next": after, "counts": counts, "at": "2026-11-29T12:00:00.000Z"}


RUNNING = current_job("order-1")
WAITING = current_job(
    "order-2", state="waiting", attempt=None, wait={"kind": "hold", "message": "m is held until its rate limit is over"}
)


async def test_the_list_says_what_runs_what_waits_and_for_what(run: Run, stub: Stub) -> None:
    stub.answers["GET jobs"] = (200, page(RUNNING, WAITING | {"cancelling": True}))
    ran = await in_thread(run, "jobs")
    lines = ran.out.splitlines()
    heading = re.sub(" {2,}", "|", lines[0])
    assert heading == "job|state|agent|key|tenant|age|attempt|model|waits for|prompt"
    assert re.sub(" {2,}", "|", lines[1]) == "order-1|running|writer|batch|acme|2 min 00 s|2|gpt-4o|Write a haiku"
    assert re.sub(" {2,}", "|", lines[2]).split("|")[:2] == ["order-2", "cancelling"]
    assert "hold: m is held until its rate limit is over" in lines[2]
    assert ran.err == "(1 running, 1 waiting, 0 parked, 10,000 queued)\n"
    stub.answers["GET jobs"] = (200, page(RUNNING, counts=COUNTS | {"running": None, "waiting": None}))
    assert (await in_thread(run, "jobs")).err == "(2 running or waiting, 0 parked, 10,000 queued)\n"


async def test_the_filters_are_sent_and_the_list_goes_on_over_pages_up_to_its_limit(run: Run, stub: Stub) -> None:
    stub.in_turn(
        (200, page(RUNNING, after="queued.writer.7")), (200, page(after="queued.writer.9")), (200, page(WAITING))
    )
    filters = {"state": "queued", "agent": "writer", "tenant": "acme", "key": "batch"}
    options = [part for name, value in filters.items() for part in (f"--{name}", value)]
    ran = await in_thread(run, "jobs", *options, "--limit", "300", "--json")
    assert [job["job_id"] for job in ran.json["jobs"]] == ["order-1", "order-2"]
    assert (ran.json["next"], ran.json["counts"]) == (None, COUNTS)
    assert stub.queries == [
        {**filters, "counts": "true", "limit": "200"},
        {**filters, "after": "queued.writer.7", "limit": "200"},
        {**filters, "after": "queued.writer.9", "limit": "200"},
    ]


async def test_a_list_that_is_cut_or_empty_says_so(run: Run, stub: Stub) -> None:
    stub.answers["GET jobs"] = (200, page(RUNNING, after="queued.writer.7", counts=None))
    ran = await in_thread(run, "jobs", "--limit", "1")
    assert ran.err == "(more than these 1; see --limit, or filter by --agent or --state)\n"
    stub.answers["GET jobs"] = (200, page(counts=None))
    for options, said in (((), ""), (("--agent", "x"), " that matches")):
        ran = await in_thread(run, "jobs", *options)
        assert (ran.code, ran.out) == (ExitCode.OK, "")
        assert ran.err == f"no job{said} is running, waiting, parked or queued\n"


async def test_a_state_that_is_none_and_a_key_that_may_not_are_named(run: Run, stub: Stub) -> None:
    ran = await in_thread(run, "jobs", "--state", "ended", "--json")
    assert (ran.code, ran.error["code"]) == (ExitCode.USAGE, "usage")
    assert "running, waiting, parked, queued" in ran.err
    assert stub.asked == []
    stub.answers["GET jobs"] = (403, problem("forbidden", "the API key 'x' may not do this"))
    ran = await in_thread(run, "jobs")
    assert (ran.code, "may not do this" in ran.err) == (ExitCode.FAILED, True)


async def test_a_narrow_terminal_shows_what_a_job_waits_for_below_it(run: Run, stub: Stub, terminal: Terminal) -> None:
    terminal(60)
    stub.answers["GET jobs"] = (200, page(WAITING))
    lines = [line.rstrip() for line in (await in_thread(run, "jobs")).out.splitlines()]
    assert lines[0].split()[:3] == ["job", "state", "agent"]
    assert "    waits for  hold: m is held until its rate limit is over" in lines
    assert "    prompt     Write a haiku" in lines


async def test_watch_refreshes_in_place_and_ends_cleanly_on_ctrl_c(stub: Stub, tmp_path: Path) -> None:
    stub.answers["GET jobs"] = (200, page(RUNNING))
    primary, secondary = pty.openpty()
    environment = {**os.environ, "BREAKWATER_URL": stub.url, "BREAKWATER_API_KEY": KEY, "TERM": "xterm"}
    process = start_command(
        "jobs", "--watch", directory=tmp_path, environment=environment, stdout=secondary, stderr=secondary
    )
    os.close(secondary)
    shown = bytearray()

    def receive() -> None:
        with suppress(OSError):  # the terminal is closed
            shown.extend(os.read(primary, 65_536))

    loop = asyncio.get_running_loop()
    loop.add_reader(primary, receive)
    try:
        await until(lambda: shown.count(b"order-1") == 1, "the first frame")
        stub.answers["GET jobs"] = (200, page(WAITING))
        await until(lambda: b"order-2" in shown, "the next one")
        os.kill(process.pid, signal.SIGINT)
        code = await asyncio.to_thread(process.wait, 20)
        await until(lambda: shown.endswith(b"\x1b[?1049l"), "the end")
    finally:
        loop.remove_reader(primary)
        os.close(primary)
    assert code == ExitCode.INTERRUPTED
    assert shown.startswith(b"\x1b[?1049h")
    assert shown.count(b"\x1b[H") == shown.count(b"\x1b[J") >= 2, "each frame begins at the top, and erases the rest"
    assert b"Traceback" not in shown
    assert b"10,000 queued" in shown
