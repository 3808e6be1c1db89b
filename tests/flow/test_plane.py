"""All six services and ClickHouse: what was accepted is answered once, stored once, and paid once."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio as aioredis

from breakwater.cli.doctor_checks import encryption_findings
from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats import subjects
from breakwater.kernel.types import NANO_PER_USD
from breakwater.local.plane import PlaneLocation
from breakwater.local.ports import free_port, http_ready
from breakwater.records.schema import TABLES
from tests.flow.fixtures import StartPlane
from tests.flow.kit import COST_NANO, Plane, model
from tests.helpers import until
from tests.records.samples import new_database, url_of
from tests.servers import RunningServer

JOBS = 80
ALL = ("request", "worker", "breaker", "budget", "alerter", "sink")


class Whole:
    """A plane with everything on."""

    def __init__(self, plane: Plane, analytics: Analytics, http: aiohttp.ClientSession, url: str) -> None:
        self.plane = plane
        self.analytics = analytics
        self.http = http
        self.url = url

    async def submit(self, job: dict[str, Any], wait_s: float | None = None) -> tuple[int, Any]:
        query = "" if wait_s is None else f"?wait_s={wait_s}"
        async with self.http.post(f"{self.url}/api/v1/jobs{query}", json=job) as response:
            return response.status, await response.json()

    async def one(self, sql: str) -> tuple[Any, ...]:
        return tuple((await self.analytics.query(sql)).rows[0])


@pytest.fixture
def start_whole(start_plane: StartPlane, clickhouse_server: RunningServer, tmp_path: Any) -> Any:
    @asynccontextmanager
    async def start(models: dict[str, Any], agents: dict[str, Any], **more: Any) -> AsyncGenerator[Whole]:
        port, keys = free_port(), tmp_path / "keys.json"
        key = create_key(keys, "test")
        async with new_database(clickhouse_server.url) as analytics:
            environment = {
                "BREAKWATER_CLICKHOUSE_URL": url_of(analytics, clickhouse_server),
                "BREAKWATER_HTTP_PORT": str(port),
                "BREAKWATER_API_KEYS_FILE": str(keys),
            }
            async with (
                start_plane(models, agents, services=ALL, environment=environment, **more) as plane,
                aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http,
            ):
                await until(http_ready("127.0.0.1", port, "/readyz"), what="the request service")
                yield Whole(plane, analytics, http, f"http://127.0.0.1:{port}")

    return start


async def test_many_jobs_at_64_in_flight_are_on_record_to_the_nano_dollar(start_whole: Any) -> None:
    agents = {"writer": {"model": "sim/m", "concurrency": 64}}
    async with start_whole({"sim/m": model()}, agents) as whole:
        plane, slots = whole.plane, asyncio.Semaphore(64)
        answers: dict[str, asyncio.Event] = {}

        async def on_result(message: Any) -> None:
            if message.subject in answers:
                answers[message.subject].set()

        await plane.client.subscribe("bw.results.*", cb=on_result)

        async def run(number: int) -> None:
            async with slots:
                job_id = f"j{number}"
                if number % 2:
                    status, answer = await whole.submit(
                        {"agent": "writer", "job_id": job_id, "prompt": "x"}, wait_s=120
                    )
                    assert (status, answer["status"]) == (200, "succeeded")
                else:
                    answers[subjects.result(job_id)] = answered = asyncio.Event()
                    await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x"})
                    await asyncio.wait_for(answered.wait(), 120)

        await asyncio.gather(*(run(number) for number in range(JOBS)))

        # A batch whose acknowledgement came late is stored twice, and merged later.
        for table, key in (("attempts", "attempt_id"), ("executions", "execution_id")):
            stored = f"SELECT uniqExact({key}) FROM {table}"
            await until(lambda stored=stored: _equals(whole, stored, (JOBS,)), what=f"all {table} in ClickHouse")
            assert await whole.one(f"SELECT count() FROM {table} FINAL") == (JOBS,)
        sums = await whole.one("SELECT sum(cost), count() FROM attempts FINAL")
        assert sums == (Decimal(JOBS * COST_NANO) / NANO_PER_USD, JOBS)
        client = aioredis.Redis.from_url(plane.environment["BREAKWATER_REDIS_URL"], decode_responses=True)
        [key] = [key async for key in client.scan_iter("bw:limits:daily:*")]

        async def settled() -> bool:
            return int(await client.hget(key, "calls:global") or 0) == JOBS

        await until(settled, what="all calls settled")
        counted = await client.hgetall(key)
        await client.aclose()
        assert int(counted["spent:global"]) == JOBS * COST_NANO == plane.sim.ledger.totals.cost_nano
        assert int(counted["reserved:global"]) == 0
        assert plane.sim.ledger.totals.calls == JOBS


async def _equals(whole: Whole, sql: str, expected: tuple[Any, ...]) -> bool:
    return await whole.one(sql) == expected


async def test_one_job_id_fifty_times_over_http_and_nats_is_one_execution_and_fifty_equal_answers(
    start_whole: Any,
) -> None:
    async with start_whole({"sim/m": model(latency_ms=100)}, {"writer": {"model": "sim/m"}}) as whole:
        plane = whole.plane
        replies: asyncio.Queue[bytes] = asyncio.Queue()

        async def on_reply(message: Any) -> None:
            await replies.put(message.data)

        await plane.client.subscribe("bw.replies.*", cb=on_reply)
        job = {"agent": "writer", "job_id": "one", "prompt": "x"}
        over_http = [whole.submit(job, wait_s=60) for _ in range(25)]
        over_nats = [plane.publish(job | {"reply_to": f"bw.replies.{number}"}) for number in range(25)]
        answered, _ = await asyncio.gather(asyncio.gather(*over_http), asyncio.gather(*over_nats))
        received = [await asyncio.wait_for(replies.get(), 60) for _ in range(25)]
        assert {status for status, _ in answered} == {200}
        answers = [answer for _, answer in answered] + [json.loads(data) for data in received]
        assert all(answer == answers[0] for answer in answers)
        assert plane.sim.ledger.totals.calls == 1
        await until(lambda: _equals(whole, "SELECT count() FROM executions FINAL", (1,)), what="the execution")


@pytest.mark.chaos
async def test_an_outage_of_clickhouse_delays_the_record_and_loses_nothing(
    start_whole: Any, clickhouse_server: RunningServer
) -> None:
    async with start_whole({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as whole:
        await whole.submit({"agent": "writer", "prompt": "x"}, wait_s=60)
        clickhouse_server.kill()
        ids = []
        for _ in range(50):
            status, answer = await whole.submit({"agent": "writer", "prompt": "x"}, wait_s=60)
            assert status == 200, "answers do not wait for ClickHouse"
            ids.append(answer["job_id"])
        await until(lambda: '"unavailable"' in whole.plane.log("sink"), what="the sink to notice")
        await clickhouse_server.restart_async()
        await until(lambda: _equals(whole, "SELECT uniqExact(execution_id) FROM executions", (51,)), what="all rows")
        stored = (await whole.analytics.query("SELECT execution_id FROM executions FINAL")).rows
        assert Counter(row[0] for row in stored) >= Counter(ids)
        lines = whole.plane.log("sink").splitlines()
        assert sum('"unavailable"' in line and "clickhouse" in line.lower() for line in lines) == 1


SECRETS = {
    "openai": "sk-proj-" + "a1B2c3D4" * 4,
    "aws": "AKIAQ3EGRTYU7HJKLMNB",
    "bearer": "Bearer q9W8e7R6t5Y4u3I2o1P0a9S8",
    "json web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJqYW5lIn0.c2lnbmF0dXJlLW9mLWphbmU",
    "e-mail": "jane.roe@example.org",
    "ssn": "078-05-1120",
    "card": "4111 1111 1111 1111",
}
NAMED = "correct horse battery staple"
"""A secret that only its field's name gives away."""

