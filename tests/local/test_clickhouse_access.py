"""What the users of ClickHouse may not do: one list of attacks, for the engine and for a real server."""

import asyncio
import socket
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import aiohttp
import psutil
import pytest
from testcontainers.core.container import DockerContainer

from breakwater.alerts.rules.anomaly import FIGURES
from breakwater.alerts.settings import AnomalyRules
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.local.clickhouse.access import (
    ANALYST_GRANTS,
    FIXED_SETTINGS,
    MAX_EXECUTION_S,
    PLANE_GRANTS,
    READER_GRANTS,
    READER_LIMITS,
    READER_SLOTS,
    EngineRole,
    check,
)
from breakwater.local.clickhouse.statements import ClickHouseError
from breakwater.local.ports import free_port, http_ready
from breakwater.records.anomalies import baselines, latest_minutes
from breakwater.records.migrations import migrate, missing
from breakwater.records.rows import execution_row
from breakwater.records.schema import ATTEMPTS, EXECUTIONS
from tests import servers
from tests.helpers import until
from tests.local.test_clickhouse_http import PASSWORD, Server, start, stop
from tests.records.samples import NOON, attempt, attempt_row, execution
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
USERS_XML = ROOT / "deploy" / "clickhouse" / "users.xml"
SECRET = "known-only-to-the-worker"
PLANE, READER = "breakwater", "reader"

