"""An erasure on servers that have the data of two users, and no services."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tracemalloc
from base64 import b64encode
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.alerts.contract import Alert
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.erasure.commands import print_search
from breakwater.erasure.erase import Eraser, UnfinishedJobsError
from breakwater.erasure.messages import READERS, NotHandledError
from breakwater.erasure.rules import DataSubject, stored_forms
from breakwater.erasure.search import Samples, StoreSearch, samples_of
from breakwater.erasure.store import SubjectKeys
from breakwater.identity.audit import Actor, AuditLog
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.store.executions import Claim, Executions
from breakwater.jobs.store.plans import KnownPlan, NotedJob, Plans
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.bodies import BodyReference, BodyWriter
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.errors import NoStreamError
from breakwater.kernel.nats.lookup import Lookup, everything_in
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.rules.budget import TOTAL
from breakwater.limits.rules.guard import Trip
from breakwater.limits.store.tasks import Tasks
from breakwater.records.rows import alert_row, attempt_row, audit_row, budget_row, execution_row, guard_row, plan_row
from breakwater.records.schema import ALERTS, ATTEMPTS, AUDIT, BUDGET_EVENTS, EXECUTIONS, GUARD_EVENTS, PLAN_CHANGES
from breakwater.records.spend import spend
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.flow.test_encryption import directory_of, files_of
from tests.helpers import until
from tests.records import samples
from tests.records.samples import new_database
from tests.servers import RunningServer

USERS = ("anna.kovacs", "ben.okafor")
OPERATOR = Actor("root", "command")
NOW = datetime.now(UTC).replace(microsecond=0)


def text(user: str, kind: str) -> str:
    return f"Codeword {user[::-1]} in the {kind} of a job"


@dataclass
class Stores:
    """The three servers."""

    client: Client
    redis: Redis
    analytics: Analytics
    folder: Path

    @property
    def publisher(self) -> Publisher:
        return Publisher(lambda: self.client, "test")

    def eraser(self, subject: DataSubject, at: datetime | None = None, **more: Any) -> Eraser:
        audit = AuditLog(self.publisher, Redactor.compile(RedactionRules()))
        at = at or datetime.now(UTC) + timedelta(seconds=1)
        return Eraser(lambda: self.client, self.redis, self.analytics, audit, subject, at, **{"wait_s": 1.0, **more})

    async def publish(self, subject: str, data: bytes, **headers: str) -> int:
        return (await self.client.jetstream().publish(subject, data, headers=headers or None)).seq

    async def messages(self, stream: Stream, subject_filter: str = "bw.>") -> list[bytes]:
        async with aclosing(Lookup(lambda: self.client).scan(stream, subject_filter)) as stored:
            return [message.data async for message in stored]


@pytest_asyncio.fixture
async def stores(
    own_nats_server: RunningServer, redis: Redis, clickhouse_server: RunningServer, tmp_path: Path
) -> AsyncGenerator[Stores]:
    await provision(own_nats_server.url, Plan(agents={"good": 1}))
    client = await nats.connect(own_nats_server.url)
    for stream, durables in READERS.items():
        for durable in durables:
            await client.jetstream().delete_consumer(stream.value, durable)
    async with new_database(clickhouse_server.url) as analytics:
        yield Stores(client, redis, analytics, tmp_path)
    await client.close()


async def fill(stores: Stores, user: str) -> None:
    """Stores two jobs of a user wherever jobs are stored: one that succeeded, one that is a dead letter."""
    for number, status in enumerate(("succeeded", "dead_lettered")):
        execution_id = f"x-{USERS.index(user)}{number}"
        attempt = samples.attempt(execution_id, user=user, job_id=f"order-{user}", completed_at=NOW, started_at=NOW)
        record = samples.execution(
            execution_id,
            user=user,
            job_id=f"order-{user}",
            status=status,
            messages=[{"role": "user", "content": text(user, "prompt")}],
            output=text(user, "answer"),
            metadata={"user": user, "note": text(user, "metadata")},
            completed_at=NOW,
        )
        await store_record(stores, attempt, record)
        await stores.publish(subjects.result(execution_id), json.dumps({"output": text(user, "answer")}).encode())
        await stores.publish(subjects.kept_request(execution_id), json.dumps({"body": text(user, "request")}).encode())
        await stores.publish(subjects.kept_chunks(execution_id), json.dumps({"chunks": [text(user, "chunk")]}).encode())
        answer = {"execution_id": execution_id, "output": text(user, "answer"), "completed_at": "2026-11-30T00:00:00Z"}
        await stores.redis.client.set(f"bw:cache:{execution_id}", json.dumps(answer))
    job = json.dumps({"agent": "good", "prompt": text(user, "job"), "metadata": {"user": user}}).encode()
    reference = BodyReference.of(job, encrypted=False, job_bytes=len(job))
    await BodyWriter(stores.publisher).put(reference, job, "good", execution_id)
    dead_letter = DeadLetter(
        reason="error",
        agent="good",
        error="refused",
        stream="JOBS",
        subject="bw.jobs.good",
        sequence=1,
        payload_base64=b64encode(job).decode(),
        execution_id=f"unrecorded-{USERS.index(user)}",
        at=NOW,
    )
    await stores.publish(subjects.dead_letter("error", "good"), dead_letter.json_bytes())
    await stores.publish(subjects.parked("good", execution_id), job)
    alert = Alert.model_validate(
        {
            **samples_of_alert(),
            "alert_id": f"a-{USERS.index(user)}",
            "title": f"Job {execution_id} was dead-lettered",
            "payload": {"execution_id": execution_id},
        }
    )
    sequence = await stores.publish(subjects.alert("job_dead_lettered"), alert.json_bytes())
    await stores.analytics.insert(ALERTS, [alert_row(alert, sequence)])
    await stores.redis.client.hset("bw:limits:monthly:2026-11", f"spent:user:{user}", "7")  # pyright: ignore


async def store_record(stores: Stores, attempt: Attempt, record: Execution) -> None:
    attempt_subject = subjects.attempt("good", record.execution_id, 1)
    sequence = await stores.publish(attempt_subject, attempt.json_bytes())
    await stores.analytics.insert(ATTEMPTS, [attempt_row(attempt, sequence, NOW)])
    sequence = await stores.publish(subjects.execution("good", record.execution_id), record.json_bytes())
    await stores.analytics.insert(EXECUTIONS, [execution_row(record, sequence)])


def samples_of_alert() -> dict[str, Any]:
    fields = ("incident_id", "key", "title", "text", "source_id")
    return {
        **dict.fromkeys(fields, "made up"),
        "key": "job_dead_lettered/good",
        "change": "opened",
        "status": "firing",
        "event": "job_dead_lettered",
        "severity": "warning",
        "count": 1,
        "version": 1,
        **dict.fromkeys(("opened_at", "last_at", "at"), NOW),
    }


async def flush_each_second(nats_server: RunningServer) -> None:
    """Restarts a server with the interval of `breakwater up` and not that of tests. It also rewrites files then."""
    config = directory_of(nats_server) / "nats.conf"
    config.write_text(config.read_text().replace("sync_interval: 1h", "sync_interval: 1s"))
    await nats_server.restart_async()


async def store_jobs(stores: Stores, jobs: int, users: int) -> None:
    """Stores the records of jobs of so many users, as the sink does."""
    started = [NOW - timedelta(seconds=number) for number in range(jobs)]
    common = [{"user": f"user number {number % users}", "completed_at": at} for number, at in enumerate(started)]
    attempts = [
        samples.attempt(f"x-{number}", started_at=fields["completed_at"], **fields)
        for number, fields in enumerate(common)
    ]
    records = [
        samples.execution(f"x-{number}", messages=[{"role": "user", "content": text(f"{number}", "prompt")}], **fields)
        for number, fields in enumerate(common)
    ]
    for start in range(0, jobs, 500):
        part = range(start, min(start + 500, jobs))
        events = [(subjects.attempt("good", f"x-{number}", 1), attempts[number]) for number in part]
        events += [(subjects.execution("good", f"x-{number}"), records[number]) for number in part]
        await asyncio.gather(*(stores.publish(subject, event.json_bytes()) for subject, event in events))
    await stores.analytics.insert(ATTEMPTS, [attempt_row(attempt, n, NOW) for n, attempt in enumerate(attempts, 1)])
    await stores.analytics.insert(EXECUTIONS, [execution_row(record, n) for n, record in enumerate(records, 1)])


def begin(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.chaos
async def test_a_user_with_a_thousand_jobs_is_erased_though_the_command_is_killed_at_each_step(
    stores: Stores, own_nats_server: RunningServer, redis_server: RunningServer, clickhouse_server: RunningServer
) -> None:
    await store_jobs(stores, 20_000, 20)
    before = await stores.analytics.query("SELECT sum(cost), count() FROM attempts FINAL")
    config = stores.folder / "breakwater.yaml"
    config.write_text(
        'providers: {local: {base_url: "http://127.0.0.1:9/v1"}}\n'
        "models: {m: {provider: local}}\nagents: {good: {model: m}}\n"
    )
    environment = {
        **os.environ,
        "BREAKWATER_NATS_URL": own_nats_server.url,
        "BREAKWATER_REDIS_URL": redis_server.url,
        "BREAKWATER_CLICKHOUSE_URL": samples.url_of(stores.analytics, clickhouse_server),
    }
    program = [sys.executable, "-m", "breakwater.cli", "erase", "--user", "user number 7", "--yes", "--json"]
    for step in ("deleting messages", "deleting keys", "changing rows", None):
        command = [*program, "--config", str(config)]
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = begin(command, environment)
        assert process.stderr is not None
        said: list[str] = []
        if step is not None:
            while (line := await asyncio.to_thread(process.stderr.readline)) and step not in line:
                said.append(line)
            await asyncio.sleep(0.1)
            process.kill()
        out, err = await asyncio.to_thread(process.communicate)
        assert process.returncode == (0 if step is None else -signal.SIGKILL), (step, said, err)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{step}: {used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime:.1f} CPU-s", out)
    assert (await stores.eraser(DataSubject("user number 7")).find()).stores == {}
    assert (await stores.analytics.query("SELECT sum(cost), count() FROM attempts FINAL")).rows == before.rows
    of_user = "SELECT count(), countIf(user = 'user number 7'), countIf(erased_at IS NOT NULL) FROM executions FINAL"
    assert (await stores.analytics.query(of_user)).rows == ((20_000, 0, 1_000),)


async def files_of_tables(stores: Stores) -> bytes:
    """The files of ClickHouse's current parts. Texts in small parts stand there as they are."""
    parts = "SELECT path FROM system.parts WHERE active AND database = {database:String}"
    paths = (await stores.analytics.query(parts, {"database": stores.analytics.database})).rows
    return b"".join(files_of(Path(path)) for (path,) in paths)


