"""The embedded ClickHouse, spoken to as its users do: clickhouse-connect, plain HTTP and a supervisor's signals."""

import asyncio
import gzip
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import aiohttp
import clickhouse_connect
import lz4.frame
import psutil
import pytest
import pytest_asyncio
from clickhouse_connect.driver.asyncclient import AsyncClient
from clickhouse_connect.driver.exceptions import DatabaseError, StreamFailureError

from breakwater.local.clickhouse.__main__ import main
from tests.helpers import until
from tests.tables import each_row

USER, PASSWORD = "breakwater", "pa:ss wörd"
AUTH = {"Authorization": aiohttp.encode_basic_auth(USER, PASSWORD, "utf-8")}


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    data: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def rss_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


def launch(data: Path, port: int = 0, program: str | None = None) -> subprocess.Popen[str]:
    secret = data.parent / f"{data.name}.password"
    secret.write_text(PASSWORD + "\n")
    return subprocess.Popen(
        [
            *(sys.executable, *(("-c", program) if program else ("-m", "breakwater.local.clickhouse"))),
            *("--data", str(data), "--port", str(port)),
            *("--user", USER, "--password-file", str(secret), "--reader-password-file", str(secret)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(data: Path, program: str | None = None) -> Server:
    process = launch(data, program=program)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready http://127.0.0.1:"):
        process.kill()
        pytest.fail(f"not ready: {line!r} {process.communicate()}")
    return Server(process, int(line.rsplit(":", 1)[1]), data)


def stop(server: Server) -> int:
    server.process.terminate()
    try:
        return server.process.wait(60)
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("clickhouse") / "data")
    yield running
    stop(running)


async def connect(server: Server, username: str = USER, **options: object) -> AsyncClient:
    return await clickhouse_connect.get_async_client(
        host="127.0.0.1", port=server.port, username=username, password=PASSWORD, **options
    )


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with await connect(server) as connected:
        yield connected


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=AUTH) as session:
        yield session


# --- clickhouse-connect ---


async def test_rows_of_every_type_we_store_come_back_as_they_went_in(client: AsyncClient) -> None:
    await client.command(
        "CREATE OR REPLACE TABLE kinds (id UInt64, cost Decimal(18, 9), at DateTime64(3, 'UTC'), note Nullable(String),"
        " tags Array(String), model LowCardinality(String), meta Map(String, String), raw String, doc JSON)"
        " ENGINE = MergeTree ORDER BY id"
    )
    at = datetime(2026, 11, 21, 10, 0, 0, 123000, tzinfo=UTC)
    rows = [
        [1, Decimal("0.000000001"), at, None, ["a", "it's"], "m", {"k": "v"}, '{"x": [1, "\\n"]}', {"a": {"b": 1}}],
        [2, Decimal("123456789.987654321"), at, "", [], "m", {}, "tab\there; \\ 'quoted'", {}],
    ]
    summary = await client.insert("kinds", rows)
    back = await client.query("SELECT * FROM kinds ORDER BY id", tz_mode="aware")

    assert summary.written_rows == 2
    assert [list(row) for row in back.result_rows] == rows


@pytest.mark.parametrize("compress", [False, "lz4", "gzip"])
async def test_inserts_and_queries_work_with_every_compression(server: Server, compress: bool | str) -> None:
    async with await connect(server, compress=compress) as client:
        await client.command("CREATE OR REPLACE TABLE packed (n UInt32, s String) ENGINE = MergeTree ORDER BY n")
        await client.insert("packed", [[n, f"row {n} " * 5] for n in range(20_000)], column_names=["n", "s"])
        back = await client.query("SELECT n, s FROM packed ORDER BY n")

    assert back.row_count == 20_000
    assert back.result_rows[-1] == (19_999, "row 19999 " * 5)


@each_row(
    "value",
    [
        *("plain", "it's", 'a "b"', "back\\slash", "tab\tnew\nline", "ünï", "' OR 1=1 --", ""),
        pytest.param("x" * 100_000, id="too long for a URL, in a form"),
    ],
)
async def test_a_string_parameter_arrives_unchanged(client: AsyncClient, value: str) -> None:
    result = await client.query("SELECT {v:String}", parameters={"v": value})

    assert result.result_rows == [(value,)]


async def test_parameters_of_other_types_are_bound_by_the_engine(client: AsyncClient) -> None:
    result = await client.query(
        "SELECT {a:Array(String)}, {n:Nullable(String)}, {d:DateTime('UTC')}, {t:Identifier} FROM (SELECT 5 AS five)",
        parameters={"a": ["x'y", "\\"], "n": None, "d": datetime(2026, 1, 2, 3, 4, 5), "t": "five"},
    )

    assert result.result_rows == [(["x'y", "\\"], None, datetime(2026, 1, 2, 3, 4, 5), 5)]


async def test_settings_hold_for_one_statement_only(client: AsyncClient) -> None:
    asked = "SELECT getSetting('max_threads'), getSetting('max_block_size')"
    with_settings = await client.query(asked, settings={"max_threads": 1, "max_block_size": 7})
    without = await client.query(asked)

    assert with_settings.result_rows == [(1, 7)]
    assert without.result_rows[0][1] != 7


async def test_a_statement_leaves_nothing_to_the_next_one(server: Server, client: AsyncClient) -> None:
    block_size = "SELECT getSetting('max_block_size')"
    default = (await client.query(block_size)).result_rows
    await client.command("SET max_block_size = 7")
    await client.query("SELECT {v:UInt8} SETTINGS max_block_size = 7", parameters={"v": 1})
    assert (await client.query(block_size)).result_rows == default
    with pytest.raises(DatabaseError, match="UNKNOWN_QUERY_PARAMETER"):
        await client.query("SELECT {v:UInt8}")
    assert (await client.query("SELECT {v:UInt8}", parameters={"v": 2})).result_rows == [(2,)]
    for made in ("CREATE TEMPORARY TABLE scratch (n UInt8)", "CREATE OR REPLACE TEMPORARY TABLE scratch (n UInt8)"):
        await client.command(made)
        with pytest.raises(DatabaseError, match="UNKNOWN_TABLE"):
            await client.query("SELECT * FROM scratch")

    await client.command("CREATE DATABASE short_lived")
    async with await connect(server, database="short_lived") as other:
        assert (await other.query("SELECT currentDatabase()")).result_rows == [("short_lived",)]
        await client.command("DROP DATABASE short_lived")
        with pytest.raises(DatabaseError, match="UNKNOWN_DATABASE"):
            await other.query("SELECT 1")


@each_row("user", [USER, "reader"])
async def test_no_expression_is_compiled_unless_it_is_asked_for(server: Server, user: str) -> None:
    names = ("compile_expressions", "compile_aggregate_expressions", "compile_sort_description")
    values = "SELECT " + ", ".join(f"getSetting('{name}')" for name in names)
    async with await connect(server, username=user) as client:
        default = await client.query(values)
        wanted = await client.query(values, settings={"compile_expressions": 1})

    assert (default.result_rows, wanted.result_rows) == ([(False, False, False)], [(True, False, False)])


async def test_raw_query_and_raw_insert_pass_bytes_through(client: AsyncClient) -> None:
    await client.command("CREATE OR REPLACE TABLE raw (a Int32, s String) ENGINE = MergeTree ORDER BY a")
    await client.raw_insert("raw", ["a", "s"], b'1,"x;\n\ny"\n', fmt="CSV")
    await client.raw_insert(
        "raw", ["a", "s"], gzip.compress(b'{"a":2,"s":"z"}\n'), fmt="JSONEachRow", compression="gzip"
    )

    assert await client.raw_query("SELECT * FROM raw ORDER BY a", fmt="JSONCompactEachRow") == (
        b'[1, "x;\\n\\ny"]\n[2, "z"]\n'
    )


async def test_an_insert_that_the_disk_has_no_room_for_fails(client: AsyncClient) -> None:
    settings = "min_free_disk_bytes_to_perform_insert = 1000000000000000"
    await client.command(f"CREATE OR REPLACE TABLE full (a Int32) ENGINE = MergeTree ORDER BY a SETTINGS {settings}")
    with pytest.raises(DatabaseError, match="NOT_ENOUGH_SPACE"):
        await client.raw_insert("full", ["a"], b"1\n", fmt="CSV")
    reserve = "SELECT value FROM system.merge_tree_settings WHERE name = 'min_free_disk_bytes_to_perform_insert'"
    assert (await client.query(reserve)).result_rows == [("268435456",)]


async def test_work_on_many_files_leaves_few_threads(server: Server, client: AsyncClient) -> None:
    columns, settings = ", ".join(f"c{n} UInt8" for n in range(80)), "SETTINGS min_bytes_for_wide_part = 0"
    before = psutil.Process(server.process.pid).num_threads()
    await client.command(f"CREATE OR REPLACE TABLE wide ({columns}) ENGINE = MergeTree ORDER BY c0 {settings}")
    await client.command(f"INSERT INTO wide SELECT {', '.join(['number'] * 80)} FROM numbers(100)")
    assert len((await client.query("SELECT * FROM wide WHERE c0 < 90")).result_rows) == 90  # a file's marks a column
    await client.command("CREATE OR REPLACE TABLE parted (n UInt8) ENGINE = MergeTree PARTITION BY n ORDER BY n")
    unlimited = {"max_partitions_per_insert_block": 0}
    await client.command("INSERT INTO parted SELECT number FROM numbers(150)", settings=unlimited)
    await client.command("DROP TABLE parted SYNC")

    assert psutil.Process(server.process.pid).num_threads() - before < 24


async def test_an_empty_result_still_has_its_columns(client: AsyncClient) -> None:
    result = await client.query("SELECT 1 AS a, 'x' AS b LIMIT 0")

    assert (result.column_names, result.result_rows) == (("a", "b"), [])


async def test_a_large_result_streams_through_without_growing_the_process(server: Server, client: AsyncClient) -> None:
    before, rows, peak = server.rss_mb(), 0, 0.0
    long = "SELECT repeat('x', 1000) FROM numbers(150000)"
    async with await client.query_row_block_stream(long, settings={"max_block_size": 10_000}) as stream:
        async for block in stream:
            rows += len(block)
            peak = max(peak, server.rss_mb())

    assert rows == 150_000
    # Of 150.
    assert peak - before < 50


async def test_sixteen_queries_are_answered_while_one_sleeps(server: Server, client: AsyncClient) -> None:
    await client.command("CREATE OR REPLACE TABLE busy (n UInt32) ENGINE = MergeTree ORDER BY n")
    slow = asyncio.create_task(client.query("SELECT sleepEachRow(1) FROM numbers(90) SETTINGS max_block_size = 1"))
    await until(lambda: _running(client, "sleepEachRow(1)"))
    began = time.monotonic()
    answers = await asyncio.gather(*(client.query(f"SELECT {n}, sum(number) FROM numbers(1000)") for n in range(16)))
    await client.insert("busy", [[1]], column_names=["n"])
    took, still_sleeps = time.monotonic() - began, not slow.done()
    slow.cancel()
    with suppress(asyncio.CancelledError):
        await slow

    assert [answer.result_rows for answer in answers] == [[(n, 499_500)] for n in range(16)]
    assert still_sleeps, f"the sleeper was done after {took} s"


@each_row(
    ("sql", "code", "name"),
    [
        ("SELECT * FROM nowhere", 60, "UNKNOWN_TABLE"),
        ("SELECT nothing FROM system.one", 47, "UNKNOWN_IDENTIFIER"),
        ("SELEKT 1", 62, "SYNTAX_ERROR"),
        ("1 + 1", 62, "SYNTAX_ERROR"),
        ("SELECT 1; SELECT 2", 62, "SYNTAX_ERROR"),
        ("SELECT * FROM nodb.t", 81, "UNKNOWN_DATABASE"),
        ("SELECT 1 INTO OUTFILE '/tmp/leak.tsv'", 348, "INTO_OUTFILE_NOT_ALLOWED"),
        ("SELECT throwIf(1)", 395, "FUNCTION_THROW_IF_VALUE_IS_NON_ZERO"),
    ],
)
async def test_an_error_arrives_with_its_code_and_text(client: AsyncClient, sql: str, code: int, name: str) -> None:
    with pytest.raises(DatabaseError, match=name) as caught:
        await client.raw_query(sql)

    assert (caught.value.code, caught.value.name) == (code, name)
    assert "/dev/fd" not in str(caught.value)


@pytest.mark.parametrize("compress", [False, "gzip"])
async def test_a_failure_in_mid_stream_arrives_as_an_error(server: Server, compress: bool | str) -> None:
    rows = 0
    async with await connect(server, compress=compress) as client:

        async def read() -> None:
            nonlocal rows
            sql = "SELECT number, throwIf(number = 600000) FROM numbers(1000000)"
            async with await client.query_row_block_stream(sql) as stream:
                async for block in stream:
                    rows += len(block)

        with pytest.raises(StreamFailureError) as caught:
            await read()

    assert caught.value.code == 395
    assert rows > 0


async def test_a_bad_row_fails_the_insert_and_names_the_column(client: AsyncClient) -> None:
    await client.command("CREATE OR REPLACE TABLE strict_rows (n UInt32) ENGINE = MergeTree ORDER BY n")
    with pytest.raises(DatabaseError, match="CANNOT_PARSE_INPUT_ASSERTION_FAILED"):
        await client.raw_insert("strict_rows", ["n"], b"1\nnot a number\n", fmt="TSV")

    assert await client.command("SELECT count() FROM strict_rows") == 0


async def test_the_engine_behaves_as_the_server_with_the_features_we_rely_on(client: AsyncClient) -> None:
    await client.command(
        "CREATE OR REPLACE TABLE latest (k UInt32, v UInt32, at DateTime) ENGINE = ReplacingMergeTree(v) ORDER BY k"
        " TTL at + INTERVAL 1 DAY"
    )
    await client.command("CREATE OR REPLACE TABLE totals (k UInt32, n UInt64) ENGINE = SummingMergeTree ORDER BY k")
    await client.command("DROP VIEW IF EXISTS feeding")
    await client.command("CREATE MATERIALIZED VIEW feeding TO totals AS SELECT k, count() AS n FROM latest GROUP BY k")
    now = datetime.now(UTC).replace(tzinfo=None)
    columns = ["k", "v", "at"]
    await client.insert("latest", [[1, 1, now], [2, 1, datetime(2020, 1, 1)]], column_names=columns)
    await client.insert("latest", [[1, 2, now]], column_names=columns, settings={"async_insert": 1})
    await client.command("OPTIMIZE TABLE latest FINAL")

    assert (await client.query("SELECT k, v FROM latest FINAL ORDER BY k")).result_rows == [(1, 2)]
    assert (await client.query("SELECT k, sum(n) FROM totals GROUP BY k ORDER BY k")).result_rows == [(1, 2), (2, 1)]
    assert [row[0] for row in (await client.query("DESCRIBE TABLE latest")).result_rows] == columns
    assert await client.command("EXISTS TABLE latest") == 1
    assert await client.command("SELECT engine FROM system.tables WHERE name = 'latest'") == "ReplacingMergeTree"
    assert client.server_version == await client.command("SELECT version()")


def test_the_sync_client_works_too(server: Server) -> None:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=server.port, username=USER, password=PASSWORD)
    try:
        client.command("CREATE OR REPLACE TABLE sync_rows (n UInt32) ENGINE = MergeTree ORDER BY n")
        client.insert("sync_rows", [[1], [2]], column_names=["n"])
        assert client.query("SELECT sum(n) FROM sync_rows").result_rows == [(3,)]
    finally:
        client.close()