BY_ANYONE = [
    # Files that are read.
    "SELECT * FROM file('{secret}', 'LineAsString')",
    "SELECT * FROM `file`('{secret}', 'LineAsString')",
    "SELECT * FROM file/* */('{secret}', LineAsString)",
    "SELECT * FROM file($tag${secret}$tag$, 'LineAsString')",
    "SELECT * FROM file(‘{secret}’, ‘LineAsString’)",
    "DESCRIBE file('{secret}')",
    "SELECT * FROM fileCluster('default', '{secret}', 'LineAsString')",
    "SELECT * FROM filesystem('{folder}')",
    "SELECT * FROM `{secret}`",
    "SELECT * FROM `default`.`{secret}`",
    "SELECT file('{secret}')",
    "SELECT \"file\"('{secret}')",
    "SELECT file(‘{secret}’)",
    "SELECT arrayMap(file, ['{secret}'])",
    "SELECT * APPLY file FROM (SELECT '{secret}')",
    "SELECT * APPLY(file) FROM (SELECT '{secret}')",
    "SELECT (SELECT file('{secret}'))",
    "SELECT 1 WHERE file('{secret}') != ''",
    "EXPLAIN SELECT file('{secret}')",
    "SELECT 1 SETTINGS format_template_resultset = '{secret}' FORMAT Template",
    "SELECT 1 FORMAT Template SETTINGS format_template_resultset = '{secret}'",
    "SELECT * FROM sqlite('{secret}', 't')",
    "SELECT * FROM icebergLocal('{folder}')",
    "SELECT * FROM deltaLakeLocal('{folder}')",
    "SELECT * FROM paimonLocal('{folder}')",
    "SELECT * FROM python(os)",
    "SELECT * FROM Python(self)",
    "SELECT * FROM arrowstream('1')",
    "SELECT * FROM executable('{secret}', TSV, 'a String')",
    "SELECT * FROM eval('SELECT 1') SETTINGS allow_experimental_eval_table_function = 1",
    "INSERT INTO breakwater.t FROM INFILE '{secret}' FORMAT LineAsString",
    "CREATE TABLE breakwater.f (a String) ENGINE = File(LineAsString, '{secret}')",
    "CREATE TEMPORARY TABLE f (a String) ENGINE = File(LineAsString, '{secret}')",
    "CREATE TABLE breakwater.x (a String) ENGINE = Executable('x', TSV)",
    "CREATE VIEW breakwater.w AS SELECT file('{secret}')",
    "CREATE DATABASE d ENGINE = Filesystem('{folder}')",
    "ATTACH TABLE breakwater.z FROM '{folder}' (a Int8) ENGINE = MergeTree ORDER BY a",
    "CREATE DICTIONARY breakwater.d (a String) PRIMARY KEY a SOURCE(FILE(PATH '{secret}' FORMAT CSV))"
    " LAYOUT(FLAT()) LIFETIME(0)",
    # Files that are written.
    "SELECT 1 INTO OUTFILE '{folder}/written'",
    "SELECT 1 into/**/outfile '{folder}/written'",
    "SELECT ‘'’ INTO OUTFILE '{folder}/written' /*' */",
    "SELECT ‘'’ INTO OUTFILE '{folder}/written' /*' c */ FORMAT TSV /* ' */",
    "SELECT “\"” INTO OUTFILE '{folder}/written' /*\" */",
    "SELECT ‘'’ INTO OUTFILE '{folder}/written' --'",
    "SELECT $a$'$a$ INTO OUTFILE '{folder}/written' /*' */",
    "SELECT 1 AS `\\`` INTO OUTFILE '{folder}/written' /*` */",
    "(SELECT 1) INTO OUTFILE '{folder}/written'",
    "EXPLAIN SELECT 1 INTO OUTFILE '{folder}/written'",
    "SHOW TABLES INTO OUTFILE '{folder}/written'",
    "CREATE TABLE breakwater.o (a Int8) ENGINE = Memory INTO OUTFILE '{folder}/written'",
    "INSERT INTO FUNCTION file('{folder}/written', 'CSV', 'a Int8') SELECT 1",
    "INSERT INTO FUNCTION file('{folder}/written', 'CSV', 'a Int8') VALUES (1)",
    "INSERT INTO TABLE FUNCTION file('{folder}/written', CSV, 'a Int8') FORMAT CSV 1",
    "BACKUP DATABASE breakwater TO File('{folder}/written')",
    "RESTORE DATABASE breakwater FROM File('{folder}/written')",
    "SELECT 1 SETTINGS input_format_record_errors_file_path = '{folder}/written'",
    # Connections.
    "SELECT * FROM url('{url}', 'LineAsString')",
    "SELECT * FROM urlCluster('default', '{url}', 'LineAsString')",
    "SELECT * FROM remote('127.0.0.1:{port}', system.one)",
    "SELECT * FROM remoteSecure('127.0.0.1:{port}', system.one)",
    "SELECT * FROM cluster('default', system.one)",
    "SELECT * FROM clusterAllReplicas('default', system.one)",
    "SELECT * FROM s3('{url}', 'CSV')",
    "SELECT * FROM gcs('{url}', 'CSV')",
    "SELECT * FROM hdfs('hdfs://127.0.0.1:{port}/x', 'CSV')",
    "SELECT * FROM mysql('127.0.0.1:{port}', 'a', 'b', 'c', 'd')",
    "SELECT * FROM postgresql('127.0.0.1:{port}', 'a', 'b', 'c', 'd')",
    "SELECT * FROM mongodb('127.0.0.1:{port}', 'a', 'b', 'c', 'd', 'a String')",
    "SELECT * FROM redis('127.0.0.1:{port}', 'a', 'a String')",
    "SELECT * FROM jdbc('jdbc:x', 'a', 'b')",
    "SELECT * FROM odbc('DSN=x', 'a', 'b')",
    "SELECT hasColumnInTable('127.0.0.1:{port}', 'a', 'b', 'system', 'one', 'dummy')",
    "INSERT INTO FUNCTION url('{url}', 'CSV', 'a Int8') SELECT 1",
    "CREATE TABLE breakwater.u (a String) ENGINE = URL('{url}', CSV)",
    "CREATE TABLE breakwater.s (a String) ENGINE = S3('{url}', CSV)",
    "CREATE DATABASE m ENGINE = MySQL('127.0.0.1:{port}', 'a', 'b', 'c')",
    "WITH x AS (SELECT * FROM url('{url}', 'LineAsString')) SELECT * FROM x",
    "SELECT 1 UNION ALL SELECT toUInt8(c1) FROM url('{url}', 'CSV')",
    "SELECT * FROM view(SELECT * FROM url('{url}', 'LineAsString'))",
    # More rights.
    "SET ROLE ALL",
    "SET ROLE engine",
    "SET DEFAULT ROLE ALL TO default",
    "SET dialect = 'kusto'",
    "SELECT 1 SETTINGS dialect = 'prql'",
    "EXECUTE AS default SELECT 1",
    "CREATE USER x",
    "ALTER USER default IDENTIFIED BY 'x'",
    "GRANT ALL ON *.* TO reader",
    "CREATE FUNCTION f AS a -> a",
    "CREATE NAMED COLLECTION c AS a = 1",
    "SELECT * FROM system.users",
    "SELECT * FROM system.named_collections SETTINGS format_display_secrets_in_show_and_select = 2",
    "SYSTEM SHUTDOWN",
    "SYSTEM RELOAD CONFIG",
    "SELECT addressToLine(1)",
    # Two statements.
    "SELECT 1; SELECT * FROM file('{secret}', 'LineAsString')",
    "SELECT ‘'’; SELECT file('{secret}') --'",
    "SELECT 1 PARALLEL WITH SELECT 2",
]
METHODS = ("POST", "GET")
BY_READERS = [
    "INSERT INTO breakwater.t VALUES (1)",
    "INSERT INTO breakwater.t SELECT 1",
    "WITH 1 AS x INSERT INTO breakwater.t SELECT x",
    "CREATE TABLE breakwater.n (a Int8) ENGINE = Memory",
    "CREATE TEMPORARY TABLE n (a Int8)",
    "CREATE VIEW breakwater.w AS SELECT 1",
    "CREATE DATABASE n",
    "ALTER TABLE breakwater.t ADD COLUMN b Int8",
    "ALTER TABLE breakwater.t DELETE WHERE 1",
    "DELETE FROM breakwater.t WHERE 1",
    "DROP TABLE breakwater.t",
    "TRUNCATE TABLE breakwater.t",
    "RENAME TABLE breakwater.t TO breakwater.s",
    "OPTIMIZE TABLE breakwater.t",
    "KILL QUERY WHERE 1",
    "SYSTEM STOP MERGES",
    "SELECT * FROM other.t",
    "SELECT * FROM loop(breakwater.t) LIMIT 1",
    "SELECT * FROM mergeTreeIndex('other', 't')",
    # What others ask, and where the server's files are.
    "SELECT query FROM system.processes",
    "SELECT query FROM `system`.`processes`",
    'SELECT query FROM "system" . "processes"',
    "SELECT 1 WHERE 1 IN (SELECT count() FROM system.processes)",
    "SELECT * FROM view(SELECT query FROM system.processes)",
    "DESCRIBE TABLE system.processes",
    "EXPLAIN SELECT * FROM system.processes",
    "SELECT path FROM system.disks",
    "SELECT path FROM system.parts",
    "SELECT * FROM merge('system', '^processes$')",
    "SELECT * FROM merge(concat('sys', 'tem'), '^processes$')",
    "SELECT * FROM merge('sys' || 'tem', '^processes$')",
    "SELECT * FROM merge('sys\\x74em', '^processes$')",
    "SELECT * FROM merge(REGEXP('s.*'), '^processes$')",
    "SHOW PROCESSLIST",
]


