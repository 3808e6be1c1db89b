"""`breakwater executions export`: what the file holds is what was stored, and a file that is there is whole."""

# ruff: noqa: ASYNC240  the files are small, and here

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from clickhouse_connect.driver import create_async_client

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.types import format_time
from breakwater.records import rows, schema
from breakwater.records.commands import export
from tests.cli.conftest import Run, in_thread, store
from tests.records.samples import (
    NOON,
    attempt,
    attempt_row,
    bare_execution,
    execution,
    full_attempt,
    full_execution,
    new_database,
)
from tests.server_sources import RunningServer

MANY = 2_000
CUT_AFTER = 2_000_000
"""Bytes of an answer with as many rows, which is longer in either format."""


async def store_much(analytics: Analytics) -> None:
    """Text that does not compress, so that the answer is long in either format."""
    await store(analytics, [execution()])
    await analytics.execute(
        "INSERT INTO executions SELECT * EXCEPT (number) "
        "REPLACE (base64Encode(randomString(2000)) AS output, toString(number) AS execution_id) "
        f"FROM (SELECT executions.*, many.number FROM executions CROSS JOIN numbers({MANY}) AS many)"
    )


def lines(file: Path, key: str) -> dict[str, dict[str, Any]]:
    """What a file of JSON lines holds, by an id."""
    text = file.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    found = [json.loads(line) for line in text.splitlines()]
    assert len({one[key] for one in found}) == len(found)
    return {one[key]: one for one in found}


