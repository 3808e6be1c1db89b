"""The demo itself, as a person starts it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from breakwater.kernel.commands.errors import ExitCode
from breakwater.local.demo import command
from tests.cli.conftest import Run
from tests.finished_demo import JOBS, FinishedDemo
from tests.helpers import wait_until


@contextmanager
def demo(tmp_path: Path, *arguments: str, stdout: int = subprocess.PIPE) -> Generator[subprocess.Popen[str]]:
    # A plane that somebody has set up must be left alone: the demo has its own.
    environment = {**os.environ, "TMPDIR": str(tmp_path), "BREAKWATER_NATS_URL": "nats://127.0.0.1:1"}
    process = subprocess.Popen(
        [Path(sys.executable).with_name("breakwater"), "demo", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long(about_s=20, together="console")
def test_the_demo_ends_with_ledgers_that_agree_and_leaves_nothing_behind(finished_demo: FinishedDemo) -> None:
    report, err = finished_demo.report, finished_demo.err
    assert report["reconciliation"]["differences"] == [], err
    assert [check for check in report["checks"] if not check["ok"]] == [], err
    assert (report["ok"], finished_demo.returncode) == (True, 0)
    assert sum(agent["executions"] for agent in report["agents"]) == report["jobs"] == JOBS
    assert list(finished_demo.temporary.iterdir()) == []


@pytest.mark.chaos
def test_ctrl_c_ends_the_demo_and_whatever_it_has_started(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.stderr is not None
        for said in process.stderr:
            if re.search(r"starting: .*(redis|nats|clickhouse)", said):
                break
        children = wait_until(lambda: psutil.Process(process.pid).children(recursive=True), "a process of the stack")
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("is_terminal", "arguments", "stays"),
    [
        (True, (), True),
        (True, ("--exit",), False),
        (True, ("--json",), False),
        (False, (), False),
        (False, ("--exit",), False),
    ],
)
@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.FAILED])
def test_only_on_a_terminal_does_the_demo_stay_after_its_report(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, arguments: Sequence[str], stays: bool, code: ExitCode
) -> None:
    asked: list[bool] = []

    def ended(*_: Any, stays: bool, **__: Any) -> ExitCode:
        asked.append(stays)
        return code

    monkeypatch.setattr(command, "_run", ended)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert (run("demo", *arguments).code, asked) == (code, [stays])


def test_the_end_of_the_demo_says_how_to_look_at_what_it_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_run", lambda *_, **__: ExitCode.OK)
    assert "`--keep` keeps it" in run("demo").err
    ran = run("demo", "--data", "it's kept")
    arguments = shlex.split(ran.out)[1:]
    data = str(Path("it's kept").absolute())
    assert arguments == ["up", "--simulate", "--config", f"{data}/breakwater.yaml", "--data", data]


def test_a_directory_with_something_in_it_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    ran = run("demo", "--data", str(tmp_path), "--json")
    assert ran.code == 2
    assert "is not empty" in ran.error["message"]
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]
