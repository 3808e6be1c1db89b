"""A backup of a plane under load, killed in the middle while it is made and while it is restored."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest

from breakwater.kernel.nats.permissions import inbox_prefix
from breakwater.kernel.security.encryption import new_key
from tests.helpers import wait_until

pytestmark = pytest.mark.chaos

JOBS = 1_000
PROGRAM = str(Path(sys.executable).with_name("breakwater"))
CONFIG = """
providers: {openai: {base_url: "https://api.openai.com/v1", api_key: {env: OPENAI_API_KEY}}}
models:
  gpt-4o-mini: {price: {input_usd_per_mtok: 0.15, output_usd_per_mtok: 0.60}}
defaults: {provider: openai, model: gpt-4o-mini}
agents:
  writer: {max_tokens: 200, concurrency: 64, budget: {monthly_usd: 1000, enforcement: hard}}
"""
ENDS = "SELECT execution_id, status, total_cost, attempts_count, completed_at FROM executions FINAL"
CALLS = "SELECT attempt_id, outcome, cost, cost_basis FROM attempts FINAL"


class Machine:
    """A directory in which commands run."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        variables = {name: text for name, text in os.environ.items() if not name.startswith(("BREAKWATER_", "AWS_"))}
        self.environment = {**variables, "BREAKWATER_BACKUP_KEY": key}
        path.mkdir()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PROGRAM, *arguments],
            cwd=self.path,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> str:
        process = self.start(*arguments)
        printed, _ = process.communicate(timeout=280)
        assert process.returncode == 0, printed
        return printed

    def json(self, *arguments: str) -> Any:
        command = [PROGRAM, *arguments, "--json"]
        ran = subprocess.run(
            command, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    def rows(self, sql: str) -> list[dict[str, Any]]:
        return json.loads(self.run("query", sql, "--format", "json", "--limit", "1000000"))

    @property
    def endpoints(self) -> dict[str, Any]:
        return json.loads((self.path / ".breakwater" / "endpoints.json").read_text())

    def _is_up(self) -> bool:
        return (self.path / ".breakwater" / "endpoints.json").exists()

    @contextmanager
    def up(self) -> Generator[None]:
        """The plane, while the block runs."""
        with (self.path / "up.log").open("ab") as log:
            process = subprocess.Popen(
                [PROGRAM, "up", "--simulate"], cwd=self.path, env=self.environment, stdout=log, stderr=log
            )
        try:
            wait_until(lambda: self._is_up() or process.poll() is not None, "the plane", timeout_s=240)
            assert process.poll() is None, (self.path / "up.log").read_text()
            yield
        finally:
            process.terminate()
            process.wait(60)


def kill_when(process: subprocess.Popen[str], condition: Any) -> None:
    """SIGKILL in the middle of its work."""
    wait_until(lambda: condition() or process.poll() is not None, "the middle", timeout_s=240)
    assert process.poll() is None, process.communicate()[0]
    process.send_signal(signal.SIGKILL)
    process.wait()


async def load(url: str, accepted: dict[str, datetime], until: asyncio.Event) -> None:
    """Publishes jobs as a program would, and notes when each was accepted, until it is told to end."""
    client = await nats.connect(url, inbox_prefix=inbox_prefix("client"))
    jetstream = client.jetstream(timeout=60)
    number = 0
    while not until.is_set():
        number += 1
        job_id = f"job-{number}"
        job = {"agent": "writer", "prompt": f"Write a line about harbour {number}.", "job_id": job_id}
        await jetstream.publish("bw.jobs.writer", json.dumps(job).encode(), timeout=60)
        accepted[job_id] = datetime.now().astimezone()
        await asyncio.sleep(0.002)
    await client.close()


def spent(machine: Machine) -> list[tuple[str, str]]:
    listed = machine.json("budgets", "list")["budgets"]
    return sorted((budget["budget"], budget["spent"]) for budget in listed)


def reconciled(machine: Machine) -> bool:
    return machine.json("budgets", "reconcile")["equal"]


@pytest.mark.timeout(1_500)
async def test_what_is_backed_up_under_load_is_restored_though_both_are_killed(tmp_path: Path) -> None:
    key = new_key()
    original, restored = Machine(tmp_path / "original", key), Machine(tmp_path / "restored", key)
    (original.path / "breakwater.yaml").write_text(CONFIG)
    backup = tmp_path / "backup"
    accepted: dict[str, datetime] = {}
    with original.up():
        original.run("limits", "set", "agent:writer", "--usd", "500", "--per", "day", "--id", "backed-up")
        original.run("keys", "create", "backed-up")
        enough = asyncio.Event()
        loading = asyncio.create_task(load(original.endpoints["nats_url"], accepted, enough))
        while len(accepted) < JOBS:
            assert not loading.done(), loading.result()
            await asyncio.sleep(0.1)
        creating = original.start("backup", "create", str(backup))
        await asyncio.to_thread(kill_when, creating, (backup / "streams").exists)
        incomplete = original.start("backup", "verify", str(backup))
        assert "is incomplete: run `breakwater backup create` again" in incomplete.communicate()[0]
        made = await asyncio.to_thread(original.json, "backup", "create", str(backup))
        enough.set()
        await loading
        moment = datetime.fromisoformat(made["moment"])
        ended = "SELECT count() AS n FROM executions FINAL"
        await asyncio.to_thread(
            wait_until, lambda: int(original.rows(ended)[0]["n"]) >= len(accepted), "all jobs to end", timeout_s=280
        )
        original_ends = {row["execution_id"]: row for row in original.rows(ENDS)}
        original_calls = {row["attempt_id"]: row for row in original.rows(CALLS)}
    assert original.json("backup", "verify", str(backup))["decrypted"]

    shutil.copy(original.path / "breakwater.yaml", restored.path)
    restoring = restored.start("backup", "restore", str(backup))
    store = restored.path / ".breakwater" / "nats" / "jetstream" / "plane" / "streams"
    await asyncio.to_thread(kill_when, restoring, (store / "JOBS").exists)
    refused = restored.start("up", "--simulate")
    assert "was interrupted: run `breakwater backup restore` again" in refused.communicate(timeout=120)[0]
    again = restored.start("backup", "restore", str(backup))
    printed, _ = again.communicate(timeout=280)
    if again.returncode:  # NATS was killed in the middle of a stream
        assert "is restored in part, as NATS ended meanwhile" in printed
        shutil.rmtree(restored.path / ".breakwater")
        restored.run("backup", "restore", str(backup))
    with restored.up():
        wanted = {job_id for job_id, at in accepted.items() if at < moment - timedelta(milliseconds=100)}
        assert len(wanted) >= JOBS

        def lacking() -> set[str]:
            return wanted - {row["execution_id"] for row in restored.rows(ENDS)}

        await asyncio.to_thread(wait_until, lambda: not lacking(), "all jobs to end", timeout_s=280)
        await asyncio.sleep(5)  # for what might come twice
        ends = restored.rows(ENDS)
        assert len(ends) == len({row["execution_id"] for row in ends}), "an execution has two records"
        before = {name: row for name, row in original_ends.items() if row["completed_at"] < made["moment"]}
        assert before
        assert {name: row for name, row in ((row["execution_id"], row) for row in ends) if name in before} == before
        # What was called until then was called once, and cost the same.
        calls = {row["attempt_id"]: row for row in restored.rows(CALLS)}
        called = {name for name in calls if name.rpartition(":")[0] in before}
        assert {name: calls[name] for name in called} == {name: original_calls[name] for name in called}
        wait_until(lambda: reconciled(restored), "Redis to be rebuilt", timeout_s=120)
        assert [amount for _, amount in spent(restored) if float(amount) > 0]
        assert "backed-up" in {limit["id"] for limit in restored.json("limits", "list")["limits"]}
        assert "backed-up" in {key["name"] for key in restored.json("keys", "list")}
    print(
        f"{len(accepted)} jobs, {len(wanted)} accepted before the moment and {len(before)} ended, {len(ends)} restored"
    )
