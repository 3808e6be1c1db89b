"""A plane with the jobs of three users in every store, one of whom is erased."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from breakwater.kernel.redis.connection import Redis
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import NotFilledError
from breakwater.records.reconciliation import RecordedSpend
from tests.erasure.test_erase import flush_each_second
from tests.flow.kit import model
from tests.flow.test_encryption import directory_of, files_of
from tests.flow.test_money import Money
from tests.flow.test_plane import Whole, start_whole
from tests.helpers import ZONE, until
from tests.servers import RunningServer

__all__ = ["start_whole"]

USERS = ("anna.kovacs", "ben.okafor", "cleo.marin")
LARGE = "z" * 4_200_000


def mark(user: str, kind: str) -> str:
    return f"Codeword {user[::-1]} {kind} says the harbour master"


def agents_and_models() -> tuple[dict[str, Any], dict[str, Any]]:
    models: dict[str, Any] = {}
    for number, user in enumerate(USERS):
        quoting = {"status": 400, "error": {"message": f"not with {mark(user, 'quoted')!r}", "type": "invalid"}}
        models[f"sim/{number}"] = model(answer=f"{mark(user, 'answer')}. Then it sails.")
        models[f"sim/bad-{number}"] = model(quoting)
    good, bad = [f"sim/{number}" for number in range(3)], [f"sim/bad-{number}" for number in range(3)]
    agents = {
        "good": {"model": "sim/0", "allowed_models": good, "cache": {"ttl_s": 900}, "breaker": "off"},
        "bad": {"model": "sim/bad-0", "allowed_models": bad, "breaker": "off", "guard": "off"},
    }
    return agents, models


async def run_all(whole: Whole, user: str) -> int:
    """Runs the jobs of a user; returns the number of calls that they made."""
    of_user = {"metadata": {"user": user, "note": mark(user, "note")}}
    number = USERS.index(user)
    good = {"agent": "good", "model": f"sim/{number}", **of_user}
    for job_id, fields in {
        f"plain-{number}": {"prompt": mark(user, "prompt")},
        f"again-{number}": {"prompt": mark(user, "prompt")},
        f"kept-{number}": {"prompt": mark(user, "kept"), "stream": True, "keep_chunks": True},
        f"params-{number}": {"prompt": mark(user, "parameter"), "params": {"stop": [mark(user, "stop")]}},
    }.items():
        status, answer = await whole.submit({**good, "job_id": job_id, **fields}, wait_s=60)
        assert (status, answer["status"]) == (200, "succeeded"), answer
    bad = {"agent": "bad", "model": f"sim/bad-{number}", **of_user}
    for job_id, prompt in {f"bad-{number}": mark(user, "bad"), f"large-{number}": mark(user, "large") + LARGE}.items():
        status, answer = await whole.submit({**bad, "job_id": job_id, "prompt": prompt}, wait_s=60)
        assert (status, answer["status"]) == (200, "dead_lettered"), answer
    response = {
        "model": f"good/sim/{number}",
        "input": mark(user, "response"),
        "store": True,
        "safety_identifier": user,
    }
    async with whole.http.post(f"{whole.url}/v1/responses", json=response) as answered:
        assert answered.status == 200, await answered.text()
    # One that waits for another, and is cancelled: its message stays where it waits.
    waiting = {**good, "job_id": f"parked-{number}", "prompt": mark(user, "parked"), "depends_on": ["never"]}
    status, answer = await whole.submit(waiting)
    assert status == 202, answer
    return 6


async def ended(whole: Whole, execution_ids: list[str]) -> None:
    async def stored() -> bool:
        sql = "SELECT count() FROM executions FINAL WHERE execution_id IN {ids:Array(String)}"
        return (await whole.analytics.query(sql, {"ids": execution_ids})).rows[0][0] == len(execution_ids)

    await until(stored, f"the records of {execution_ids}")


def command(whole: Whole, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **whole.plane.environment}
    program = [sys.executable, "-m", "breakwater.cli", "erase", *arguments]
    return subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def erase(whole: Whole, *arguments: str) -> tuple[int, Any, str]:
    process = command(whole, *arguments, "--json")
    out, err = await asyncio.to_thread(process.communicate)
    return process.returncode, json.loads(out) if out.strip() else None, err


def bytes_of(file: Path) -> bytes:
    """What a file has; nothing if it is none, or its server has just removed it."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return b""


def nats_files(nats_server: RunningServer) -> bytes:
    return b"".join(map(bytes_of, directory_of(nats_server).rglob("*")))