@dataclass
class Target:
    """A running ClickHouse, a folder with a secret that its process may read, and a port that hears connections."""

    url: str
    folder: Path
    listening: socket.socket
    pid: int | None = None  # of the engine

    async def ask(self, user: str, sql: str, *, method: str = "POST", **params: str) -> tuple[int, str]:
        query = {"user": user, "password": PASSWORD, **params}
        data = sql.encode() if method == "POST" else None
        query |= {} if method == "POST" else {"query": sql}
        async with aiohttp.ClientSession() as http, http.request(method, self.url, params=query, data=data) as answer:
            return answer.status, (await answer.read()).decode(errors="replace")

    def filled_in(self, attack: str) -> str:
        port = self.listening.getsockname()[1]
        where = {"secret": self.folder / "secret", "folder": self.folder, "port": port}
        where["url"] = f"http://127.0.0.1:{port}/x"
        for name, value in where.items():
            attack = attack.replace(f"{{{name}}}", str(value))
        return attack

    def connections(self) -> int:
        count = 0
        with suppress(BlockingIOError):
            while True:
                self.listening.accept()[0].close()
                count += 1
        return count


@contextmanager
def real_server() -> Iterator[str]:
    image = servers.docker_servers().CLICKHOUSE_IMAGE
    container = DockerContainer(image, volumes=[(str(USERS_XML), "/etc/clickhouse-server/users.d/users.xml", "ro")])
    container.with_envs(
        CLICKHOUSE_USER=PLANE, CLICKHOUSE_PASSWORD=PASSWORD, READER_PASSWORD=PASSWORD, ALERTER_PASSWORD=PASSWORD
    )
    port = free_port()
    container.with_bind_ports(8123, port)
    with container:
        host = container.get_container_host_ip()
        probe = http_ready(host, port, "/ping", body_prefix=b"Ok")
        asyncio.run(until(probe, "ClickHouse's answer"))
        yield f"http://{host}:{port}/"


