"""The health of agents and models: the same word and the same reason wherever it is shown."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from urllib.parse import quote

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port
from tests.commands import run_command
from tests.flow.fixtures import StartPlane
from tests.flow.kit import model
from tests.helpers import until
from tests.records.samples import new_database, url_of
from tests.server_sources import RunningServer
from tests.services.console.conftest import Console, Page

MODELS = {
    "sim/refused": model({"requests": [1, 100], "status": 401}),
    "sim/flaky": model({"requests": [1, 11], "status": 500}, {"requests": [19, 19], "status": 500}),
    "sim/recovers": model({"requests": [1, 2], "status": 500}),
    "sim/down": model({"requests": [1, 100], "status": 500}),
    "sim/good": model(),
}
ONE_TRY = {"retry": {"max_attempts": 1}}
GUARDED = {"breaker": {"consecutive_failures": 3, "cooldown_s": 600}}
AGENTS: dict[str, Any] = {
    # A refused key is not counted by the breaker, which stays closed.
    "wrong-key": {"model": "sim/refused", **GUARDED, **ONE_TRY},
    "flaky": {"model": "sim/flaky", "breaker": "off", **ONE_TRY},
    "recovered": {"model": "sim/recovers", **GUARDED, **ONE_TRY},
    "opened": {"model": "sim/down", **GUARDED, **ONE_TRY},
    "saved": {"model": "sim/refused", "fallback_models": ["sim/good"], **GUARDED, **ONE_TRY},
    "fine": {"model": "sim/good", **GUARDED, **ONE_TRY},
    "idle": {"model": "sim/good", **GUARDED},
    "too-dear": {"model": "sim/good", "budget": {"daily_usd": "0.000000001", "enforcement": "hard"}, **GUARDED},
}
JOBS = {"wrong-key": 12, "flaky": 19, "recovered": 3, "opened": 3, "saved": 1, "fine": 2}
OPEN = r"breaker open until \d\d:\d\d:\d\d UTC"
UNCALLED = ("healthy", "no calls yet")
OF_AGENTS = {
    "wrong-key": ("unhealthy", "12 calls failed in a row"),
    "flaky": ("degraded", "12 of the last 19 calls failed"),
    "recovered": ("healthy", "the last call succeeded; 2 of the last 3 did not"),
    "opened": ("unhealthy", OPEN),
    # Its jobs succeed, with the fallback model.
    "saved": ("healthy", "1 of the last 2 calls succeeded"),
    "fine": ("healthy", "2 of the last 2 calls succeeded"),
    "idle": UNCALLED,
    "too-dear": ("unhealthy", "no call fits under a hard limit"),
}
OF_MODELS = {
    ("wrong-key", "sim/refused"): OF_AGENTS["wrong-key"],
    ("flaky", "sim/flaky"): OF_AGENTS["flaky"],
    ("recovered", "sim/recovers"): OF_AGENTS["recovered"],
    ("opened", "sim/down"): OF_AGENTS["opened"],
    ("saved", "sim/refused"): ("degraded", "the last call failed"),
    ("saved", "sim/good"): ("healthy", "the last call succeeded"),
    ("fine", "sim/good"): OF_AGENTS["fine"],
    ("idle", "sim/good"): UNCALLED,
    ("too-dear", "sim/good"): UNCALLED,
}
PROVIDERS = {
    "sim/refused": ("degraded", "wrong-key: 12 calls failed in a row", "0 %"),
    "sim/flaky": (*OF_AGENTS["flaky"], "36.8 %"),
    "sim/recovers": (*OF_AGENTS["recovered"], "33.3 %"),
    "sim/down": (*OF_AGENTS["opened"], "0 %"),
    "sim/good": ("healthy", "healthy for all agents", "100 %"),
}


WITH_PAGES = ("opened", "saved")
"""The agents whose own pages are read: with an open breaker, and with two models. Lists show all agents."""


async def command(environment: dict[str, str], *arguments: str) -> str:
    ran = await asyncio.to_thread(run_command, *arguments, environment={**environment, "COLUMNS": "300"})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def row_of(page: Page, *names: str) -> str:
    """The words of the row of a table that has all of these."""
    rows = [Page(200, {}, row, "").words for row in re.findall(r"<tr.*?</tr>", page.text, re.DOTALL)]
    found = [row for row in rows if all(f" {name} " in f" {row} " for name in names)]
    assert len(found) == 1, (names, found)
    return found[0]


async def test_health_is_the_same_in_api_cli_console_and_metrics(
    start_plane: StartPlane, tmp_path: Any, clickhouse_server: RunningServer
) -> None:
    port, console_port = free_port(), free_port()
    key = create_key(tmp_path / "keys.json", "test")
    url = f"http://127.0.0.1:{port}"
    environment = {
        "BREAKWATER_HTTP_PORT": str(port),
        "BREAKWATER_REQUEST_URL": url,
        "BREAKWATER_CONSOLE_PORT": str(console_port),
        "BREAKWATER_API_KEYS_FILE": str(tmp_path / "keys.json"),
    }
    services = ("request", "console", "worker", "breaker", "budget", "sink")
    async with (
        new_database(clickhouse_server.url) as analytics,
        start_plane(
            MODELS,
            AGENTS,
            services=services,
            environment={**environment, "BREAKWATER_CLICKHOUSE_URL": url_of(analytics, clickhouse_server)},
        ) as plane,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http,
    ):
        for agent, jobs in JOBS.items():
            for number in range(jobs):  # one after the other
                await plane.publish({"agent": agent, "job_id": f"{agent}-{number}", "prompt": "x"})
                await plane.result(f"{agent}-{number}")

        async def asked(path: str) -> Any:
            async with http.get(f"{url}{path}", headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == 200
                return json.loads(await response.text()) if path.startswith("/api/") else await response.text()

        def is_as_expected(shown: dict[Any, tuple[str, str]], expected: dict[Any, tuple[str, str]]) -> bool:
            return shown.keys() == expected.keys() and all(
                shown[one][0] == health and re.fullmatch(reason, shown[one][1])
                for one, (health, reason) in expected.items()
            )

        async def stored() -> bool:
            calls = await analytics.query("SELECT count() FROM attempts FINAL WHERE NOT short_circuited")
            return calls.rows[0][0] == sum(JOBS.values()) + 1

        async def settled() -> Any:
            agents = await asked("/api/v1/agents")
            healths = {one["agent_id"]: (one["health"], one["health_reason"]) for one in agents}
            return agents if is_as_expected(healths, OF_AGENTS) else None

        await until(stored, what="the record of all calls")
        agents = await until(settled, what="the health of all agents")
        of_models = {
            (one["agent_id"], of["model"]): (of["health"], of["health_reason"])
            for one in agents
            for of in one["models"]
        }
        assert is_as_expected(of_models, OF_MODELS), of_models
        of_breakers = {
            (one["agent"], one["model"]): (one["health"], one["health_reason"])
            for one in (await asked("/api/v1/breakers"))["breakers"]
        }
        assert of_breakers == {one: health for one, health in of_models.items() if one[0] != "flaky"}

        cli = {"BREAKWATER_URL": url, "BREAKWATER_API_KEY": key}
        assert json.loads(await command(cli, "agents", "--json")) == agents
        lines = [" ".join(line.split()) for line in (await command(cli, "agents")).splitlines()[1:]]
        health_of = {one["agent_id"]: (one["health"], one["health_reason"]) for one in agents}
        shown = [
            health
            for one in agents
            for health in (health_of[one["agent_id"]], *((of["health"], of["health_reason"]) for of in one["models"]))
        ]
        assert len(lines) == len(shown)
        for line, (health, reason) in zip(lines, shown, strict=True):
            assert line.split()[1] == health, line
            assert line.endswith(reason), line
        breakers = [line.split() for line in (await command(cli, "breakers")).splitlines()[1:]]
        assert {(agent, name): health for agent, name, _, health, *_ in breakers} == {
            one: health for one, (health, _) in of_breakers.items()
        }

        async def measured() -> dict[str, str]:
            families = text_string_to_metric_families(await asked("/metrics"))
            samples = [one for family in families for one in family.samples if one.name == "breakwater_agent_health"]
            return {one.labels["agent"]: one.labels["health"] for one in samples if one.value == 1}

        async def are_measured() -> bool:
            return await measured() == {agent: health for agent, (health, _) in OF_AGENTS.items()}

        await until(are_measured, what="the metrics")

        await plane.ready("console")
        console = Console(f"http://127.0.0.1:{console_port}", http, None, analytics)  # type: ignore[arg-type]
        assert (await console.sign_in(key)).status == 303
        overview, all_agents, all_breakers = [await console.get(path) for path in ("/", "/agents", "/breakers")]
        for agent, (health, reason) in health_of.items():
            assert f"{agent} {health} {reason} " in row_of(all_agents, agent)
            if agent not in WITH_PAGES:
                continue
            page = await console.get(f"/agents/{agent}")
            assert f"{agent} {health} {reason} " in page.words
            models = Page(200, {}, page.text.partition('id="models"')[2].partition("</section>")[0], "")
            for (name, of), its in of_models.items():
                if name == agent:
                    assert " ".join(its) in row_of(models, of)
        for (agent, name), (health, reason) in of_breakers.items():
            # Other cells of the row say that the breaker is open, and until when.
            said = health if reason.startswith("breaker open") else f"{health} {reason}"
            assert f" {said} " in row_of(all_breakers, agent, name)
            if agent in WITH_PAGES:
                page = await console.get(f"/breakers/one?agent={agent}&model={quote(name, safe='')}")
                assert f"Health {health} {reason} " in page.words
        providers = Page(200, {}, overview.text.partition('id="providers"')[2].partition("</details>")[0], "")
        for name, (health, reason, available) in PROVIDERS.items():
            assert re.search(f"{health} {reason} ({available}) ", row_of(providers, name, "sim"))
