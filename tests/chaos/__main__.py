"""Kills, stops and cuts off parts of a whole plane under load, and compares all that is left.

    python -m tests.chaos                               each scenario in turn
    python -m tests.chaos --fault nats:stop:28          PART:KIND:SECONDS[@START], as often as you like
    python -m tests.chaos --random 20 --seed 7          scenarios of four faults each
    python -m tests.chaos --hours 8                     random ones for so long
    python -m tests.chaos streams                       what can happen to a streamed answer
    python -m tests.chaos kills                         how long jobs take whose worker is killed
    python -m tests.chaos last-answer --times 50        what is there after everything is killed
    python -m tests.chaos background --times 200        background responses whose worker and whose `request` are killed
    python -m tests.chaos history --seed 3 --times 10   random clients and faults for 600 s each, and a checker
    python -m tests.chaos limits --seed 3 --seconds 300 limits and keys that an API changes under load and kills
    python -m tests.chaos failover --times 20           the primary of Redis is killed, and Sentinels replace it
    python -m tests.chaos storm --jobs 20000 --per-s 30 caps, holds, trips and kills; its record is replayed
    python -m tests.chaos replay --keep DIRECTORY       a record again that a storm with this option has left there

A line of a table is printed for each. The exit code is 1 where anything is not as it must be: a job without a record, a
call that no attempt stands for, a job that was called twice though its worker was well, records of spend that differ,
a reservation that stays, a consumer that is stuck. What this machine can't do is left out, with what it lacks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path

from tests.chaos import background, failover, history, identity, kills, last_answer, limits, storm, streams
from tests.chaos.clock import JumpingClock, libfaketime
from tests.chaos.faults import KINDS, LEADER, NODES, PARTS, SCENARIOS, SERVERS, Fault, Scenario, at_random
from tests.chaos.plane import Outcome, chaos_plane
from tests.server_sources import EmbeddedServers

HEADER = (
    "| what happens | jobs | records | calls | attempts | called twice | lost | failed | cost, in all five places | "
    "reserved | stuck | recovered after |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def directories() -> tuple[Path, Callable[[], Path]]:
    """A new one, and what makes numbered ones for servers in it."""
    directory, made = Path(tempfile.mkdtemp(prefix="breakwater-chaos-")), itertools.count()

    def new_directory() -> Path:
        path = directory / f"server-{next(made)}"
        path.mkdir()
        return path

    return directory, new_directory


async def run_streams() -> int:
    """Prints the table of streams. Returns how many lines are wrong."""
    directory, new_directory = directories()
    servers = EmbeddedServers(new_directory)
    try:
        return await printed(streams.HEADER, streams.stream_outcomes(directory, servers))
    finally:
        servers.stop()
        shutil.rmtree(directory, ignore_errors=True)


async def run_kills() -> int:
    """Prints how long jobs took. Returns how many lines are wrong."""
    directory, new_directory = directories()
    servers = EmbeddedServers(new_directory)
    try:
        rows = await kills.kill_rows(directory, servers)
    finally:
        servers.stop()
        shutil.rmtree(directory, ignore_errors=True)
    print("\n".join((kills.HEADER, *rows)))
    return sum(row.startswith("wrong") for row in rows)


async def run_last_answer(times: int) -> int:
    """Prints what is there after each kill of everything. Returns how many lines are wrong."""
    directory, _ = directories()
    try:
        return await printed(last_answer.HEADER, last_answer.outcomes(directory, times))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def run_background(times: int, seed: int) -> int:
    """Prints what each client has of its response. Returns how many have anything but the answer, once."""
    directory, new_directory = directories()
    servers = EmbeddedServers(new_directory)
    try:
        return await printed(background.HEADER, background.background_outcomes(directory, servers, times, seed))
    finally:
        servers.stop()
        shutil.rmtree(directory, ignore_errors=True)


async def run_histories(seconds: float, first_seed: int, times: int, logs: Path | None) -> int:
    """Prints a line, what was done and what was broken for each history. Returns how many broke a promise."""
    failed = 0
    print(history.HEADER, flush=True)
    for seed in range(first_seed, first_seed + times):
        outcome = await one_history(seed, seconds, logs)
        failed += report(outcome, seed)
    return failed


async def run_limits(seconds: float, first_seed: int, times: int) -> int:
    """Prints a line, what was done and what was broken for each run. Returns how many broke a promise."""
    failed = 0
    print(limits.HEADER, flush=True)
    for seed in range(first_seed, first_seed + times):
        directory, new_directory = directories()
        servers = EmbeddedServers(new_directory)
        try:
            outcome = await limits.run_limits(directory, servers, seed, seconds)
        finally:
            servers.stop()
            shutil.rmtree(directory, ignore_errors=True)
        failed += report(outcome, seed)
    return failed


async def run_failover(times: int, per_s: float, seed: int) -> int:
    """Prints what is left after so many failovers of Redis. Returns how many lines are wrong."""
    directory, new_directory = directories()
    servers = EmbeddedServers(new_directory)
    try:
        outcome = await failover.run_failovers(directory, servers, times, per_s, seed)
    finally:
        servers.stop()
        shutil.rmtree(directory, ignore_errors=True)
    print(f"{failover.HEADER}\n{outcome.row()}")
    wrong = outcome.faults_found()
    sys.stderr.writelines(f"wrong with --seed {seed}: {fault}\n" for fault in wrong)
    return bool(wrong)


async def run_storm(jobs: int, per_s: float, seed: int, at_once: int, keep: Path | None) -> int:
    """Prints how the record of a storm and its replay agree. Returns how many decisions differ without a cause."""
    directory, new_directory = directories()
    servers = EmbeddedServers(new_directory)
    try:
        outcome = await storm.run_storm(
            directory, servers, jobs=jobs, per_s=per_s, seed=seed, at_once=at_once, keep=keep
        )
    finally:
        servers.stop()
        shutil.rmtree(directory, ignore_errors=True)
    ends = ", ".join(f"{reason or 'answered'} {count:,}" for reason, count in outcome.reasons.most_common())
    print(f"{outcome.jobs:,} jobs in {outcome.took_s:.0f} s, {outcome.kills} services killed: {ends}")
    return unexplained(outcome.replayed)


def unexplained(replayed: identity.ReplayedRecord) -> int:
    """Prints how a record and its replay agree. Returns how many decisions differ without a cause."""
    print(identity.table([replayed]))
    sys.stderr.writelines(f"replayed otherwise: {example}\n" for example in replayed.examples)
    return replayed.unexplained


def report(outcome: history.HistoryOutcome | limits.LimitsOutcome, seed: int) -> bool:
    """Prints the line of a run, what was done and what was broken. Returns True if it broke a promise."""
    broken = outcome.faults_found()
    print(outcome.row(), flush=True)
    sys.stderr.write(f"{outcome.account()}\n")
    sys.stderr.writelines(f"wrong with --seed {seed}: {violation}\n" for violation in broken)
    sys.stderr.flush()
    return bool(broken)


async def one_history(seed: int, seconds: float, logs: Path | None) -> history.HistoryOutcome:
    """Runs a history on servers of its own; disks are filled where they can be mounted.

    The logs of the services are copied to `logs`, unless that is None.
    """
    directory, new_directory = directories()
    mounts = os.geteuid() == 0
    disks = {name: directory / f"server-{number}" for number, name in enumerate(SERVERS)} if mounts else {}
    has_clocks = libfaketime() is not None
    clocks = {part: JumpingClock(directory / f"clock-{part}") for part in history.CLOCKS} if has_clocks else {}
    servers = EmbeddedServers(
        lambda: small_disk(new_directory()) if mounts else new_directory(),
        clocks["redis"].environment() if clocks else {},
    )
    try:
        return await history.run_history(directory, servers, seed, seconds, disks=disks, clocks=clocks)
    finally:
        servers.stop()
        if logs is not None:
            (copies := logs / f"{seed}").mkdir(parents=True, exist_ok=True)
            for log in directory.rglob("*.log"):
                shutil.copy(log, copies)
        for disk in disks.values():
            await asyncio.to_thread(subprocess.run, ["umount", "--lazy", disk], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(directory, ignore_errors=True)


async def printed(
    header: str, outcomes: AsyncGenerator[streams.StreamOutcome | last_answer.Outcome | background.BackgroundOutcome]
) -> int:
    """Prints a table line by line. Returns how many lines are wrong."""
    failed = 0
    print(header, flush=True)
    async with aclosing(outcomes) as rows:
        async for outcome in rows:
            print(outcome.row(), flush=True)
            if found := outcome.faults_found():
                failed += 1
                sys.stderr.write(f"wrong: {'; '.join(found)}\n")
    return failed


async def run(scenario: Scenario, jobs: int, per_s: float) -> Outcome:
    """Runs a scenario on a plane of its own."""
    directory, new_directory = directories()
    full = any(fault.kind == "full" for fault in scenario)
    clocks = {fault.part: JumpingClock(directory / f"clock-{fault.part}") for fault in scenario if fault.kind == "jump"}
    servers = EmbeddedServers(
        lambda: small_disk(new_directory()) if full else new_directory(),
        clocks["redis"].environment() if "redis" in clocks else {},
    )
    disks = {name: directory / f"server-{number}" for number, name in enumerate(SERVERS)}  # in the order they ask in
    nodes = len(NODES) if any(fault.part in {LEADER, *NODES} for fault in scenario) else 1
    try:
        async with chaos_plane(directory, servers, nodes=nodes, disks=disks if full else {}, clocks=clocks) as chaos:
            return await chaos.run(scenario, jobs, per_s)
    finally:
        servers.stop()
        for disk in disks.values() if full else ():
            await asyncio.to_thread(subprocess.run, ["umount", "--lazy", disk], check=False)
        shutil.rmtree(directory, ignore_errors=True)


def small_disk(directory: Path) -> Path:
    """Mounts one that is soon full; as root, on Linux."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", directory], check=True)
    return directory