@contextmanager
def engine(data: Path) -> Iterator[Server]:
    started = start(data)
    try:
        yield started
    finally:
        stop(started)


NO_SERVER = servers.docker_problem()
TARGETS = ["engine", *([] if NO_SERVER else ["server"])]


def test_the_attacks_are_made_on_a_real_server_too() -> None:
    # One that says so, and not each attack by itself.
    if NO_SERVER is not None:
        assert TARGETS == ["engine"]
        pytest.skip(f"none of the attacks on ClickHouse is made on a real server: {NO_SERVER}")
    assert TARGETS == ["engine", "server"]
    with real_server() as url, socket.socket() as unused:
        target = Target(url, USERS_XML.parent, unused)
        assert asyncio.run(target.ask(READER, "SELECT currentUser()")) == (200, f"{READER}\n")
        assert asyncio.run(target.ask(PLANE, "SELECT currentUser()")) == (200, f"{PLANE}\n")


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "secret").write_text(SECRET + "\n")
    running = engine(folder / "data") if request.param == "engine" else real_server()
    with running as server, socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url, pid = (server.url, server.process.pid) if isinstance(server, Server) else (server, None)
        found = Target(url, folder, listening, pid)
        for sql in (
            "CREATE DATABASE IF NOT EXISTS breakwater",
            "CREATE TABLE breakwater.t (a Int64, s String) ENGINE = MergeTree ORDER BY a",
            "INSERT INTO breakwater.t VALUES (7, 'seven')",
            "CREATE TABLE breakwater.busy (a Int64) ENGINE = MergeTree ORDER BY a",
            # Who may read Breakwater's tables may not read others.
            "CREATE DATABASE IF NOT EXISTS other",
            "CREATE TABLE other.t (a Int64) ENGINE = MergeTree ORDER BY a",
        ):
            if "other" not in sql or request.param == "engine":
                assert asyncio.run(found.ask(PLANE, sql)) == (200, ""), sql
        yield found


async def attacked(target: Target, user: str, attack: str, method: str) -> None:
    status, text = await target.ask(user, target.filled_in(attack), method=method)
    assert SECRET not in text
    assert status >= 400, text
    assert target.connections() == 0
    assert sorted(path.name for path in target.folder.iterdir() if path.name != "data.password") in (
        ["data", "secret"],
        ["secret"],
    )


# A GET may do less than a POST, whoever sends it: the next test sends the attacks of anyone by both.
@each_row(
    ("attack", "method"),
    [*((attack, "POST") for attack in BY_ANYONE), *((attack, method) for attack in BY_READERS for method in METHODS)],
)
async def test_a_reader_reads_its_tables_and_nothing_else(target: Target, attack: str, method: str) -> None:
    await attacked(target, READER, attack, method)
    assert await target.ask(READER, "SELECT a, s FROM breakwater.t") == (200, "7\tseven\n")


@each_row("method", METHODS)
@each_row("attack", BY_ANYONE)
async def test_who_writes_reaches_no_file_and_no_other_machine_either(target: Target, attack: str, method: str) -> None:
    await attacked(target, PLANE, attack, method)


@pytest.mark.parametrize("user", [READER, PLANE])
@pytest.mark.parametrize(
    "params",
    [
        {"format_template_resultset": "{secret}", "default_format": "Template"},
        {"format_schema": "{secret}:x", "default_format": "Protobuf"},
        {"dialect": "kusto", "allow_experimental_kusto_dialect": "1"},
    ],
)
async def test_settings_in_the_url_widen_nothing(target: Target, user: str, params: dict[str, str]) -> None:
    filled = {name: target.filled_in(value) for name, value in params.items()}
    status, text = await target.ask(user, "SELECT 1", **filled)
    assert status >= 400
    assert SECRET not in text


@each_row(
    ("sql", "params"),
    [
        ("SELECT query FROM processes", {"database": "system"}),
        ("SELECT query FROM {db:Identifier}.processes", {"param_db": "system"}),
        ("SELECT query FROM {db:Identifier}.processes", {"param_db": "`system`"}),
        ("SELECT query FROM {of:Identifier}", {"param_of": "system.processes"}),
    ],
)
async def test_parameters_name_no_system_table_to_a_reader(target: Target, sql: str, params: dict[str, str]) -> None:
    status, text = await target.ask(READER, sql, **params)
    assert status >= 400, text


