"""The cost of a request here, in durable engines and in other gateways, in one run: `make bench-peers`.

    python -m bench.peers [--rounds 3] [--requests 1000] [--seconds 3] [--latency-ms 20] [--only NAME ...] [...]

Each is installed from its registry in the version pinned beside this file. One that can't be installed or started is
left out, and a line says so. In each round each is started alone, on an empty directory, and asked for the same short
answer of the same provider: first to warm up, then with 1, 16 and 64 requests in flight. The figures are medians of the
rounds.

CPU is user's and kernel's time of all its processes, for the requests and, if it stores anything, two seconds after
them, for what lags behind the answers. Neither the provider nor a client that asks over HTTP is counted. The floor,
celery and DBOS are asked by a program that speaks their own protocol, which is counted: it stands for a service.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.programs import BrokenSystemError, Programs, takes_connections
from bench.peers.systems import HERE, LOOPBACK, MOST_IN_FLIGHT, SYSTEMS, System
from breakwater.local.ports import free_port

IN_FLIGHT = (1, 16, MOST_IN_FLIGHT)
WARM_UP = 200
SETTLE_S = 2
HEADER = ("", *(f"{n}: CPU ms" for n in IN_FLIGHT), "64: requests/s", "1: p50 ms", "stored data")
DURABILITY = (
    "NATS and celery's Redis sync their files each second; synced NATS, Restate and Postgres before they acknowledge."
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The measurements of one system at one number of requests in flight. CPU is by what its processes do."""

    cpu_ms: Mapping[str, float]
    per_s: float
    p50_ms: float


def measure(programs: Programs, requests: int, in_flight: int, seconds: float, *, stores: bool) -> Figures:
    """Has it asked, and reads the clocks before and after."""
    before_ms = programs.cpu_ms()
    load = programs.ask(requests, in_flight, seconds)
    if stores:
        time.sleep(SETTLE_S)
    answers = len(load.took_s)
    used_ms = {role: ms / answers for role, ms in (programs.cpu_ms() - before_ms).items()}
    return Figures(used_ms, answers / load.wall_s, statistics.median(load.took_s) * 1000)


def run_once(system: System, upstream: str, requests: int, seconds: float) -> list[Figures]:
    """Starts a system, and measures it with each number of requests in flight. Raises BrokenSystemError."""
    with tempfile.TemporaryDirectory() as directory, Programs(Path(directory)) as programs:
        system.start(programs, upstream)
        programs.ask(WARM_UP, MOST_IN_FLIGHT, seconds)
        stores = bool(system.stores)
        return [measure(programs, requests, in_flight, seconds, stores=stores) for in_flight in IN_FLIGHT]


def install(systems: Sequence[str]) -> dict[str, str]:
    """Installs the packages of systems. Returns why it could not, by system."""
    problems: dict[str, str] = {}
    for name in systems:
        try:
            SYSTEMS[name].install()
        except (subprocess.CalledProcessError, OSError) as error:
            problems[name] = f"its packages can't be installed: {error}"
    return problems


def cpu_ms(rounds: Sequence[Sequence[Figures]]) -> list[float]:
    """The median of the rounds for each number of requests in flight."""
    return [statistics.median(sum(figures.cpu_ms.values()) for figures in level) for level in zip(*rounds, strict=True)]


def by_process(rounds: Sequence[Sequence[Figures]]) -> Generator[str]:
    """A line for each number of requests in flight: the medians of the rounds, the largest first."""
    for in_flight, level in zip(IN_FLIGHT, zip(*rounds, strict=True), strict=True):
        roles = {role for figures in level for role in figures.cpu_ms}
        medians = {role: statistics.median(figures.cpu_ms.get(role, 0.0) for figures in level) for role in roles}
        shares = (f"{role} {ms:.2f}" for role, ms in sorted(medians.items(), key=lambda share: -share[1]))
        yield f"{in_flight:2} in flight: {', '.join(shares)}"


def cells(name: str, rounds: Sequence[Sequence[Figures]]) -> tuple[str, ...]:
    """The medians of the rounds, and what the system stores."""
    by_level = list(zip(*rounds, strict=True))
    per_s = statistics.median(figures.per_s for figures in by_level[-1])
    alone_ms = statistics.median(figures.p50_ms for figures in by_level[0])
    cpu = (f"{median_ms:.2f}" if median_ms else "" for median_ms in cpu_ms(rounds))
    return (*cpu, f"{per_s:,.0f}", f"{alone_ms:.0f}", SYSTEMS[name].stores)


def table(measured: Mapping[str, Sequence[Sequence[Figures]]]) -> Generator[str]:
    """The lines of the table. The figures of a system's variants are in one row."""
    yield "".join(f"| {title} " for title in HEADER) + "|"
    yield "|---" * len(HEADER) + "|"
    for system, names in itertools.groupby(measured, lambda name: name.partition(";")[0]):
        variants = list(names)
        titles = (variant.removeprefix(system) for variant in variants)
        label = f"{system} {SYSTEMS[variants[0]].version}".strip() + "".join(titles)
        columns = zip(*(cells(variant, measured[variant]) for variant in variants), strict=True)
        # Once where all are the same, as what they store.
        yield "| " + " | ".join([label, *("; ".join(dict.fromkeys(column)) for column in columns)]) + " |"


def main() -> None:
    """Installs and measures, and prints the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--requests", type=int, default=1000, help="at most so many in a measurement (default 1000)")
    parser.add_argument("--seconds", type=float, default=3.0, help="at most so long (default 3)")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="of the provider (default 20)")
    parser.add_argument("--only", nargs="*", choices=SYSTEMS, metavar="NAME", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument(
        "--by-process", action="store_true", help="also print the CPU of floor and Breakwater by process"
    )
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, LiteLLM compiles a failing import at each request
    systems = options.only or list(SYSTEMS)
    problems = install(systems)
    measured: defaultdict[str, list[list[Figures]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory, Programs(Path(directory)) as provider:
        port = free_port()
        command = (sys.executable, HERE / "upstream.py", port, options.latency_ms)
        provider.start(*command, ready=takes_connections(port))
        for number in range(options.rounds):
            for name in systems:
                if name in problems:
                    continue
                try:
                    figures = run_once(SYSTEMS[name], f"http://{LOOPBACK}:{port}/v1", options.requests, options.seconds)
                except (BrokenSystemError, OSError) as error:
                    problems[name] = str(error)
                    measured.pop(name, None)
                    continue
                measured[name].append(figures)
                said = "; ".join(f"{sum(level.cpu_ms.values()):.2f} ms, {level.per_s:.0f}/s" for level in figures)
                print(f"round {number + 1}: {name}: {said}", file=sys.stderr, flush=True)
    print(*table(measured), DURABILITY, sep="\n")
    if {"floor", "Breakwater"} <= measured.keys():
        times = (
            ours / least for ours, least in zip(cpu_ms(measured["Breakwater"]), cpu_ms(measured["floor"]), strict=True)
        )
        print(f"Breakwater takes {', '.join(f'{number:.1f}' for number in times)} times the CPU of the floor.")
    for name in ("floor", "Breakwater") if options.by_process else ():
        print(f"{name}, ms of CPU by process:", *by_process(measured.get(name, ())), sep="\n")
    for name, problem in problems.items():
        print(f"{name} is left out: {problem}")


if __name__ == "__main__":
    main()
