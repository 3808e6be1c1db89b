"""`breakwater size`: the servers that a load needs."""

from __future__ import annotations

from typing import Annotated

import typer

from breakwater.kernel.columns import Column
from breakwater.kernel.commands import output
from breakwater.local.plane import JsonOption
from breakwater.sizing.contract import PartSize
from breakwater.sizing.rules import Load, size_of

COLUMNS: tuple[Column[PartSize], ...] = (
    Column("part", lambda size: size.part),
    Column("processes", lambda size: size.processes, "count"),
    Column("cores", lambda size: size.cores, display=lambda size: f"{size.cores:.2f}", align_right=True),
    Column(
        "memory GB", lambda size: size.memory_mb, display=lambda size: _gb(size.memory_mb / 1_000), align_right=True
    ),
    Column("disk GB", lambda size: size.disk_gb, display=lambda size: _gb(size.disk_gb), align_right=True),
    Column("from", lambda size: size.why, below=True),
)


def size(
    jobs_per_s: Annotated[float, typer.Option("--jobs-per-s", min=0.001, help="Jobs a second at the busiest time.")],
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Tokens of a job, prompt and answer.")] = 1_000,
    retention_days: Annotated[
        int, typer.Option("--retention-days", min=1, help="Days for which ClickHouse keeps records.")
    ] = 400,
    streamed: Annotated[
        float, typer.Option("--streamed", min=0, max=1, help="Share of the jobs whose answer is streamed.")
    ] = 0.0,
    average: Annotated[
        float, typer.Option("--average", min=0.01, max=1, help="Average load, as a share of the busiest.")
    ] = 1.0,
    events_h: Annotated[float, typer.Option("--events-h", min=1, help="`limits.events_max_age_h`.")] = 72.0,
    results_h: Annotated[float, typer.Option("--results-h", min=1, help="`limits.results_max_age_h`.")] = 24.0,
    as_json: JsonOption = False,
) -> None:
    """Print the nodes, cores, memory and disks that a load needs, from measured figures, and what ends first.

    It asks no server. docs/scaling.md has the measurements, and the way to 10,000 jobs a second.

    For example:

        breakwater size --jobs-per-s 20 --tokens 2000

        breakwater size --jobs-per-s 1000 --tokens 1500 --retention-days 90 --events-h 6 --results-h 6
    """
    plane = size_of(Load(jobs_per_s, tokens, retention_days, streamed, events_h, results_h, average))
    if as_json:
        output.json_document(plane)
        return
    output.table(COLUMNS, plane.parts)
    nodes = f"{plane.nodes} x {plane.cores_per_node} cores and {plane.memory_gb_per_node} GB"
    output.write(f"in all: {plane.cores:g} cores, {plane.memory_gb:,g} GB of memory, {plane.disk_gb:,g} GB of disk")
    output.write(f"nodes: {nodes}")
    for bound in plane.bounds:
        state = "too much" if bound.reached else "enough"
        output.write(f"{state}: up to {bound.jobs_per_s:,.0f} jobs a second, {bound.part}; then {bound.remedy}")
    for assumption in plane.assumptions:
        output.note(assumption)


def _gb(amount: float) -> str:
    return f"{amount:,.1f}" if amount else ""
