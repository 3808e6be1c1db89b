"""The process of a plan: reads its task from stdin, writes lines to stdout, and ends when its stdin does."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
import time
from datetime import datetime

from pydantic import SecretStr

from breakwater.config import parse_config
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.formats import hint
from breakwater.kernel.process import background, prctl
from breakwater.replay.contract import ConfigPlanError, ConfigPlanLine
from breakwater.replay.plan import MAX_SILENCE_S, plan_config
from breakwater.replay.process import PlanTask

MAX_MEMORY_BYTES = 768 << 20
"""The most memory of the process: `request` is given 1 GB in compose.yaml."""

NICENESS = 10
"""By it, a busy machine gives the plan a tenth of what it gives a service."""

PROGRESS_EVERY_S = 0.3
SILENCE_S = 10.0
"""The longest time in seconds without a line."""


class PlanProgress:
    """Writes how far a plan is: when it has moved, and in any case so often that no proxy takes it for dead."""

    def __init__(self, until: datetime) -> None:
        self._until = until
        self._first: datetime | None = None
        self._latest = until
        self._jobs = 0

    @property
    def share(self) -> float:
        """The share of the time from the first job to the end that is replayed, from 0 to 1."""
        if self._first is None:
            return 0.0
        length_s = max((self._until - self._first).total_seconds(), 0.001)
        return min(1.0, max(0.0, (self._latest - self._first).total_seconds() / length_s))

    def add(self, started_at: datetime) -> None:
        """Counts a job that was replayed."""
        self._jobs += 1
        self._first = self._first or started_at  # the record may begin long after the window
        self._latest = started_at

    async def run(self) -> None:
        """Writes until it is cancelled."""
        written_jobs = -1
        written_at = 0.0
        while True:
            if self._jobs != written_jobs or time.monotonic() - written_at >= SILENCE_S:
                written_jobs = self._jobs
                written_at = time.monotonic()
                _write(ConfigPlanLine(progress=self.share, jobs=written_jobs))
            await asyncio.sleep(PROGRESS_EVERY_S)


def _write(line: ConfigPlanLine) -> None:
    sys.stdout.buffer.write(line.model_dump_json(exclude_defaults=True).encode() + b"\n")
    sys.stdout.buffer.flush()


def _error(code: str, message: str) -> ConfigPlanLine:
    return ConfigPlanLine(error=ConfigPlanError(code=code, message=message))


async def _plan(task: PlanTask) -> ConfigPlanLine:
    try:
        config = parse_config(task.config, source="the config")
        before = parse_config(task.before, source="the current config")
    except ConfigError as error:
        return _error("invalid_config", str(error))
    if task.agent is not None and task.agent not in {*config.agents, *before.agents}:
        return _error("unknown_agent", f"neither config has an agent {task.agent!r}")
    for name in task.renames.values():
        if name not in config.agents:
            return _error("unknown_agent", f"the changed config has no agent {name!r}{hint(name, config.agents)}")
    progress = PlanProgress(task.until)
    writing = asyncio.create_task(progress.run())
    analytics = connect(SecretStr(task.clickhouse_url), answer_timeout_s=MAX_SILENCE_S)
    try:
        report = await plan_config(
            *(analytics, config, before, task.since, task.until, task.agent),
            on_end=lambda run: progress.add(run.job.record.dispatched_at),
            renames=task.renames,
            leaves_out_unknown=task.leaves_out_unknown,
        )
    except AnalyticsUnavailableError as error:
        return _error("unavailable", str(error))
    except QueryError as error:
        return _error("query_failed", f"ClickHouse refuses to read the record: {error}")
    except MemoryError:
        return _error("too_many_jobs", "the jobs of this time need more memory than a plan may have; shorten the time")
    finally:
        await background.stop(writing)
        await analytics.close()
    return ConfigPlanLine(report=report)


def _end_with_stdin() -> None:
    # Not by `sys.stdin`, whose lock the thread would hold when the process ends.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def main() -> None:
    """Reads the task, and writes the lines."""
    prctl.hide_memory()
    prctl.set_name("bw-plan")
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    task = PlanTask.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _write(asyncio.run(_plan(task)))


if __name__ == "__main__":
    main()