# --- plain HTTP ---


async def test_health_checks_need_no_password(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("", "ping", "replicas_status"):
            async with session.get(server.url + path) as answer:
                assert (answer.status, await answer.text()) == (200, "Ok.\n")
        async with session.head(server.url + "ping") as answer:
            assert answer.status == 200


async def test_a_get_select_answers_with_the_headers_of_a_server(server: Server, http: aiohttp.ClientSession) -> None:
    params = {"query": "SELECT number AS n FROM numbers(2)", "default_format": "JSON", "query_id": "mine"}
    async with http.get(server.url, params=params) as answer:
        body = await answer.json()

    assert body["data"] == [{"n": 0}, {"n": 1}] or body["data"] == [{"n": "0"}, {"n": "1"}]
    assert answer.headers["X-ClickHouse-Query-Id"] == "mine"
    assert answer.headers["X-ClickHouse-Format"] == "JSON"
    assert answer.headers["X-ClickHouse-Timezone"]
    assert answer.headers["X-ClickHouse-Server-Display-Name"]
    summary = json.loads(answer.headers["X-ClickHouse-Summary"])
    assert (summary["read_rows"], summary["result_rows"]) == ("2", "2")
    assert all(isinstance(value, str) for value in summary.values())


@each_row(
    ("sql", "expected"),
    [
        ("SELECT 1 AS format", "1\n"),
        ("SELECT 'a FORMAT CSV' FORMAT CSV", '"a FORMAT CSV"\n'),
        ("SELECT 1 FORMAT CSV SETTINGS max_threads = 1", "1\n"),
        ("SELECT 1 SETTINGS max_threads = 1 FORMAT CSV;", "1\n"),
        ("/* a */ SELECT 1 -- FORMAT CSV", "1\n"),
        ("(SELECT 1) UNION ALL (SELECT 1)", "1\n1\n"),
        ("WITH 1 AS x SELECT x", "1\n"),
        ("FROM system.one SELECT 3", "3\n"),
        ("SELECT $$it's;$$", "it\\'s;\n"),
        ("EXISTS DATABASE default", "1\n"),
        ("SELECT [1, 2][1], map('k', 1)['k']", "1\t1\n"),
        ("SELECT '--', `a` FROM (SELECT 2 AS a)", "--\t2\n"),
        ("SELECT format FROM (SELECT 2 AS format) ORDER BY format ASC", "2\n"),
        ("SELECT 'FORMAT CSV' AS `\nFORMAT CSV`", "FORMAT CSV\n"),
        ("((SELECT 1) UNION ALL (SELECT 2)) INTERSECT (SELECT 2) FORMAT CSV", "2\n"),
        ("SELECT 1 FORMAT Null", ""),
        (
            "SELECT 1::UInt8, 'a'||'b', 1e3, NOT 1, CASE WHEN 1 THEN 2 END FORMAT CSVWithNames",
            '"CAST(\'1\', \'UInt8\')","concat(\'a\', \'b\')","1000.","not(1)","multiIf(1, 2, NULL)"\n1,"ab",1000,0,2\n',
        ),
    ],
)
async def test_sql_of_every_shape_is_understood(
    server: Server, http: aiohttp.ClientSession, sql: str, expected: str
) -> None:
    async with http.post(server.url, data=sql) as answer:
        assert (answer.status, await answer.text()) == (200, expected)


@each_row(
    ("query", "body"),
    [
        ("", b"INSERT INTO bodies VALUES (1, 'a;b'), (2, upper('x'));"),
        ("INSERT INTO bodies VALUES", b"(1, 'a;b'), (2, 'X')"),
        ("INSERT INTO bodies FORMAT JSONEachRow", b'{"n": 1, "s": "a;b"}\n\n{"n": 2, "s": "X"}'),
        ("", b"INSERT INTO bodies FORMAT TSV\n1\ta;b\n2\tX\n"),
        ("", b"insert into `bodies` (s, n) settings async_insert = 0 format CSV\r\na;b,1\nX,2\n"),
        ("", b"INSERT INTO bodies SELECT number + 1, ['a;b', 'X'][number + 1] FROM numbers(2)"),
        ("INSERT INTO bodies", b"SELECT number + 1, ['a;b', 'X'][number + 1] FROM numbers(2)"),
        (
            "/* a */ INSERT INTO TABLE default.bodies (* EXCEPT(s), s) -- b",
            b"\n SETTINGS async_insert=0 VALUES(1, 'a;b') (2, 'X')",
        ),
        ("", b"INSERT INTO {t:Identifier} FORMAT CSV  \r\n1,a;b\n2,X"),
    ],
)
async def test_an_insert_takes_its_data_wherever_it_stands(
    server: Server, http: aiohttp.ClientSession, query: str, body: bytes
) -> None:
    for sql in (
        "DROP TABLE IF EXISTS bodies",
        "CREATE TABLE bodies (n UInt32, s String) ENGINE = MergeTree ORDER BY n",
    ):
        async with http.post(server.url, data=sql) as answer:
            assert await answer.read() == b""
    async with http.post(server.url, params={"query": query, "param_t": "bodies"}, data=body) as answer:
        assert (answer.status, await answer.text()) == (200, "")
        assert json.loads(answer.headers["X-ClickHouse-Summary"])["written_rows"] == "2"
    async with http.post(server.url, data="SELECT * FROM bodies ORDER BY n") as answer:
        assert await answer.text() == "1\ta;b\n2\tX\n"


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("gzip", lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])),
        ("lz4", lambda data: lz4.frame.compress(data[:9]) + lz4.frame.compress(data[9:])),
    ],
)
async def test_a_compressed_body_is_inserted_even_in_several_frames(
    server: Server, http: aiohttp.ClientSession, client: AsyncClient, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    await client.command("CREATE OR REPLACE TABLE coded (n UInt32) ENGINE = MergeTree ORDER BY n")
    body = pack(b"".join(b'{"n": %d}\n' % n for n in range(200_000)))
    params = {"query": "INSERT INTO coded FORMAT JSONEachRow"}
    async with http.post(server.url, params=params, data=body, headers={"Content-Encoding": coding}) as answer:
        assert answer.status == 200, await answer.text()
    async with http.post(server.url, params=params, data=body[:-9], headers={"Content-Encoding": coding}) as cut:
        assert (cut.status, cut.headers["X-ClickHouse-Exception-Code"]) == (400, "271")

    assert await client.command("SELECT uniqExact(n), sum(n) >= 19999900000 FROM coded") == ["200000", "1"]


def form_with_a_table() -> aiohttp.FormData:
    form = aiohttp.FormData({"query": "SELECT sum(n) FROM sent"})
    form.add_field("sent", b"1\n5\n", filename="sent")
    return form


@each_row(
    ("params", "headers", "body", "named"),
    [
        ({"session_id": "s"}, {}, b"SET max_block_size = 11", "a session"),
        ({"session_id": "s"}, {}, b"USE default", "a session"),
        ({"session_id": "s"}, {}, b"create /* a */ temporary table t (n UInt8)", "a session"),
        ({"session_id": "s", "session_check": "1"}, {}, b"SELECT 1", "a session"),
        ({"sent_structure": "n UInt32"}, {}, form_with_a_table, "an external table"),
        ({}, {}, b"KILL QUERY WHERE 1", "KILL QUERY"),
        ({}, {"Content-Encoding": "zstd"}, b"SELECT 1", "Content-Encoding zstd (send gzip or lz4)"),
        ({}, {}, "INSERT INTO “t” VALUES (1)".encode(), "INSERT INTO table (columns) FORMAT name"),
        ({"compress": "1"}, {}, b"SELECT 1", "compression"),
        ({"decompress": "1"}, {}, b"SELECT 1", "compression"),
    ],
)
async def test_what_only_a_real_server_has_is_answered_with_that(
    server: Server,
    http: aiohttp.ClientSession,
    params: dict[str, str],
    headers: dict[str, str],
    body: bytes | Callable[[], aiohttp.FormData],
    named: str,
) -> None:
    data = body if isinstance(body, bytes) else body()
    async with http.post(server.url, params=params, headers=headers, data=data) as answer:
        text = await answer.text()

    assert (answer.status, answer.headers["X-ClickHouse-Exception-Code"]) == (501, "48")
    assert named in text
    assert "use a real ClickHouse server" in text


@pytest.mark.parametrize("accepted", ["zstd, lz4, br, deflate", "gzip;q=0", ""])
async def test_a_client_that_takes_no_gzip_gets_its_result_plain(
    server: Server, http: aiohttp.ClientSession, accepted: str
) -> None:
    async with http.post(server.url, headers={"Accept-Encoding": accepted}, data="SELECT 1") as answer:
        assert (answer.headers.get("Content-Encoding"), await answer.read()) == (None, b"1\n")


@pytest.mark.parametrize("whole", ["0", "1"])
async def test_a_large_result_is_the_same_held_back_or_streamed(
    server: Server, http: aiohttp.ClientSession, whole: str
) -> None:
    sql = "SELECT number FROM numbers(2500000)"  # 19 MB: more than is held in memory
    async with http.post(server.url, params={"wait_end_of_query": whole}, data=sql) as answer:
        body = await answer.read()

    assert answer.headers["Content-Encoding"] == "gzip"
    assert json.loads(answer.headers["X-ClickHouse-Summary"])["read_rows"] == ("2500000" if whole == "1" else "0")
    assert body.count(b"\n") == 2_500_000
    assert body.endswith(b"\n2499999\n")


@pytest.mark.parametrize(
    ("params", "headers", "status", "code"),
    [
        ({"user": USER, "password": PASSWORD}, {}, 200, None),
        ({"user": USER, "password": "wrong"}, {}, 403, "516"),
        ({"user": "someone", "password": PASSWORD}, {}, 403, "516"),
        ({}, {}, 403, "516"),
        ({}, {"Authorization": "Basic !!"}, 403, "516"),
        ({"user": USER, "password": PASSWORD}, {"X-ClickHouse-User": USER, "X-ClickHouse-Key": "wrong"}, 403, "516"),
    ],
)
async def test_nobody_gets_in_without_the_password(
    server: Server, params: dict[str, str], headers: dict[str, str], status: int, code: str | None
) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url, params=params, headers=headers, data="SELECT 1") as answer,
    ):
        assert (answer.status, answer.headers.get("X-ClickHouse-Exception-Code")) == (status, code)
        assert code is None or "AUTHENTICATION_FAILED" in await answer.text()


