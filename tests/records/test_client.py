"""What goes wrong is reported by its kind: the rows, the statement, or the server."""

import asyncio
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from pydantic import SecretStr

from breakwater.kernel.clickhouse.client import Analytics, connect, insert_body
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError, RowsRejectedError
from breakwater.local.ports import free_port
from breakwater.records import schema
from breakwater.records.migrations import migrate
from tests.chaos.faults import Kind
from tests.chaos.network import Link
from tests.records import samples
from tests.server_sources import PASSWORD, RunningServer
from tests.tables import each_row


async def test_a_value_that_does_not_fit_its_column_is_about_the_rows(analytics: Analytics) -> None:
    good = samples.attempt_row(samples.attempt("good"), 1)
    bad = samples.attempt_row(samples.attempt("bad", number=2**40), 2)
    with pytest.raises(RowsRejectedError, match=r"attempts\.number"):
        await analytics.insert(schema.ATTEMPTS, [good, bad])
    assert (await analytics.query("SELECT count() FROM attempts")).rows == ((0,),)


async def test_what_the_server_has_against_a_row_is_about_the_rows_and_what_the_schema_lacks_is_not(
    analytics: Analytics,
) -> None:
    good = samples.attempt_row(samples.attempt("good"), 1)
    # Altered while it is empty: ClickHouse may take a minute to alter parts.
    await analytics.execute("ALTER TABLE attempts DROP COLUMN backoff_ms")
    with pytest.raises(AnalyticsUnavailableError, match="backoff_ms"):
        await analytics.insert(schema.ATTEMPTS, [good])
    await migrate(analytics)
    await analytics.execute("ALTER TABLE attempts MODIFY COLUMN provider Enum8('openai' = 1)")
    await analytics.insert(schema.ATTEMPTS, [good])
    with pytest.raises(RowsRejectedError, match="Unknown element 'unheard-of'"):
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt(provider="unheard-of"), 2)])
    await analytics.execute("DROP TABLE attempts")
    with pytest.raises(AnalyticsUnavailableError, match="attempts"):
        await analytics.insert(schema.ATTEMPTS, [good])


async def test_a_wrong_password_is_not_about_the_rows_and_is_not_repeated(clickhouse_server: RunningServer) -> None:
    analytics = connect(clickhouse_server.url.replace(PASSWORD, "wrong-secret"))
    with pytest.raises(AnalyticsUnavailableError) as failure:
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt(), 1)])
    assert "wrong-secret" not in str(failure.value)
    with pytest.raises(QueryError) as refusal:
        await analytics.ping()
    assert refusal.value.code == 516


async def test_a_server_that_is_not_there_is_unavailable_for_everything() -> None:
    analytics = connect(f"http://127.0.0.1:{free_port()}/breakwater")
    with pytest.raises(AnalyticsUnavailableError):
        await analytics.ping()
    with pytest.raises(AnalyticsUnavailableError):
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt(), 1)])
    await analytics.close()


async def test_a_server_that_hangs_is_tried_once_for_all_who_wait() -> None:
    tried = 0

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tried
        tried += 1
        await asyncio.sleep(600)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    analytics = connect(f"http://127.0.0.1:{port}/x", answer_timeout_s=0.5)
    try:
        answers = await asyncio.gather(*(analytics.query("SELECT 1") for _ in range(5)), return_exceptions=True)
        assert all(isinstance(answer, AnalyticsUnavailableError) for answer in answers), answers
        assert tried == 1
        # The next one tries again, as the server may be back.
        with pytest.raises(AnalyticsUnavailableError):
            await analytics.query("SELECT 1")
        assert tried == 2
    finally:
        await analytics.close()
        server.close()


async def test_a_gateway_that_answers_for_a_dead_server_is_unavailable() -> None:
    async def bad_gateway(_: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>Bad Gateway</html>")

    application = web.Application()
    application.router.add_route("*", "/{tail:.*}", bad_gateway)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    analytics = connect(f"http://127.0.0.1:{port}/breakwater")
    with pytest.raises(AnalyticsUnavailableError):
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt(), 1)])
    await runner.cleanup()


async def test_one_client_works_on_after_the_server_was_killed(
    analytics: Analytics, clickhouse_server: RunningServer
) -> None:
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt("before"), 1)])
    clickhouse_server.kill()
    with pytest.raises(AnalyticsUnavailableError):
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt("during"), 2)])
    await clickhouse_server.restart_async()
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt("after"), 3)])
    found = await analytics.query("SELECT execution_id FROM attempts FINAL ORDER BY execution_id")
    assert found.rows == (("after",), ("before",))


