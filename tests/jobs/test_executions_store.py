"""Claims: by a table, and whatever is asked in whatever order, against the real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.executions import (
    KEEP_MS,
    LINGER_MS,
    MAYBE_HELD_MS,
    Claim,
    Claimed,
    ClaimEnded,
    ClaimKept,
    Conflict,
    Executions,
    MaybeHeld,
    SavedProgress,
    Taken,
)
from breakwater.kernel.redis.connection import KEPT_SINCE, Redis, StateUnavailableError
from tests.servers import RunningServer

Value = TypeVar("Value")
SLACK_MS = 1_000


async def pass_time(redis: Redis, claim: Claim, by_ms: int) -> None:
    """Makes what is stored of a claim older, instead of waiting."""
    for name in ("lease_until", "asked_at"):
        if await redis.client.hexists(claim.key, name):
            await redis.client.hincrby(claim.key, name, -by_ms)


async def test_a_job_is_claimed_once_and_whoever_comes_later_waits(redis: Redis) -> None:
    executions, first = Executions(redis), Claim.new("j")
    assert await executions.claim(first) == Claimed(None)
    later = await executions.claim(Claim.new("j"))
    assert isinstance(later, Taken)
    assert (
        LIVENESS.claim_lease_ms + LIVENESS.grace_ms - SLACK_MS
        < later.for_ms
        <= LIVENESS.claim_lease_ms + LIVENESS.grace_ms
    )
    # As after an answer that was lost.
    assert await executions.claim(first) == Claimed(None)


async def test_of_many_messages_with_one_id_one_gets_the_job(redis: Redis) -> None:
    executions = Executions(redis)
    answers = await asyncio.gather(*(executions.claim(Claim.new("j")) for _ in range(100)))
    assert sum(isinstance(answer, Claimed) for answer in answers) == 1


async def test_a_holder_that_renews_keeps_the_job_however_long_and_whoever_asks(redis: Redis) -> None:
    executions, holder = Executions(redis), Claim.new("j")
    await executions.claim(holder, "digest")
    for number in range(6):
        # Redis stood still, or its clock jumped: the lease has ended though the holder lives.
        await pass_time(redis, holder, 10 * LIVENESS.claim_lease_ms)
        asked = await executions.claim(Claim.new("j"), "digest")
        assert isinstance(asked, Taken)
        assert asked.for_ms == LIVENESS.grace_ms
        if number % 2:
            assert await executions.restore(holder, SavedProgress("so far"), "digest")
        else:
            assert await executions.renew([holder]) == [ClaimKept()]


async def test_a_holder_that_is_gone_is_followed_by_who_asks_twice_and_then_fenced_off(redis: Redis) -> None:
    executions, gone, next_one = Executions(redis), Claim.new("j"), Claim.new("j")
    await executions.claim(gone)
    assert await executions.checkpoint(gone, "so far")
    await pass_time(redis, gone, LIVENESS.claim_lease_ms)
    assert isinstance(await executions.claim(next_one), Taken)
    await pass_time(redis, gone, LIVENESS.grace_ms - SLACK_MS)
    assert isinstance(await executions.claim(Claim.new("j")), Taken)
    await pass_time(redis, gone, SLACK_MS)
    assert await executions.claim(next_one) == Claimed("so far")
    assert not await executions.checkpoint(gone, "too late")
    assert await executions.renew([gone, next_one]) == [None, ClaimKept()]
    assert isinstance(await executions.claim(gone), Taken)
    await executions.release(gone)
    await executions.finish(gone)
    assert isinstance(await executions.claim(Claim.new("j")), Taken)
    assert await redis.client.hget(next_one.key, "checkpoint") == "so far"


async def test_a_job_that_is_given_up_is_for_whoever_asks_next(redis: Redis) -> None:
    executions, first = Executions(redis), Claim.new("j")
    await executions.claim(first)
    await executions.checkpoint(first, "so far")
    await executions.release(first)
    assert await executions.claim(Claim.new("j")) == Claimed("so far")
    assert not await executions.checkpoint(first, "")


async def test_a_finished_job_stays_taken_for_a_while_and_then_leaves_nothing_behind(redis: Redis) -> None:
    executions, claim = Executions(redis), Claim.new("j")
    await executions.claim(claim)
    await executions.finish(claim)
    later = await executions.claim(Claim.new("j"))
    assert isinstance(later, Taken)
    assert later.for_ms > LINGER_MS - SLACK_MS
    assert 0 < await redis.client.pttl(claim.key) <= LINGER_MS


async def test_what_redis_has_lost_is_still_that_of_its_holder(redis: Redis) -> None:
    executions, holder = Executions(redis), Claim.new("j")
    await executions.claim(holder, "digest")
    await executions.append_partial(holder, "so ", 1)
    await redis.client.flushall()
    assert await executions.append_partial(holder, "far", 2) == ClaimKept(incomplete=True)
    assert await redis.client.keys("*") == []
    assert await executions.renew([holder]) == [ClaimKept(incomplete=True)]
    assert await executions.append_partial(holder, "far", 2) == ClaimKept(incomplete=True)
    assert isinstance(await executions.claim(Claim.new("j"), "digest"), Taken)
    # It is not released without its checkpoint, either.
    assert await executions.release(holder) == ClaimKept(incomplete=True)
    assert isinstance(await executions.claim(Claim.new("j"), "digest"), Taken)


async def test_its_holder_writes_again_what_redis_has_lost(redis: Redis) -> None:
    executions, holder, progress = Executions(redis), Claim.new("j"), SavedProgress("so far", "so ", 1)
    job: dict[str, Any] = {"tenant": "acme", "task_key": "t", "owner": "o", "run_id": "r"}
    await executions.claim(holder, "digest", **job)
    await executions.checkpoint(holder, "so far")
    await executions.append_partial(holder, "so ", 1)
    saved = await redis.client.hgetall(holder.key)
    for renewed in (False, True):
        await redis.client.flushall()
        if renewed:
            await executions.renew([holder])
        assert await executions.restore(holder, progress, "digest", **job)
        assert (await redis.client.hgetall(holder.key)).keys() == saved.keys()
        assert await executions.renew([holder]) == [ClaimKept()]
    # A message whose answer was lost is repeated, and appended once.
    for _ in range(2):
        assert await executions.append_partial(holder, "far", 2) == ClaimKept()
    assert await executions.partial_output(holder) == ("so far", 2)
    assert await executions.restore(holder, progress, "digest", **job, release=True)
    assert await executions.claim(Claim.new("j"), "another") == Conflict()
    assert await executions.claim(Claim.new("j"), "digest") == Claimed("so far")
    assert not await executions.restore(holder, progress, "digest", **job)


async def test_a_job_that_was_delivered_before_waits_until_its_holder_has_written_its_claim_again(redis: Redis) -> None:
    executions, holder = Executions(redis), Claim.new("j")
    await executions.claim(holder)
    await redis.client.flushall()
    asked = await executions.claim(Claim.new("j"), redelivered=True)
    assert asked == Taken(LIVENESS.grace_ms)
    assert await executions.renew([holder]) == [ClaimKept(incomplete=True)]
    # Of a job that nobody has written again by then, there is no holder.
    assert isinstance(await executions.claim(Claim.new("k"), redelivered=True), Taken)
    await redis.client.incrby(KEPT_SINCE, -LIVENESS.grace_ms)
    assert await executions.claim(Claim.new("k"), redelivered=True) == Claimed(None)
    assert isinstance(await executions.claim(Claim.new("j"), redelivered=True), Taken)


@pytest.mark.parametrize("step", ["checkpoint", "restore", "append_partial", "release"])
async def test_a_claim_that_another_primary_lacks_is_its_holders_unless_it_was_taken_since(
    redis: Redis, step: str
) -> None:
    executions, first, holder = Executions(redis), Claim.new("j"), Claim.new("j")

    async def writes() -> bool:
        match step:
            case "checkpoint":
                return await executions.checkpoint(holder, "so far") == ClaimKept(incomplete=True)
            case "append_partial":
                return await executions.append_partial(holder, "so far", 1) == ClaimKept(incomplete=True)
            case "release":
                return await executions.release(holder) == ClaimKept(incomplete=True)
            case _:
                return await executions.restore(holder, SavedProgress("so far"))

    await executions.claim(first)
    await executions.release(first)
    # The replica received the release, and not the next claim.
    assert not await writes()
    seconds, _ = await redis.client.time()
    await redis.client.set(KEPT_SINCE, (seconds + 1) * 1000)
    assert await writes()
    await redis.client.delete(holder.key)
    await executions.claim(first)
    await executions.release(first)
    await executions.claim(Claim.new("j"))
    assert not await writes()


async def test_a_job_with_another_message_is_new_only_if_redis_has_had_its_data_for_a_while(redis: Redis) -> None:
    executions, holder = Executions(redis), Claim.new("j")
    asked = await executions.claim(Claim.new("k"), checked_since_ms=0)
    kept_since_ms = int(await redis.client.get(KEPT_SINCE))
    assert asked == MaybeHeld(kept_since_ms)
    await executions.claim(holder)
    assert isinstance(await executions.claim(Claim.new("j"), checked_since_ms=0), Taken)
    assert await executions.claim(Claim.new("m"), checked_since_ms=kept_since_ms) == Claimed(None)
    # A message that was delivered before, and comes later than the loss.
    kept_since_ms = await redis.client.incrby(KEPT_SINCE, -LIVENESS.grace_ms)
    seconds, _ = await redis.client.time()
    again = {"redelivered": True, "accepted_s": float(seconds), "delivered_before": True, "checked_since_ms": 0}
    assert await executions.claim(Claim.new("k"), **again) == MaybeHeld(kept_since_ms)
    await redis.client.incrby(KEPT_SINCE, -MAYBE_HELD_MS)
    assert await executions.claim(Claim.new("k"), **again) == Claimed(None)
    assert await executions.claim(Claim.new("l"), checked_since_ms=0) == Claimed(None)


async def test_a_claim_says_where_redis_may_have_lost_a_checkpoint(redis: Redis) -> None:
    executions = Executions(redis)
    seconds, _ = await redis.client.time()
    await redis.client.set(KEPT_SINCE, (seconds - 60) * 1000)

    async def claim(job: str, accepted_s: float, *, delivered_before: bool) -> Claimed | Taken | Conflict | MaybeHeld:
        return await executions.claim(
            Claim.new(job), accepted_s=accepted_s, redelivered=True, delivered_before=delivered_before
        )

    assert await claim("younger", seconds - 59, delivered_before=True) == Claimed(None)
    assert await claim("parked", seconds - 61, delivered_before=False) == Claimed(None)
    assert await claim("older", seconds - 61, delivered_before=True) == Claimed(None, incomplete=True)
    # It is said again until a checkpoint is saved.
    older, again = Claim.new("older"), Claim.new("older")
    await redis.client.hdel(older.key, "token")
    assert await executions.claim(older, redelivered=True) == Claimed(None, incomplete=True)
    await executions.checkpoint(older, "so far")
    await executions.release(older)
    assert await executions.claim(again, redelivered=True) == Claimed("so far")


async def test_a_clock_that_was_ahead_as_redis_was_emptied_makes_no_job_wait(redis: Redis) -> None:
    executions, claim = Executions(redis), Claim.new("j")
    seconds, _ = await redis.client.time()
    await redis.client.set(KEPT_SINCE, (seconds + 3600) * 1000)
    assert await executions.claim(claim, redelivered=True) == Taken(LIVENESS.grace_ms)
    await redis.client.incrby(KEPT_SINCE, -LIVENESS.grace_ms)
    assert await executions.claim(claim, redelivered=True) == Claimed(None)


async def test_a_job_that_was_taken_over_is_never_that_of_its_first_holder_again(redis: Redis) -> None:
    executions, stopped, next_one = Executions(redis), Claim.new("j"), Claim.new("j")
    await executions.claim(stopped, "digest")
    await pass_time(redis, stopped, LIVENESS.claim_lease_ms)
    await executions.claim(next_one, "digest")
    await pass_time(redis, stopped, LIVENESS.grace_ms)
    assert await executions.claim(next_one, "digest") == Claimed(None)
    await executions.finish(next_one)
    assert await redis.client.pttl(next_one.key) > 100 * LINGER_MS
    assert await executions.renew([stopped]) == [None]


async def test_an_id_is_that_of_one_job(redis: Redis) -> None:
    executions = Executions(redis)
    await executions.claim(Claim.new("j"), "one")
    assert await executions.claim(Claim.new("j"), "another") == Conflict()


async def test_scripts_are_learned_again_by_a_server_that_forgot_them(redis: Redis) -> None:
    executions = Executions(redis)
    await executions.claim(Claim.new("a"))
    await redis.client.script_flush()
    assert await executions.claim(Claim.new("b")) == Claimed(None)


async def test_a_redis_that_is_away_is_reported_as_such() -> None:
    away = Redis("redis://127.0.0.1:1/0")
    with pytest.raises(StateUnavailableError, match="did not answer"):
        await Executions(away).claim(Claim.new("j"))
    await away.close()


WORKERS = st.integers(0, 2)


class Claims(RuleBasedStateMachine):
    """Three handlings of one job against a model of who holds it.

    The promise: nobody gets the job from a holder that renews it within a grace time of the first question after the
    end of its lease; and of two handlings, one at most may call or decide.
    """

    redis_url: str

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.redis = Redis(self.redis_url)
        self.executions = Executions(self.redis)
        self.run(self.redis.client.flushall())
        self.claims = [Claim.new("j") for _ in range(3)]
        self.holder: int | None = None
        self.lease_ms = self.asked_ms = 0
        """Left of the lease, and gone since the first question after its end; the latter -1 without one."""
        self.asked_ms = -1
        self.known = self.complete = False
        """Whether Redis has anything of the job, and all of it."""

    def run(self, work: Awaitable[Value]) -> Value:
        async def awaited() -> Value:
            return await work

        return self.runner.run(awaited())

    @rule(worker=WORKERS)
    def claims_it(self, worker: int) -> None:
        answer = self.run(self.executions.claim(self.claims[worker], "digest"))
        gone = self.lease_ms <= 0 and self.asked_ms >= LIVENESS.grace_ms
        if self.holder in {None, worker} or gone or not self.known:
            assert isinstance(answer, Claimed)
            self.held_by(worker)
        else:
            assert isinstance(answer, Taken)
            if self.lease_ms <= 0 and self.asked_ms < 0:
                self.asked_ms = 0

    @rule(worker=WORKERS)
    def renews_it(self, worker: int) -> None:
        # What Redis has lost is that of its holder, who is whoever renews it first: nobody has claimed it since.
        kept = self.holder == worker or not self.known
        answer = ClaimKept(incomplete=not self.complete) if kept else None
        assert self.run(self.executions.renew([self.claims[worker]])) == [answer]
        if kept:
            self.held_by(worker, complete=self.complete)

    @rule(worker=WORKERS)
    def restores_it(self, worker: int) -> None:
        kept = self.holder == worker or not self.known
        progress = SavedProgress("so far")
        assert self.run(self.executions.restore(self.claims[worker], progress, "digest")) == kept
        if kept:
            self.held_by(worker)

    @rule(worker=WORKERS)
    def gives_it_up(self, worker: int) -> None:
        self.run(self.executions.release(self.claims[worker]))
        # One that Redis has lost is restored first.
        if self.holder == worker and self.complete:
            self.holder, self.lease_ms, self.asked_ms = None, 0, -1

    @precondition(lambda self: self.holder is not None)
    @rule()
    def redis_loses_all(self) -> None:
        self.run(self.redis.client.flushall())
        self.known = self.complete = False

    @rule(worker=WORKERS)
    def comes_again(self, worker: int) -> None:
        if self.holder != worker:
            self.claims[worker] = Claim.new("j")

    @precondition(lambda self: self.holder is not None)
    @rule(by_ms=st.sampled_from([LIVENESS.grace_ms // 2, LIVENESS.grace_ms, LIVENESS.claim_lease_ms]))
    def time_passes(self, by_ms: int) -> None:
        # A little more each time, so that what the test itself takes tips no balance.
        by_ms += SLACK_MS
        self.lease_ms -= by_ms
        self.asked_ms = self.asked_ms if self.asked_ms < 0 else self.asked_ms + by_ms
        self.run(pass_time(self.redis, self.claims[0], by_ms))

    def held_by(self, worker: int, *, complete: bool = True) -> None:
        self.holder, self.lease_ms, self.asked_ms, self.known = worker, LIVENESS.claim_lease_ms, -1, True
        self.complete = complete

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.run(self.redis.close())
            self.runner.close()


def test_one_handling_has_the_job_whatever_happens_in_whatever_order(own_redis_server: RunningServer) -> None:
    machine: Any = type("Machine", (Claims,), {"redis_url": own_redis_server.url})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))


def order(name: str) -> PendingCancel:
    by = Cancellation(by="program", name=name, at=datetime(2026, 11, 21, tzinfo=UTC))
    return PendingCancel(execution_id="j", cancellation=by, agents=("writer",))


async def test_an_order_to_cancel_comes_with_all_that_is_asked_about_a_claim_until_the_job_ends(redis: Redis) -> None:
    executions, gone, next_one = Executions(redis), Claim.new("j"), Claim.new("j")
    first = order("one")
    assert await executions.cancel(first) == first
    assert await executions.claim(gone) == Claimed(None, (first,))
    assert await executions.checkpoint(gone, "so far") == ClaimKept((first,))
    assert await executions.renew([gone]) == [ClaimKept((first,))]
    assert await executions.release(gone) == ClaimKept((first,))
    # Whatever became of the worker: who takes the job finds it, too.
    assert await executions.claim(next_one) == Claimed("so far", (first,))
    await executions.finish(gone)
    assert await executions.renew([gone, next_one]) == [None, ClaimKept((first,))]
    await executions.finish(next_one)
    assert await executions.renew([next_one]) == [ClaimKept()]


async def test_the_first_order_of_each_who_gives_one_stands_and_is_kept_as_long_as_a_claim(redis: Redis) -> None:
    executions, claim = Executions(redis), Claim.new("j")
    first, other = order("one"), order("two")
    await executions.cancel(first)
    later = first.cancellation.model_copy(update={"at": datetime(2026, 11, 22, tzinfo=UTC)})
    assert await executions.cancel(first.model_copy(update={"cancellation": later})) == first
    await executions.cancel(other)
    found = await executions.claim(claim)
    assert isinstance(found, Claimed)
    assert sorted(found.cancels, key=str) == sorted((first, other), key=str)
    left_ms = await redis.client.pttl(claim.keys[1])
    assert KEEP_MS - SLACK_MS < left_ms <= KEEP_MS


async def test_an_order_for_other_agents_stands_beside_one_that_held_for_none(redis: Redis) -> None:
    executions = Executions(redis)
    await executions.cancel(order("one"))
    wider = order("one").model_copy(update={"agents": ("writer", "support")})
    assert await executions.cancel(wider) == wider


async def test_an_order_alone_is_no_claim(redis: Redis) -> None:
    executions, mine = Executions(redis), Claim.new("j")
    await executions.cancel(order("one"))
    # What Redis has lost is still that of its holder.
    assert await executions.renew([mine]) == [ClaimKept((order("one"),), incomplete=True)]


# Parents


async def test_a_parent_under_way_learns_that_it_has_children_in_its_task(redis: Redis) -> None:
    executions, claim = Executions(redis), Claim.new("j")
    await executions.claim(claim, tenant="acme")
    assert await executions.parent("j", "acme", dry_run=True) == ("", "", "", ""), "it has not called yet"
    await executions.checkpoint(claim, "so far")
    assert await executions.parent("j", "acme", dry_run=True) == ("", "so far", "", "")
    assert await executions.parent("j", None, dry_run=False) == ("", "", "", "")
    assert await executions.parent("j", "other", dry_run=False) == ("", "", "", "")
    assert await executions.renew([claim]) == [ClaimKept()]
    assert await executions.parent("j", "acme", dry_run=False) == ("", "so far", "", "")
    assert await executions.renew([claim]) == [ClaimKept(has_children=True)]
    await executions.cancel(order("deploy"))
    assert await executions.renew([claim]) == [ClaimKept((order("deploy"),), has_children=True)]
    for _ in range(2):  # also to who comes back after a crash, and asks again
        assert await executions.finish(claim) == ClaimEnded(tenant="acme", task_key="j")
    assert await executions.parent("j", "acme", dry_run=False) == ("j", "", "", "")


async def test_a_parent_that_is_not_begun_learns_that_it_has_children_when_it_is(redis: Redis) -> None:
    executions, claim = Executions(redis), Claim.new("j")
    assert await executions.parent("j", "acme", dry_run=True) == ("", "", "", "")
    assert await redis.client.keys("*") == []
    assert await executions.parent("j", "acme", dry_run=False) == ("", "", "", "")
    assert KEEP_MS - SLACK_MS < await redis.client.pttl(claim.keys[1]) <= KEEP_MS
    # What Redis has lost is still that of its holder.
    assert await executions.renew([claim]) == [ClaimKept(has_children=True, incomplete=True)]
    await redis.client.delete(claim.key)
    assert await executions.claim(claim, tenant="acme") == Claimed(None, has_children=True)
    # Also one that sleeps, and has no checkpoint.
    await executions.release(claim)
    assert await executions.parent("j", "acme", dry_run=False) == ("", "", "", "")
    assert await executions.claim(claim, tenant="acme") == Claimed(None, has_children=True)


async def test_a_job_that_is_decided_is_let_go_of_by_whoever_finds_it_so(redis: Redis) -> None:
    executions, gone = Executions(redis), Claim.new("j")
    anybody = Claim("j", "")
    assert await executions.finish(anybody) == ClaimEnded()
    assert await redis.client.keys("*") == [], "nobody has begun it"
    await executions.claim(gone, tenant="acme", task_key="t")
    await executions.checkpoint(gone, "so far")
    await executions.wait_for(["j"], "next", unknown={}, owner="")
    assert await executions.finish(anybody) == ClaimEnded(("next",), "acme", "t")
    assert await executions.finish(anybody) == ClaimEnded((), "acme", "t")
    assert await redis.client.hget(gone.key, "checkpoint") is None
    assert isinstance(await executions.claim(Claim.new("j")), Taken)


async def test_a_parent_with_a_task_tells_it_and_learns_nothing(redis: Redis) -> None:
    executions, claim = Executions(redis), Claim.new("j")
    await executions.claim(claim, task_key="t", task_id="nightly", run_id="a session")
    await executions.checkpoint(claim, "so far")
    assert await executions.parent("j", None, dry_run=False) == ("t", "so far", "a session", "nightly")
    assert await executions.renew([claim]) == [ClaimKept()]
    assert await executions.finish(claim) == ClaimEnded(task_key="t")
    assert await executions.parent("j", None, dry_run=False) == ("t", "", "a session", "nightly")


async def test_unknown_jobs_that_others_wait_for_are_limited_and_kept_no_longer_than_that(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.jobs.store.executions.MAX_UNKNOWN", 2)
    executions = Executions(redis)
    await executions.wait_for([], "a", unknown={"u1": 60_000, "u2": 1_000, "u3": 60_000}, owner="app")
    await executions.wait_for([], "b", unknown={"u3": 60_000}, owner="another")
    await executions.wait_for([], "c", unknown={"u1": 1_000}, owner="app")
    assert await executions.waiting_for(["u1", "u2", "u3"]) == {"a", "b", "c"}
    assert await executions.waiting_for(["u3"]) == {"b"}, "the third of its owner has to look again by itself"
    left = [await redis.client.pttl(key) for key in ("bw:cancel:u1", "bw:cancel:u2", "bw:unknown-dependencies:app")]
    assert 50_000 < left[0] <= 60_000, "as long as the last of them waits"
    assert 0 < left[1] <= 1_000
    assert 50_000 < left[2] <= 60_000
    await executions.wait_for(["u1"], "d", unknown={}, owner="app")
    assert await redis.client.pttl("bw:cancel:u1") > 60_000, "a known one as long as it takes"
