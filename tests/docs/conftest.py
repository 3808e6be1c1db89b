"""The stack that README.md has a newcomer start, in an empty directory and on free ports."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_command, run_program
from tests.docs.markdown import ROOT
from tests.forked_commands import start_command
from tests.helpers import share_event_loop

START_S = 240.0
DOCUMENTED_URL = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A directory that looks like a fresh checkout after `make up`, with the stack running."""

    path: Path
    environment: dict[str, str]

    @property
    def endpoints(self) -> dict[str, Any]:
        return json.loads((self.path / ".breakwater" / "endpoints.json").read_text())

    def as_here(self, text: str) -> str:
        """A command as a page has it; only the port is this stack's, as 8080 may be taken."""
        return text.replace(DOCUMENTED_URL, self.endpoints["request_url"])

    def run(
        self, *command: str, stdin: str | None = None, timeout_s: float = 290, within: str = "."
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.path / within,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def commands(self, text: str) -> Iterator[str]:
        """The commands of a block for a shell, one by one; each may go over several lines."""
        command = ""
        for line in self.as_here(text).splitlines(keepends=True):
            command += line
            with suppress(ValueError):  # an open quote
                if shlex.split(command) and not command.endswith("\\\n"):
                    yield command
                    command = ""
        assert not command.strip(), command

    def sh(self, command: str, *, stdin: bytes | io.BytesIO = b"") -> subprocess.CompletedProcess[str]:
        """Runs a command of a block. Its `breakwater` runs in this process: starting it takes 0.6 s of CPU."""
        before, _, last = command.rpartition(" | ")
        last, on_failure, after = last.partition(" || ")
        words = shlex.split(last, comments=True)
        if words[0] != "breakwater":
            return self.run("sh", "-eu", stdin=command)
        if before:
            stdin = self.run("sh", "-eu", stdin=before).stdout.encode()
        ran = self.breakwater(*words[1:], stdin=stdin)
        if not on_failure:
            return ran
        shell = self.run("sh", "-eu", stdin=f"(exit {ran.returncode}) || {after}")
        return subprocess.CompletedProcess(
            command, shell.returncode, ran.stdout + shell.stdout, ran.stderr + shell.stderr
        )

    def breakwater(self, *arguments: str, stdin: bytes | io.BytesIO = b"") -> subprocess.CompletedProcess[str]:
        """The command line, in this process."""
        path = {"PATH": self.environment["PATH"]}
        return run_command(*arguments, environment=path, directory=self.path, stdin=stdin)

    def python(self, program: str) -> subprocess.CompletedProcess[str]:
        """A program in Python, in this process."""
        path = {"PATH": self.environment["PATH"]}
        return run_program(self.as_here(program), environment=path, directory=self.path)

    def paste(self, text: str) -> str:
        """Runs the commands of a text that is pasted into a shell at once; returns all that they printed.

        The rest of the text is what a command reads on its standard input, unless it leaves that alone.
        """
        printed = ""
        left = list(self.commands(text))
        while left:
            command = left.pop(0)
            rest = io.BytesIO("".join(left).encode())
            ran = self.sh(command, stdin=rest)
            printed += f"{command}{ran.stdout}\n{ran.stderr}\n"
            assert ran.returncode == 0, printed
            assert rest.tell() == 0, f"{command} has read what was pasted after it"
        return printed

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=self.path, env=self.environment, stdout=subprocess.PIPE, text=True)

    def get(self, path: str) -> tuple[int, Any]:
        """The HTTP interface's answer to a GET."""
        key = Path(self.endpoints["api_key_file"]).read_text().strip()
        request = urllib.request.Request(
            self.endpoints["request_url"] + path, headers={"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)

    def script_provider(self, faults: dict[str, list[dict[str, Any]]]) -> None:
        """Makes models of the simulated provider fail; those that are not named work."""
        script = json.loads((self.path / ".breakwater" / "simulation.json").read_text())
        for model, behaviour in script["models"].items():
            behaviour["faults"] = faults.get(model, [])
        url = self.endpoints["simulated_provider_url"]
        urllib.request.urlopen(urllib.request.Request(f"{url}/_sim/script", json.dumps(script).encode()), timeout=30)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share_event_loop(items, Path(__file__).parent)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Generator[Checkout]:
    path = tmp_path_factory.mktemp("checkout")
    for name in ("README.md", "CHANGELOG.md", "proto"):
        (path / name).symlink_to(ROOT / name)
    # Copied: Node.js takes the directory of a program to be that of the file that a link leads to.
    shutil.copytree(ROOT / "examples", path / "examples", ignore=shutil.ignore_patterns("node_modules"))
    (path / "examples" / "node" / "node_modules").symlink_to(ROOT / "examples" / "node" / "node_modules")
    (path / ".venv").symlink_to(sys.prefix)
    # The tutorial has a copy made; `make up` takes the file itself.
    config = (ROOT / "examples" / "breakwater.yaml").read_text()
    # The page on adoption makes keys for agents of its own config.
    of_adoption = "  search-answers: {model: gpt-4o-mini}\n  code-review: {model: gpt-4o}\n\n"
    after_agents = "# Spend of all agents together"
    assert config.count(after_agents) == 1
    (path / "tutorial.yaml").write_text(config.replace(after_agents, of_adoption + after_agents))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BREAKWATER_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    with (path / "up.log").open("wb") as log:
        process = start_command(
            *("up", "--config", "tutorial.yaml", "--simulate"),
            directory=path,
            environment=environment,
            stdout=log.fileno(),
            stderr=log.fileno(),
        )
    try:
        deadline = time.monotonic() + START_S
        while not (path / ".breakwater" / "endpoints.json").exists():
            assert process.poll() is None, (path / "up.log").read_text()
            assert time.monotonic() < deadline, f"not up within {START_S:g} s:\n{(path / 'up.log').read_text()}"
            time.sleep(0.1)
        yield Checkout(path, environment)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()
        process.wait()
