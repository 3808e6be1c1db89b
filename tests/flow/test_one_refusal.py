"""A refusal in the same words in the HTTP API, below `/v1`, in the CLI, on the console and in alerts."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import aiohttp

from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port, http_ready
from tests.commands import run_command
from tests.flow.kit import model, running_plane
from tests.helpers import ZONE, accepts, until
from tests.records.samples import new_database, url_of
from tests.servers import RunningServer

GOOD = {"model": "sim/good", "max_tokens": 40}
AGENTS: dict[str, dict[str, Any]] = {
    "capped": {**GOOD, "budget": {"daily_usd": "0.0001", "enforcement": "hard"}},
    "own": {**GOOD, "max_cost_usd": "0.00001"},
    "looping": {**GOOD, "guard": {"max_iterations": 1}},
    "costly": {**GOOD, "guard": {"max_cost_usd": "0.0001"}},
    "breaking": {
        "model": "sim/bad",
        "retry": {"max_attempts": 1},
        "breaker": {"consecutive_failures": 1, "cooldown_s": 3600},
    },
    "limited": {**GOOD, "rate_limit": {"requests": 1, "per": "hour", "on_exceeded": "fail"}},
}
SAID = {
    "capped": (
        r"the limit of agent capped on spend per day has no room for a call to sim/good; it resets at .{19} UTC\. "
        r"It has \$0\.0000\d+ of \$0\.0001 left, and a call to sim/good may cost up to \$0\.0000\d+\. "
        r"To do: lower `max_tokens`, raise the limit \(agents\.capped\.budget\.daily_usd, or for this day "
        r"`breakwater limits raise agent:capped --per day --to USD --reason WHY`\), or wait until it resets\."
    ),
    "own": (
        r"a call to sim/good does not fit under the job's own limit \(max_cost_usd\)\. The job has cost \$0\.00, a "
        r"call to sim/good may cost up to \$0\.0000\d+, and agents\.own\.max_cost_usd is \$0\.00001\. "
        r"To do: lower `max_tokens`, or raise agents\.own\.max_cost_usd\."
    ),
    "looping": (
        r"task t is stopped by the guard of agent looping \(max_iterations: it has reached its limit of iterations\) "
        r"until an operator resets it; other work needs another task_id\. 1 iteration \(limit: 1\)\. "
        r"To do: look at its last executions; `breakwater guards reset t` resumes it, and "
        r"agents\.looping\.guard\.max_iterations sets the limit \(`preset: agent-run` allows 100\)\."
    ),
    "costly": (
        r"task u is stopped by the guard of agent costly \(max_cost: .*\) until .*\. "
        r"\$0\.0000\d+ spent, and the next call may cost up to \$0\.0000\d+ \(limit: \$0\.0001\)\. "
        r"To do: .*`breakwater guards reset u` resumes it, and agents\.costly\.guard\.max_cost_usd sets the limit\."
    ),
    "breaking": (
        r"the breaker of agent breaking for sim/bad is open until .{19} UTC\. 1 job failed \(threshold: 1\)\. "
        r"To do: look at `breakwater executions --agent=breaking --since=1h` and at the provider's status page; "
        r"`breakwater breakers reset breaking sim/bad` admits calls now\."
    ),
    "limited": (
        r"the limit of agent limited on requests per hour has no room for this call; try again in \d+ s\. It is 1 "
        r"requests per hour, of which 0 are left\. To do: wait, or raise agents\.limited\.rate_limit\.requests, or for "
        r"some time `breakwater limits raise agents\.limited\.rate_limit\.requests --to AMOUNT --until WHEN "
        r"--reason WHY`\."
    ),
}
ALERTS = {
    "capped": "budget_hard_cap",
    "looping": "guard_tripped",
    "costly": "guard_tripped",
    "breaking": "breaker_open",
}
STATUSES = {"capped": 429, "own": 429, "looping": 403, "costly": 403, "breaking": 503, "limited": 429}
SERVICES = ("worker", "breaker", "budget", "sink", "request", "alerter", "console")


def steady(text: str) -> str:
    """A text in one line, without the waits and times that differ between two refusals."""
    return re.sub(r"in \d+ s|until .{19} UTC", "later", " ".join(text.split()))


async def test_a_refusal_is_explained_in_the_same_words_everywhere(
    tmp_path: Path, own_nats_server: RunningServer, own_redis_server: RunningServer, clickhouse_server: RunningServer
) -> None:
    port, console_port = free_port(), free_port()
    keys, config = tmp_path / "api_keys.json", tmp_path / "breakwater.yaml"
    operator, program = create_key(keys, "ann"), create_key(keys, "app", scopes=("submit",))
    variables = {
        "BREAKWATER_CONFIG": str(config),
        "BREAKWATER_NATS_URL": own_nats_server.url,
        "BREAKWATER_REDIS_URL": own_redis_server.url,
        "BREAKWATER_HTTP_PORT": str(port),
        "BREAKWATER_CONSOLE_PORT": str(console_port),
        "BREAKWATER_REQUEST_URL": f"http://127.0.0.1:{port}",
        "BREAKWATER_URL": f"http://127.0.0.1:{port}",
        "BREAKWATER_API_KEYS_FILE": str(keys),
        "BREAKWATER_API_KEY": operator,
    }
    async with (
        new_database(clickhouse_server.url) as analytics,
        running_plane(
            tmp_path,
            nats_url=own_nats_server.url,
            redis_url=own_redis_server.url,
            script={"models": {"sim/good": model(), "sim/bad": model({"rate": 1.0, "status": 500})}},
            agents=AGENTS,
            services=(),
            environment=variables | {"BREAKWATER_CLICKHOUSE_URL": url_of(analytics, clickhouse_server)},
            budgets={"timezone": ZONE.key},
        ) as plane,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        aiohttp.ClientSession(f"http://127.0.0.1:{console_port}", cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser,
    ):
        for service in SERVICES:
            plane.start(service)
        for listening in (port, console_port):
            await until(lambda at=listening: accepts("127.0.0.1", at), what="the services to listen")
        for service in SERVICES[:4]:
            await plane.ready(service)
        await until(http_ready("127.0.0.1", port, "/readyz"), what="the API to accept jobs")

        async def asked(method: str, path: str, key: str, body: Any = None, **headers: str) -> tuple[int, Any]:
            given = {"Authorization": f"Bearer {key}", **headers}
            async with http.request(method, path, json=body, headers=given) as response:
                return response.status, await response.json()

        async def submitted(agent: str, key: str) -> dict[str, Any]:
            job = {"agent": agent, "prompt": "x" * 300, "task_id": {"looping": "t", "costly": "u"}.get(agent)}
            job = {name: value for name, value in job.items() if value is not None}
            status, result = await asked("POST", "/api/v1/jobs?wait_s=30", key, job)
            assert status == 200, result
            return result

        async def refused(agent: str, key: str = operator) -> dict[str, Any]:
            for _ in range(4):
                result = await submitted(agent, key)
                if result["reason"] not in {None, "error"}:
                    return result
            raise AssertionError(f"no call of {agent} is refused")

        def command(*arguments: str) -> subprocess.CompletedProcess[str]:
            return run_command(*arguments, environment=plane.environment)

        results = {agent: await refused(agent) for agent in AGENTS}
        said = {agent: f"{one['error']['message']}. {one['error']['figures']}" for agent, one in results.items()}
        for agent, text in said.items():
            assert re.fullmatch(SAID[agent], text), text

        async with browser.post("/sign-in", data={"key": operator, "next": "/"}) as response:
            assert response.status == 200
        for agent, text in said.items():
            execution_id = results[agent]["execution_id"]
            _, again = await asked("GET", f"/api/v1/jobs/{execution_id}", operator)
            assert again["error"] == results[agent]["error"]

            # A program is shown the rule, and no figure. Its tasks are its own, and a breaker that is open for the
            # operator alone lets its calls pass.
            readers = {operator: text}
            if agent != "breaking":
                of_program = (await refused(agent, program))["error"]
                readers[program] = of_program["message"]
                assert steady(of_program["message"]) == steady(results[agent]["error"]["message"])
                assert of_program["figures"] is None
            task = {"looping": {"task_id": "t"}, "costly": {"task_id": "u"}}.get(agent, {})
            chat = {"model": agent, "messages": [{"role": "user", "content": "x" * 300}], "breakwater": task}
            for key, shown in readers.items():
                status, answer = await asked("POST", "/v1/chat/completions", key, chat)
                assert (status, steady(answer["error"]["message"])) == (STATUSES[agent], steady(shown))

            async def recorded(at: str = execution_id) -> dict[str, Any] | None:
                ran = await asyncio.to_thread(command, "executions", at, "--json")
                found = json.loads(ran.stdout) if ran.returncode == 0 else None
                return found if found is not None and found["attempts"] else None

            assert (await until(recorded, what="the record"))["error"]["message"] == text
            options = [f"--task-id={task['task_id']}"] if task else []
            ran = await asyncio.to_thread(command, "submit", agent, "x" * 300, *options)
            assert steady(text) in steady(ran.stderr)
            async with browser.get(f"/executions/{execution_id}") as response:
                page = " ".join(unescape(re.sub(r"<[^>]*>", " ", await response.text())).split())
            assert " ".join(text.split()) in page

        for agent, event in ALERTS.items():

            async def alerted(agent: str = agent, event: str = event) -> list[str]:
                _, found = await asked("GET", f"/api/v1/alerts?agent={agent}&event={event}", operator)
                return [alert["text"] for alert in found["alerts"]]

            texts = await until(alerted, what=f"the alert {event}")
            assert any(steady(said[agent])[1:] in steady(text) for text in texts), texts

        async def own_alert() -> dict[str, Any] | None:
            _, found = await asked("GET", "/api/v1/alerts?agent=own", operator)
            return next(iter(found["alerts"]), None)

        assert results["own"]["error"]["message"] in (await until(own_alert, what="the own alert"))["text"]