async def contents(stores: Stores) -> bytes:
    """All that can be read of the three servers, but for the streams of keys."""
    parts = [data for stream in Stream for data in await stores.messages(stream, everything_in(stream))]
    parts += [
        str((await stores.analytics.query(f"SELECT * FROM {table.name} FINAL")).rows).encode()
        for table in (ATTEMPTS, EXECUTIONS, ALERTS)
    ]
    async for key in stores.redis.client.scan_iter():
        kind = await stores.redis.client.type(key)
        value: Any = stores.redis.client.get(key) if kind == "string" else stores.redis.client.hgetall(key)
        parts.append(f"{key} {await value}".encode())
    return b"\n".join(parts)


@pytest.mark.long(about_s=4)
async def test_one_user_is_erased_and_the_other_stays_even_if_it_is_broken_off_between_any_two_steps(
    stores: Stores,
) -> None:
    for user in reversed(USERS):  # so that all streams end with what is erased
        await fill(stores, user)
    anna, ben = USERS
    subject = DataSubject(anna)
    log = IncidentLog(lambda: stores.client, stores.publisher, Redactor.compile(RedactionRules()))
    assert "x-01" in str((await log.catch_up()).of("job_dead_lettered/good"))
    every_log = NOW - timedelta(days=1)
    before = await spend(stores.analytics, [TOTAL], log_created=every_log, upto=1_000)
    assert anna.encode() in await files_of_tables(stores)
    eraser = stores.eraser(subject)
    counted = (await eraser.find()).stores
    everything = {**dict.fromkeys(("EVENTS", "RESPONSES"), 4), "RESULTS": 2, "DLQ": 1, "ALERTS": 1, "PARKED": 1}
    tables = {"attempts": 2, "executions": 2, "alerts": 1, "cached answers": 2, "counters": 1}
    assert counted == {**everything, "OBJ_bodies": 2, **tables}

    class BrokenOffError(Exception):
        pass

    steps: list[str] = []
    await eraser.erase(await stores.eraser(DataSubject("nobody")).find(), OPERATOR, steps.append)
    for last_step in steps[1:]:

        def break_off(step: str, last_step: str = last_step) -> None:
            if step == last_step:
                raise BrokenOffError

        eraser = stores.eraser(subject)
        with pytest.raises(BrokenOffError):
            await eraser.erase(await eraser.find(), OPERATOR, break_off)
    eraser = stores.eraser(subject)
    await eraser.erase(await eraser.find(), OPERATOR, steps.append)
    assert (await stores.eraser(subject).find()).stores == {}

    left_open = str((await log.catch_up()).of("job_dead_lettered/good"))
    assert ("x-01" in left_open, "x-11" in left_open) == (False, True), "an alerter that runs forgets it, too"

    search = StoreSearch(lambda: stores.client, stores.redis, stores.analytics, {})
    searched = (await search.run(Samples([text(anna, "answer")], 1, anna))).searched
    assert {"EVENTS": 4, "RESULTS": 2, "DLQ": 1, "OBJ_bodies": 2, "executions": 4}.items() <= searched.items()
    tables = await files_of_tables(stores)
    assert (anna.encode() in tables, ben.encode() in tables) == (False, True), "nor under a NULL"
    assert (anna[::-1].encode() in tables, ben[::-1].encode() in tables) == (False, True)
    rest = (await contents(stores)).decode()
    assert anna[::-1] not in rest
    assert anna not in rest
    for kind in ("prompt", "answer", "request", "chunk", "metadata", "job"):
        assert text(ben, kind) in rest or b64encode(text(ben, kind).encode()).decode()[4:-8] in rest, kind
    erased = await stores.analytics.query(
        "SELECT job_id, user, output, messages, metadata, status, total_cost > 0 FROM executions FINAL"
        " WHERE erased_at IS NOT NULL ORDER BY execution_id"
    )
    assert [row[:5] for row in erased.rows] == [(f"x-0{number}", None, None, None, "{}") for number in range(2)]
    assert [row[5] for row in erased.rows] == ["succeeded", "dead_lettered"]
    # What EVENTS has no longer counts whatever part of the log is read from ClickHouse.
    assert await spend(stores.analytics, [TOTAL], log_created=every_log, upto=1_000) == before
    assert (await Lookup(lambda: stores.client).facts(Stream.EVENTS)).deleted >= 4
    actions = [json.loads(data) for data in await stores.messages(Stream.AUDIT)]
    assert {action["action"] for action in actions} == {"erase"}
    assert actions[-1]["outcome"] == "done"
    assert actions[-1]["details"]["subject"] == subject.digest