@pytest.mark.parametrize("profile", ["?profile=default", "SETTINGS profile = 'default'", "SET profile = 'default'"])
async def test_another_profile_lets_a_reader_write_nothing(target: Target, profile: str) -> None:
    session = {"session_id": "attack"}
    if profile.startswith("?"):
        session["profile"] = "default"
    elif profile.startswith("SET "):
        # A server refuses the profile, and the engine whatever a session would keep.
        status, _ = await target.ask(READER, profile, **session)
        assert status == 501 if target.pid else status >= 400
    suffix = f" {profile}" if profile.startswith("SETTINGS") else ""
    for sql in ("INSERT INTO breakwater.t SELECT 1, 'x'", "SELECT file('{secret}')", "SET ROLE ALL"):
        status, text = await target.ask(READER, target.filled_in(sql) + suffix * sql.startswith("SELECT"), **session)
        assert status >= 400, text
        assert SECRET not in text


HEAVY = [
    "SELECT * FROM numbers(900000000) ORDER BY cityHash64(number) DESC",
    "SELECT number, count() FROM numbers_mt(900000000) GROUP BY number FORMAT Null",
    "SELECT length(range(400000000)) SETTINGS function_range_max_elements_in_block = 1000000000",
    "SELECT length(groupArray(number)) FROM numbers(2000000000)",
    # What a subquery asks for is cut to what is allowed.
    "SELECT * FROM (SELECT length(groupArray(number)) FROM numbers(900000000) SETTINGS max_memory_usage = 0)",
    "SELECT sum(sipHash64(number)) FROM system.numbers SETTINGS max_execution_time = 0.3",
    "SELECT sleepEachRow(1) FROM numbers(60) SETTINGS function_sleep_max_microseconds_per_block = 0,"
    " max_execution_time = 1",
]
REASONS = ("MEMORY_LIMIT_EXCEEDED", "TOO_MANY_ROWS", "TIMEOUT_EXCEEDED", "TOO_MANY_ROWS_OR_BYTES")


@pytest.mark.timeout(180)
async def test_statements_of_a_reader_take_their_share_and_the_plane_goes_on(target: Target) -> None:
    heavy = asyncio.gather(*(target.ask(READER, sql) for sql in HEAVY))
    most, slowest = 0, 0.0
    while not heavy.done():
        began = time.monotonic()
        assert await target.ask(PLANE, "INSERT INTO breakwater.busy VALUES (1)") == (200, "")
        assert (await target.ask(PLANE, "SELECT min(a) FROM breakwater.busy")) == (200, "1\n")
        slowest = max(slowest, time.monotonic() - began)
        most = max(most, psutil.Process(target.pid).memory_info().rss if target.pid is not None else 0)
        await asyncio.sleep(0.05)
    for sql, (_, text) in zip(HEAVY, await heavy, strict=True):
        assert any(reason in text for reason in REASONS), (sql, text[-300:])
    assert most < 2.5e9
    assert slowest < 20


@pytest.fixture(scope="module")
def impatient_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An engine whose `reader` has the rights of a server's `alerter`, and two seconds to take an answer."""
    grants = tuple(query.text for query in ET.parse(USERS_XML).getroot().iterfind("users/alerter/grants/query"))
    program = (
        "from breakwater.local.clickhouse import __main__, access, http\n"
        f"access.READER_GRANTS = {grants!r}\n"
        "http._LONGEST_ANSWER_S = 2\n"
        "raise SystemExit(__main__.main())"
    )
    server = start(tmp_path_factory.mktemp("impatient") / "data", program)
    yield server
    stop(server)


async def test_readers_that_take_nothing_lose_their_turn(impatient_engine: Server) -> None:
    target = Target(impatient_engine.url, impatient_engine.data.parent, socket.socket())
    url = f"{impatient_engine.url}?user={READER}&query=SELECT+number+FROM+system.numbers"
    async with aiohttp.ClientSession(headers={"X-ClickHouse-User": READER, "X-ClickHouse-Key": PASSWORD}) as http:
        held = [await http.get(url) for _ in range(READER_SLOTS)]
        await asyncio.sleep(1)  # or its own time ends with theirs
        async with asyncio.timeout(30):
            assert await target.ask(READER, "SELECT 1") == (200, "1\n")
        for answer in held:
            answer.close()


