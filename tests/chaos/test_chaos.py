"""A short form of `python -m tests.chaos`: a minute's faults on one plane, in seconds."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos import background, clock, failover, history, last_answer
from tests.chaos.faults import SCENARIOS, Fault, Scenario, at_random
from tests.chaos.identity import ReplayedRecord
from tests.chaos.network import Link
from tests.chaos.plane import Outcome, chaos_plane
from tests.servers import Servers


@pytest.mark.chaos
async def test_nothing_is_lost_or_paid_twice_while_parts_die_stand_still_and_are_cut_off(
    tmp_path: Path, servers: Servers
) -> None:
    scenario = (
        Fault("reset", "redis", 1, 0.5),
        Fault("kill", "sink", 0.5, 0.5),
        Fault("silent", "nats", 2, 2),
        Fault("kill", "budget", 0.5, 2),
        Fault("stop", "worker", 3, 2),
        Fault("kill", "request", 0.5, 3),
    )
    async with chaos_plane(tmp_path, servers, nodes=1, disks={}, clocks={}) as plane:
        outcome = await plane.run(scenario, jobs=60, per_s=20)
    assert outcome.faults_found(scenario) == []


@pytest.mark.chaos
async def test_a_primary_of_redis_that_is_killed_costs_no_job_and_passes_no_cap(
    tmp_path: Path, servers: Servers
) -> None:
    outcome = await failover.run_failovers(tmp_path, servers, kills=1, per_s=20, seed=2, down_after_ms=1_000)
    assert outcome.faults_found() == []


@pytest.mark.chaos
async def test_after_a_kill_of_everything_as_the_last_job_is_answered_all_records_are_equal(tmp_path: Path) -> None:
    async with aclosing(last_answer.outcomes(tmp_path, kills=1)) as outcomes:
        assert [outcome.faults_found() async for outcome in outcomes] == [[]]


async def test_background_responses_are_whole_although_all_workers_and_all_replicas_are_killed(
    tmp_path: Path, servers: Servers
) -> None:
    async with aclosing(background.background_outcomes(tmp_path, servers, background.AT_ONCE, seed=1)) as outcomes:
        found = [outcome async for outcome in outcomes]
    assert [fault for outcome in found for fault in outcome.faults_found()] == []
    assert {"worker", "request"} <= {name.partition("-")[0] for outcome in found for name in outcome.killed}


def test_a_seed_gives_the_same_scenario_and_a_part_has_one_fault_at_a_time() -> None:
    for seed in range(200):
        scenario = at_random(seed)
        assert scenario == at_random(seed)
        for earlier, later in pairwise(scenario):
            assert earlier.part != later.part or earlier.at_s + earlier.for_s < later.at_s


async def test_a_link_that_is_closed_reports_no_error_of_its_connections() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(lambda _, writer: accepted.put(writer), "127.0.0.1", 0)
    async with server:
        link = Link("127.0.0.1", server.sockets[0].getsockname()[1])
        _, client = await asyncio.open_connection("127.0.0.1", await link.listen())
        onward = await accepted.get()
        await link.close()
        client.close()
        onward.close()
    assert reported == []


@pytest.mark.parametrize(
    "text",
    ["nats:stop", "nats:sleep:1", "disk:full:1", "worker:full:1", "nats:jump:1", "nats-leader:slow:3", "nats:stop:x"],
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Fault.parse(text)


def test_what_the_machine_cannot_do_is_left_out_with_what_it_lacks_and_the_rest_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[Scenario] = []

    async def run(scenario: Scenario, jobs: int, per_s: float) -> Outcome:
        began.append(scenario)
        replayed = ReplayedRecord(jobs, [], Counter())
        return Outcome(jobs, jobs, jobs, 0, jobs, 0, 0, 0, {"log": 1}, 0, (), 0.0, replayed)

    monkeypatch.setattr(chaos, "run", run)
    monkeypatch.setattr(clock, "_PLACES", ())
    monkeypatch.setattr(chaos.os, "geteuid", lambda: 1000)
    assert chaos.main([]) == 0
    assert began == [each for each in SCENARIOS if not {fault.kind for fault in each} & {"jump", "full"}]
    said = capsys.readouterr().err
    assert "left out: worker jump 15 s (clocks jump by libfaketime: apt-get install libfaketime)" in said
    assert "left out: redis full 10 s (small disks are mounted by root)" in said
    assert chaos.main(["--fault", "budget:jump:15"]) == 1, "what was asked for was not run"


@pytest.mark.chaos
async def test_a_short_history_of_random_clients_and_faults_keeps_every_promise(
    tmp_path: Path, servers: Servers
) -> None:
    outcome = await history.run_history(tmp_path, servers, seed=0, seconds=4, disks={}, clocks={})
    assert outcome.faults_found() == [], outcome.account()
    assert outcome.evidence.calls
    assert outcome.history.faults
