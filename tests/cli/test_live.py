"""The commands against a running plane: real servers, real services, a simulated provider."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
import pytest_asyncio
import yaml

from breakwater.config import load_config
from breakwater.config.servers import prepare
from breakwater.identity.api_keys import create_key
from breakwater.jobs.commands.submit import MAX_CLOCK_LAG
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.nats import subjects
from breakwater.kernel.process.settings import Settings
from breakwater.local.ports import free_port, http_ready
from tests.cli.conftest import VARIABLES, Ran, Run, in_thread
from tests.flow.kit import Plane, model, running_plane
from tests.forked_commands import start_command
from tests.helpers import ZONE, until
from tests.server_sources import RunningServer, Servers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long(about_s=30, together=True)]

ONE_TRY = {"retry": {"max_attempts": 1}, "breaker": {"consecutive_failures": 2, "cooldown_s": 600}}
AGENTS: dict[str, dict[str, Any]] = {
    "writer": {"model": "sim/good", "budget": {"daily_usd": 1, "enforcement": "hard"}},
    "spender": {"model": "sim/good"},
    "teller": {"model": "sim/good"},
    "failing": {"model": "sim/bad", **ONE_TRY},
    "breaking": {"model": "sim/bad", **ONE_TRY},
    "forced": {"model": "sim/good"},
    "looping": {"model": "sim/good", "guard": {"max_iterations": 1}},
}
NOTHING = "0.000000000"
MODELS = {"sim/good": model(), "sim/bad": model({"rate": 1.0, "status": 500})}
SERVICES = ("worker", "breaker", "budget", "sink", "request")
"""The alerter is missing, for the doctor to find."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running plane, and the variables by which the commands find it."""

    plane: Plane
    variables: dict[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(
    tmp_path_factory: pytest.TempPathFactory, servers: Servers, clickhouse_server: RunningServer
) -> AsyncGenerator[Started]:
    directory = tmp_path_factory.mktemp("plane")
    nats_server, redis_server = servers.nats(), servers.redis()
    port = free_port()
    keys, config = directory / "api_keys.json", directory / "breakwater.yaml"
    clickhouse = urlsplit(clickhouse_server.url)._replace(path=f"/cli_{uuid.uuid4().hex[:8]}").geturl()
    variables = {
        "BREAKWATER_CONFIG": str(config),
        "BREAKWATER_NATS_URL": nats_server.url,
        "BREAKWATER_REDIS_URL": redis_server.url,
        "BREAKWATER_CLICKHOUSE_URL": clickhouse,
        "BREAKWATER_HTTP_PORT": str(port),
        "BREAKWATER_API_KEYS_FILE": str(keys),
        "BREAKWATER_API_KEY": create_key(keys, "tests"),
        "BREAKWATER_URL": f"http://127.0.0.1:{port}",
    }
    async with running_plane(
        directory,
        nats_url=nats_server.url,
        redis_url=redis_server.url,
        script={"models": MODELS},
        agents=AGENTS,
        services=(),
        environment=variables,
        budgets={"timezone": ZONE.key},
    ) as plane:
        await prepare(Settings(nats_url=nats_server.url, clickhouse_url=clickhouse), load_config(config))
        for service in SERVICES:
            plane.start(service)

        for service in SERVICES[:-1]:
            await plane.ready(service)
        # It listens before it is connected to NATS, and refuses jobs until then.
        await until(http_ready("127.0.0.1", port, "/readyz"), "the HTTP API to accept jobs")
        yield Started(plane, variables)
    nats_server.stop()
    redis_server.stop()


@pytest.fixture
def plane(run: Run, started: Started, monkeypatch: pytest.MonkeyPatch) -> Plane:
    """A plane that the commands find by their variables."""
    for name, value in started.variables.items():
        monkeypatch.setenv(name, value)
    return started.plane


async def recorded(run: Run, *arguments: str, least: int = 1) -> Any:
    """What a command that reads ClickHouse prints as JSON, once there is enough of it."""

    async def look() -> Any:
        ran = await in_thread(run, *arguments, "--json")
        found = ran.json if ran.code == ExitCode.OK else []
        # One execution comes with its attempts, which are a table of their own, and stored before or after it.
        rows = found["attempts"] if isinstance(found, dict) else found
        return found if len(rows) >= least else None

    return await until(look, what=" ".join(arguments))


async def test_jobs_are_submitted_and_found_again(run: Run, plane: Plane) -> None:
    ran = await in_thread(run, "submit", "writer", "hello", "--job-id", "order/1")
    assert ran.code == ExitCode.OK, ran.err
    assert "hello" in ran.out
    for part in ("sim/good", "1 attempt", "$0.000042", "order/1"):
        assert part in ran.err
    assert "answered from its record" not in ran.err
    await asyncio.sleep(MAX_CLOCK_LAG.total_seconds() + 0.1)
    again = await in_thread(run, "submit", "writer", "other", "--job-id", "order/1", "--via", "nats", "--json")
    assert "answered from the record: order/1" in again.err
    assert again.json["output"] == ran.out.rstrip("\n")
    assert [attempt["attempt_id"] for attempt in await plane.attempts("writer", "order/1")] == ["order/1:1"]

    over_nats = await in_thread(run, "submit", "writer", "straight", "--via", "nats")
    assert over_nats.code == ExitCode.OK, over_nats.err
    assert "straight" in over_nats.out

    planned = await in_thread(run, "submit", "writer", "x", "--dry-run")
    assert planned.out.splitlines()[1].split()[:3] == ["sim/good", "sim", "3"]
    assert planned.out.splitlines()[1].endswith("admitted")
    assert "dry run · worst case $" in planned.err

    failed = await in_thread(run, "submit", "failing", "x", "--job-id", "f1")
    assert failed.code == ExitCode.JOB_FAILED
    assert failed.out == ""
    assert "dead-lettered: error" in failed.err
    assert "1. sim/bad: server 500" in failed.err

    async def stored() -> Any:
        rows = (await in_thread(run, "executions", "--json")).json
        there = {"order/1", "f1"} <= {row["execution_id"] for row in rows}
        return rows if there and any(row["dry_run"] and row["agent"] == "writer" for row in rows) else None

    listed = await until(stored, what="the sink to store them all")
    assert [line["dry_run"] for line in listed if line["agent"] == "writer"].count(True) == 1
    shown = (await in_thread(run, "executions", "--agent", "writer")).out.splitlines()
    assert [line.endswith("dry run") for line in shown].count(True) == 1
    assert {line["status"] for line in listed} == {"succeeded", "dead_lettered"}
    [dead] = await recorded(run, "executions", "--status", "dead_lettered", "--since", "1h", "--agent", "failing")
    assert dead["execution_id"] == "f1"
    await recorded(run, "executions", "order/1")
    shown = await in_thread(run, "executions", "order/1")
    for part in ("agent           writer", "cost            $0.000042", "sim/good", "first", "success"):
        assert part in shown.out
    assert (await recorded(run, "executions", "f1"))["attempts"][0]["error"]["status_code"] == 500
    missing = await in_thread(run, "executions", "nope")
    assert missing.code == ExitCode.FAILED
    assert "there is no execution 'nope'" in missing.err


async def test_an_unknown_agent_is_refused_on_both_ways(run: Run, plane: Plane) -> None:
    for way in ("http", "nats"):
        ran = await in_thread(run, "submit", "writr", "x", "--via", way, "--json")
        assert ran.code == ExitCode.FAILED
        assert ran.error["code"] == "unknown_agent"
    wrong = await in_thread(run, "submit", "writer", "x", "--via", "nats", "--total-timeout", "-1")
    assert wrong.code == ExitCode.USAGE
    assert "total_timeout_s" in wrong.err
    assert (await in_thread(run, "submit", "writer", "x", "--api-key", "bw_no_no")).code == ExitCode.FAILED


async def test_agents_shows_health_runs_and_spend_as_they_are_now(run: Run, plane: Plane) -> None:
    await in_thread(run, "submit", "spender", "x")
    for _ in range(2):
        await in_thread(run, "submit", "breaking", "x")

    async def opened() -> Any:
        listed = (await in_thread(run, "agents", "--since", "24h", "--json")).json
        agents = {agent["agent_id"]: agent for agent in listed}
        breaking, spender = agents["breaking"], agents["spender"]
        # Attempts and executions are tables of their own, and stored one after the other.
        counts = [
            (one["figures"] or {}).get(name) for one in (breaking, spender) for name in ("executions", "attempts")
        ]
        settled = counts[0] == 2 and all(counts) and spender["spent_today"] != NOTHING
        # The breaker opens as the call ends; health is noted from the log.
        noted = breaking["health"] == "unhealthy" and breaking["models"][0]["consecutive_failures"] == 2
        return agents if noted and settled else None

    agents = await until(opened, what="the breaker to open, the spend to be settled, the rows to be there")
    planned = await in_thread(run, "submit", "breaking", "x", "--dry-run")
    assert "refused" in planned.out
    assert "the breaker of agent breaking for sim/bad is open" in planned.out
    [model] = agents["spender"]["models"]
    assert (model["model"], model["health"], model["breaker"]) == ("sim/good", "healthy", "closed")
    assert agents["spender"]["spent_today"] == agents["spender"]["figures"]["spend"] == "0.000042000"
    [model] = agents["breaking"]["models"]
    assert (model["breaker"], model["consecutive_failures"]) == ("open", 2)
    assert model["last_failure_at"] < model["circuit_open_until"]
    assert agents["breaking"]["figures"]["success_rate"] == 0
    lines = (await in_thread(run, "agents", "--since", "24h")).out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("breaking")] == ["unhealthy", "2"]


