"""`breakwater logs`, on files as the processes of a stack write them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from breakwater.kernel.commands.errors import ExitCode
from breakwater.local.commands import logs
from tests.cli.conftest import Run

NOW = datetime.now(UTC).replace(microsecond=421_000)
AGO = [NOW - timedelta(seconds=seconds) for seconds in range(10)]


@pytest.fixture
def folder(run: Run) -> Path:
    folder = Path(".breakwater/logs")
    folder.mkdir(parents=True)
    return folder


def line(at: datetime, event: str, **fields: object) -> str:
    return json.dumps({"event": event, "level": "info", "timestamp": at.isoformat(), **fields}) + "\n"


def written(at: datetime, form: str) -> str:
    """As a server writes it, on the clock of this machine."""
    return at.astimezone().strftime(form)[:-3]


def fill(folder: Path) -> None:
    (folder / "worker.log").write_text(line(AGO[9], "ready") + line(AGO[2], "unavailable", what="nats", tries=2))
    (folder / "worker-2.log").write_text(line(AGO[4], "ready") + line(NOW - timedelta(days=2), "old"))
    nats = f"[46] {written(AGO[5], '%Y/%m/%d %H:%M:%S.%f')} [WRN] Plaintext passwords\n"
    redis = f"4624:M {written(AGO[3], '%d %b %Y %H:%M:%S.%f')} * Ready\n"
    (folder / "nats.log").write_text(nats + "a line without a time\n")
    (folder / "redis.log").write_text(redis)


def test_all_processes_are_shown_in_the_order_of_time(run: Run, folder: Path) -> None:
    fill(folder)
    shown = [re.split(r"  +", line[19:]) for line in run("logs").out.splitlines()]
    assert [[part.strip() for part in one] for one in shown] == [
        ["info", "worker", "ready"],
        ["warning nats", "Plaintext passwords"],
        ["", "nats", "a line without a time"],
        ["info", "worker-2", "ready"],
        ["info", "redis", "Ready"],
        ["info", "worker", "unavailable", "what=nats", "tries=2"],
    ]
    assert run("logs").out.startswith(AGO[9].astimezone().strftime("%m-%d %H:%M:%S.421 "))


def test_one_service_is_shown_with_all_its_processes_since_a_time(run: Run, folder: Path) -> None:
    fill(folder)
    since = f"{(datetime.now(UTC) - AGO[5]).total_seconds():.0f}s"
    events = [json.loads(line) for line in run("logs", "worker", "--since", since, "--json").out.splitlines()]
    assert [(one["service"], one["event"]) for one in events] == [("worker-2", "ready"), ("worker", "unavailable")]
    assert events[1]["tries"] == 2


def test_a_traceback_goes_below_its_line(run: Run, folder: Path) -> None:
    (folder / "sink.log").write_text(line(NOW, "failed", exception="Traceback:\n  boom\x1b[2J"))
    ran = run("logs").out.splitlines()
    assert ran[0].endswith("failed")
    assert ran[1:] == ["    Traceback:", "      boom\x1b[2J"]  # escaped on a terminal, see output.visible


def test_what_is_not_there_is_said(run: Run, folder: Path) -> None:
    fill(folder)
    ran = run("logs", "wroker")
    assert (ran.code, "nats, redis, worker, worker-2" in ran.err) == (ExitCode.USAGE, True)
    assert "there are no logs in elsewhere/logs" in run("logs", "--data", "elsewhere").err


def test_following_goes_on_with_whole_lines_and_new_files(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = line(NOW, "third")
    steps = [
        lambda: (folder / "worker.log").open("a").write(line(NOW, "second") + whole[:20]),
        lambda: (folder / "worker.log").open("a").write(whole[20:]),
        lambda: (folder / "sink.log").write_text(line(NOW, "fourth")),
        lambda: (folder / "sink.log").write_text(line(NOW, "5")),  # shorter: it was replaced
    ]

    def next_step(_: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=next_step))
    (folder / "worker.log").write_text(line(NOW, "first"))
    ran = run("logs", "--follow", "--json")
    assert ran.code == ExitCode.INTERRUPTED
    events = [json.loads(line)["event"] for line in ran.out.splitlines()]
    assert events == ["first", "second", "third", "fourth", "5"]