@each_row(
    ("params", "status", "code"),
    [
        ({"query": "SELECT * FROM nowhere"}, 404, "60"),
        ({"query": "SELEKT"}, 400, "62"),
        ({"query": "SELECT 1", "no_such_setting": "1"}, 404, "115"),
        ({"query": "SELECT 1", "max threads": "1"}, 404, "115"),
        ({"query": "SELECT 1", "database": "nodb"}, 404, "81"),
        ({"query": "SELECT 1 FORMAT Nonsense"}, 404, "73"),
        ({"query": "SELECT toUInt8('x')"}, 400, "6"),
        ({"query": "SELECT throwIf(1)"}, 500, "395"),
        ({"query": "CREATE TABLE over_get (n UInt8) ENGINE = Memory"}, 403, "164"),
        ({"query": "INSERT INTO written_over_get VALUES (1)"}, 403, "164"),
        ({"query": "INSERT INTO FUNCTION null('n UInt8') VALUES (1)"}, 403, "164"),
        ({"query": "INSERT INTO written_over_get SELECT 1"}, 403, "164"),
        ({"query": "SELECT 1", "readonly": "0"}, 403, "164"),
        ({"query": ""}, 400, "62"),
    ],
)
async def test_an_error_over_get_has_the_status_of_a_server(
    server: Server, http: aiohttp.ClientSession, params: dict[str, str], status: int, code: str
) -> None:
    async with http.post(
        server.url, data="CREATE TABLE IF NOT EXISTS written_over_get (n UInt8) ENGINE = Null"
    ) as made:
        assert made.status == 200
    async with http.get(server.url, params=params) as answer:
        text = await answer.text()

    assert (answer.status, answer.headers["X-ClickHouse-Exception-Code"]) == (status, code)
    assert text.startswith(f"Code: {code}. DB::Exception: ")
    assert "(version " in text