async def test_what_a_worker_writes_while_its_claim_is_awaited_goes_and_jobs_that_were_accepted_later_stay(
    stores: Stores,
) -> None:
    anna = USERS[0]
    now = datetime.now(UTC).replace(microsecond=0)
    job = json.dumps({"agent": "good", "prompt": text(anna, "later"), "metadata": {"user": anna}}).encode()
    early = {"user": anna, "completed_at": now - timedelta(minutes=2)}
    record = samples.execution("x-early", **early)
    await store_record(stores, samples.attempt("x-early", **early, started_at=early["completed_at"]), record)
    await stores.redis.client.hset("bw:execution:x-early", "token", "a worker's")  # pyright: ignore
    eraser = stores.eraser(DataSubject(anna), now - timedelta(seconds=1), wait_s=20.0)
    data = await eraser.find()
    steps: list[str] = []
    erasure = asyncio.create_task(eraser.erase(data, OPERATOR, steps.append))
    await until(lambda: steps, "the wait for claims")
    # Of the job that is claimed, and of one that was accepted before the erasure, and ended after it.
    ended = {"user": anna, "completed_at": now, "messages": [{"role": "user", "content": text(anna, "ended")}]}
    record = samples.execution("x-ended", **ended, duration_ms=60_000)
    attempt = samples.attempt("x-ended", user=anna, completed_at=now, started_at=now)
    await store_record(stores, attempt, record)
    attempt = samples.attempt("x-early", 2, user=anna, completed_at=now - timedelta(minutes=2), started_at=now)
    await stores.publish(subjects.attempt("good", "x-early", 2), attempt.json_bytes())
    for execution_id in ("x-early", "x-ended", "x-later"):
        kind = "later" if execution_id == "x-later" else "late"
        await stores.publish(subjects.result(execution_id), json.dumps({"output": text(anna, kind)}).encode())
        await stores.publish(subjects.kept_chunks(execution_id), json.dumps({"chunks": [text(anna, kind)]}).encode())
        dead_letter = DeadLetter(
            reason="error",
            error="refused",
            payload_base64=b64encode(json.dumps({"metadata": {"user": anna}}).encode()).decode(),
            stream="JOBS",
            subject="bw.jobs.good",
            sequence=1,
            execution_id=execution_id,
            at=now,
        )
        await stores.publish(subjects.dead_letter("error", "good"), dead_letter.json_bytes())
    later = {"user": anna, "completed_at": now, "duration_ms": 1}
    attempt = samples.attempt("x-later", user=anna, completed_at=now, started_at=now)
    await store_record(stores, attempt, samples.execution("x-later", **later))
    await stores.publish("bw.jobs.good", job)
    await stores.redis.client.delete("bw:execution:x-early")
    report = await erasure
    assert report.remaining[-1] == "1 job accepted after it began: erase again"
    assert (await stores.eraser(DataSubject(anna), now - timedelta(seconds=1)).find()).stores == {}
    rest = (await contents(stores)).decode()
    assert [kind for kind in ("ended", "late", "later") if text(anna, kind) in rest] == ["later"]
    of_user = "SELECT execution_id FROM {} FINAL WHERE user = {{user:String}}"
    for table in ("attempts", "executions"):
        assert (await stores.analytics.query(of_user.format(table), {"user": anna})).rows == (("x-later",),)
    left = [json.loads(event)["execution_id"] for event in await stores.messages(Stream.EVENTS)]
    assert left == ["x-later", "x-later"]
    assert [json.loads(message)["execution_id"] for message in await stores.messages(Stream.DLQ)] == ["x-later"]