async def test_a_breaker_is_forced_open_and_reset_by_an_operator(run: Run, plane: Plane) -> None:
    breaker = ("forced", "sim/good")
    assert (await in_thread(run, "submit", "forced", "x")).code == ExitCode.OK
    forced = await in_thread(run, "breakers", "isolate", *breaker, "--reason", "garbled")
    assert forced.code == ExitCode.OK, forced.err
    assert "is now isolated: isolated by tests: garbled" in forced.out
    again = await in_thread(run, "breakers", "isolate", *breaker)
    assert "is already isolated" in again.out, again.err
    assert (await in_thread(run, "submit", "forced", "x")).code == ExitCode.JOB_FAILED
    listed = (await in_thread(run, "breakers")).out.splitlines()
    assert ["forced", "sim/good", "isolated"] in [line.split()[:3] for line in listed]
    reported = (await in_thread(run, "breakers", "--json")).json
    assert reported["alive"]
    reset = await in_thread(run, "breakers", "reset", *breaker)
    assert "was isolated, is now closed: reset by tests" in reset.out, reset.err
    assert (await in_thread(run, "submit", "forced", "x")).code == ExitCode.OK
    unknown = await in_thread(run, "breakers", "reset", "nobody", "sim/good", "--json")
    assert (unknown.code, unknown.error["code"]) == (ExitCode.FAILED, "unknown_breaker")
    assert "breakwater breakers" in unknown.error["remedy"]


