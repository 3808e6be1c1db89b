"""The record of a storm, replayed under the policy it ran under, and under others."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from breakwater.breakers.settings import BreakerRules
from breakwater.cli.main import main
from breakwater.limits.contract import LimitEvent, LimitSettings
from breakwater.limits.rules.budget import LimitTable
from breakwater.replay.contract import ConfigPlan
from breakwater.replay.policy import policy_of
from breakwater.replay.records import read_stretch, replay_records, stretches
from breakwater.replay.rules.engine import ReplayedEvent, ReplayedJob
from breakwater.replay.rules.history import AgentPolicy, Changes, Policy, RecordedJob
from breakwater.replay.rules.identity import UNEXPLAINED, identity, share_of_unequal
from tests.docs.markdown import ROOT, all_code
from tests.finished_demo import FinishedDemo
from tests.records.samples import new_database, url_of
from tests.replay.storms import Storm, config_of, replayed, rows_of, storm_of
from tests.replay.test_policies import job_of, timed
from tests.replay.test_unchanged import differences_of
from tests.servers import RunningServer

CONFIG_PAGE = ROOT / "docs" / "config.md"
PIPELINE = "--markdown --max-newly-refused 0"

pytestmark = pytest.mark.long(about_s=20, together="console")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def storm(finished_demo: FinishedDemo, tmp_path_factory: pytest.TempPathFactory) -> Storm:
    return await storm_of(finished_demo, tmp_path_factory.mktemp("storm"))


@pytest.fixture
def policy(finished_demo: FinishedDemo) -> Policy:
    return policy_of(config_of(finished_demo))


def with_agent(policy: Policy, name: str, change: Callable[[AgentPolicy], AgentPolicy]) -> Policy:
    return replace(policy, agents={**policy.agents, name: change(policy.agents[name])})


def test_the_policy_of_that_time_decides_all_as_it_was_decided(storm: Storm, policy: Policy) -> None:
    jobs, changes = storm
    outcome, ended = replayed(storm, policy)
    parts = identity(jobs, changes, outcome)
    unexplained = {subject: part.examples for subject, part in parts.items() if part.unequal[UNEXPLAINED]}
    assert unexplained == {}
    # Two clocks and a loaded machine may leave the order of two events open, and no more than that.
    assert share_of_unequal(parts.values()) <= 0.01, parts
    assert len(ended) == len(jobs)
    # There was something to decide.
    assert min(outcome.refusals["breaker_open"], outcome.refusals["budget_exceeded"]) > 0
    assert {event.to_state for event in outcome.transitions} == {"open", "half_open", "closed"}
    assert parts["thresholds"].equal >= 2
    assert parts["alerts"].equal >= 5
    assert "deployment_failing" in {alert.event for alert in outcome.alerts}


def test_without_breakers_nothing_is_refused_by_them_and_more_calls_fail(storm: Storm, policy: Policy) -> None:
    agents = {name: replace(agent, breaker=None) for name, agent in policy.agents.items()}
    outcome, ended = replayed(storm, replace(policy, agents=agents), policy)
    assert outcome.transitions == []
    attempts = [attempt for run in ended for attempt in run.attempts]
    assert "breaker_open" not in {attempt.refused_reason for attempt in attempts}
    was = Counter(logged.attempt.outcome for job in storm[0] for logged in job.attempts)
    assert Counter(attempt.outcome for attempt in attempts)["error"] > was["error"]
    assert sum(run.drawn for run in ended) > 0


def test_a_breaker_of_one_failure_opens_more_often_and_refuses_more(storm: Storm, policy: Policy) -> None:
    strict = with_agent(
        policy,
        "content-writer",
        lambda agent: replace(agent, breaker=BreakerRules(consecutive_failures=1, cooldown_s=9)),
    )
    outcome, ended = replayed(storm, strict, policy)
    before, _ = replayed(storm, policy)
    opened = [event.reason for event in outcome.transitions if event.to_state == "open"]
    assert "1 job failed (threshold: 1)" in opened
    refused = [attempt for run in ended for attempt in run.attempts if attempt.refused_reason == "breaker_open"]
    assert len(refused) > before.refusals["breaker_open"]


def test_without_caps_what_was_refused_is_called_and_paid(storm: Storm, policy: Policy) -> None:
    free = replace(policy, limits=LimitTable(agents=policy.limits.agents))
    outcome, ended = replayed(storm, free, policy)
    assert outcome.budgets == []
    of_cap = [run for run in ended if run.job.record.agent == "small-budget"]
    assert {run.reason for run in of_cap} == {None}
    was = sum(run.job.record.total_cost or 0 for run in of_cap)
    assert sum(attempt.cost or 0 for run in of_cap for attempt in run.attempts) > was
    assert {run.follows for run in of_cap} == {True, False}


def test_a_smaller_cap_is_reached_earlier_and_refuses_more(storm: Storm, policy: Policy) -> None:
    halved = tuple(
        replace(limit, amount=limit.amount // 2) if limit.id.startswith("agents.small-budget") else limit
        for limit in policy.limits.limits
    )
    outcome, ended = replayed(storm, replace(policy, limits=replace(policy.limits, limits=halved)), policy)
    [before] = [event.at for event in storm[1].budgets if event.kind == "hard_cap"]
    [after] = [event.at for event in outcome.budgets if event.kind == "hard_cap"]
    assert after < before
    refused = Counter(run.reason for run in ended)["budget_exceeded"]
    assert refused > Counter(run.job.record.reason for run in ended)["budget_exceeded"]


def test_a_time_limit_below_the_usual_duration_fails_calls(storm: Storm, policy: Policy) -> None:
    hasty = with_agent(policy, "support-triage", lambda agent: replace(agent, timeout_s=0.05))
    _, ended = replayed(storm, hasty, policy)
    of_agent = [run for run in ended if run.job.record.agent == "support-triage"]
    attempts = [attempt for run in of_agent for attempt in run.attempts]
    assert max(attempt.duration_ms for attempt in attempts) == 50
    assert Counter(attempt.error and attempt.error.kind for attempt in attempts)["timeout"] > 10
    assert Counter(run.reason for run in of_agent)["error"] > 0


def limit_of_nobody(at: datetime) -> LimitEvent:
    """A limit that was set by API."""
    settings = LimitSettings.model_validate({"scope": "key:nobody", "usd": "1", "per": "day", "action": "refuse"})
    return LimitEvent(
        event_id="limit1", kind="created", limit_id="l1", scope="key:nobody", after=settings, by="ann", reason="", at=at
    )


async def test_the_tables_say_of_the_storm_what_the_log_says(
    storm: Storm, policy: Policy, clickhouse_server: RunningServer
) -> None:
    jobs, changes = storm
    since = min(job.record.dispatched_at for job in jobs)
    changes = replace(changes, limits=[limit_of_nobody(since)])
    until = max(job.record.completed_at for job in jobs) + timedelta(seconds=1)
    ended: list[ReplayedJob] = []
    events: list[ReplayedEvent] = []
    async with new_database(clickhouse_server.url) as analytics:
        for table, rows in rows_of((jobs, changes)):
            await analytics.insert(table, rows)
        findings, read_changes = await replay_records(
            analytics, policy, policy, since, until, on_end=ended.append, on_event=events.append
        )
    for event in events:
        findings.add(event)
    assert len(ended) == len(jobs)
    parts = identity(jobs, read_changes, findings)
    # The tables lack the figures and the statistics of refusals.
    unexplained = {subject: part.examples for subject, part in parts.items() if part.unequal[UNEXPLAINED]}
    assert unexplained.keys() <= {"calls"}, unexplained
    assert {difference.kind for difference in findings.differences} <= {"refusal"}
    assert all(run.follows for run in ended)
    assert read_changes.limits == changes.limits
    assert parts["transitions"].equal == len(changes.transitions)


async def test_the_tables_tell_when_a_call_asked_its_task_and_when_that_counted_the_job(
    clickhouse_server: RunningServer,
) -> None:
    jobs = [timed(job_of(1, (0, 500, True), task="t"), 3, 510), job_of(2, (600, 50, True))]
    times = [job.record.dispatched_at for job in jobs]
    async with new_database(clickhouse_server.url) as analytics:
        for table, rows in rows_of((jobs, Changes())):
            await analytics.insert(table, rows)
        read: list[RecordedJob] = []
        for stretch in await stretches(analytics, times[0], times[-1] + timedelta(seconds=1)):
            read += await read_stretch(analytics, stretch)
    assert [_task_times_of(job) for job in read] == [_task_times_of(job) for job in jobs]


def _task_times_of(job: RecordedJob) -> object:
    [logged] = job.attempts
    return logged.asked_ms, logged.attempt.task_asked_at, job.record.task_counted_at


def test_the_command_says_what_would_have_been_and_its_code_whether_that_is_too_much(
    storm: Storm,
    finished_demo: FinishedDemo,
    clickhouse_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    before = tmp_path / "before.yaml"
    shutil.copy(finished_demo.data / "breakwater.yaml", before)
    document = yaml.safe_load(before.read_text())
    document["agents"]["small-budget"]["budget"]["daily_usd"] = "0.0003"
    changed = tmp_path / "breakwater.yaml"
    changed.write_text(yaml.safe_dump(document))
    with asyncio.Runner() as runner:
        database = new_database(clickhouse_server.url)
        analytics = runner.run(database.__aenter__())
        try:
            for table, rows in rows_of(storm):
                runner.run(analytics.insert(table, rows))
            monkeypatch.setenv("BREAKWATER_CLICKHOUSE_URL", url_of(analytics, clickhouse_server))
            asked = ("plan", str(changed), "--before", str(before), "--since", "1h")
            assert main([*asked, "--json"]) == 0
            report = json.loads(capsys.readouterr().out)
            # As in a pipeline: docs/config.md shows it.
            monkeypatch.chdir(tmp_path)
            [command] = {line.lstrip("- run:") for line in all_code(CONFIG_PAGE) if PIPELINE in line}
            words = command[command.index("breakwater plan ") : command.index(" > plan.md")].split()
            assert main(words[1:]) == 1
            markdown, problem = capsys.readouterr()
            none_refused = "--max-newly-refused", "0"
            unchanged = "plan", str(before), "--before", str(before), "--since", "1h", "--json"
            assert main([*unchanged, *none_refused]) == 0
            same = ConfigPlan.model_validate_json(capsys.readouterr().out)
        finally:
            runner.run(database.__aexit__(None, None, None))
    assert report["jobs"] == len(storm[0])
    refused = report["newly_refused"]
    assert 0 < refused["low"] <= refused["after"] <= refused["high"]
    assert float(report["spend"]["after"]) < float(report["spend"]["before"])
    assert {limit["budget"] for limit in report["limits"]} == {"agent:small-budget/daily"}
    assert {job["after"] for job in report["most_changed"]} == {"budget_exceeded"}
    assert f"| jobs newly refused |  | {refused['after']:.0f} |" in markdown
    assert "newly refused, more than --max-newly-refused 0" in problem
    assert differences_of(same) == []
    assert (same.jobs, len(same.limits)) == (report["jobs"], 1)


def test_the_same_replay_finds_the_same(storm: Storm, policy: Policy, tmp_path: Path) -> None:
    agents = {name: replace(agent, breaker=None) for name, agent in policy.agents.items()}
    first, second = (replayed(storm, replace(policy, agents=agents), policy)[0] for _ in range(2))
    assert first == second