async def test_of_a_plan_that_others_share_only_the_changes_by_their_own_jobs_go(stores: Stores) -> None:
    for number, user in enumerate(USERS):
        names = {"user": user, "plan_id": "plan of both", "plan_key": "x-plan", "job_id": f"letter to {user}"}
        record = samples.execution(f"x-{number}", **names, completed_at=NOW)
        await store_record(stores, samples.attempt(f"x-{number}", user=user, completed_at=NOW, started_at=NOW), record)
    changes = [(None, None), ("x-0", f"letter to {USERS[0]}"), ("x-1", f"letter to {USERS[1]}")]
    for version, (execution_id, job_id) in enumerate(changes):
        source = {"execution_id": execution_id, "job_id": job_id, "reason": f"the job {job_id!r} ended"}
        change = samples.plan_change(f"x-plan#{version}", plan_id="plan of both", plan_key="x-plan", **source)
        sequence = await stores.publish(subjects.plan("x-plan"), change.json_bytes())
        await stores.analytics.insert(PLAN_CHANGES, [plan_row(change, sequence)])

    plans = Plans(stores.redis)
    noted = {f"x-{number}": NotedJob(NOW, "good", None, None, f"letter to {user}") for number, user in enumerate(USERS)}
    await plans.change("x-plan", "succeeded", noted, plan_id="plan of both")
    queued = {"x-queued": NotedJob(NOW, "good", None, None, "a job that has not begun")}
    await plans.change("x-own", "pending", {"x-own-1": noted["x-0"], **queued})
    names = {"user": USERS[0], "plan_id": "x-own", "plan_key": "x-own", "completed_at": NOW}
    record = samples.execution("x-own-1", **names)
    await store_record(stores, samples.attempt("x-own-1", user=USERS[0], completed_at=NOW, started_at=NOW), record)

    async def left() -> tuple[list[str], list[tuple[Any, ...]]]:
        events = [json.loads(event)["change_id"] for event in await stores.messages(Stream.EVENTS, "bw.plans.>")]
        sql = "SELECT plan_id, job_id, reason FROM plan_changes FINAL ORDER BY change_id"
        return events, [*(await stores.analytics.query(sql)).rows]

    before = (await left())[1]
    eraser = stores.eraser(DataSubject(USERS[0]))
    await eraser.erase(await eraser.find(), OPERATOR, str)
    assert (await stores.eraser(DataSubject(USERS[0])).find()).stores == {}
    assert await left() == (["x-plan#0", "x-plan#2"], [before[0], ("x-plan", "x-0", "erased"), before[2]])
    notes = await plans.notes_of(["x-plan", "x-own"])
    assert (notes["x-plan"].jobs, notes["x-own"].jobs) == ({"x-1": noted["x-1"]}, queued)
    # With the last who shares it, all go.
    eraser = stores.eraser(DataSubject(USERS[1]))
    await eraser.erase(await eraser.find(), OPERATOR, str)
    assert (await left())[0] == []
    assert (await plans.notes_of(["x-plan"]))["x-plan"] == KnownPlan()
    move = await plans.change("x-plan", "pending", queued)
    assert move is not None
    assert move.version == 2, "it has no name that NATS takes for that of an earlier change"


