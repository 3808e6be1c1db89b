"""Calls that were never made, and that another policy makes."""

from __future__ import annotations

import random
from typing import Any

import yaml

from breakwater.config import parse_config
from breakwater.kernel.types import ms_from_time
from breakwater.replay.policy import policy_of
from breakwater.replay.rules.engine import Replay, ReplayedJob
from breakwater.replay.rules.world import World
from tests.replay.histories import Model, every, jobs_at, lived


def config(daily_usd: float) -> str:
    agent = {"model": "p/small", "budget": {"daily_usd": daily_usd, "enforcement": "hard"}}
    return yaml.safe_dump({"providers": {"p": {"base_url": "http://127.0.0.1:9/v1"}}, "agents": {"writer": agent}})


def test_a_call_that_a_larger_limit_lets_through_counts_with_its_cost_and_holds_no_more() -> None:
    days = lived(config(0.05), jobs_at("writer", every(3, days=2, hours=1)), [Model("p/small", 0.01)])
    before, after = (policy_of(parse_config(config(usd))) for usd in (0.05, 0.12))
    ended: list[ReplayedJob] = []
    world = World(logged.attempt for job in days.jobs for logged in job.attempts)
    replay = Replay(after, before, days.changes, world, on_end=ended.append)
    replay.run(days.jobs)
    replay.finish()
    # Each call reserves 2 cents and costs 1: the last that fits under 12 cents begins at 10.
    assert [sum(job.record.reason is None for job in days.jobs), len(days.jobs)] == [2 * 4, 40]
    assert sum(run.reason is None for run in ended) == 2 * 11


def test_a_job_that_was_refused_tries_a_fallback_that_its_agent_lacked() -> None:
    def of(**writer: Any) -> str:
        agents = {"writer": {"model": "p/small", "breaker": {"consecutive_failures": 1}, **writer}}
        agents["reader"] = {"model": "p/mini"}
        return yaml.safe_dump({"providers": {"p": {"base_url": "http://127.0.0.1:9/v1"}}, "agents": agents})

    jobs = [*jobs_at("writer", every(0.1, days=1, hours=0.2)), *jobs_at("reader", every(1, days=1, hours=0.2))]
    days = lived(of(), jobs, [Model("p/small", 0.01, lambda _: 1.0), Model("p/mini", 0.01)])
    refused = {job.record.execution_id for job in days.jobs if job.record.reason == "breaker_open"}
    before, after = (policy_of(parse_config(text)) for text in (of(), of(fallback_models=["p/mini"])))
    ended: dict[str, ReplayedJob] = {}
    world = World(logged.attempt for job in days.jobs for logged in job.attempts)
    replay = Replay(
        after, before, days.changes, world, on_end=lambda run: ended.setdefault(run.job.record.execution_id, run)
    )
    replay.run(days.jobs)
    findings = replay.finish()
    assert refused
    assert {ended[name].chosen_model for name in refused} == {"p/mini"}
    assert findings.followed["time used up"] == 0


def test_a_call_is_drawn_from_calls_of_its_agent_if_some_are_near() -> None:
    times = every(2, days=1, hours=4)
    prices = {"writer": 0.03, "reader": 0.01}
    chance = random.Random(1)
    calls = [
        Model("p/small", usd).call(job, job.queued_at, chance)
        for agent, usd in prices.items()
        for job in jobs_at(agent, times if agent == "reader" else times[60:])
    ]
    world = World(calls)

    def drawn(agent: str, number: int) -> set[int | None]:
        draws = (world.draw("p/small", agent, ms_from_time(times[number]), str(seed)) for seed in range(64))
        return {draw.cost for draw in draws if draw is not None}

    assert (drawn("reader", 90), drawn("writer", 90)) == ({10_000_000}, {30_000_000})
    assert drawn("writer", 10) == {10_000_000}
    assert drawn("other", 90) == {10_000_000, 30_000_000}
