"""One demo that ran to its end, for all tests that look at what it reported or left: it takes half a minute."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.forked_commands import start_command

JOBS = 100
USED_IN = ("tests.browser.", "tests.cli.test_demo", "tests.replay.test_identity")
"""How the names of the modules begin whose tests look at it."""


@dataclass(frozen=True, slots=True)
class FinishedDemo:
    """What `breakwater demo --json --data` left behind. Nothing of it runs any more.

    Attributes:
        data: Its data directory. Copy it to start a plane on it: other processes of the tests look at it, too.
        temporary: The directory that it had for temporary files.
        returncode: How it ended.
    """

    data: Path
    temporary: Path
    returncode: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        """What it printed."""
        return json.loads(self.out)


@pytest.fixture(scope="session")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> FinishedDemo:
    """The demo with 100 jobs, which the first process of the tests that wants it runs for all of them."""
    base = tmp_path_factory.getbasetemp()
    return finish_demo(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


def finish_demo(base: Path) -> FinishedDemo:
    """Runs the demo, or waits for the process that runs it.

    Args:
        base: the directory of all processes of the tests.
    """
    directory = base / "finished-demo"
    directory.mkdir(exist_ok=True)
    data = directory / "data"
    temporary = directory / "temporary"
    outcome = directory / "outcome.json"
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not outcome.exists():
            temporary.mkdir(exist_ok=True)
            outcome.write_text(json.dumps(_run_demo(data, temporary)))
    return FinishedDemo(data, temporary, *json.loads(outcome.read_text()))


def _run_demo(data: Path, temporary: Path) -> tuple[int, str, str]:
    """Runs it as a person starts it. A plane that somebody has set up is left alone."""
    out, err = data.with_name("out"), data.with_name("err")
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = start_command(
            *("demo", "--json", "--jobs", str(JOBS), "--data", str(data)),
            directory=temporary,
            environment={**os.environ, "TMPDIR": str(temporary), "BREAKWATER_NATS_URL": "nats://127.0.0.1:1"},
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
        )
        code = process.wait(280)
        assert code is not None, f"the demo has not ended: {err.read_text()[-2000:]}"
    return code, out.read_text(), err.read_text()