async def test_a_task_that_its_guard_stopped_goes_on_once_it_is_reset(run: Run, plane: Plane) -> None:
    job = ("submit", "looping", "x", "--task-id", "loop/1", "--tenant", "acme")
    assert (await in_thread(run, *job)).code == ExitCode.OK
    assert (await in_thread(run, *job)).code == ExitCode.JOB_FAILED
    [task] = (await in_thread(run, "guards", "--json")).json["stopped"]
    assert (task["task_id"], task["tenant"], task["rule"]) == ("loop/1", "acme", "max_iterations")
    unnamed = await in_thread(run, "guards", "reset", "loop/1")
    assert unnamed.code == ExitCode.FAILED
    assert "--tenant" in unnamed.err
    reset = await in_thread(run, "guards", "reset", "loop/1", "--tenant", "acme", "--reason", "mended")
    assert reset.out == "loop/1 of acme may continue: reset by tests: mended\n", reset.err
    assert (await in_thread(run, *job)).code == ExitCode.OK
    assert (await in_thread(run, "guards")).err == "no task is stopped\n"


BY_API = [
    *("agents", "agents --since 1d", "jobs", "executions", "executions --runs", "costs", "plans", "breakers", "guards"),
    *(
        "budgets",
        "alerts",
        "dlq list",
        "tail --since 1h --no-follow",
        "submit writer hello",
        "cancel nothing-of-this-id",
    ),
]
ON_THE_MACHINE = ["console", "simulate fault sim/good --status 500"]


