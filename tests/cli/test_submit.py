"""Putting a job together, and showing what became of it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from breakwater.cli.errors import CliError, ExitCode
from breakwater.cli.submit_answer import refused
from tests.cli.conftest import Run

Sent = Callable[..., dict[str, Any]]


@pytest.fixture
def sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The job that a command line would send."""
    jobs: list[dict[str, Any]] = []

    async def keep(_door: object, job: dict[str, Any], *, wait_s: float) -> None:
        jobs.append(job | {"wait_s": wait_s})

    monkeypatch.setattr("breakwater.cli.submit_http.send", keep)
    monkeypatch.setenv("BREAKWATER_URL", "http://127.0.0.1:9")

    def send(*arguments: str, stdin: str = "", code: int = ExitCode.UNDECIDED) -> dict[str, Any]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        ran = run("submit", *arguments)
        assert ran.code == code, ran.err
        return jobs[-1]

    return send


def test_what_is_not_said_is_not_sent(sent: Sent) -> None:
    job = sent("writer", "hi")
    assert job.keys() == {"agent", "prompt", "job_id", "wait_s"}
    assert job["wait_s"] == 30


def test_every_option_has_its_field(sent: Sent) -> None:
    options = "--model m --param max_tokens=60 --param stop=END --param seed=1 --tenant t --task-id k --metadata a={} "
    options += "--total-timeout 9.5 --dry-run --job-id j --no-wait"
    job = sent("writer", "hi", *options.split(), code=ExitCode.OK)
    assert job == {
        "agent": "writer",
        "prompt": "hi",
        "job_id": "j",
        "model": "m",
        "params": {"max_tokens": 60, "stop": "END", "seed": 1},
        "tenant": "t",
        "task_id": "k",
        "metadata": {"a": {}},
        "total_timeout_s": 9.5,
        "dry_run": True,
        "wait_s": 0,
    }


def test_every_job_gets_an_id_of_its_own(sent: Sent) -> None:
    assert sent("writer", "hi")["job_id"] != sent("writer", "hi")["job_id"]


def test_a_prompt_comes_from_stdin_or_a_file(sent: Sent, tmp_path: Path) -> None:
    assert sent("writer", "-", stdin="from stdin\n")["prompt"] == "from stdin\n"
    (tmp_path / "prompt.txt").write_text("from a file")
    assert sent("writer", "--message-file", "prompt.txt")["prompt"] == "from a file"


def test_options_go_over_the_job_of_a_file(sent: Sent, tmp_path: Path) -> None:
    whole = {"agent": "writer", "messages": [{"role": "user", "content": "hi"}], "tenant": "t", "job_id": "j"}
    (tmp_path / "job.json").write_text(json.dumps(whole))
    assert sent("--job", "job.json") == whole | {"wait_s": 30}
    assert sent("--job", "-", "--tenant", "u", stdin=json.dumps(whole))["tenant"] == "u"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["writer"], "nothing to say"),
        (["--job", "nope.json"], "can't be read"),
        (["--job", "-"], "is not JSON"),
        (["writer", "hi", "--param", "x"], "is not KEY=JSON"),
        (["writer", "hi", "--param", 'x={"a"'], "is not JSON"),
        (["writer", "hi", "--message-file", "x"], "both"),
        (["writer", "--message-file", "x"], "can't be read"),
        ([], "the agent is missing"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("{"))
    ran = run("submit", *arguments)
    assert ran.code == ExitCode.USAGE
    assert said in ran.err


def test_a_job_that_nobody_waited_for_shows_its_id(run: Run, sent: Sent) -> None:
    ran = run("submit", "writer", "hi", "--job-id", "j", "--no-wait")
    assert (ran.code, ran.out, ran.err) == (ExitCode.OK, "j\n", "accepted\n")
    ran = run("submit", "writer", "hi", "--job-id", "j", "--wait-s", "2")
    assert ran.code == ExitCode.UNDECIDED
    assert "breakwater executions j" in ran.err


@pytest.mark.parametrize(
    ("status", "body", "code", "exit_code", "said"),
    [
        (404, {"code": "unknown_agent", "message": "no such agent"}, "unknown_agent", 1, "no such agent"),
        (401, {"code": "unauthorized", "message": "a key is needed"}, "unauthorized", 1, "a key is needed"),
        (503, {"code": "unavailable", "message": "NATS is away"}, "unavailable", 4, "NATS is away"),
        (422, {"code": "invalid_job", "message": "2 mistakes"}, "invalid_job", 2, "2 mistakes"),
        (502, "<html>", "http", 1, "502"),
    ],
)
def test_a_refusal_is_told_in_the_interfaces_own_words(
    status: int, body: Any, code: str, exit_code: int, said: str
) -> None:
    text = body if isinstance(body, str) else json.dumps({"error": body})
    error = refused(status, text.encode())
    assert isinstance(error, CliError)
    assert (error.code, error.exit_code) == (code, exit_code)
    assert said in error.message


def test_nothing_listening_is_said_with_its_address(run: Run) -> None:
    ran = run("submit", "writer", "hi", "--url", "http://127.0.0.1:9")
    assert ran.code == ExitCode.UNREACHABLE
    assert "127.0.0.1:9" in ran.err
    ran = run("submit", "writer", "hi", "--url", "nonsense")
    assert ran.code == ExitCode.USAGE
    assert "http://host:port" in ran.err
