"""How long jobs take whose worker is killed: ten kills of one of two workers under load, streams among the jobs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.plane import AGENTS, MODELS, chaos_plane
from tests.flow.kit import seconds_between
from tests.server_sources import Servers

KILLS = 10
EVERY_S = 7.3
DOWN_S = 1.0
PER_S = 20.0

HEADER = "| jobs | how many | failed | p50 | p99 | longest |\n|---|---|---|---|---|---|"


async def kill_rows(directory: Path, source: Servers) -> list[str]:
    """Kills, and returns the lines of the table. The wrong ones begin with `wrong`."""
    agents = {
        "writer": AGENTS["writer"] | {"on_stream_break": "continue", "retry": {"max_attempts": 10, "base_s": 0.1}}
    }
    async with chaos_plane(directory, source, nodes=1, disks={}, clocks={}, models=MODELS, agents=agents) as chaos:
        plane, jobs = chaos.plane, int((KILLS + 1) * EVERY_S * PER_S)

        async def kill() -> None:
            for number in range(KILLS):
                await asyncio.sleep(EVERY_S)
                name = ("worker", "worker-2")[number % 2]
                plane.kill(name)
                await asyncio.sleep(DOWN_S)
                plane.start("worker", name)

        killing = asyncio.create_task(kill())
        for number in range(jobs):
            job = {"agent": "writer", "job_id": f"j{number}", "prompt": "x" * 300, "stream": number % 2 == 0}
            await plane.publish(job)
            await asyncio.sleep(1 / PER_S)
        await killing
        for number in range(jobs):
            await plane.result(f"j{number}", timeout_s=300)
        records = await plane.messages("EVENTS", "bw.executions.writer.*", at_least=jobs)
        lost = [one for one in records if any(a["outcome"] == "worker_lost" for a in one["attempts"])]
        streamed = [one for one in lost if int(one["execution_id"][1:]) % 2 == 0]
        rows = [_row(name, found) for name, found in (("all", records), ("in flight", lost), ("streamed", streamed))]
        wrong = [
            f"wrong: {one['execution_id']} ended with {one['reason']}: {one['error']}, as attempts "
            f"{[attempt['error'] or attempt['outcome'] for attempt in one['attempts']]}"
            for one in records
            # A stream can't go on where its worker died between sending a piece and saving it.
            if one["status"] != "succeeded" and one["reason"] != "worker_lost"
        ]
        return rows + wrong


def _row(name: str, records: Sequence[dict[str, Any]]) -> str:
    took = sorted(seconds_between(one["queued_at"], one["completed_at"]) for one in records)
    p50, p99 = (took[math.ceil(len(took) * part) - 1] for part in (0.5, 0.99))
    failed = sum(one["status"] != "succeeded" for one in records)
    return f"| {name} | {len(took)} | {failed} | {p50:.1f} s | {p99:.1f} s | {took[-1]:.1f} s |"