async def test_every_command_of_the_api_works_with_url_and_key_alone_in_an_empty_directory(
    run: Run, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        if name not in ("URL", "API_KEY"):
            monkeypatch.delenv(f"BREAKWATER_{name}", raising=False)
    for command in BY_API:
        ran = await in_thread(run, *command.split())
        refused = "cancel" in command and "nothing-of-this-id" in ran.err
        assert ran.code == ExitCode.OK or refused, (command, ran.err)
    for command in ON_THE_MACHINE:
        ran = await in_thread(run, *command.split())
        assert ran.code == ExitCode.UNREACHABLE, command
        assert "BREAKWATER_URL does not lead to what this command needs" in ran.err, command
    over_nats = await in_thread(run, "submit", "writer", "hello", "--via", "nats")
    assert "BREAKWATER_NATS_URL is not set" in over_nats.err


async def test_query_prints_rows_in_three_forms_and_clickhouses_own_errors(run: Run, plane: Plane) -> None:
    statement = "SELECT number AS n, toDecimal64(number, 2) AS usd, NULL AS nothing FROM numbers(2);"
    assert (await in_thread(run, "query", statement)).out == "n   usd  nothing\n0  0.00\n1  1.00\n"
    as_csv = await in_thread(run, "query", statement, "--format", "csv")
    assert as_csv.out == "n,usd,nothing\n0,0.00,\n1,1.00,\n"
    assert (await in_thread(run, "query", statement, "--json")).json[1] == {"n": 1, "usd": "1.00", "nothing": None}
    wrong = await in_thread(run, "query", "SELECT nope", "--json")
    assert wrong.code == ExitCode.FAILED
    assert "code 47" in wrong.error["message"]
    statement = in_file("-- a note\nCREATE TABLE t (a Int8) ENGINE = Memory")
    made = await in_thread(run, "query", "--write", "--file", statement)
    assert (made.code, made.out, made.err) == (ExitCode.OK, "", "done\n")


async def test_query_is_bounded_and_only_reads(run: Run, plane: Plane) -> None:
    many = "SELECT number FROM numbers(10000000)"
    table = await in_thread(run, "query", many)
    assert table.out.splitlines()[-1].strip() == "999"
    assert table.err == "only the first 1,000 rows are shown; --limit N or --format csv for more\n"
    exact = await in_thread(run, "query", "SELECT number FROM numbers(1000)")
    assert (len(exact.out.splitlines()), exact.err) == (1001, "")
    inner = await in_thread(run, "query", "SELECT count() FROM (SELECT number FROM numbers(1000000))", "--json")
    assert inner.json == [{"count()": 1000000}]
    assert len((await in_thread(run, "query", many, "--json", "--limit", "1500")).json) == 1500
    assert (await in_thread(run, "query", "SELECT 1 WHERE 0", "--json")).json == []

    slow = "SELECT sum(sleepEachRow(0.1)) FROM numbers(100) SETTINGS max_block_size = 1"
    stopped = await in_thread(run, "query", slow, "--timeout", "0.5", "--json")
    assert (stopped.code, stopped.error["code"]) == (ExitCode.FAILED, "query_timeout")
    # The server refuses as well, whatever a statement looks like.
    refused = await in_thread(run, "query", "SELECT 1 SETTINGS readonly = 0")
    assert "code 164" in refused.err


async def test_a_reader_of_endless_rows_that_goes_away_ends_query(run: Run, plane: Plane) -> None:
    reader = Reader("query", "SELECT number FROM numbers(10000000000)", "--format", "csv", "--timeout", "600")
    assert await asyncio.to_thread(reader.hang_up_after_a_line) == ExitCode.FAILED
    assert reader.errors() == ""


def in_file(statement: str) -> str:
    Path("q.sql").write_text(statement)
    return "q.sql"


async def test_tail_shows_the_past_and_then_what_happens(run: Run, plane: Plane) -> None:
    await in_thread(run, "submit", "teller", "x", "--job-id", "past")
    # The record comes after the answer.
    await plane.messages("EVENTS", subjects.execution("teller", "past"), at_least=1)
    past = await in_thread(run, "tail", "--since", "1h", "--no-follow", "--json", "--agent", "teller")
    assert [json.loads(line)["id"] for line in past.out.splitlines()] == ["past:1", "past"]
    nobody = await in_thread(run, "tail", "--since", "1h", "--no-follow", "--agent", "nobody")
    assert "agent 'nobody' is not configured; " in nobody.err

    tail = Reader("tail", "--since", "1h", "--events", "attempts,executions", "--json", "--agent", "teller")
    try:
        assert [event["id"] for event in await asyncio.to_thread(tail.read, 2)] == ["past:1", "past"]
        await in_thread(run, "submit", "writer", "x", "--job-id", "not-shown")
        await in_thread(run, "submit", "teller", "x", "--job-id", "now")
        events = await asyncio.to_thread(tail.read, 2)
        assert [event["id"] for event in events] == ["now:1", "now"]
        assert events[0]["data"]["cost"] == "0.000042000"
    finally:
        assert tail.interrupt() == ExitCode.INTERRUPTED
    assert tail.errors() == ""


class Reader:
    """A command as a process, whose lines are read as they come."""

    def __init__(self, *arguments: str) -> None:
        read_end, write_end = os.pipe()
        # Small pipes: one that holds all of the output never breaks.
        fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, 4096)
        self._stdout = os.fdopen(read_end, "rb")
        self._stderr = Path(f"{arguments[0]}-{read_end}.err")
        with self._stderr.open("wb") as stderr:
            self._process = start_command(
                *arguments, directory=Path.cwd(), environment=os.environ, stdout=write_end, stderr=stderr.fileno()
            )
        os.close(write_end)

    def read(self, count: int) -> list[Any]:
        return [json.loads(self._stdout.readline()) for _ in range(count)]

    def hang_up_after_a_line(self) -> int | None:
        self._stdout.readline()
        self._stdout.close()
        return self._process.wait(60)

    def interrupt(self) -> int | None:
        os.kill(self._process.pid, signal.SIGINT)
        return self._process.wait(60)

    def errors(self) -> str:
        return self._stderr.read_text()


