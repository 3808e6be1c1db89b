"""The page of configs, and the result of a plan on it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from breakwater.replay.contract import ConfigPlanLine
from tests.cli.api_stub import problem
from tests.replay.test_report import made
from tests.services.console.conftest import Console, key_with


def lines(*of_response: ConfigPlanLine) -> str:
    """A response of the HTTP API."""
    return "".join(f"{line.model_dump_json(exclude_defaults=True)}\n" for line in of_response)


async def test_a_plan_is_shown_beside_its_form(console: Console) -> None:
    report = made(newly_refused=3, spend=(4_000_000, 2_000_000))
    progress = ConfigPlanLine(progress=0.5, jobs=600)
    console.interface.answers["POST config/plan"] = (200, lines(progress, ConfigPlanLine(report=report)))
    more = {"renames": "old=new, a = b,", "unknown": "exclude"}
    page = await console.submit("/config", "/config", config="agents: {}", window="7d", agent=" writer ", **more)
    assert page.status == 200
    assert "3 more of 1,204 jobs would have been refused; spend −50 % ($0.004 → $0.002)" in page.words
    assert ">agents: {}</textarea>" in page.text
    _, asked = console.interface.asked[-1]
    assert (asked["config"], asked["version"], asked["agent"]) == ("agents: {}", None, "writer")
    assert (asked["renames"], asked["unknown"]) == ({"old": "new", "a": "b"}, "exclude")
    assert 'value="old=new, a = b,"' in page.text
    assert '<option value="exclude" selected>' in page.text
    length = datetime.fromisoformat(asked["until"]) - datetime.fromisoformat(asked["since"])
    assert length == timedelta(days=7)
    assert datetime.now(UTC) - datetime.fromisoformat(asked["until"]) < timedelta(minutes=5)


async def test_a_script_gets_the_progress_and_then_the_result(console: Console) -> None:
    progress = ConfigPlanLine(progress=0.5, jobs=600)
    console.interface.answers["POST config/plan"] = (200, lines(progress, ConfigPlanLine(report=made())))
    opened = await console.get("/config")
    answer = await console.post("/config", {"csrf": opened.csrf, "version": "v1"}, Accept="application/json")
    first, last = map(json.loads, answer.text.splitlines())
    assert first == {"progress": 0.5, "jobs": 600}
    assert "would have stayed" in last["html"]


async def test_why_there_is_no_result_is_said(console: Console) -> None:
    assert "Paste a config, or choose a version." in (await console.submit("/config", "/config")).words
    for renames, said in (("old", "'old' names no two agents"), ("a=b,a=c", "'a' has two new names, 'b' and 'c'")):
        assert (
            f"Renamed agents: {said}" in (await console.submit("/config", "/config", config="x", renames=renames)).words
        )
    for code, said in (
        ("invalid_config", "agents.writer.modle: is not a known setting (line 2) <b>"),
        ("unavailable", "ClickHouse does not answer"),
    ):
        console.interface.answers["POST config/plan"] = (422, problem(code, said))
        page = await console.submit("/config", "/config", config="x")
        assert said in page.words
        assert "<b>\n" not in page.text
    console.interface.answers["POST config/plan"] = (503, problem("too_many_config_plans", "…"))
    assert "one is at a time" in (await console.submit("/config", "/config", config="x")).words


async def test_who_only_reads_tries_nothing(console: Console) -> None:
    console.interface.answers["GET key"] = key_with("read")
    console.http.cookie_jar.clear()
    await console.sign_in()
    page = await console.get("/config")
    assert "with the scope operate you could try a config" in page.words
    assert "textarea" not in page.text
