"""The stages of a plan's jobs in Redis, and the changes that they make."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.rules.plans import plan_state, state_by_stages
from breakwater.jobs.store.plans import NotedJob, PlanMove, Plans, TooManyPlansError
from breakwater.kernel.redis.connection import Redis

NOTED = NotedJob(datetime(2026, 11, 28, tzinfo=UTC), "writer", None, "app", "j", ("first", "second"))


async def test_whoever_changes_the_state_of_a_plan_learns_of_it_also_after_a_crash(redis: Redis) -> None:
    plans = Plans(redis)
    assert await plans.announce("p", "app") == PlanMove(1, None, "draft")
    assert await plans.announce("p", "app") is None
    assert await plans.change("p", "pending", {"a": NOTED, "b": NOTED}, "app") == PlanMove(3, "draft", "pending")
    assert await plans.change("p", "pending", {"b": NOTED}) is None
    running = PlanMove(4, "pending", "running")
    assert await plans.change("p", "running", {"a": NOTED}) == running
    assert await plans.change("p", "running", {"a": NOTED}) == running, "its worker crashed, and it may be unpublished"
    assert await plans.change("p", "pending", {"a": NOTED}) is None, "it has begun"
    assert await plans.change("p", "succeeded", {"a": None}) is None, "the other job is open"
    assert await plans.change("p", "dead_lettered", {"b": None}) == PlanMove(6, "running", "partial")
    assert await plans.change("p", "succeeded", {"b": None}) is None, "it has ended"
    assert await plans.change("p", "running", {"c": NOTED}) == PlanMove(7, "partial", "running")
    known = (await plans.notes_of(["p"]))["p"]
    assert (known.jobs, known.announced) == (dict.fromkeys("abc", NOTED), {})
    assert known.begun == {"a", "b", "c"}


async def test_of_a_plan_that_redis_has_lost_no_end_is_made_up(redis: Redis) -> None:
    plans = Plans(redis)
    await plans.change("p", "pending", {"a": NOTED, "b": NOTED})
    await redis.client.flushall()
    assert await plans.change("p", "succeeded", {"a": None}) is None
    assert (await plans.notes_of(["p"]))["p"].jobs == {}


async def test_jobs_that_are_withdrawn_count_no_more(redis: Redis) -> None:
    plans = Plans(redis)
    await plans.change("p", "pending", {"a": NOTED, "b": NOTED})
    await plans.withdraw("p", ["b"])
    assert await plans.change("p", "succeeded", {"a": None}) == PlanMove(2, "pending", "succeeded")


async def test_a_refused_plan_has_failed_until_a_job_of_it_is_accepted(redis: Redis) -> None:
    plans = Plans(redis)
    assert await plans.announce("p", "app", "unwell") == PlanMove(1, None, "failed")
    assert await plans.change("p", "pending", {"a": NOTED}, "app") == PlanMove(2, "failed", "pending")
    assert await plans.announce("p", "app", "unwell") is None, "its job counts"


async def test_announcements_are_limited_for_each_caller(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.jobs.store.plans.MAX_ANNOUNCED", 2)
    plans = Plans(redis)
    for plan_id in ("p", "q", "q"):
        await plans.announce(plan_id, "app")
    with pytest.raises(TooManyPlansError):
        await plans.announce("r", "app", "unwell")
    assert await redis.client.exists("bw:plan:r") == 0
    await plans.announce("r", "another")
    await plans.change("q", "pending", {"a": NOTED}, "app")
    assert await plans.announce("s", "app") is not None


@given(st.lists(st.sampled_from(["pending", "running", "succeeded", "dead_lettered"])), st.booleans())
def test_numbers_of_stages_make_the_same_state_as_the_jobs(jobs: list[str], refused: bool) -> None:
    names = ("pending", "running", "succeeded", "dead_lettered")
    stages = [jobs.count(name) for name in names]
    assert state_by_stages(stages, refused=refused) == plan_state(jobs, refused=refused)  # type: ignore[arg-type]