async def test_history_of_more_than_a_batch_is_read_whole_and_in_order(run: Run, plane: Plane) -> None:
    client = await nats.connect(plane.environment["BREAKWATER_NATS_URL"])
    jetstream = client.jetstream(timeout=30)
    events = [{"agent": "crowd", "at": "2026-11-21T10:00:00.000Z", "n": number} for number in range(1001)]
    # Of one connection, they are stored in the order in which they were sent.
    await asyncio.gather(
        *(jetstream.publish(f"bw.guards.{event['n'] % 7}", json.dumps(event).encode()) for event in events)
    )
    await client.close()
    ran = await in_thread(run, "tail", "--since", "1h", "--no-follow", "--events", "guards", "--json")
    reported = [json.loads(line)["data"] for line in ran.out.splitlines()]
    assert [one["n"] for one in reported if one["agent"] == "crowd"] == list(range(1001))


async def test_a_reader_that_goes_away_ends_tail_quietly(run: Run, plane: Plane) -> None:
    client = await nats.connect(plane.environment["BREAKWATER_NATS_URL"])
    for number in range(200):
        await client.jetstream(timeout=30).publish(
            "bw.guards.many", json.dumps({"agent": "many", "n": number}).encode()
        )
    await client.close()
    tail = Reader("tail", "--since", "1h", "--no-follow", "--events", "guards", "--agent", "many")
    assert await asyncio.to_thread(tail.hang_up_after_a_line) == ExitCode.FAILED
    [noted] = tail.errors().splitlines()
    assert noted.startswith("agent 'many' is not configured; ")


UNREAD = ["alerter", "alerter-executions", "alerter-dead-letters", "alerter-replays"]


