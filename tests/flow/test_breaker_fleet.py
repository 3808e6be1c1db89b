"""One breaker for a whole fleet of workers, while its upstream fails and comes back.

The tests print what they measured; see it with `pytest -s tests/flow/test_breaker_fleet.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count

import pytest
from hypothesis import settings

from breakwater.kernel.nats.topology import ACK_WAIT_S
from breakwater.kernel.types import format_time
from breakwater.local.provider import LedgerCall
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model, seconds_between
from tests.helpers import until

WORKERS = tuple(f"worker-{number}" for number in range(1, 5))
IN_FLIGHT = 40
PER_S = 15
CALL_S = 4.0
"""What a call takes while the upstream is well: 10 jobs a second, on a slow machine, are 40 in flight, too."""

FAILED_CALL_S = 0.5
RECOVERED_CALL_S = 0.3
COOLDOWN_S = 1.0
SLACK_S = 15.0
"""For all that is no cool-down and no call: five processes and a load on as few as two busy cores."""

LEASE_S = 240.0
"""At least, of a probe: it is held for as long as its call may take."""

ONE_TRY = {"retry": {"max_attempts": 1}}
BREAKERS = "bw.breakers.writer.*"


@pytest.mark.chaos
async def test_calls_stop_when_the_breaker_opens_and_one_probe_at_a_time_finds_the_recovery(
    start_plane: StartPlane,
) -> None:
    well = {"models": {"sim/m": model(latency_ms=CALL_S * 1000)}}
    ill = {"models": {"sim/m": model({"status": 503}, latency_ms=FAILED_CALL_S * 1000)}}
    well_again = {"models": {"sim/m": model(latency_ms=RECOVERED_CALL_S * 1000)}}
    # Old calls that succeed and new ones that fail end side by side for a while: only a count can show.
    rules = {"errors": 20, "consecutive_failures": "off", "same_error": "off", "cooldown_s": COOLDOWN_S}
    agents = {"writer": {"model": "sim/m", **ONE_TRY, "breaker": rules, "concurrency": 400, "timeout_s": 60}}
    async with start_plane(well["models"], agents, services=("breaker",)) as plane:
        for name in WORKERS:
            plane.start("worker", name)
        for name in WORKERS:
            await plane.ready(name)
        async with jobs_coming(plane) as job_ids:
            await until(lambda: _calling(plane, IN_FLIGHT), what=f"{IN_FLIGHT} calls in flight")
            failed_at = datetime.now(UTC)
            plane.sim.use(ill)
            await until(lambda: _reopened(plane, 2), what="two probes that failed")
            recovered_at = datetime.now(UTC)
            plane.sim.use(well_again)
            await until(lambda: _state(plane, "closed"), what="the breaker to close")
            closed_for_all = len(job_ids) + 1  # one may be on its way since before
            await until(lambda: _more(job_ids, closed_for_all + PER_S), what="jobs after the closing")
        results = {job_id: await plane.result(job_id) for job_id in job_ids}
        transitions = await plane.messages("EVENTS", BREAKERS)

        attempts = [attempt for result in results.values() for attempt in result["attempts"]]
        assert len(attempts) == len(job_ids)
        calls = {call.client_request_id: call for call in plane.sim.ledger.calls}
        made = {attempt["attempt_id"]: attempt for attempt in attempts if not attempt["short_circuited"]}
        # What is recorded as a call was one, and nothing else reached the upstream.
        assert not calls.keys() ^ made.keys()

        opened, *_, closed = transitions
        half_opens = [event for event in transitions if event["to_state"] == "half_open"]
        states = [event["to_state"] for event in transitions]
        assert states == ["open", *["half_open", "open"] * (len(half_opens) - 1), "half_open", "closed"]
        assert opened["rule"] == "errors"
        assert {event["rule"] for event in transitions[2:-1:2]} == {"probe_failed"}

        # Calls by the version of the breaker that let them pass: decided in Redis, atomically with the state.
        let_pass = Counter(attempt["breaker_version"] for attempt in made.values())
        before, after = opened["version"] - 1, closed["version"]
        assert let_pass.keys() == {before, after, *(event["version"] for event in half_opens)}
        for event in half_opens:
            [probe] = [attempt for attempt in made.values() if attempt["breaker_version"] == event["version"]]
            assert probe["cause"] == "probe"
        assert Counter(attempt["cause"] for attempt in attempts)["probe"] == len(half_opens)

        # And as the upstream saw it.
        failing_at, opened_at = format_time(failed_at), opened["at"]
        at_once, in_flight = (_in_flight(calls.values(), moment) for moment in (failing_at, opened_at))
        assert at_once >= IN_FLIGHT
        meanwhile = [call for call in calls.values() if opened_at < call.received_at < closed["at"]]
        late = [call for call in meanwhile if made[call.client_request_id]["breaker_version"] == before]
        probes = [made[call.client_request_id]["cause"] for call in meanwhile if call not in late]
        assert probes == ["probe"] * len(half_opens)
        latest_ms = max([0.0, *(seconds_between(opened_at, call.received_at) * 1000 for call in late)])

        refused = [result for result in results.values() if result["reason"] == "breaker_open"]
        for result in refused:
            [attempt] = result["attempts"]
            assert (attempt["outcome"], attempt["cost"]) == ("short_circuited", "0.000000000")
            assert attempt["error"]["retry_after_s"] >= 0
            assert result["error"]["retry_after_s"] >= 0
            assert "Please try again after" in result["error"]["user_message"]
        assert len(refused) + len(made) == len(job_ids)
        assert len(refused) > PER_S

        recovery_s = seconds_between(format_time(recovered_at), closed["at"])
        assert recovery_s <= COOLDOWN_S + RECOVERED_CALL_S + SLACK_S
        assert {results[job_id]["status"] for job_id in list(job_ids)[closed_for_all:]} == {"succeeded"}

        print(
            f"\n{len(job_ids)} jobs over {len(WORKERS)} workers: {len(made)} called, {len(refused)} refused\n"
            f"calls in flight when the upstream began to fail: {at_once}; at the opening: {in_flight}\n"
            f"calls that were let pass before the opening and came after it: {len(late)}, up to {latest_ms:.0f} ms\n"
            f"probes: {len(half_opens)}, a call each; other calls while it was not closed: 0\n"
            f"from the recovery to the closing: {recovery_s:.2f} s "
            f"(cool-down {COOLDOWN_S:g} s, the probe's call {RECOVERED_CALL_S:g} s)"
        )


async def test_the_probe_of_a_killed_worker_passes_on_with_the_redelivery_of_its_job(start_plane: StartPlane) -> None:
    models = {"sim/m": model({"requests": [1, 3], "status": 500}, {"requests": [4, 4], "hang_s": 600})}
    rules = {"consecutive_failures": 3, "cooldown_s": 1}
    agents = {"writer": {"model": "sim/m", **ONE_TRY, "breaker": rules, "timeout_s": LEASE_S}}
    async with start_plane(models, agents, environment={"BREAKWATER_PACE": "4"}) as plane:
        for number in range(3):
            await plane.publish({"agent": "writer", "job_id": f"f{number}", "prompt": "x"})
        await until(lambda: _state(plane, "open"), what="the breaker to open")
        await asyncio.sleep(1)  # the cool-down itself
        await plane.publish({"agent": "writer", "job_id": "probe", "prompt": "x"})
        await until(lambda: _calling(plane, 1), what="the probe's call")
        plane.start("worker", "second")
        await plane.ready("second")

        plane.kill("worker")
        killed = datetime.now(UTC)
        asked: list[str] = []
        while not await _state(plane, "closed"):
            asked.append(f"n{len(asked)}")
            await plane.publish({"agent": "writer", "job_id": asked[-1], "prompt": "x"})
            await plane.result(asked[-1])
            await asyncio.sleep(0.1)  # as often as a job comes
            assert (datetime.now(UTC) - killed).total_seconds() < LEASE_S / 2, "the probe waits for its lease"

        lost = await plane.result("probe")
        results = [await plane.result(job_id) for job_id in asked]
        transitions = await plane.messages("EVENTS", BREAKERS)
        assert [event["to_state"] for event in transitions] == ["open", "half_open", "closed"]
        assert [attempt["outcome"] for attempt in lost["attempts"]] == ["worker_lost"]
        assert lost["reason"] == "worker_lost"
        outcomes = [(attempt["outcome"], attempt["cause"]) for result in results for attempt in result["attempts"]]
        refusals = outcomes.index(("success", "probe"))
        assert set(outcomes[:refusals]) <= {("short_circuited", "first")}
        assert {outcome for outcome, _ in outcomes[refusals:]} <= {"short_circuited", "success"}
        assert plane.sim.ledger.totals.by_status["500"] == 3

        reported_at = lost["attempts"][0]["completed_at"]
        probed_at = next(a["started_at"] for result in results for a in result["attempts"] if a["cause"] == "probe")
        since = format_time(killed)
        print(
            f"\nfrom the kill to worker_lost: {seconds_between(since, reported_at):.1f} s "
            f"(NATS alone would deliver again after {ACK_WAIT_S:g} s)\n"
            f"to the next probe: {seconds_between(since, probed_at):.1f} s\n"
            f"to the closing: {seconds_between(since, transitions[-1]['at']):.1f} s; {refusals} jobs refused meanwhile"
        )


@asynccontextmanager
async def jobs_coming(plane: Plane) -> AsyncGenerator[list[str]]:
    """A steady stream of jobs; gives the ids of those that were accepted."""
    accepted: list[str] = []
    enough = asyncio.Event()

    async def load() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in count():
            await asyncio.sleep(max(0.0, begun + number / PER_S - loop.time()))
            if enough.is_set():
                return
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
            accepted.append(f"j{number}")

    coming = asyncio.create_task(load())
    try:
        yield accepted
    finally:
        enough.set()
        await coming


async def _calling(plane: Plane, number: int) -> bool:
    return plane.sim.ledger.totals.in_progress >= number


async def _state(plane: Plane, state: str) -> bool:
    last = await plane.last("EVENTS", BREAKERS)
    return last is not None and last["to_state"] == state


async def _reopened(plane: Plane, times: int) -> bool:
    last = await plane.last("EVENTS", BREAKERS)
    return last is not None and last["to_state"] == "open" and last["version"] >= 1 + 2 * times


async def _more(items: list[str], number: int) -> bool:
    return len(items) >= number


def _in_flight(calls: Iterable[LedgerCall], moment: str) -> int:
    return sum(call.received_at <= moment <= (call.answered_at or moment) for call in calls)


async def test_after_the_call_that_trips_a_breaker_no_call_is_admitted_in_sequence_on_any_worker(
    start_plane: StartPlane,
) -> None:
    """Many sequences side by side, each on a breaker of its own: a job is sent when the one before has its result.

    A hundred for each threshold with `--hypothesis-profile=thorough`.
    """
    runs = min(settings().max_examples // 6, 100)
    thresholds = (1, 3, 5)
    failing = {f"sim/r{run}": model({"status": 503, "requests": [1, 10_000]}) for run in range(runs)}
    agents = {
        f"t{threshold}": {
            "model": "sim/r0",
            "allowed_models": sorted(failing),
            "breaker": {"consecutive_failures": threshold, "same_error": "off"},
            **ONE_TRY,
        }
        for threshold in thresholds
    }
    async with start_plane(failing, agents, services=("breaker",), retry_budget="off") as plane:
        for name in WORKERS[:3]:
            plane.start("worker", name)
        for name in WORKERS[:3]:
            await plane.ready(name)

        async def calls_in_sequence(threshold: int, run: int) -> int:
            reasons: list[str] = []
            for number in range(threshold + 2):
                job = {"agent": f"t{threshold}", "job_id": f"j-{threshold}-{run}-{number}", "model": f"sim/r{run}"}
                await plane.publish({**job, "prompt": "x"})
                reasons.append((await plane.result(job["job_id"]))["reason"])
            return reasons.count("error")

        for threshold in thresholds:
            calls = await asyncio.gather(*(calls_in_sequence(threshold, run) for run in range(runs)))
            assert set(calls) == {threshold}