@pytest.mark.parametrize("name", READER_LIMITS)
async def test_a_reader_lifts_no_limit(target: Target, name: str) -> None:
    # For threads, 0 is as many as there are cores: refused where that is too many.
    for value in (0, READER_LIMITS[name] + 1, 1 << 62)[name == "max_threads" :]:
        for sql, params in (
            ("SELECT 1", {name: str(value)}),
            (f"SELECT 1 SETTINGS {name} = {value}", {}),
            (f"SELECT 1 UNION ALL SELECT 2 SETTINGS {name} = {value}", {}),
            (f"SET {name} = {value}", {"session_id": "lifted"}),
        ):
            status, text = await target.ask(READER, sql, **params)
            assert status >= 400, (sql, params, text)
    for sql in (f"SET {name} = DEFAULT", f"SELECT 1 SETTINGS {name} = DEFAULT", "SET profile = 'default'"):
        await target.ask(READER, sql, session_id="lifted")
        held = f"toFloat64(extract(value, '[0-9.]+')) BETWEEN 0.001 AND {READER_LIMITS[name]}"
        held = f"SELECT {held} FROM system.settings WHERE name = '{name}'"
        assert await target.ask(READER, held, session_id="lifted") == (200, "1\n")
    assert (await target.ask(READER, "SELECT 1", profile="default"))[0] >= 400
    assert (await target.ask(PLANE, "SELECT 1", **{name: "0"})) == (200, "1\n")
    assert (await target.ask(READER, "SELECT 1", max_execution_time="0.5")) == (200, "1\n")


async def test_a_reader_sees_what_the_schema_lacks(target: Target) -> None:
    """As `breakwater doctor` does, which connects as one."""
    reader = connect(f"http://{READER}:{PASSWORD}@{target.url.partition('://')[2]}/breakwater")
    plane = connect(f"http://{PLANE}:{PASSWORD}@{target.url.partition('://')[2]}/breakwater")
    try:
        await migrate(plane)
        assert await missing(reader) == ()
        await plane.execute("ALTER TABLE attempts DROP INDEX by_charged_at")
        assert [one.description for one in await missing(reader)] == ["index attempts.by_charged_at"]
        tables = "SELECT name FROM system.tables WHERE database = 'breakwater' AND name NOT IN ('t', 'busy')"
        for (name,) in (await plane.query(tables)).rows:
            await plane.execute(f"DROP TABLE {name}")
    finally:
        await reader.close()
        await plane.close()


async def test_a_session_keeps_nothing_for_another_user(target: Target) -> None:
    taken, _ = await target.ask(PLANE, "USE breakwater", session_id="shared")
    assert taken == (501 if target.pid else 200)  # the engine has no sessions
    assert (await target.ask(READER, "SELECT a FROM t", session_id="shared"))[0] >= 400


async def test_tables_sent_along_open_no_file(target: Target) -> None:
    structure = target.filled_in("a String) AS SELECT * FROM file('{secret}', 'LineAsString', 'a String'")
    for user in (READER, PLANE):
        form = aiohttp.FormData({"query": "SELECT * FROM x"})
        form.add_field("x", b"", filename="x")
        query = {"user": user, "password": PASSWORD, "x_structure": structure}
        async with aiohttp.ClientSession() as http, http.post(target.url, params=query, data=form) as answer:
            assert answer.status >= 400
            assert SECRET not in await answer.text()


@each_row(
    ("sql", "rows"),
    [
        ("SELECT ‘it\\'s’, “a”, $x$'$x$ FROM breakwater.t AS “a”", None),
        ("SELECT 'INTO OUTFILE file(' FROM breakwater.t", "INTO OUTFILE file(\n"),
        ("SELECT ‘'’ FROM breakwater.t -- INTO OUTFILE 'x'", "\\'\n"),
        ("SELECT sum(number) FROM numbers(10) /* file('x') */", "45\n"),
        ("SELECT count() FROM merge('breakwater', '^t$')", "1\n"),
        ("WITH 2 AS x SELECT a * x FROM breakwater.t FORMAT CSV SETTINGS max_threads = 1", "14\n"),
        ("FROM breakwater.t SELECT s LIMIT 1 FORMAT JSONEachRow;", '{"s":"seven"}\n'),
        ("SHOW TABLES FROM breakwater", "busy\nt\n"),
        ("EXISTS TABLE breakwater.t", "1\n"),
        ("SELECT {a:Int64} + a FROM {t:Identifier} . t", None),
        ("SELECT name FROM system.tables WHERE database = 'other'", ""),
        ("SET max_threads = 2", ""),
    ],
)
async def test_what_is_no_attack_is_answered(target: Target, sql: str, rows: str | None) -> None:
    status, text = await target.ask(READER, sql, param_a="1", param_t="breakwater")
    assert rows is None or (status, text) == (200, rows), text