async def test_settings_of_the_transport_do_not_reach_the_engine(server: Server, http: aiohttp.ClientSession) -> None:
    params = {
        "query": "SELECT 1",
        "buffer_size": "100",
        "client_protocol_version": "54405",
        "http_headers_progress_interval_ms": "10000",
        "send_progress_in_http_headers": "1",
        "cancel_http_readonly_queries_on_client_close": "1",
        "session_timeout": "10",
        "quota_key": "q",
        "role": "r",
        "enable_http_compression": "0",
    }
    async with http.get(server.url, params=params, headers={"Accept-Encoding": "gzip"}) as answer:
        assert (answer.status, await answer.text()) == (200, "1\n")
        assert "Content-Encoding" not in answer.headers


async def _running(client: AsyncClient, text: str) -> int:
    found = await client.query(
        "SELECT count() FROM system.processes WHERE position(query, {t:String}) > 0 AND query NOT LIKE '%processes%'",
        parameters={"t": text},
    )
    return int(found.result_rows[0][0])


async def _ended(client: AsyncClient, text: str) -> bool:
    return not await _running(client, text)


async def _leave(request: asyncio.Task[aiohttp.ClientResponse]) -> None:
    if request.done():
        request.result().close()
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request


@pytest.mark.parametrize("sql", ["sleepEachRow(1) FROM numbers(60)", "number FROM system.numbers"])
async def test_a_client_that_leaves_cancels_its_query(server: Server, client: AsyncClient, sql: str) -> None:
    mark = f"left_alone_{time.monotonic_ns()}"
    async with aiohttp.ClientSession(headers=AUTH) as session:
        request = asyncio.create_task(
            session.post(server.url, data=f"SELECT '{mark}', {sql} SETTINGS max_block_size = 1")
        )
        await until(lambda: _running(client, mark))
        await _leave(request)
    await until(lambda: _ended(client, mark))