def lacking(scenario: Scenario) -> str | None:
    """What this machine lacks for a scenario, and how to get it."""
    kinds = {fault.kind for fault in scenario}
    if "jump" in kinds and libfaketime() is None:
        return "clocks jump by libfaketime: apt-get install libfaketime"
    if "full" in kinds and os.geteuid() != 0:
        return "small disks are mounted by root"
    return None


def row(scenario: Scenario, one: Outcome) -> str:
    """A line of the table."""
    different = sorted(set(one.sums.values()))
    money = " / ".join(f"${nano / 1e9:.6f}" for nano in different)
    figures = [one.jobs, one.records, one.calls, one.attempts, one.called_twice, one.lost, one.failed, money]
    stuck = ", ".join(one.stuck) or 0
    what = ", ".join(f"{fault}" if len(scenario) < 3 else f"{fault} at {fault.at_s:g} s" for fault in scenario)
    return f"| {what} | {' | '.join(map(str, figures))} | {one.reserved} | {stuck} | {one.recovered_s:.1f} s |"


def scenarios(wanted: argparse.Namespace) -> Iterable[tuple[int | None, Scenario]]:
    """What is asked for; with its seed where it is random."""
    if wanted.fault:
        yield None, tuple(wanted.fault)
    elif wanted.random or wanted.hours:
        ends = time.monotonic() + (wanted.hours or 0) * 3600
        for seed in itertools.count(wanted.seed):
            if time.monotonic() >= ends and seed - wanted.seed >= wanted.random:
                return
            yield seed, at_random(seed)
    else:
        yield from ((None, scenario) for scenario in SCENARIOS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs them, and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fault",
        type=Fault.parse,
        action="append",
        help=f"PART of {', '.join((*PARTS, LEADER, *NODES))}; KIND of {', '.join(KINDS)}",
    )
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random scenarios")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the first random scenario")
    parser.add_argument("--hours", type=float, help="random scenarios for so long")
    parser.add_argument("--jobs", type=int, default=300, help="in each (default 300)")
    parser.add_argument("--per-s", type=float, default=50.0, help="jobs a second (default 50)")
    parser.add_argument(
        "what",
        nargs="?",
        choices=["streams", "kills", "last-answer", "background", "history", "limits", "storm", "replay", "failover"],
        help="another table than that of faults",
    )
    parser.add_argument(
        "--times",
        type=int,
        help="kills (of Redis' primary 20), background responses (50), histories or runs of limits, each with the next "
        "seed (1)",
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of a history, or a run of limits (default 600)")
    parser.add_argument("--logs", type=Path, help="folder to copy the services' logs of histories to")
    parser.add_argument(
        "--at-once", type=int, default=1, help="jobs of each task in a storm that run at once (default 1)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="where the record of a storm is copied to")
    wanted = parser.parse_args(arguments)
    if wanted.what == "last-answer":
        return 1 if asyncio.run(run_last_answer(wanted.times or 50)) else 0
    if wanted.what == "background":
        return 1 if asyncio.run(run_background(wanted.times or 50, wanted.seed)) else 0
    if wanted.what == "history":
        return 1 if asyncio.run(run_histories(wanted.seconds, wanted.seed, wanted.times or 1, wanted.logs)) else 0
    if wanted.what == "limits":
        return 1 if asyncio.run(run_limits(wanted.seconds, wanted.seed, wanted.times or 1)) else 0
    if wanted.what == "failover":
        return 1 if asyncio.run(run_failover(wanted.times or 20, wanted.per_s, wanted.seed)) else 0
    if wanted.what == "storm":
        return 1 if asyncio.run(run_storm(wanted.jobs, wanted.per_s, wanted.seed, wanted.at_once, wanted.keep)) else 0
    if wanted.what == "replay":
        return 1 if unexplained(asyncio.run(identity.replayed_again(wanted.keep))) else 0
    if wanted.what == "streams":
        return 1 if asyncio.run(run_streams()) else 0
    if wanted.what == "kills":
        return 1 if asyncio.run(run_kills()) else 0
    print(HEADER, flush=True)
    failed = left_out = 0
    replayed: list[identity.ReplayedRecord] = []
    for seed, scenario in scenarios(wanted):
        if lacks := lacking(scenario):
            left_out += 1
            sys.stderr.write(f"left out: {', '.join(map(str, scenario))} ({lacks})\n")
            continue
        outcome = asyncio.run(run(scenario, wanted.jobs, wanted.per_s))
        print(row(scenario, outcome), flush=True)
        replayed.append(outcome.replayed)
        if found := outcome.faults_found(scenario):
            failed += 1
            sys.stderr.write(f"wrong{'' if seed is None else f' with --seed {seed}'}: {'; '.join(found)}\n")
            sys.stderr.writelines(f"replayed otherwise: {example}\n" for example in outcome.replayed.examples)
    print(f"\nThe records, replayed under their config:\n{identity.table(replayed)}")
    return 1 if failed or (wanted.fault and left_out) else 0


if __name__ == "__main__":
    for name in ("nats", "aiohttp.server"):  # they log every connection that is lost on purpose
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    sys.exit(main())