async def test_a_search_finds_what_was_not_erased_and_looks_at_every_store(stores: Stores) -> None:
    for user in USERS:
        await fill(stores, user)
    eraser = stores.eraser(DataSubject(USERS[0]))
    found = await eraser.find()
    wanted = await samples_of(eraser.rows, found.rows, eraser.subject)
    assert {text(USERS[0], kind)[:48] for kind in ("prompt", "answer")} == set(wanted.texts)
    others = {text(USERS[1], "prompt"), text(USERS[1], "answer"), f"order-{USERS[1]}"}
    assert await eraser.rows.used_by_others([*others, *wanted.texts, f"order-{USERS[0]}"]) == others
    (stores.folder / "block").write_bytes(b"\0" * 9 + text(USERS[0], "answer").encode())
    search = StoreSearch(lambda: stores.client, stores.redis, stores.analytics, {"NATS": stores.folder}, files_wait_s=0)
    traces = (await search.run(wanted)).traces
    assert {trace.store for trace in traces if trace.kind == "text"} == {
        *("EVENTS", "RESULTS", "Redis", "executions", "files of NATS", "files of ClickHouse")
    }
    assert {"attempts", "executions", "EVENTS", "Redis"} <= {trace.store for trace in traces if trace.kind == "name"}


async def test_what_was_acknowledged_leaves_the_files_of_queues_in_which_others_jobs_wait(
    stores: Stores, own_nats_server: RunningServer
) -> None:
    await flush_each_second(own_nats_server)
    for consumer, stream, subject in (
        ("worker-good", Stream.JOBS, "bw.jobs.good"),
        ("worker-parked", Stream.PARKED, "bw.parked.good.x-"),
    ):
        for number, user in enumerate((*USERS, USERS[1])):
            numbered = f"{subject}{number}" if stream is Stream.PARKED else subject
            job = {"agent": "good", "prompt": text(user, "job"), "metadata": {"user": user}}
            await stores.publish(numbered, json.dumps(job).encode())
        pulled = await stores.client.jetstream().pull_subscribe_bind(consumer, stream)
        [delivered] = await pulled.fetch(1)
        await delivered.ack_sync()
    eraser = stores.eraser(DataSubject(USERS[0]))
    await eraser.erase(await eraser.find(), OPERATOR, str)

    async def is_gone() -> bool:
        return all(form not in files_of(directory_of(own_nats_server)) for form in stored_forms(text(USERS[0], "job")))

    await until(is_gone, "rewritten files", timeout_s=30)
    left = files_of(directory_of(own_nats_server))
    assert left.count(text(USERS[1], "job").encode()) == 4


async def test_ids_that_callers_chose_for_tasks_and_plans_give_way_to_those_of_the_plane(stores: Stores) -> None:
    anna = {"user": USERS[0], "job_id": "letter to anna kovacs", "task_id": "task of anna kovacs", "task_key": "x-task"}
    record = samples.execution("x-0", **anna, plan_id="plan of anna kovacs", plan_key="x-plan", completed_at=NOW)
    await store_record(stores, samples.attempt("x-0", **anna, completed_at=NOW, started_at=NOW), record)
    for key, chosen in (("x-task", "task of anna kovacs"), ("x-other", "task of ben")):
        guard = samples.guard_event(event_id=f"g-{key}", task_key=key, task_id=chosen, execution_id=None)
        sequence = await stores.publish(subjects.guard("good"), guard.json_bytes())
        await stores.analytics.insert(GUARD_EVENTS, [guard_row(guard, sequence)])
    change = samples.plan_change(
        plan_id="plan of anna kovacs", plan_key="x-plan", execution_id="x-0", job_id=anna["job_id"]
    )
    sequence = await stores.publish(subjects.plan("x-plan"), change.json_bytes())
    await stores.analytics.insert(PLAN_CHANGES, [plan_row(change, sequence)])
    eraser = stores.eraser(DataSubject(USERS[0]))
    data = await eraser.find()
    searched = await samples_of(eraser.rows, data.rows, eraser.subject)
    assert searched.ids == ("letter to anna kovacs", "plan of anna kovacs", "task of anna kovacs")
    # As if it had been killed after the copy.
    copy = "SELECT * REPLACE (task_key AS task_id) FROM (SELECT * FROM guard_events WHERE task_key = 'x-task')"
    await stores.analytics.execute(f"INSERT INTO guard_events {copy}")
    await eraser.erase(data, OPERATOR, str)
    assert (await stores.eraser(DataSubject(USERS[0])).find()).stores == {}
    guards = await stores.analytics.query("SELECT task_id, task_key FROM guard_events FINAL ORDER BY task_key")
    assert guards.rows == (("task of ben", "x-other"), ("x-task", "x-task"))
    plans = await stores.analytics.query("SELECT plan_id, job_id, reason FROM plan_changes FINAL")
    assert plans.rows == (("x-plan", "x-0", "erased"),)
    search = StoreSearch(lambda: stores.client, stores.redis, stores.analytics, {})
    assert (await search.run(searched)).traces == ()