@asynccontextmanager
async def cutting(url: str, after: int, *, hangs: bool = False) -> AsyncGenerator[str]:
    """A way to ClickHouse on which an answer breaks off when it has so many bytes, or no more of it comes."""
    at = urlsplit(url)
    over = asyncio.Event()

    async def serve(questions: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        answers, onward = await asyncio.open_connection(at.hostname, at.port)

        async def ask() -> None:
            while chunk := await questions.read(1 << 16):
                onward.write(chunk)

        asking = asyncio.create_task(ask())
        left = after
        with suppress(ConnectionError):
            while left > 0 and (chunk := await answers.read(1 << 16)):
                back.write(chunk[:left])
                await back.drain()
                left -= len(chunk)
        if hangs and left <= 0:
            await over.wait()
        asking.cancel()
        onward.close()
        back.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            yield url.replace(f"{at.hostname}:{at.port}", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            over.set()


async def test_a_parquet_file_read_back_is_what_was_stored(
    run: Run, analytics: Analytics, clickhouse_server: RunningServer
) -> None:
    records = [
        full_execution(),
        bare_execution(),
        *(execution(f"e{n}", total_cost=n, attempts=(attempt(f"e{n}"),)) for n in range(50)),
    ]
    await store(analytics, records)
    await store(analytics, records[:10])  # again, and not merged yet
    at = urlsplit(clickhouse_server.url)
    async with new_database(clickhouse_server.url) as other:
        client = await create_async_client(
            host=at.hostname, port=at.port, username=at.username, password=at.password, database=other.database
        )
        async with client:
            for what, table in (("executions", schema.EXECUTIONS), ("attempts", schema.ATTEMPTS)):
                ran = await in_thread(run, "executions", "export", "--format", "parquet", "--what", what, "--json")
                assert ran.code == ExitCode.OK, ran.err
                assert ran.json["file"] == f"{what}.parquet"
                stored = await analytics.query(f"SELECT * FROM {table.name} FINAL ORDER BY ALL")
                assert ran.json["rows"] == len(stored.rows)
                await client.raw_insert(table.name, insert_block=Path(f"{what}.parquet").read_bytes(), fmt="Parquet")
                assert await other.query(f"SELECT * FROM {table.name} ORDER BY ALL") == stored


async def test_executions_as_lines_of_json_are_as_on_the_wire(run: Run, analytics: Analytics) -> None:
    full, bare = full_execution(), bare_execution()
    await store(analytics, [full, bare, full])
    ran = await in_thread(run, "executions", "export", "--format", "jsonl", "--json")
    assert (ran.code, ran.json["rows"], ran.json["file"]) == (ExitCode.OK, 2, "executions.jsonl")
    file = Path("executions.jsonl")
    assert ran.json["bytes"] == file.stat().st_size
    reported = lines(file, "execution_id")
    for record in (full, bare):
        wire = json.loads(record.json_bytes())
        line = reported[record.execution_id]
        assert list(line) == list(schema.EXECUTIONS.columns)
        error = wire.pop("error") or {}
        for name, value in wire.items():
            if name in line:
                assert line[name] == value, name
        for name in ("kind", "class", "message", "status_code", "retryable", "hash", "user_message"):
            assert line[f"error_{name}"] == error.get(name)
    assert reported["e-full"]["total_cost"] == "999999999.999999999"
    assert reported["e-full"]["wasted_by_cause"]["worker_lost"] == "0.000000001"
    assert reported["e-full"]["messages"][0]["content"] == "Grüße"
    assert reported["e-bare"]["total_cost"] is None


async def test_attempts_as_lines_of_json_are_as_on_the_wire(run: Run, analytics: Analytics) -> None:
    tried = full_attempt()
    await analytics.insert(schema.ATTEMPTS, [attempt_row(tried, 1)])
    assert (await in_thread(run, "executions", "export", "--format", "jsonl", "--what", "attempts")).code == ExitCode.OK
    wire, line = json.loads(tried.json_bytes()), lines(Path("attempts.jsonl"), "attempt_id")[tried.attempt_id]
    assert {name: line[name] for name in wire if name in line} == {name: wire[name] for name in wire if name in line}
    assert line["error_kind"] == "rate_limit"
    assert line["reserved"] == "123456789.123456790"


async def test_text_that_should_be_json_and_is_not_stays_text(run: Run, analytics: Analytics) -> None:
    row = list(rows.execution_row(execution("odd"), 1))
    row[list(schema.EXECUTIONS.columns).index("output")] = 'no "json"\nat all'
    await analytics.insert(schema.EXECUTIONS, [row])
    await in_thread(run, "executions", "export", "--format", "jsonl")
    assert lines(Path("executions.jsonl"), "execution_id")["odd"]["output"] == 'no "json"\nat all'


async def test_only_what_is_asked_for_is_exported(run: Run, analytics: Analytics) -> None:
    hours = [
        execution(f"h{n}", agent="writer" if n % 2 else "tagger", completed_at=NOON + timedelta(hours=n))
        for n in range(6)
    ]
    failed = execution("failed", status="dead_lettered", completed_at=NOON)
    await store(analytics, [*hours, failed])

    async def exported(*options: str) -> set[str]:
        ran = await in_thread(run, "executions", "export", "--format", "jsonl", "--output", "-", *options)
        assert ran.code == ExitCode.OK, ran.err
        return {json.loads(line)["execution_id"] for line in ran.out.splitlines()}

    begin, end = (format_time(NOON + timedelta(hours=n)) for n in (2, 4))
    assert await exported("--since", begin, "--until", end) == {"h2", "h3"}
    assert await exported("--agent", "writer", "--since", begin) == {"h3", "h5"}
    assert await exported("--status", "dead_lettered") == {"failed"}


async def test_no_rows_are_a_success_that_says_so_and_leave_no_file(run: Run, analytics: Analytics) -> None:
    await store(analytics, [execution()])
    ask = ("executions", "export", "--format", "parquet", "--agent", "nobody")
    ran = await in_thread(run, *ask)
    assert (ran.code, ran.out) == (ExitCode.OK, "")
    assert ran.err == (
        "no executions of agent 'nobody' to export; no file is written\n(the other filters match agents writer)\n"
    )
    nothing = await in_thread(run, *ask, "--until", "2020-01-01")
    assert nothing.err.endswith("(the other filters match no agent)\n")
    assert (await in_thread(run, *ask, "--json")).json == {"rows": 0, "bytes": 0, "file": None}
    assert list(Path().iterdir()) == []


async def test_a_file_that_is_there_is_replaced_only_by_force(run: Run, analytics: Analytics) -> None:
    await store(analytics, [execution()])
    file = Path("kept.jsonl")
    file.write_text("precious")
    ask = ("executions", "export", "--format", "jsonl", "--output", str(file))
    ran = await in_thread(run, *ask)
    assert (ran.code, file.read_text()) == (ExitCode.USAGE, "precious")
    assert "kept.jsonl already exists" in ran.err
    assert "--force" in ran.err
    ran = await in_thread(run, *ask, "--force")
    assert ran.code == ExitCode.OK
    assert "1 execution in kept.jsonl" in ran.err
    assert "e1" in lines(file, "execution_id")


async def test_an_answer_that_breaks_off_leaves_no_file(
    run: Run, analytics: Analytics, clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_much(analytics)
    for form in ("parquet", "jsonl"):
        async with cutting(clickhouse_server.url, CUT_AFTER) as url:
            monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"{url.rstrip('/')}/{analytics.database}")
            ran = await in_thread(run, "executions", "export", "--format", form)
        assert ran.code == ExitCode.UNREACHABLE, ran.err
        assert "aborted" in ran.err
        assert list(Path().iterdir()) == []
        monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"{clickhouse_server.url.rstrip('/')}/{analytics.database}")
        whole = await in_thread(run, "executions", "export", "--format", form, "--json")
        assert whole.json["rows"] == MANY + 1
        assert whole.json["bytes"] > CUT_AFTER
        Path(whole.json["file"]).unlink()


async def test_a_server_that_falls_silent_is_given_up_and_leaves_no_file(
    run: Run, analytics: Analytics, clickhouse_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_much(analytics)
    monkeypatch.setattr(export, "MAX_SILENCE_S", 1.0)
    for form, after in itertools.product(("parquet", "jsonl"), (1, CUT_AFTER)):
        async with cutting(clickhouse_server.url, after, hangs=True) as url:
            monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", f"{url.rstrip('/')}/{analytics.database}")
            async with asyncio.timeout(120):
                ran = await in_thread(run, "executions", "export", "--format", form)
        assert ran.code == ExitCode.UNREACHABLE, (form, after, ran.err)
        assert "Timeout on reading data" in ran.err, (form, after)
        assert "breakwater doctor" in ran.err
        assert list(Path().iterdir()) == []


async def test_a_parquet_file_reports_whether_it_is_whole(run: Run, analytics: Analytics) -> None:
    def whole(data: bytes) -> bool:
        progress = export.ExportProgress("executions", "parquet", 77)
        for start in range(0, len(data), 1_000):
            progress.add(data[start : start + 1_000])
        return progress.is_complete

    await store(analytics, [execution(f"e{n}") for n in range(77)])
    await in_thread(run, "executions", "export", "--format", "parquet")
    data = Path("executions.parquet").read_bytes()
    assert whole(data)
    for end in (0, 3, 4, 12, len(data) // 2, len(data) - 8, len(data) - 1):
        assert not whole(data[:end])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--what", "attempts", "--status", "succeeded"), "--status applies only to executions"),
        (("--output", "-", "--json"), "--json prints a summary on stdout"),
        (("--since", "1h", "--until", "2h"), "--since 1h must be before --until 2h"),
        (("--since", "2999-01-01"), "--since 2999-01-01 must be before now"),
        (("--until", "soon"), "--until 'soon' is neither a duration nor a time"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_asked(run: Run, options: tuple[str, ...], why: str) -> None:
    ran = run("executions", "export", "--format", "jsonl", *options)
    assert ran.code == ExitCode.USAGE
    assert why in ran.err


async def test_a_file_that_cannot_be_written_is_reported(run: Run, analytics: Analytics) -> None:
    await store(analytics, [execution()])
    ran = await in_thread(run, "executions", "export", "--format", "jsonl", "--output", "nowhere/x.jsonl", "--json")
    assert ran.code == ExitCode.FAILED
    assert ran.err.splitlines()[-1].startswith('{"error": {"code": "not_written", "message": "nowhere/x.jsonl can')
    assert "No such file or directory" in ran.err


async def test_executions_are_listed_and_shown_beside_the_export(run: Run, analytics: Analytics) -> None:
    await store(analytics, [execution("export"), execution("list"), execution("plain")])
    assert {one["execution_id"] for one in (await in_thread(run, "executions", "--json")).json} == {
        "export",
        "list",
        "plain",
    }
    assert (await in_thread(run, "executions", "list", "--json")).json == (
        await in_thread(run, "executions", "--json")
    ).json
    assert (await in_thread(run, "executions", "plain", "--json")).json["execution_id"] == "plain"
    for name in ("export", "list"):
        assert (await in_thread(run, "executions", "--json", "--", name)).json["execution_id"] == name
        assert (await in_thread(run, "executions", "--", name)).out.count(name) >= 1