async def test_statements_that_end_slowly_hold_up_no_other_that_was_left(server: Server, client: AsyncClient) -> None:
    # One that sleeps looks once a second whether it is to end: one after the other, these take as many seconds.
    mark, many = f"slow_{time.monotonic_ns()}", 16
    sql = f"SELECT '{mark}', sleepEachRow(3) FROM numbers(60) SETTINGS max_block_size = 1"

    async def all_run() -> bool:
        return await _running(client, mark) == many

    async with aiohttp.ClientSession(headers=AUTH) as session:
        requests = [asyncio.create_task(session.post(server.url, data=sql)) for _ in range(many)]
        await until(all_run)
        for request in requests:
            await _leave(request)
    left_at = time.monotonic()
    await until(lambda: _ended(client, mark))
    assert time.monotonic() - left_at < many / 2


async def test_a_client_may_leave_at_any_moment(server: Server, client: AsyncClient) -> None:
    mark = f"left_early_{time.monotonic_ns()}"
    takes_long_to_parse = f"SELECT '{mark}', length([{'1,' * 50_000}1]) + number FROM system.numbers"
    async with aiohttp.ClientSession(headers=AUTH) as session:
        for milliseconds in range(0, 200, 20):
            request = asyncio.create_task(session.post(server.url, data=f"{takes_long_to_parse} + {milliseconds}"))
            await asyncio.sleep(milliseconds / 1000)
            await _leave(request)
    await until(lambda: _ended(client, mark))


