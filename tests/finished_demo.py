"""One demo that ran to its end, for all tests that look at what it reported or left: it takes half a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

JOBS = 100


@dataclass(frozen=True, slots=True)
class FinishedDemo:
    """What `breakwater demo --json --data` left behind. Nothing of it runs any more.

    Attributes:
        data: Its data directory. Whoever starts a plane on it has it until the end of the test run.
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
    """The demo with 100 jobs, as a person starts it. A plane that somebody has set up is left alone."""
    directory = tmp_path_factory.mktemp("demo")
    data, temporary = directory / "data", directory / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "BREAKWATER_NATS_URL": "nats://127.0.0.1:1"}
    command = [str(Path(sys.executable).with_name("breakwater")), "demo", "--json", "--jobs", str(JOBS)]
    ran = subprocess.run(
        [*command, "--data", str(data)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=temporary,
        timeout=280,
    )
    return FinishedDemo(data, temporary, ran.returncode, ran.stdout, ran.stderr)
