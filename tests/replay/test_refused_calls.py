"""Calls that were refused, and that another policy lets through."""

from __future__ import annotations

import yaml

from breakwater.config import parse_config
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
