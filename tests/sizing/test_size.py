"""The size of a plane follows from the load, and says what ends first."""

from __future__ import annotations

import json

import pytest

from breakwater.sizing.contract import PartSize
from breakwater.sizing.rules import Load, cpu_ms, size_of
from tests.commands import run_command

LOADS = [
    # Jobs a second, tokens, days, streamed; nodes, NATS servers, workers; what ends first, and if it is reached.
    (1.0, 500, 400, 0.0, 1, 1, 1, "NATS: 32 GB", False),
    (20.0, 2_000, 90, 0.5, 1, 1, 1, "NATS: 32 GB", False),
    (200.0, 1_500, 90, 0.0, 3, 3, 2, "NATS: 32 GB", False),
    (1_000.0, 1_500, 90, 0.0, 9, 3, 3, "NATS: 32 GB", True),
]


def part(plane_parts: tuple[PartSize, ...], name: str) -> PartSize:
    return next(size for size in plane_parts if size.part == name)


@pytest.mark.parametrize(
    ("jobs", "tokens", "days", "streamed", "nodes", "servers", "workers", "first", "reached"), LOADS
)
def test_a_load_needs(
    jobs: float,
    tokens: int,
    days: int,
    streamed: float,
    nodes: int,
    servers: int,
    workers: int,
    first: str,
    reached: bool,
) -> None:
    plane = size_of(Load(jobs, tokens, days, streamed))
    assert part(plane.parts, "nats").processes == servers
    assert part(plane.parts, "worker").processes == workers
    assert plane.nodes >= nodes
    assert (plane.bounds[0].part.startswith(first), plane.bounds[0].reached) == (True, reached)
    assert plane.cores == pytest.approx(sum(size.cores for size in plane.parts), abs=0.1)


def test_each_figure_grows_with_the_load_and_none_is_lost() -> None:
    small, large = size_of(Load(60, 1_000, 30)), size_of(Load(600, 1_000, 30))
    for before, after in zip(small.parts, large.parts, strict=True):
        assert after.cores == pytest.approx(10 * before.cores, rel=0.05, abs=0.06)
        assert after.disk_gb == pytest.approx(10 * before.disk_gb, rel=0.05, abs=0.6)
    assert part(size_of(Load(60, 1_000, 60)).parts, "clickhouse").disk_gb == pytest.approx(
        2 * part(small.parts, "clickhouse").disk_gb, rel=0.05
    )
    assert cpu_ms("worker", Load(1, 1_000, 1, 1.0)) - cpu_ms("worker", Load(1, 1_000, 1)) == pytest.approx(250 * 0.028)


def test_events_that_are_kept_for_less_time_fit_into_memory() -> None:
    bound = next(bound for bound in size_of(Load(1_000, 1_000, 30)).bounds if "index" in bound.part)
    assert bound.reached
    hours = float(bound.remedy.partition("at most ")[2].partition(" for")[0])
    fits = size_of(Load(1_000, 1_000, 30, events_h=hours * 0.99, results_h=hours * 0.33))
    assert not next(bound for bound in fits.bounds if "index" in bound.part).reached


def test_the_command_prints_the_size_as_a_table_and_as_json() -> None:
    arguments = ("size", "--jobs-per-s", "1000", "--tokens", "1500", "--retention-days", "90")
    table, document = run_command(*arguments), run_command(*arguments, "--json")
    assert (table.returncode, document.returncode) == (0, 0), table.stderr
    plane = json.loads(document.stdout)
    assert f"nodes: {plane['nodes']} x 8 cores" in table.stdout
    assert [size["part"] for size in plane["parts"]][:2] == ["request", "worker"]
    assert "too much: up to" in table.stdout
    assert run_command("size").returncode == 2
