"""The gates before a call: one round trip, what precedes what, what is given back, and an eighth gate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
from prometheus_client import CollectorRegistry

import breakwater
from bench.counting import CountingRedis
from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.store import Saving
from breakwater.calls.assignment import Checkpoint
from breakwater.calls.claim_gate import ClaimGate
from breakwater.calls.gate import Admission, AskAgain, ClaimLostError, Gate, Refused, WaitForCapacity
from breakwater.calls.rules.waits import POLL_S
from breakwater.config import LiveConfig, parse_config
from breakwater.jobs.contract.execution import Cancellation, ErrorInfo, Reason
from breakwater.jobs.metrics import WorkerMetrics
from breakwater.jobs.store.executions import Claim
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.redis.connection import Script, ScriptCommand, StateUnavailableError, scripts_of
from breakwater.limits.gate.budget import BudgetGate, LiveReservations
from breakwater.limits.gate.deployment import DeploymentGate
from breakwater.limits.rules.budget import Counter, OverBudget
from breakwater.limits.rules.guard import JobOutcome, Trip
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.rules.limit import Limit
from breakwater.limits.rules.rate_limit import HELD
from breakwater.limits.rules.scopes import PLANE, CallNames
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Settlement
from breakwater.limits.store.tasks import Tasks
from breakwater.services.worker.admission import admit, check, gates_of
from breakwater.services.worker.attempts import kind_of_wait
from breakwater.services.worker.context import context_for
from breakwater.services.worker.next_call import admission_for
from tests.records import samples
from tests.servers import RunningServer
from tests.services.worker.assignments import assignment_of

CONFIG = """
providers: {sim: {base_url: "http://127.0.0.1:1/v1"}}
models: {sim/m: {price: {input_usd_per_mtok: 1, output_usd_per_mtok: 4}}}
agents:
  writer:
    model: sim/m
    max_tokens: 100
    breaker: {consecutive_failures: 3}
    guard: {max_iterations: 10}
    rate_limit: {requests_per_minute: 1, on_exceeded: fail}
  free: {model: sim/m, breaker: "off", guard: "off"}
  patient: {model: sim/m, breaker: "off", guard: "off", rate_limit: {concurrent_calls: 1}}
  careful: {model: sim/m, guard: "off", rate_limit: {concurrent_calls: 1}}