async def test_a_mistake_in_a_statement_is_named_as_it_was_sent(target: Target) -> None:
    status, text = await target.ask(READER, "SELECT FROM WHERE")
    assert status == 400
    assert "formatQuery" not in text
    assert "OUTFILE '/dev" not in text


@each_row(
    "canonical",
    [
        "SELECT 1\nINTO OUTFILE '/dev/fd/0'\nINTO OUTFILE '/x'",
        "SELECT 1\nINTO OUTFILE {f:String}",
        "SELECT 1",
        "INSERT INTO t FROM INFILE '/x'\nFORMAT CSV",
        "INSERT INTO t FROM INFILE '/dev/fd/0'\nSELECT * FROM u INTO OUTFILE '/x'",
        "INSERT INTO t\nFORMAT CSV",
    ],
)
def test_result_and_data_take_the_one_way_that_was_added(canonical: str) -> None:
    check("SELECT 1\nINTO OUTFILE '/dev/fd/0' APPEND\nFORMAT CSV", EngineRole.READER, frozenset(), "'/dev/fd/0'")
    check("INSERT INTO t FROM INFILE '/dev/fd/0'\nFORMAT CSV", EngineRole.PLANE, frozenset(), "'/dev/fd/0'")
    with pytest.raises(ClickHouseError, match="INTO OUTFILE is not allowed"):
        check(canonical, EngineRole.PLANE, frozenset(), "'/dev/fd/0'")


def test_a_real_server_is_given_the_same_rights() -> None:
    written = ET.parse(USERS_XML).getroot()
    for user, grants in ((READER, READER_GRANTS), ("analyst", ANALYST_GRANTS), (PLANE, PLANE_GRANTS)):
        found = [query.text for query in written.findall(f"users/{user}/grants/query")]
        assert tuple(found) == grants
    for profile in ("default", READER):
        fixed = written.findall(f"profiles/{profile}/constraints/*")
        assert [setting.tag for setting in fixed if setting.find("const") is not None] == list(FIXED_SETTINGS)
    assert written.findtext("profiles/reader/readonly") == "2"
    assert written.findtext("profiles/reader/max_execution_time") == str(MAX_EXECUTION_S)
    within = {one.tag: one.findtext("max") for one in written.findall("profiles/reader/constraints/*") if len(one) == 2}
    assert {name: within[name] for name in READER_LIMITS} == {name: str(most) for name, most in READER_LIMITS.items()}
    for name, most in READER_LIMITS.items():
        assert written.findtext(f"profiles/reader/{name}") == str(MAX_EXECUTION_S if "time" in name else most)
    assert written.findtext("profiles/default/max_memory_usage") == "0"


async def test_the_alerter_reads_what_anomalies_are_judged_by_and_no_text(impatient_engine: Server) -> None:
    assert ET.parse(USERS_XML).getroot().findtext("users/alerter/profile") == "reader"
    plane, alerter = (
        connect(f"http://{user}:{PASSWORD}@127.0.0.1:{impatient_engine.port}/breakwater") for user in (PLANE, READER)
    )
    await migrate(plane)
    fell_back = execution(agent="writer", chosen_model="mini", requested_model_cost=10)
    await plane.insert(EXECUTIONS, [execution_row(fell_back, 1)])
    await plane.insert(ATTEMPTS, [attempt_row(attempt(agent="writer", first_token_ms=200), 1)])
    now, rules = NOON + timedelta(minutes=5), AnomalyRules(minimum_calls=1, minimum_minutes=5)
    latest = await latest_minutes(alerter, rules, now)
    assert {measure for _, measure in latest} == FIGURES.keys()
    assert await baselines(alerter, rules, now) == {}
    for refused in ("SELECT messages FROM executions", "SELECT * FROM alerts", "TRUNCATE TABLE attempts"):
        with pytest.raises(QueryError, match="Not enough privileges"):
            await alerter.query(refused)
    await plane.close()
    await alerter.close()