FAILING_PROGRAM = "import sys; sys.stderr.write(sys.argv[1]); sys.exit(3)"


async def test_a_secret_never_reaches_an_event_a_log_a_dead_letters_reason_or_clickhouse(start_whole: Any) -> None:
    said = "; ".join(SECRETS.values())
    arguments = json.dumps({"password": NAMED, "deep": json.dumps({"Api-Key": NAMED, "note": said})})
    call = {"id": "c1", "type": "function", "function": {"name": "login", "arguments": arguments}}
    messages = [
        {"role": "system", "content": f"you are {said}"},
        {"role": "user", "content": [{"type": "text", "text": f"remember {said}"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": f'{{"access_token": "{NAMED}"}}'},
    ]
    error = {"type": "x", "code": "y", "message": f"your request {said} is bad"}
    models = {
        "sim/bad": model({"status": 400, "error": error}),
        "sim/flaky": model({"status": 500, "error": error}),
        "sim/broken": model({"kind": "error_in_200", "error": error}),
        "sim/echo": model(answer=f'{{"password": "{NAMED}", "all": "{said}"}}'),
        "sim/shapeless": model(answer=said),
    }
    quick = {"retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.01}}
    agents: dict[str, Any] = {name.removeprefix("sim/"): {"model": name, **quick} for name in models}
    agents["bad"]["on_error"] = "message"
    agents["shapeless"]["output"] = {"schema": "task_result", "max_corrections": 1}
    agents["program"] = {"provider": "program", **quick}
    providers = {"program": {"kind": "process", "command": [sys.executable, "-c", FAILING_PROGRAM, said]}}
    metadata = {"api_key": NAMED, "nested": {"note": said, "Authorization": NAMED}}
    async with start_whole(models, agents, more_providers=providers) as whole:
        plane = whole.plane
        answers: dict[str, Any] = {}
        for agent in agents:
            job = {"agent": agent, "job_id": agent, "messages": messages, "metadata": metadata}
            status, answers[agent] = await whole.submit(job, wait_s=60)
            assert status == 200
        await plane.publish({"agent": "bad", "job_id": "invalid", "prompt": said, said: {"password": NAMED}})
        await plane.result("invalid")
        assert SECRETS["openai"] in answers["echo"]["output"], "the submitter gets the answer as it is"
        count = len(agents) + 1
        await until(lambda: _equals(whole, "SELECT count() FROM executions FINAL", (count,)), what="the executions")
        events = await plane.messages("EVENTS", "bw.>")
        alerts = await plane.messages("ALERTS", "bw.>")
        dead_letters = [dead_letter | {"payload_base64": ""} for dead_letter in await plane.messages("DLQ", "bw.>")]
        assert len(dead_letters) == count - 1
        rows = [await whole.analytics.query(f"SELECT * FROM {table.name}") for table in TABLES]
        reported = [answer["error"]["user_message"] for answer in answers.values() if answer["error"]]
        places = {
            "events": json.dumps(events),
            "alerts": json.dumps(alerts),
            "dead letters": json.dumps(dead_letters),
            "ClickHouse": str([table.rows for table in rows]),
            "messages to users": json.dumps([*reported, answers["bad"]["output"]]),
            "logs": "".join(plane.log(name) for name in ALL),
        }
    assert len(events) >= 2 * len(agents)
    leaks = [
        (place, name)
        for place, text in places.items()
        for name, secret in {**SECRETS, "named": NAMED}.items()
        if secret.removeprefix("Bearer ") in text
    ]
    assert leaks == []


PROMPT, ANSWER = "the heron sleeps at noon", "a lantern under the lake"


async def test_persist_prompts_false_and_persist_responses_false_mean_it(
    start_whole: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"type": "invalid_request_error", "code": "bad_thing", "message": f"not with {PROMPT!r}: {ANSWER}"}
    models = {
        **{f"sim/s{status}": model({"status": status, "error": error}) for status in (300, 400, 418, 429, 500)},
        "sim/disguised": model({"kind": "error_in_200", "error": error}),
        "sim/answers": model(answer=ANSWER),
        "sim/shapeless": model(answer=ANSWER),
    }
    private = {"persist_prompts": False, "persist_responses": False, "retry": {"max_attempts": 2, "base_s": 0.01}}
    agents: dict[str, Any] = {name.removeprefix("sim/"): {"model": name, **private} for name in models}
    agents["shapeless"]["output"] = {"schema": "task_result", "max_corrections": 1}
    agents["program"] = {"provider": "program", **private}
    agents["s500"]["on_error"] = "message"
    said = f"{PROMPT}; {ANSWER}"
    providers = {"program": {"kind": "process", "command": [sys.executable, "-c", FAILING_PROGRAM, said]}}
    reader = {"Authorization": f"Bearer {create_key(tmp_path / 'keys.json', 'reader', ('read',))}"}
    async with start_whole(models, agents, more_providers=providers) as whole:
        plane = whole.plane
        answers: dict[str, Any] = {}
        progress = await plane.client.subscribe("bw.progress.>")
        for agent in agents:
            status, answers[agent] = await whole.submit({"agent": agent, "job_id": agent, "prompt": PROMPT}, wait_s=60)
            assert status == 200
        await plane.publish({"agent": "s400", "job_id": "invalid", "prompt": PROMPT, "promt": PROMPT})
        await plane.result("invalid")
        assert answers["answers"].pop("output") == ANSWER, "the submitter gets the answer"
        first = answers["s400"]["attempts"][0]["error"]["message"]
        assert first == "BadRequestError, HTTP 400, code #094f6ba5; what the provider said is not kept for this agent"
        await until(lambda: _equals(whole, "SELECT count() FROM executions FINAL", (len(agents) + 1,)), what="records")
        dead_letters = await plane.messages("DLQ", "bw.>", at_least=len(agents))
        paths = ["dlq", "alerts", "agents", "breakers", "guards", "budgets", "executions", "queues"]
        paths += [f"dlq/{number}" for number in range(1, len(dead_letters) + 1)]
        seen: dict[str, str] = {}
        for path in paths:
            async with whole.http.get(f"{whole.url}/api/v1/{path}", headers=reader) as response:
                seen[f"GET {path}"] = await response.text()
        shown = json.loads(seen["GET dlq/1"])
        assert (shown["payload"], shown["payload_withheld"], shown["replayable"]) == (None, True, True)
        rows = [await whole.analytics.query(f"SELECT * FROM {table.name}") for table in TABLES]
        redis = aioredis.from_url(plane.environment["BREAKWATER_REDIS_URL"])
        async with redis:
            # The config is there too, with the program whose argument says the same.
            dumps = [await redis.dump(key) async for key in redis.scan_iter() if not key.startswith(b"bw:configs:")]
        steps = [str((await progress.next_msg(timeout=5)).data) for _ in range(progress.pending_msgs)]
        places = seen | {
            "events": json.dumps(await plane.messages("EVENTS", "bw.>")),
            "alerts": json.dumps(await plane.messages("ALERTS", "bw.>")),
            "dead letters": json.dumps(dead_letters),
            "results": json.dumps(await plane.messages("RESULTS", "bw.>")),
            "answers": json.dumps(answers),
            "progress": str(steps),
            "ClickHouse": str([table.rows for table in rows]),
            "Redis": str(dumps),
            "logs": "".join(plane.log(name) for name in ALL),
        }
        assert all(one["encrypted"].startswith("bwe1.") and not one.get("payload_base64") for one in dead_letters)
        async with whole.http.get(f"{whole.url}/api/v1/jobs/answers") as response:
            assert (await response.json())["output"] == ANSWER, "while RESULTS holds it"
        async with whole.http.post(f"{whole.url}/api/v1/dlq/replay", json={"dead_letters": [1]}) as response:
            assert [one["dead_letter_id"] for one in (await response.json())["replayed"]] == [1]
        for name, value in plane.environment.items():
            monkeypatch.setenv(name, value)
        config = load_config(Path(plane.environment["BREAKWATER_CONFIG"]))
        [readable] = [one async for one in encryption_findings(PlaneLocation(None), config)]
        monkeypatch.delenv("BREAKWATER_PLANE_KEY")
        [without] = [one async for one in encryption_findings(PlaneLocation(None), config)]
    assert (readable.verdict, without.verdict) == ("ok", "warn")
    assert "which are encrypted with the plane's own key" in readable.text
    assert "stored without texts" in without.text
    assert [(place, text) for place, said in places.items() for text in (PROMPT, ANSWER) if text in said] == []


async def test_a_task_a_session_a_trace_and_a_tree_are_one_run_each(start_whole: Any) -> None:
    agents = {"writer": {"model": "sim/m", "guard": "off"}, "loop": {"model": "sim/broken", "guard": "off"}}
    broken = model({"status": 500})
    async with start_whole({"sim/m": model(), "sim/broken": broken}, agents) as whole:
        trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
        for number in range(8):
            # The steps 1 to 4 are below step 0, and the rest below step 4.
            parent = {} if number == 0 else {"parent_execution_id": "step-0" if number < 5 else "step-4"}
            job = {"agent": "writer", "job_id": f"step-{number}", "prompt": "x", "task_id": "research"}
            status, answer = await whole.submit({**job, **parent}, wait_s=60)
            assert (status, answer["run_id"]) == (200, "research")
        chat = {"model": "writer", "messages": [{"role": "user", "content": "x"}]}
        for headers in [{"x-session-id": "a session"}] * 2 + [{"traceparent": trace}] * 2 + [{}]:
            async with whole.http.post(f"{whole.url}/v1/chat/completions", json=chat, headers=headers) as response:
                assert response.status == 200
                alone = response.headers["x-breakwater-execution-id"]
        # A child is in its parent's run, also if it comes with the trace of its parent's call.
        status, child = await whole.submit(
            {"agent": "loop", "prompt": "x", "parent_execution_id": alone, "retry": {"max_attempts": 1}}, wait_s=60
        )
        assert (status, child["run_id"]) == (200, alone)
        over_nats = {"agent": "writer", "job_id": "in-trace", "prompt": "x"}
        await whole.plane.publish(over_nats, traceparent=trace)
        in_session = {"agent": "writer", "job_id": "in-session", "prompt": "x", "session_id": "a session"}
        await whole.plane.publish(in_session)
        # Its run is known once a worker has it, and not before.
        await whole.plane.result("in-session")
        grandchild = {"agent": "writer", "job_id": "below", "prompt": "x", "parent_execution_id": "in-session"}
        await whole.plane.publish(grandchild)
        await until(lambda: _equals(whole, "SELECT uniqExact(execution_id) FROM executions", (17,)), what="the record")

        async with whole.http.get(f"{whole.url}/api/v1/runs") as response:
            runs = {run["run_id"]: run for run in (await response.json())["runs"]}
        assert {name: run["steps"] for name, run in runs.items()} == {
            "research": 8,
            "a session": 4,
            "ab" * 16: 3,
            alone: 2,
        }
        assert (runs[alone]["status"], runs[alone]["failed"]) == ("dead_lettered", 1)
        assert runs[alone]["agents"] == ["loop", "writer"]
        for name, run in runs.items():
            async with whole.http.get(f"{whole.url}/api/v1/executions", params={"run_id": name}) as response:
                steps = (await response.json())["executions"]
            assert len(steps) == run["steps"]
            for amount in ("total_cost", "wasted_cost"):
                assert Decimal(run[amount]) == sum(Decimal(step[amount]) for step in steps)
            assert run["completed_at"] == max(step["completed_at"] for step in steps)
        assert Decimal(runs["research"]["total_cost"]) * NANO_PER_USD == 8 * COST_NANO