"""


def is_stopped(verdict: object) -> bool:
    return isinstance(verdict, Refused) and verdict.reason == "guard_tripped"


class Published:
    """In place of NATS: on which subjects was published."""

    def __init__(self) -> None:
        self.subjects: list[str] = []

    async def event(self, subject: str, *_: object, **__: object) -> None:
        self.subjects.append(subject)


class Bench:
    """A worker without NATS, and a job of it that is about to call."""

    def __init__(self, redis: CountingRedis) -> None:
        config = parse_config(CONFIG)
        self.redis = redis
        self.published = Published()
        lookup: Any = None
        publisher: Any = self.published
        context = context_for(
            config, LiveConfig(config).limits, redis=redis, publisher=publisher, lookup=lookup, providers={}
        )
        self.worker = replace(context, metrics=WorkerMetrics([], CollectorRegistry()), jitter=lambda: 0.0)
        self.key = BreakerKey("writer", "sim/m")

    async def admission(
        self, name: str = "j1", *, agent_name: str = "writer", claimed: bool = True, dry_run: bool = False
    ) -> Admission:
        job = {"agent": agent_name, "job_id": name, "prompt": "hello", "task_id": "t1"}
        assignment = assignment_of(self.worker, job)
        # A claim is lost to another holder; what Redis knows nothing of is still ours.
        await self.worker.executions.claim(assignment.claim if claimed else Claim.new(name))
        now = datetime.now(UTC)
        at = Checkpoint(dispatched_at=now, deadline=now + timedelta(minutes=1))
        target = self.worker.targets.of(agent_name, assignment.chain[0])
        return admission_for(self.worker, assignment, at, target, 30.0, is_dry_run=dry_run)

    async def admit(self, admission: Admission) -> object:
        """Asks all gates of the worker."""
        return await admit(self.worker, admission, gates_of(self.worker))

    async def set_breaker(self, **fields: Any) -> None:
        [before] = await self.worker.breakers.load([self.key])
        after = replace(before.breaker, version=1, **fields)
        assert await self.worker.breakers.save([Saving(self.key, before, after, None)]) == [True]

    async def cool_down_is_over(self) -> None:
        """The next call is the probe."""
        await self.set_breaker(state="open", open_until_ms=1)

    async def fill_rate_limit(self) -> None:
        names = CallNames("writer")
        command = self.worker.budgets.reserve_command(
            *("other:1", names, 0, ()),
            now=datetime.now(UTC),
            lease_ms=60_000,
            rates=self.worker.limits().rate_limits(names),
        )
        [answer] = await self.redis.run([command])
        assert answer[0] == 1

    async def stop_task(self) -> None:
        await self.worker.guards.tasks.trip(
            TaskKey(None, "t1"), Trip("max_cost", "why"), agent="writer", execution_id="x"
        )

    async def granted(self) -> dict[str, object]:
        """What is held in Redis for calls."""
        client = self.redis.client
        [loaded] = await self.worker.breakers.load([self.key])
        return {
            "reservations": await client.hlen("bw:limits:reservations"),
            "task": int(await client.hget("bw:task:{/t1}", "held_cost") or 0),
            "calls in the window": int(await client.hget("bw:limits:window:minute:agent:writer", "c") or 0),
            "probe": loaded.breaker.probe,
            # Their sum: what is given back may be counted in the next slice of time.
            "first tries": sum([sum(map(int, await client.hvals(key))) for key in await client.keys("bw:retries:*")]),
        }


@asynccontextmanager
async def bench_on(url: str) -> AsyncGenerator[Bench]:
    redis = CountingRedis(url)
    await redis.client.flushall()
    bench = Bench(redis)
    try:
        # A script that Redis does not know yet would be a round trip more.
        modules = Path(breakwater.__file__).parent.rglob("*.lua")
        scripts = [script for module in modules for script in scripts_of(str(module)).values()]
        for script in (*scripts, _COUNT, _UNDO):
            await redis.client.script_load(script.text)
        yield bench
    finally:
        await redis.close()


async def test_all_gates_are_asked_in_one_round_trip_and_a_refusal_takes_a_second(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        request = await bench.admission()
        before = bench.redis.round_trips
        assert await bench.admit(request) is None
        assert bench.redis.round_trips == before + 1
        request = await bench.admission("j2")
        before = bench.redis.round_trips
        assert isinstance(await bench.admit(request), Refused)
        assert bench.redis.round_trips == before + 2


async def test_what_all_others_granted_is_given_back_when_one_refuses(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        await bench.cool_down_is_over()
        await bench.fill_rate_limit()
        before = await bench.granted()
        request = await bench.admission()
        refused = await bench.admit(request)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.refused_by, refused.ends_chain) == ("rate_limited", "agent:writer", False)
        after = await bench.granted()
        # A first try that was not made earns nothing.
        counts = after.pop("first tries")
        assert counts == 0
        assert after == {name: value for name, value in before.items() if name != "first tries"} | {"probe": None}
        text = await bench.redis.client.hget(Claim.new("j1").key, "checkpoint")
        assert text == request.checkpoint.text()


async def test_a_cancelled_job_leaves_the_queue_of_a_rate(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        assert await bench.admit(await bench.admission("first", agent_name="patient")) is None
        waiting = await bench.admission("waiting", agent_name="patient")
        assert isinstance(await bench.admit(waiting), WaitForCapacity)
        assert len(await bench.redis.client.keys("bw:limits:queue:*")) == 1
        waiting.job.lease.cancel.cancellation = Cancellation(by="api_key", at=datetime.now(UTC))
        await bench.admit(waiting)
        assert await bench.redis.client.keys("bw:limits:queue:*") == []


async def test_a_call_that_may_wait_for_the_next_period_is_told_when_that_begins(redis_server: RunningServer) -> None:
    now = datetime.now(UTC)
    begins = now + timedelta(minutes=7)
    async with bench_on(redis_server.url) as bench:
        admission = await bench.admission(agent_name="free")
        gate = next(
            gate for bind in gates_of(bench.worker) if isinstance(gate := bind(admission=admission), BudgetGate)
        )
        gate.now, gate.jitter = lambda: now, lambda: 0.0
        for action, amount, resets_at, waits_s in (
            ("wait", 9, begins, 420),
            ("wait", 9, now - timedelta(hours=1), POLL_S),
            ("wait", 11, begins, None),
            ("refuse", 9, begins, None),
            ("cheaper_model", 9, begins, None),
        ):
            cap = Limit("daily", PLANE, "usd", "day", 10, action)
            over = OverBudget(Counter("daily", "global", cap), resets_at, 10, 5, 0, amount)
            verdict = gate._over_budget(over)  # pyright: ignore[reportPrivateUsage]  a day takes too long
            if waits_s is None:
                assert isinstance(verdict, Refused)
                assert verdict.ends_chain == (action == "refuse")
            else:
                assert isinstance(verdict, WaitForCapacity)
                assert verdict.delay_s == pytest.approx(waits_s)
                assert "the limit of the plane on spend per day has no room" in verdict.refused.error.message


async def test_half_open_is_published_only_after_the_probe_was_given_back(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        await bench.cool_down_is_over()
        await bench.fill_rate_limit()
        probes: list[str | None] = []
        event = bench.published.event

        async def looking(subject: str, *more: object, **named: object) -> None:
            [loaded] = await bench.worker.breakers.load([bench.key])
            probes.append(loaded.breaker.probe)
            await event(subject, *more, **named)

        bench.published.event = looking
        assert isinstance(await bench.admit(await bench.admission()), Refused)
        assert bench.published.subjects == ["bw.breakers.writer.sim%2Fm"]
        assert probes == [None]


async def test_after_a_lost_claim_nothing_is_given_back_but_half_open_is_published(
    redis_server: RunningServer,
) -> None:
    async with bench_on(redis_server.url) as bench:
        await bench.cool_down_is_over()
        with pytest.raises(ClaimLostError):
            await bench.admit(await bench.admission(claimed=False))
        held = await bench.granted()
        assert (held["reservations"], held["calls in the window"], held["probe"]) == (1, 1, "j1:1")
        assert bench.published.subjects == ["bw.breakers.writer.sim%2Fm"]


async def test_half_open_is_published_though_redis_fails_while_the_end_of_a_task_is(
    redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The breaker is half-open for the one admission that made it so, and for no repetition of it."""
    async with bench_on(redis_server.url) as bench:
        await bench.cool_down_is_over()
        await bench.stop_task()

        async def unavailable(*_: object) -> None:
            raise StateUnavailableError("x")

        request = await bench.admission("j2")
        with monkeypatch.context() as patch:
            patch.setattr(type(bench.worker.guards.tasks), "mark_published", unavailable)
            with pytest.raises(StateUnavailableError):
                await bench.admit(request)
        assert is_stopped(await bench.admit(request))
        assert bench.published.subjects.count("bw.breakers.writer.sim%2Fm") == 1