async def test_a_task_that_others_share_stays_stopped_when_redis_is_filled_from_the_log(stores: Stores) -> None:
    for number, (user, task) in enumerate([(USERS[0], "shared"), (USERS[1], "shared"), (USERS[0], "own")]):
        names = {"user": user, "task_id": f"task named {task}", "task_key": f"x-{task}", "completed_at": NOW}
        record = samples.execution(f"x-{number}", **names)
        await store_record(stores, samples.attempt(f"x-{number}", **names, started_at=NOW), record)
    tasks = Tasks(stores.redis)
    for number, task in enumerate(["shared", "shared", "own"]):
        trip = Trip("max_iterations", "10 iterations")
        place = {"agent": "good", "execution_id": f"x-{number}", "task_id": f"task named {task}"}
        await tasks.trip(TaskKey("acme", f"x-{task}"), trip, **place)
        chosen = {"task_id": f"task named {task}", "task_key": f"x-{task}", "execution_id": f"x-{number}"}
        guard = samples.guard_event(event_id=f"g-{number}", **chosen)
        sequence = await stores.publish(subjects.guard("good"), guard.json_bytes())
        await stores.analytics.insert(GUARD_EVENTS, [guard_row(guard, sequence)])
    eraser = stores.eraser(DataSubject(USERS[0]))
    data = await eraser.find()
    searched = await samples_of(eraser.rows, data.rows, eraser.subject)
    await eraser.erase(data, OPERATOR, str)
    left = [json.loads(event)["task_key"] for event in await stores.messages(Stream.EVENTS, "bw.guards.>")]
    assert left == ["x-shared", "x-shared"]
    rows = await stores.analytics.query("SELECT task_id FROM guard_events FINAL ORDER BY event_id")
    assert rows.rows == (("task named shared",), ("task named shared",), ("x-own",))
    search = StoreSearch(lambda: stores.client, stores.redis, stores.analytics, {})
    assert (await search.run(searched)).traces == ()
    stopped = {key.task_key: record.task_id for key, record in await tasks.stopped_tasks()}
    assert stopped == {"x-shared": "task named shared", "x-own": None}
    # With the last who shares it, it goes.
    eraser = stores.eraser(DataSubject(USERS[1]))
    await eraser.erase(await eraser.find(), OPERATOR, str)
    assert await stores.messages(Stream.EVENTS, "bw.guards.>") == []


async def test_an_operators_actions_name_a_job_as_the_plane_does(stores: Stores) -> None:
    for number, user in enumerate(USERS):
        record = samples.execution(f"x-{number}", user=user, job_id=f"letter to {user}", completed_at=NOW)
        await store_record(stores, samples.attempt(f"x-{number}", user=user, completed_at=NOW, started_at=NOW), record)
    named = [
        {"job_id": "letter to anna.kovacs", "execution_id": "x-0"},
        {"job_id": "letter to anna.kovacs"},
        {"job_id": "letter to ben.okafor", "execution_id": "x-1"},
        {"job_id": "letter to anna.kovacs", "execution_id": "of another caller"},
        {"agent": "letter to anna.kovacs"},
    ]
    for number, details in enumerate(named):
        for outcome in ("begun", "done"):
            action = samples.audit_event(f"a-{number}", details=details, outcome=outcome)
            await stores.analytics.insert(AUDIT, [audit_row(action, 2 * number + (outcome == "done"))])
            await stores.publish(subjects.audit(action.action), action.json_bytes())
    eraser = stores.eraser(DataSubject(USERS[0]))
    data = await eraser.find()
    assert data.stores["audit"] == 2
    searched = await samples_of(eraser.rows, data.rows, eraser.subject)
    await eraser.erase(data, OPERATOR, str)
    assert (await stores.eraser(DataSubject(USERS[0])).find()).stores == {}
    sql = "SELECT details, outcome FROM audit {} ORDER BY audit_id"
    stored = await stores.analytics.query(sql.format("FINAL"))
    rewritten = [{"job_id": "x-0", "execution_id": "x-0"}, {"job_id": "x-0"}, *named[2:]]
    assert [(json.loads(details), outcome) for details, outcome in stored.rows] == [
        (action, "done") for action in rewritten
    ]
    every_row = str((await stores.analytics.query(sql.format(""))).rows)
    assert every_row.count("letter to anna") <= 4, "of the last two"
    search = StoreSearch(lambda: stores.client, stores.redis, stores.analytics, {})
    report = await search.run(searched)
    assert (report.actions, {trace.store for trace in report.traces}) == (8, {"audit"}), (
        "nobody may change the log itself"
    )