async def bytes_at_rest(whole: Whole, nats_server: RunningServer, redis: Redis) -> dict[str, bytes]:
    tables = await whole.analytics.query(
        "SELECT name FROM system.tables WHERE database = {database:String} AND engine LIKE '%MergeTree'",
        {"database": whole.analytics.database},
    )
    rows = [await whole.analytics.query(f"SELECT * FROM {name}") for (name,) in tables.rows]
    folder = Path((await redis.client.config_get("dir"))["dir"])  # pyright: ignore
    return {
        "NATS": nats_files(nats_server),
        "Redis": files_of(folder),
        "ClickHouse": "".join(str(table.rows) for table in rows).encode(),
    }


async def spent(whole: Whole) -> tuple[Any, ...]:
    return await whole.one("SELECT sum(cost), count(), sum(input_tokens), sum(output_tokens) FROM attempts FINAL")


@pytest.mark.chaos
async def test_one_of_three_users_is_erased_everywhere_and_the_books_stay_equal(
    start_whole: Any, own_nats_server: RunningServer, own_redis_server: RunningServer
) -> None:
    agents, models = agents_and_models()
    await flush_each_second(own_nats_server)
    limits = {"timezone": ZONE.key, "limits": [{"scope": "user:*", "usd": 50, "per": "month"}]}
    async with start_whole(models, agents, budgets=limits) as whole:
        redis = Redis(own_redis_server.url)
        record = RecordedSpend(lambda: whole.plane.client, whole.analytics, ZONE)
        money = Money(whole.plane, redis, whole.analytics, record)
        for user in USERS:
            await run_all(whole, user)
        erased, *others = USERS
        code, report, err = await erase(whole, "--user", erased, "--yes")
        assert (code, report) == (1, None)
        assert "unfinished_jobs" in err
        async with whole.http.post(f"{whole.url}/api/v1/jobs/parked-0/cancel", json={}) as response:
            assert response.status in (200, 202), await response.text()
        await ended(whole, [f"{kind}-{number}" for number in range(3) for kind in ("plain", "again", "bad", "large")])
        await ended(whole, ["parked-0"])
        await until(money.agree, "equal books")
        before = await spent(whole)
        at_rest = await bytes_at_rest(whole, own_nats_server, redis)
        for user in USERS:
            assert mark(user, "kept").encode() in at_rest["NATS"]
            assert mark(user, "prompt").encode() in at_rest["ClickHouse"]
            assert mark(user, "answer").encode() in at_rest["Redis"]

        code, counted, err = await erase(whole, "--user", erased, "--dry-run")
        assert code == 0, err
        # Killed in the middle, at three moments.
        for step in ("deleting messages", "deleting keys", "changing rows"):
            process = command(whole, "--user", erased, "--yes")
            assert process.stderr is not None
            while (line := await asyncio.to_thread(process.stderr.readline)) and step not in line:
                pass
            await asyncio.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            print(f"killed while {line.strip()}")
        code, report, err = await erase(whole, "--user", erased, "--yes", "--verify")
        assert code == 0, (report and report["search"]["traces"], err)
        assert {"EVENTS", "RESULTS", "DLQ", "RESPONSES", "OBJ_bodies", "AUDIT", "Redis"} <= report["search"][
            "searched"
        ].keys()
        print(json.dumps(counted), json.dumps(report))

        words = [f"Codeword {erased[::-1]}".encode(), erased.encode()]

        async def are_rewritten() -> bool:
            return not any(word in nats_files(own_nats_server) for word in words)

        await until(are_rewritten, "files of NATS without the user", timeout_s=30)
        at_rest = await bytes_at_rest(whole, own_nats_server, redis)
        found = [
            (store, word, data[max(data.find(word) - 300, 0) : data.find(word) + 100])
            for store, data in at_rest.items()
            for word in words
            if word in data
        ]
        assert found == []
        for user in others:
            for kind in ("prompt", "kept", "note", "parameter", "bad"):
                assert mark(user, kind).encode() in at_rest["ClickHouse"], (user, kind)
            assert mark(user, "answer").encode() in at_rest["Redis"]
            assert mark(user, "large").encode() in at_rest["NATS"]
        assert await spent(whole) == before
        compared = await until(money.agree, "equal books after the erasure")
        assert compared.reconciliation().equal
        thorough = await _thorough(record, redis)
        assert thorough == [], "also where the whole log is read again"
        _, again, _ = await erase(whole, "--user", erased, "--dry-run")
        assert (again["jobs"], again["stores"]) == (0, {})
        actions = await whole.analytics.query("SELECT action, outcome, by FROM audit FINAL")
        assert ("erase", "done") in {row[:2] for row in actions.rows}
        await redis.close()


async def _thorough(record: RecordedSpend, redis: Redis) -> list[Any]:
    from datetime import UTC, datetime

    from breakwater.records.reconciliation import compare

    try:
        compared = await compare(record, BudgetCounters(redis, ZONE), datetime.now(UTC), thorough=True)
    except NotFilledError:
        return ["not filled"]
    return list(compared.differences)
