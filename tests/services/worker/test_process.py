"""What a worker's id says of its process."""

from __future__ import annotations

import subprocess

from breakwater.services.worker import process
from tests.helpers import until

MACHINE, PID, BEGAN = process.own_id().split("-")


def test_a_process_runs_if_it_is_still_the_one_that_had_its_pid() -> None:
    assert process.runs(process.own_id())
    assert process.runs(f"{MACHINE}-{PID}-{int(BEGAN) + 1}") is False
    assert process.runs(f"other-{PID}-{BEGAN}") is None


async def test_a_killed_process_runs_no_more_before_and_after_it_is_reaped() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:  # noqa: ASYNC220  it is killed at once
        fields = process.Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()
        worker = f"{MACHINE}-{other.pid}-{fields[19]}"
        assert process.runs(worker)
        other.kill()
        await until(lambda: process.runs(worker) is False, "that it is dead")
        other.wait()
        assert process.runs(worker) is False