async def test_a_name_that_another_tenant_has_too_is_no_trace(stores: Stores) -> None:
    for number, tenant in enumerate(("acme", "globex")):
        fields = {"user": USERS[0], "tenant": tenant, "completed_at": NOW}
        record = samples.execution(f"x-{number}", **fields)
        await store_record(stores, samples.attempt(f"x-{number}", **fields, started_at=NOW), record)
    eraser = stores.eraser(DataSubject(USERS[0], "acme"))
    data = await eraser.find()
    searched = await samples_of(eraser.rows, data.rows, eraser.subject)
    search = [StoreSearch(lambda: stores.client, stores.redis, stores.analytics, {}) for _ in range(2)]
    assert {trace.store for trace in (await search[0].run(searched)).traces} == {"EVENTS", "attempts", "executions"}
    await eraser.erase(data, OPERATOR, str)
    assert (await search[1].run(searched)).traces == ()
    assert (await stores.eraser(DataSubject(USERS[0], "globex")).find()).rows.rows["executions"] == 1


def test_a_name_of_few_letters_is_no_trace_of_its_base64_or_of_a_short_tenant(tmp_path: Path) -> None:
    event = json.dumps({"user": "anna", "tenant": "globex"}).encode()
    assert Samples(name="anna").count_in(event) == {"name": 1}
    assert Samples(name="anna", tenant="globex").count_in(event) == {"name": 1}
    assert Samples(name="anna", tenant="us").count_in(event) == {}, "which is in the name of the field `user`"
    assert Samples(name="anna").count_in(b64encode(b"annual report")) == {}
    file = tmp_path / "file"
    file.write_bytes(b"")
    os.truncate(file, 24 * 1024 * 1024)
    tracemalloc.start()
    assert Samples().count_in_file(file) == ({}, 24 * 1024 * 1024)
    assert tracemalloc.get_traced_memory()[1] < 20 * 1024 * 1024, "a file is read in parts, even for nothing"
    tracemalloc.stop()