async def test_a_lost_claim_stops_no_task(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        await bench.stop_task()
        with pytest.raises(ClaimLostError):
            await bench.admit(await bench.admission(claimed=False))
        assert bench.published.subjects == []
        assert is_stopped(await bench.admit(await bench.admission("j2")))
        assert bench.published.subjects == ["bw.guards.writer"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (("stop_task", "open", "fill_rate_limit"), "guard_tripped"),
        (("open", "fill_rate_limit"), "breaker_open"),
        (("fill_rate_limit",), "rate_limited"),
    ],
)
async def test_a_stopped_task_precedes_an_open_breaker_and_that_a_full_limit(
    redis_server: RunningServer, setting: tuple[str, ...], reason: str
) -> None:
    async with bench_on(redis_server.url) as bench:
        for what in setting:
            if what == "open":
                await bench.set_breaker(state="isolated")
            else:
                await getattr(bench, what)()
        refused = await bench.admit(await bench.admission())
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.ends_chain) == (reason, reason == "guard_tripped")


async def test_a_call_waits_for_what_other_jobs_of_its_task_hold_and_stops_the_task_for_what_they_have_cost(
    redis_server: RunningServer,
) -> None:
    async with bench_on(redis_server.url) as bench:
        key, cap = TaskKey(None, "t1"), 10_000_000_000
        worst_case = (await bench.admission(dry_run=True)).flight.reserved or 0

        async def verdict(held_by_another: int) -> object:
            await bench.redis.run([Tasks.enter_command(key, "other", hold=held_by_another)])
            return await check(bench.worker, await bench.admission(dry_run=True), gates_of(bench.worker))

        assert await verdict(cap - worst_case) is None
        for held in (cap - worst_case + 1, 10 * cap):
            waits = await verdict(held)
            assert isinstance(waits, WaitForCapacity)
            assert (waits.refused.reason, waits.refused.refused_by) == ("budget_exceeded", "task")
        cost = cap - worst_case + 1
        ended = JobOutcome(tokens=0, cost=cost, failed=False, called=True, error_hash=None, confidence=None)
        await bench.worker.guards.tasks.record(key, "ended", ended)
        assert is_stopped(await verdict(10 * cap))