async def test_doctor_finds_a_healthy_plane_healthy(run: Run, plane: Plane) -> None:
    called = plane.sim.ledger.totals.calls

    async def healthy() -> Any:
        ran = await in_thread(run, "doctor", "--json")
        # Other tests have made calls fail on purpose.
        wrong = [one["text"].split(":")[0] for one in not_ok(ran) if one["area"] != "calls"]
        return ran if wrong == UNREAD else None

    ran = await until(healthy, what="all findings to be ok, but that nobody alerts")
    texts = "\n".join(one["text"] for one in ran.json["findings"])
    for part in (
        f"{len(AGENTS)} agents",
        f"{len(subjects.Stream)} streams and {len(AGENTS) + 10} consumers are as the config requires",
        "worker-writer: 0 waiting",
        "appendonly yes",
        "noeviction",
        "a breaker service is running",
        "the counters are complete",
        "the schema is at version",
        "may submit, read, operate",
        "no call was made",
        "its clock agrees with this machine's",
    ):
        assert part in texts
    assert plane.sim.ledger.totals.calls == called


def not_ok(ran: Ran) -> list[dict[str, str]]:
    return [one for one in ran.json["findings"] if one["verdict"] != "ok"]


def with_another_agent(plane: Plane, name: str) -> str:
    """A copy of the config with one more agent, which nobody has set up."""
    document = yaml.safe_load((plane.directory / "breakwater.yaml").read_text())
    document["agents"][name] = {"model": "sim/good"}
    Path("other.yaml").write_text(yaml.safe_dump(document))
    return "other.yaml"


async def test_doctor_says_what_is_wrong_and_what_to_do(
    run: Run, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKWATER_API_KEY", "bw_no_no")
    monkeypatch.setenv("BREAKWATER_REDIS_URL", "redis://127.0.0.1:9/0")
    ran = await in_thread(run, "doctor", "--config", with_another_agent(plane, "missing"))
    assert ran.code == ExitCode.FAILED
    for part in (
        "stream JOBS differs from the config: subjects",
        "consumer worker-missing is missing",
        "breakwater setup",
        "the API key is not accepted",
        "0 in progress, and no service reads them",
        "Is the service `alerter` running?",
    ):
        assert part in ran.out
    assert any(line.startswith("fail  redis") for line in ran.out.splitlines())


async def test_a_table_that_is_gone_is_found_and_made_again(run: Run, plane: Plane) -> None:
    await in_thread(run, "query", "DROP TABLE alerts", "--write")
    await in_thread(run, "query", "DROP TABLE attempts", "--write")
    await in_thread(run, "submit", "writer", "x", "--job-id", "held")

    async def failing() -> Any:
        ran = await in_thread(run, "doctor", "--json")
        texts = [one["text"] for one in ran.json["findings"] if one["verdict"] == "fail"]
        return ran if any(text.startswith("sink-events") for text in texts) else None

    ran = await until(failing, what="the doctor to see that the sink stores nothing")
    assert ran.code == ExitCode.FAILED
    texts = [one["text"] for one in ran.json["findings"] if one["verdict"] == "fail"]
    assert "table alerts is missing" in texts
    assert "table attempts is missing" in texts

    done = (await in_thread(run, "setup", "--json")).json["done"]
    assert done == [f"created table {name} in ClickHouse: it was missing" for name in ("attempts", "alerts")]

    async def stored() -> Any:
        ran = await in_thread(run, "executions", "held", "--json")
        return ran.code == ExitCode.OK and ran.json["attempts"]

    await until(stored, what="the sink to store what it held")


async def test_setup_does_what_is_missing_and_nothing_twice(run: Run, plane: Plane) -> None:
    assert (await in_thread(run, "setup")).out == "everything is up to date; nothing was changed\n"
    other = with_another_agent(plane, "new")
    ran = await in_thread(run, "setup", "--config", other, "--json")
    assert ran.json["done"] == ["updated stream JOBS (subjects)", "created consumer worker-new"]
    assert (await in_thread(run, "setup", "--config", other, "--json")).json["done"] == []
    await in_thread(run, "setup")  # The plane's own config again, for the tests after it.