async def test_of_an_insert_that_is_cut_off_nothing_is_stored(
    server: Server, http: aiohttp.ClientSession, client: AsyncClient
) -> None:
    await client.command("CREATE OR REPLACE TABLE cut_off (n UInt32) ENGINE = MergeTree ORDER BY n")
    began = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield b'{"n": 1}\n' * 200_000
        began.set()
        await asyncio.sleep(60)

    params = {"query": "INSERT INTO cut_off FORMAT JSONEachRow"}
    request = asyncio.create_task(http.post(server.url, params=params, data=half()))
    await began.wait()
    assert not await _running(client, "INSERT INTO cut_off")
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request
    await client.command("INSERT INTO cut_off VALUES (2)")

    assert await client.command("SELECT groupArray(n) FROM cut_off") == "[2]"


# --- the process ---


async def test_inserts_survive_a_kill_and_sigterm_lets_a_short_statement_finish_and_no_endless_one(
    tmp_path: Path,
) -> None:
    first = start(tmp_path / "data")
    acknowledged = 0
    try:
        async with await connect(first) as client:
            await client.command("CREATE DATABASE books")
            await client.command("CREATE TABLE books.kept (n UInt32) ENGINE = MergeTree ORDER BY n")
            for n in range(20):
                await client.insert("kept", [[n]], column_names=["n"], database="books", settings={"async_insert": 1})
                acknowledged += 1
    finally:
        first.process.kill()
        first.process.communicate()
    again = start(tmp_path / "data")
    try:
        async with await connect(again, database="books") as client:
            assert await client.command("SELECT count() FROM kept") == acknowledged
            short = asyncio.create_task(client.query("SELECT sleep(1.5), 'done'"))
            endless = asyncio.create_task(  # it takes five minutes
                client.query("SELECT sleepEachRow(3) FROM numbers(100) SETTINGS max_block_size = 1")
            )
            await until(lambda: _running(client, "sleep(1.5),"))
            await until(lambda: _running(client, "sleepEachRow(3)"))
            again.process.send_signal(signal.SIGTERM)
            answer = await short
            code = await asyncio.to_thread(again.process.wait, 60)
            with pytest.raises(DatabaseError):
                await endless
    finally:
        stop(again)

    assert (answer.result_rows, code) == ([(0, "done")], 0)


def test_a_data_directory_in_use_is_refused(server: Server) -> None:
    second = launch(server.data)
    _, complaint = second.communicate(timeout=60)

    assert second.returncode == 1
    assert "already running" in complaint


def test_a_port_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        second = launch(tmp_path / "data", port)
        _, complaint = second.communicate(timeout=60)

    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in complaint


def test_an_empty_password_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("\n")
    data = str(tmp_path / "data")
    arguments = ["--data", data, "--port", "0", "--user", USER, "--password-file", str(password_file)]

    assert main(arguments) == 1
    assert "authentication is always on" in capsys.readouterr().err
