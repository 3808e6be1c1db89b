"""Statements over the HTTP API, as ClickHouse's user `analyst`, on the engine of `breakwater up`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import psutil
import pytest
import pytest_asyncio

from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key, revoke_key
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.security.encryption import Cipher, new_key
from breakwater.local.ports import free_port
from breakwater.records import rows, schema
from breakwater.records.api import export as export_api
from breakwater.records.api import query as query_api
from breakwater.records.api import streamed_rows
from breakwater.records.migrations import migrate
from tests.commands import run_command
from tests.helpers import until
from tests.local.test_clickhouse_http import PASSWORD, start, stop
from tests.records.samples import attempt, attempt_row, execution
from tests.server_sources import RunningServer
from tests.services.request.conftest import CONFIG, Answer, HttpApi, running, settings_for
from tests.tables import each_row

KEY = new_key()
SECRET = "what nobody may read"


@dataclass(frozen=True, slots=True)
class Queried:
    """The API of a plane whose ClickHouse has a user that only reads."""

    api: HttpApi
    analytics: Analytics
    reader_url: str
    key: str
    directory: Path

    async def ask(self, statement: str, *, key: str | None = None, **fields: Any) -> Answer:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = json.dumps({"statement": statement, **fields}).encode()
        return await self.api.ask("POST", "/api/v1/query", data=data, headers=headers)

    async def lines(self, statement: str, **fields: Any) -> list[Any]:
        answer = await self.ask(statement, **fields)
        assert answer.status == 200, answer.body
        return [json.loads(line) for line in answer.body.splitlines()]

    async def running(self, mark: str) -> int:
        found = await self.analytics.query(
            f"SELECT count() FROM system.processes WHERE query LIKE '%{mark}%' AND query NOT LIKE '%system.processes%'"
        )
        return found.rows[0][0]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Queried]:
    directory = tmp_path_factory.mktemp("query")
    server = await asyncio.to_thread(start, directory / "data")
    config = parse_config(f'{CONFIG}encryption: {{keys: [{{command: [echo, "{KEY}"]}}]}}')
    try:

        def url(user: str) -> str:
            return f"http://{user}:{quote(PASSWORD)}@127.0.0.1:{server.port}/breakwater"

        analytics = connect(url("breakwater"))
        await migrate(analytics)
        attempts = (attempt(), attempt(number=2, model="gpt-4.1-mini"))
        stored = [
            execution(attempts=attempts, total_cost=3_000_000, tags={"team": "a"}),
            execution("e2", output="=1+1"),
            Execution.model_validate_json(
                Cipher([KEY]).encrypt_document(execution("sealed", output=SECRET).json_bytes())
            ),
        ]
        # In one insert: rows of several parts come in any order.
        await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in stored])
        await analytics.insert(schema.ATTEMPTS, [attempt_row(one, 1) for record in stored for one in record.attempts])
        await provision(module_nats_server.url, bus_plan(config))
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        key = create_key(settings.api_keys_file, "tests", ("read",))
        addresses = {"clickhouse_url": url("breakwater"), "clickhouse_analyst_url": url("analyst")}
        async with running(type(settings).model_validate(settings.model_dump() | addresses), config, key) as api:
            yield Queried(api, analytics, url("reader"), key, directory)
        await analytics.close()
    finally:
        await asyncio.to_thread(stop, server)


async def test_a_statement_streams_names_types_rows_and_their_number(plane: Queried) -> None:
    statement = "SELECT job_id, total_cost, completed_at FROM executions FINAL ORDER BY job_id -- newest; last"
    assert await plane.lines(statement, limit=1) == [
        ["job_id", "total_cost", "completed_at"],
        ["String", "Nullable(Decimal(18, 9))", "DateTime64(3, 'UTC')"],
        ["e1", "0.003000000", "2026-11-21T12:00:00.000Z"],
        {"rows": 1, "more": True},
    ]
    assert (await plane.lines("SELECT 1 WHERE 0;"))[-1] == {"rows": 0, "more": False}
    assert (await plane.lines("SELECT number FROM numbers(5)", limit=5))[-1] == {"rows": 5, "more": False}


FORMS = ("table", "json", "csv")
STATEMENTS = [
    # These two have values of every type, and are printed in every form.
    ("SELECT * FROM executions FINAL ORDER BY execution_id",),
    (
        "SELECT toDateTime('2026-11-21 12:00:00', 'UTC') AS at, toDate('2026-11-21'), NULL AS nothing, true AS yes,"
        " 18446744073709551615, -1.5, toDecimal64(-1.5, 2), [1, 2], map('a', 'b'), 'zwei\nZeilen'",
    ),
    ("SELECT model, count() AS calls, avg(duration_ms), sum(cost) FROM attempts FINAL GROUP BY ALL ORDER BY 1",),
    ("SELECT 1 WHERE 0",),
    ("SELECT number FROM numbers(1500)",),
    ("SELECT number FROM numbers(5)", "--limit", "3"),
    ("DESCRIBE TABLE executions",),
    ("SHOW TABLES LIKE 'ex%'",),
]


@each_row("arguments", STATEMENTS)
async def test_query_by_url_and_key_alone_prints_what_it_prints_from_clickhouse(
    plane: Queried, arguments: tuple[str, ...]
) -> None:
    by_url = {"BREAKWATER_URL": plane.api.url, "BREAKWATER_API_KEY": plane.key}
    by_server = {"BREAKWATER_CLICKHOUSE_URL": plane.reader_url}
    for form in FORMS if arguments in STATEMENTS[:2] else FORMS[:1]:
        command = ("query", *arguments, "--format", form)
        expected, printed = [
            await asyncio.to_thread(run_command, *command, environment=environment, directory=plane.directory)
            for environment in (by_server, by_url)
        ]
        assert expected.returncode == 0, expected.stderr
        assert (printed.stdout, printed.stderr, printed.returncode) == (expected.stdout, expected.stderr, 0)


async def test_the_command_tells_by_url_of_errors_as_it_does_from_clickhouse(plane: Queried) -> None:
    variables = {"BREAKWATER_URL": plane.api.url, "BREAKWATER_API_KEY": plane.key}

    async def fails(*arguments: str) -> tuple[int, str]:
        ran = await asyncio.to_thread(
            run_command, "query", *arguments, environment=variables, directory=plane.directory
        )
        return ran.returncode, ran.stderr

    code, text = await fails("SELECT *\nFROM executions WHERE ) 1")
    assert code == ExitCode.FAILED
    assert text.startswith("error: ClickHouse refuses it, code 62: Syntax error: failed at position 32 ())")
    code, text = await fails("SELECT sum(sipHash64(number)) FROM system.numbers", "--timeout", "0.2")
    assert (code, text) == (
        ExitCode.FAILED,
        "error: the statement took longer than 0.2 s and was stopped\n  Raise the limit with --timeout SECONDS.\n",
    )
    code, text = await fails("INSERT INTO executions SELECT * FROM executions", "--write")
    assert (code, "Set BREAKWATER_CLICKHOUSE_URL" in text) == (ExitCode.USAGE, True)
    code, text = await fails("SELECT 1", "--api-key", "bw_wrong")
    assert (code, "this API key is unknown" in text) == (ExitCode.FAILED, True)


REFUSED = [
    "INSERT INTO executions SELECT * FROM executions",
    "DROP TABLE executions",
    "SELECT 1; DROP TABLE executions",
    "SELECT * FROM file('/etc/passwd', 'LineAsString')",
    "SELECT file('/etc/passwd')",
    "SELECT 1 INTO OUTFILE '/tmp/written'",
    "SELECT query FROM system.processes",
    "SELECT * FROM system.users",
    "SHOW PROCESSLIST",
    "SELECT * FROM audit",
    "SELECT * FROM merge('breakwater', '^audit$')",
    "SELECT by FROM merge('breakwater', '^(audit|alerts)$')",
    "SELECT count() FROM audit",
    "SELECT * FROM loop(audit) LIMIT 1",
    "SELECT * FROM mergeTreeIndex('breakwater', 'audit')",
    "SELECT * FROM url('http://127.0.0.1:9/x', 'LineAsString')",
    "SELECT * FROM remote('127.0.0.1:9', system.one)",
    "SET max_memory_usage = 0",
    "SELECT 1 SETTINGS max_memory_usage = 0",
    "SELECT 1 SETTINGS readonly = 0",
    "SELECT 1 FORMAT CSV",
    "SELECT length(groupArray(number)) FROM numbers(900000000)",
]


@each_row("statement", REFUSED)
async def test_a_statement_that_writes_or_reads_files_system_tables_or_urls_is_refused_in_words(
    plane: Queried, statement: str
) -> None:
    answer = await plane.ask(statement)
    assert (answer.status, answer.code) == (422, "query_failed"), answer.body
    assert answer.message.startswith("ClickHouse refuses it, code ")


async def test_encrypted_texts_stay_encrypted(plane: Queried) -> None:
    answer = await plane.ask("SELECT * FROM executions FINAL WHERE job_id = 'sealed'")
    assert answer.body.count(b"\n") == 4
    assert SECRET.encode() not in answer.body


async def test_only_a_key_with_read_may_ask_and_a_bound_or_revoked_one_may_not(plane: Queried) -> None:
    file = plane.api.settings.api_keys_file
    keys = {scope: create_key(file, scope, (scope,)) for scope in ("submit", "operate", "approve", "audit")}
    keys["bound"] = create_key(file, "bound", ("submit",), tenants=("acme",), agents=("writer",))
    for name, key in keys.items():
        refused = await plane.ask("SELECT 1", key=key)
        assert (refused.status, refused.code) == (403, "forbidden"), name
        assert "this needs an API key with the scope read" in refused.message
    revoked = create_key(file, "revoked", ("read",))
    assert (await plane.ask("SELECT 1", key=revoked)).status == 200
    revoke_key(file, "revoked")
    assert (await plane.ask("SELECT 1", key=revoked)).status == 401


async def test_a_long_statement_is_stopped(plane: Queried) -> None:
    slow = await plane.ask("SELECT sum(sipHash64(number)), 'too slow' FROM system.numbers", timeout_s=0.2)
    assert (slow.status, slow.code) == (422, "query_timeout")
    # Also one that asks for more time than its request.
    own_limit = "SELECT sum(sipHash64(number)), 'own limit' FROM system.numbers SETTINGS max_execution_time = 600"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_rows, "ANSWER_MARGIN_S", 0.1)
        slow = await plane.ask(own_limit, timeout_s=0.2)
    assert (slow.status, slow.code) == (422, "query_timeout")

    async def all_ended() -> bool:
        return await plane.running("own limit") + await plane.running("too slow") == 0

    await until(all_ended)


async def test_a_client_that_leaves_stops_its_statement(plane: Queried) -> None:
    asking = asyncio.create_task(
        plane.ask("SELECT sum(sipHash64(number)), 'left alone' FROM system.numbers", timeout_s=600)
    )
    await until(lambda: plane.running("left alone"))
    asking.cancel()

    async def has_ended() -> bool:
        return not await plane.running("left alone")

    await until(has_ended)


async def test_at_most_two_statements_run_at_a_time_and_a_key_that_is_revoked_stops_its_own(
    plane: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_rows, "KEY_LOOK_S", 0.05)
    key = create_key(plane.api.settings.api_keys_file, "leaving", ("read",))
    headers = {"Authorization": f"Bearer {key}"}
    endless = json.dumps({"statement": "SELECT number FROM system.numbers", "timeout_s": 600})
    async with aiohttp.ClientSession(headers=headers) as http:
        held = [
            await http.post(f"{plane.api.url}/api/v1/query", data=endless) for _ in range(streamed_rows.MAX_AT_ONCE)
        ]
        refused = await plane.ask("SELECT 1")
        assert (refused.status, refused.code, refused.headers["Retry-After"]) == (503, "too_many_statements", "5")
        revoke_key(plane.api.settings.api_keys_file, "leaving")
        for answer in held:
            last = (await answer.read()).splitlines()[-1]
            assert json.loads(last)["error"] == {
                "code": "stopped",
                "message": "the statement was stopped: this API key was revoked",
            }
    assert (await plane.ask("SELECT 1")).status == 200


async def test_a_failure_after_the_first_rows_is_the_last_line(plane: Queried) -> None:
    rows = "throwIf(number = 28000, 'in the middle'), repeat('x', 1000) FROM numbers(30000)"
    statement = f"SELECT {rows} SETTINGS max_block_size = 1000"
    *found, last = await plane.lines(statement)
    assert len(found) > 1_000
    assert last["error"]["code"] == "query_failed"
    assert "in the middle" in last["error"]["message"]


async def test_many_rows_stream_with_flat_memory(plane: Queried) -> None:
    process = psutil.Process(os.getpid())
    body = json.dumps(
        {"statement": "SELECT number, repeat('x', 2000) FROM numbers(40000) SETTINGS max_block_size = 1000"}
    ).encode()
    lines = size = most = 0
    before = process.memory_info().rss
    async with plane.api.http.post(f"{plane.api.url}/api/v1/query", data=body) as answer:
        assert answer.status == 200, await answer.text()
        async for chunk in answer.content.iter_any():
            lines += chunk.count(b"\n")
            size += len(chunk)
            most = max(most, process.memory_info().rss - before)
    assert (lines, size > 80e6) == (40_003, True)
    assert most < 30e6


async def test_a_larger_answer_than_is_allowed_ends_with_the_reason(
    plane: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_api, "MAX_ANSWER_BYTES", 1_000_000)
    *_, last = await plane.lines("SELECT number, repeat('x', 1000) FROM numbers(10000)")
    assert last["error"]["code"] == "answer_too_large"


async def test_a_plane_without_a_user_that_only_reads_runs_no_statement(
    plane: Queried, module_nats_server: RunningServer, redis_server: RunningServer, tmp_path: Path
) -> None:
    settings = settings_for(module_nats_server.url, redis_server.url, tmp_path)
    key = create_key(settings.api_keys_file, "tests", ("read",))
    writer_url = plane.api.settings.clickhouse_url
    for reader_url, problem in ((None, "no BREAKWATER_CLICKHOUSE_ANALYST_URL"), (writer_url, "`readonly = 0`")):
        fields = settings.model_dump() | {"clickhouse_analyst_url": reader_url, "http_port": free_port()}
        async with running(type(settings).model_validate(fields), parse_config(CONFIG), key) as api:
            answer = await api.ask("POST", "/api/v1/query", data=b'{"statement": "SELECT 1"}')
            assert (answer.status, answer.code) == (501, "no_analyst")
            assert problem in answer.message


@each_row(
    "options", [(), ("--what", "attempts"), ("--agent", "nobody"), ("--status", "succeeded", "--since", "2026-11-01")]
)
async def test_an_export_by_url_and_key_alone_is_the_file_that_clickhouse_gives(
    plane: Queried, options: tuple[str, ...]
) -> None:
    by_url = {"BREAKWATER_URL": plane.api.url, "BREAKWATER_API_KEY": plane.key}
    by_server = {"BREAKWATER_CLICKHOUSE_URL": plane.reader_url}
    # A file of each kind is of the same rows: which those are, is asked for once more in each case, as text.
    for form in ("jsonl",) if options else ("jsonl", "parquet"):
        exported = list[tuple[int, str, list[bytes]]]()
        for environment in (by_server, by_url):
            file = plane.directory / "exported"
            command = ("executions", "export", "--format", form, "--output", str(file), *options)
            ran = await asyncio.to_thread(run_command, *command, environment=environment, directory=plane.directory)
            content = file.read_bytes() if file.exists() else b""
            file.unlink(missing_ok=True)
            note = ran.stderr.splitlines()[0 if "nobody" in options else -1]
            exported.append((ran.returncode, note, sorted(content.splitlines()) if form == "jsonl" else [content]))
        assert exported[0] == exported[1]
        assert exported[0][0] == ExitCode.OK
        assert "nobody" in options or "in " in exported[0][1]


async def test_the_head_of_an_export_tells_the_number_of_records_and_runs_nothing(plane: Queried) -> None:
    answer = await plane.api.ask("HEAD", "/api/v1/export?format=jsonl&agent=nobody")
    assert (answer.status, answer.headers["breakwater-rows"], answer.body) == (200, "0", b"")


async def test_an_export_that_breaks_off_leaves_no_file(plane: Queried, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "SELECT throwIf(number = 2900000, 'in the middle') FROM numbers(3000000) FORMAT TSVRaw"

    def failing_statement(*_: object) -> str:
        return failing

    monkeypatch.setattr(export_api, "export_statement", failing_statement)
    environment = {"BREAKWATER_URL": plane.api.url, "BREAKWATER_API_KEY": plane.key}
    command = ("executions", "export", "--format", "jsonl", "--output", "cut.jsonl")
    ran = await asyncio.to_thread(run_command, *command, environment=environment, directory=plane.directory)
    assert (ran.returncode, "no response from" in ran.stderr) == (ExitCode.UNREACHABLE, True)
    assert not (plane.directory / "cut.jsonl").exists()