@asynccontextmanager
async def two_addresses(analytics: Analytics, url: str) -> AsyncGenerator[tuple[Analytics, Link]]:
    """A client of two addresses, the first through a link. Both lead to one server, as to replicas with equal rows."""
    direct = urlsplit(url)
    link = Link(direct.hostname or "", direct.port or 0)
    addresses = f"127.0.0.1:{await link.listen()},{direct.hostname}:{direct.port}"
    user = direct.netloc.rpartition("@")[0]
    several = connect(f"http://{user}@{addresses}/{analytics.database}", answer_timeout_s=0.5)
    try:
        yield several, link
    finally:
        await several.close()
        await link.close()


@pytest.mark.parametrize("kind", ["reset", "silent"])
async def test_rows_that_one_server_does_not_take_go_to_the_next(
    analytics: Analytics, clickhouse_server: RunningServer, kind: Kind
) -> None:
    async with two_addresses(analytics, clickhouse_server.url) as (several, link):
        await several.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt("before"), 1)])
        link.become(kind)
        await several.insert(schema.ATTEMPTS, [samples.attempt_row(samples.attempt("during"), 2)])
        found = await several.query("SELECT execution_id FROM attempts FINAL ORDER BY execution_id")
        assert found.rows == (("before",), ("during",))


async def test_what_is_counted_is_read_from_the_server_that_has_caught_up(
    analytics: Analytics, clickhouse_server: RunningServer
) -> None:
    async with two_addresses(analytics, clickhouse_server.url) as (several, link):
        caught_up = await several.caught_up(schema.ATTEMPTS)
        assert (await caught_up.query("SELECT 1")).rows == ((1,),)
        link.become("reset")
        assert (await several.query("SELECT 1")).rows == ((1,),)  # by the other one, which may lack rows
        with pytest.raises(AnalyticsUnavailableError):
            await caught_up.query("SELECT 1")


async def test_a_wrong_statement_is_reported_with_its_code_and_without_the_grammar(analytics: Analytics) -> None:
    with pytest.raises(QueryError) as refusal:
        await analytics.query("SELEC 1")
    assert refusal.value.code == 62
    assert "Expected one of" not in refusal.value.message
    assert "http" not in refusal.value.message
    with pytest.raises(QueryError, match="UNKNOWN_IDENTIFIER"):
        await analytics.query("SELECT nope FROM attempts")


async def test_parameters_are_values_and_never_sql(analytics: Analytics) -> None:
    found = await analytics.query("SELECT {text:String} AS text", {"text": "it's '); DROP TABLE attempts; --\\\n\t"})
    assert found.columns == ("text",)
    assert found.rows == (("it's '); DROP TABLE attempts; --\\\n\t",),)


def test_the_driver_does_not_load_data_frames_for_rows() -> None:
    # The row is made here: to import what makes one takes longer than all the rest.
    program = """
import pickle, sys
from breakwater.kernel.clickhouse import client
from breakwater.records import schema
client.insert_body(schema.ATTEMPTS, [pickle.loads(sys.stdin.buffer.read())])
print({"numpy", "pandas", "pyarrow"} & sys.modules.keys())
"""
    row = pickle.dumps(samples.attempt_row(samples.full_attempt(), 1))
    ended = subprocess.run([sys.executable, "-c", program], input=row, capture_output=True, check=False)
    assert (ended.stdout, ended.stderr) == (b"set()\n", b"")


def test_rows_are_freed_with_their_insert() -> None:
    class Row(list[object]):
        """Can be referred to weakly."""

    row = Row(samples.attempt_row(samples.full_attempt(), 1))
    seen = weakref.ref(row)
    gc.disable()
    try:
        insert_body(schema.ATTEMPTS, [row])
        del row
        assert seen() is None
    finally:
        gc.enable()


async def test_an_insert_of_no_rows_asks_nobody() -> None:
    await connect(f"http://127.0.0.1:{free_port()}/breakwater").insert(schema.ATTEMPTS, [])


@each_row(
    "url",
    [
        "clickhouse://u:sesame@host/db",
        "http://",
        "http://u:sesame@host:port/db",
        "http://u:sesame@host/db?x=1",
        "http://u:sesame@a,/db",
        "",
    ],
)
def test_a_wrong_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="must look like") as refusal:
        connect(SecretStr(url))
    assert "sesame" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "database"), [("http://h:1/mine", "mine"), ("http://h:1/", "breakwater"), ("https://h/a%20b", "a b")]
)
def test_the_database_is_that_of_the_url(url: str, database: str) -> None:
    assert connect(url).database == database