async def test_what_took_long_to_announce_is_asked_for_again(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        await bench.cool_down_is_over()
        request = await bench.admission()
        moments = iter([0.0, 61.0])
        bench.worker = replace(bench.worker, clock=lambda: next(moments, 61.0))
        before = bench.redis.round_trips
        assert await bench.admit(request) is None
        assert request.flight.cause == "probe"
        # Twice what was asked, and what the breaker was at, to publish it.
        assert bench.redis.round_trips == before + 4


async def test_a_job_that_has_got_its_first_child_is_asked_about_again(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        request = await bench.admission()
        await bench.worker.executions.parent("j1", None, dry_run=False)
        before = await bench.granted()
        assert isinstance(await bench.admit(request), AskAgain)
        assert await bench.granted() | {"first tries": 0} == before | {"first tries": 0}
        assert request.job.lease.has_children, "now it counts in the task that has its id"
        assert await bench.admit(request) is None


# The eighth gate of CONTRIBUTING: this is the file, and `partial(DailyCallsGate, now=now),` the line in `gates_of`.

_COUNT = Script.of("""
local most, dry_run = tonumber(ARGV[1]), ARGV[2] == '1'
if tonumber(redis.call('GET', KEYS[1]) or '0') >= most then
  return 0
end
return dry_run and 1 or redis.call('INCR', KEYS[1])
""")
_UNDO = Script.of("return redis.call('DECR', KEYS[1])")
MAX_CALLS = 2


@dataclass(slots=True, kw_only=True)
class DailyCallsGate(Gate):
    """Lets an agent make so many calls a day."""

    now: Callable[[], datetime]
    _counted: bool = False

    def ask(self) -> ScriptCommand:
        """Counts the call, unless the day's calls are used up."""
        return ScriptCommand(_COUNT, [self._key()], [MAX_CALLS, int(self.admission.lease_ms is None)])

    def read(self, answer: Any) -> Refused | None:
        """Refused where they are."""
        self._counted = bool(answer)
        text = f"{self.admission.job.agent_name} has made its {MAX_CALLS} calls of today; no call was made"
        error = ErrorInfo(kind="rate_limit", class_="DailyCallsExceededError", message=text)
        return None if answer else Refused("rate_limited", error, "calls", ends_chain=True)

    def release(self) -> ScriptCommand | None:
        """A call that was not made does not count."""
        return ScriptCommand(_UNDO, [self._key()], []) if self._counted else None

    def _key(self) -> str:
        return f"bw:calls:{self.admission.job.agent_name}:{self.now():%Y-%m-%d}"


async def test_an_agent_without_limits_asks_nothing_of_them(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        request = await bench.admission(agent_name="free")
        assert await bench.admit(request) is None
        assert [type(gate) for gate in request.gates] == [ClaimGate, BudgetGate, DeploymentGate]
        assert not await bench.redis.client.keys("bw:limits:window:*")


async def test_what_is_settled_long_before_its_worker_has_recorded_it_is_not_held_again(
    redis_server: RunningServer,
) -> None:
    async with bench_on(redis_server.url) as bench:
        worker = bench.worker
        counters = BudgetCounters(bench.redis, ZoneInfo("UTC"))
        assert await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})
        request = await bench.admission(agent_name="free")
        assert await bench.admit(request) is None
        reserved_at = request.flight.reserved_at
        assert reserved_at is not None
        watch = LiveReservations(worker.live_reservations, bench.redis, worker.budgets, worker.limits, worker.now)
        with request.under_way():
            attempt = samples.attempt("j1", agent="free", reserved_at=reserved_at)
            commands = [gate.settle(attempt) for gate in request.gates]
            await bench.redis.run([command for command in commands if command is not None])
            event = Settlement(attempt.attempt_id, 1, CallNames("free"), AttemptSums(spent=4, calls=1), reserved_at)
            await worker.budgets.settle([event], "log")
            for _ in range(3):
                await watch.check()
        assert (await bench.granted())["reservations"] == 0


def test_a_gate_may_wait_for_any_reason_and_the_list_of_running_jobs_says_for_what():
    error = ErrorInfo(kind="rate_limit", class_="DailyCallsExceededError", message="no calls are left today")
    kinds = {reason: kind_of_wait(Refused(reason, error)) for reason in get_args(Reason)}
    assert kinds.keys() == set(get_args(Reason))
    assert (kinds["rate_limited"], kinds["breaker_open"], kinds["guard_tripped"]) == ("rate_limit", "probe", "gate")
    assert kind_of_wait(Refused("rate_limited", error.model_copy(update={"class_": HELD}))) == "hold"


async def test_an_eighth_gate_is_one_file_and_one_line(redis_server: RunningServer) -> None:
    async with bench_on(redis_server.url) as bench:
        worker, calls = bench.worker, f"bw:calls:writer:{datetime.now(UTC):%Y-%m-%d}"
        gates = (*gates_of(worker), partial(DailyCallsGate, now=worker.now))
        request = await bench.admission("j1")
        before = bench.redis.round_trips
        assert await admit(worker, request, gates) is None
        assert isinstance(request.gates[-1], DailyCallsGate)
        assert bench.redis.round_trips == before + 1, "it joins the one round trip"
        # Refused by another gate, the call does not count.
        refused = await admit(worker, await bench.admission("j2"), gates)
        assert isinstance(refused, Refused)
        assert (refused.refused_by, await bench.redis.client.get(calls)) == ("agent:writer", "1")
        # Its own refusal gives back what the others granted, and a dry run names it.
        await bench.redis.client.delete("bw:limits:window:minute:agent:writer")
        await bench.redis.client.set(calls, MAX_CALLS)
        held = await bench.granted()
        refused = await admit(worker, await bench.admission("j3"), gates)
        assert isinstance(refused, Refused)
        assert (refused.refused_by, refused.ends_chain) == ("calls", True)
        assert await bench.granted() == held
        assert await check(worker, await bench.admission("j4", dry_run=True), gates) == refused
        assert await check(worker, await bench.admission("j5", dry_run=True), gates_of(worker)) is None
        assert await bench.redis.client.get(calls) == str(MAX_CALLS)


async def test_a_call_that_another_gate_refuses_keeps_no_place_in_the_queue_of_a_rate(
    redis_server: RunningServer,
) -> None:
    async with bench_on(redis_server.url) as bench:
        assert await bench.admit(await bench.admission("first", agent_name="careful")) is None
        bench.key = BreakerKey("careful", "sim/m")
        await bench.set_breaker(state="isolated")
        verdict = await bench.admit(await bench.admission("refused", agent_name="careful"))
        assert isinstance(verdict, Refused)
        assert verdict.reason == "breaker_open"
        assert await bench.redis.client.keys("bw:limits:queue:*") == []