@contextmanager
def without_roots_rights() -> Generator[None]:
    """Root may read everything: in its place, someone who may not."""
    user = os.geteuid()
    os.seteuid(65_534 if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


@contextmanager
def partly_closed_folder() -> Generator[Path]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        closed = folder / "closed"
        closed.mkdir()
        for file in (closed / "block", folder / "file", folder / "open"):
            file.write_bytes(b"the text that is searched for")
        (folder / "file").chmod(0)
        closed.chmod(0)
        yield folder
        closed.chmod(0o700)


async def test_files_that_may_not_be_read_are_counted_as_not_searched(stores: Stores) -> None:
    wanted = Samples(["the text that is searched for"], 1)
    with partly_closed_folder() as folder, without_roots_rights():
        folders = {"NATS": folder, "Redis": folder / "closed" / "data"}
        search = StoreSearch(lambda: stores.client, stores.redis, stores.analytics, folders, files_wait_s=0)
        report = await search.run(wanted)
    assert {"NATS": 2, "Redis": 1}.items() <= report.unread.items()
    assert [(trace.store, trace.place) for trace in report.traces] == [("files of NATS", "open")]


@pytest.mark.parametrize(
    ("subject", "names"),
    [(DataSubject("anna"), True), (DataSubject("ann"), False), (DataSubject(None, "acme"), False)],
)
def test_the_command_says_what_it_searched_for(
    subject: DataSubject, names: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant = subject.user and subject.tenant
    wanted = Samples(["a text that is long"], 2, subject.user, ids=["an id that is long"], tenant=tenant)
    print_search(wanted.report({"AUDIT": 1}, {"Redis": 2}, actions=2), subject)
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"searched for 1 text of 2 jobs, 1 id{' and the name' * names}, in:"
    assert ("not searched for: the name, which is too short" in err) == (subject.user == "ann")
    assert "kept: 2 operators' actions in AUDIT" in err
    assert "not searched: 2 of the files and folders of Redis, which you may not read" in err


async def test_nothing_is_erased_while_a_job_has_not_ended_or_a_service_is_behind(stores: Stores) -> None:
    await fill(stores, USERS[0])
    subject = DataSubject(USERS[0])
    job = {"agent": "good", "prompt": text(USERS[0], "queued"), "metadata": {"user": USERS[0]}}
    sequence = await stores.publish("bw.jobs.good", json.dumps(job).encode())
    before = await contents(stores)
    eraser = stores.eraser(subject)
    jetstream = stores.client.jetstream()
    config = (await jetstream.stream_info("RESULTS")).config
    await jetstream.update_stream(config.evolve(subjects=["bw.results.*"]))  # as an earlier version made it
    with pytest.raises(NoStreamError, match="RESULTS has the config of an earlier version: run `breakwater setup`"):
        await eraser.erase(await eraser.find(), OPERATOR, str)
    await jetstream.update_stream(config)
    with pytest.raises(UnfinishedJobsError, match="1 of the jobs"):
        await eraser.erase(await eraser.find(), OPERATOR, str)
    await stores.client.jetstream().delete_msg("JOBS", sequence)
    attempt = samples.attempt("x-parked", user=USERS[0], completed_at=NOW, started_at=NOW)
    await stores.publish(subjects.attempt("good", "x-parked", 1), attempt.json_bytes())
    sequence = await stores.publish(subjects.parked("good", "x-parked"), json.dumps(job).encode())
    eraser = stores.eraser(subject)
    with pytest.raises(UnfinishedJobsError, match="1 of the jobs"):
        await eraser.erase(await eraser.find(), OPERATOR, str)
    await jetstream.delete_msg("PARKED", sequence)
    await stores.redis.client.hset("bw:execution:x-00", "token", "a worker's")  # pyright: ignore
    eraser = stores.eraser(subject, wait_s=0.1)
    with pytest.raises(NotHandledError, match="1 of the jobs are still claimed"):
        await eraser.erase(await eraser.find(), OPERATOR, str)
    await stores.publish(subjects.audit("cancel"), samples.audit_event("a-1").json_bytes())
    await jetstream.pull_subscribe("bw.audit.>", "sink-audit", stream="AUDIT")
    with pytest.raises(NotHandledError, match="the consumer sink-audit has not handled message 1 of AUDIT"):
        await eraser.erase(await eraser.find(), OPERATOR, str)
    await jetstream.pull_subscribe("bw.attempts.>", "budget", stream="EVENTS")
    with pytest.raises(NotHandledError, match="the consumer budget"):
        await eraser.erase(await eraser.find(), OPERATOR, str)
    assert text(USERS[0], "prompt").encode() in await contents(stores)
    assert before.count(USERS[0].encode()) <= (await contents(stores)).count(USERS[0].encode()) + 1


async def test_a_job_that_was_taken_over_is_not_claimed_any_more_a_minute_after_its_end(redis: Redis) -> None:
    executions = Executions(redis)
    claim = Claim("x-1", "a worker's")
    keys = SubjectKeys(redis, DataSubject("anna"))
    await executions.claim(claim, task_id="a task of anna's")
    await redis.client.hset("bw:execution:x-1", "taken_over", "1")  # pyright: ignore
    assert await keys.claimed(["x-1", "x-2"]) == 1
    await executions.finish(claim)
    assert await keys.claimed(["x-1", "x-2"]) == 1, "another message of it may be on its way"
    await redis.client.hset("bw:execution:x-1", "lease_until", "1")  # pyright: ignore
    assert await keys.claimed(["x-1", "x-2"]) == 0
    assert await keys.noted_ids({"x-1", "x-2"}, set(), set()) == [("bw:execution:x-1", "task_id")]


async def test_counters_of_another_user_stay_and_those_of_rates_go_too(redis: Redis) -> None:
    """Where a counter of another's limit is lost, calls pass it."""
    client: Any = redis.client
    day = "bw:limits:daily:2026-11-30"
    both = ("anna", "anna, Ltd.")
    counters = {f"{kind}:user:{name}": "7" for kind in ("spent", "tokens") for name in both}
    await client.hset(day, mapping={**counters, "announced:user:anna@9@50": "1", "reserved:user:anna": "3"})
    await client.hset(day, "spent:user:anna\vtenant:acme", "2")
    rates = {name: f"bw:limits:window:minute:user:{name}" for name in both}
    for key in rates.values():
        await client.hset(key, "r", "1")
        await client.hset(f"bw:limits:waiters:{key}", "k", "1")
        await client.zadd("bw:limits:names:a-key", {key: 9})
    await client.zadd("bw:limits:slots:user:anna", {"attempt": 9})
    of_acme = SubjectKeys(redis, DataSubject("anna", "acme"))
    assert await of_acme.counters() == [(day, "spent:user:anna\vtenant:acme")], "what all tenants share stays"
    of_anna = SubjectKeys(redis, DataSubject("anna"))
    await of_anna.delete([], await of_anna.counters())
    assert set(await client.hgetall(day)) == {"spent:user:anna, Ltd.", "tokens:user:anna, Ltd.", "reserved:user:anna"}
    others = rates[both[1]]
    assert {key async for key in client.scan_iter("bw:limits:*")} == {
        *(day, others, f"bw:limits:waiters:{others}", "bw:limits:names:a-key")
    }
    assert await client.zrange("bw:limits:names:a-key", 0, -1) == [others]


async def test_events_of_the_limits_on_a_user_go_also_where_another_scope_counts_within(stores: Stores) -> None:
    annas = [
        {"scope": "user", "name": "anna"},
        {"scope": "agent", "agent": "writer", "within": "user:anna"},
        {"scope": "user", "name": "anna", "within": "tenant:acme"},
    ]
    others = [{"scope": "user", "name": "anna, Ltd."}, {"scope": "team", "name": "anna"}]
    for number, scope in enumerate([*annas, *others]):
        event = samples.budget_event(event_id=f"e-{number}", **{"name": None, "agent": None, **scope})
        sequence = await stores.publish("bw.budgets.soft_cap", event.json_bytes())
        await stores.analytics.insert(BUDGET_EVENTS, [budget_row(event, sequence)])
    for subject, count in ((DataSubject("anna", "acme"), 1), (DataSubject("anna"), len(annas))):
        counted = (await stores.eraser(subject).find()).stores
        assert counted == {"EVENTS": count, "budget_events": count}
