"""Putting a job together, and showing what became of it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from breakwater.client import ApiError, ApiKeyRefusedError, ApiRefusedError, UnexpectedResponseError
from breakwater.client.commands import api_errors
from breakwater.jobs.commands.submit import note_if_recorded
from breakwater.jobs.contract.execution import Result
from breakwater.kernel.commands.errors import CliError, ExitCode
from tests.cli.conftest import Run
from tests.tables import each_row

Sent = Callable[..., dict[str, Any]]


def stdin_of(given: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(given))


@pytest.fixture
def sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The job that a command line would send."""
    jobs: list[dict[str, Any]] = []

    async def keep(_client: object, job: dict[str, Any], *, wait_s: float) -> None:
        jobs.append(job | {"wait_s": wait_s})

    monkeypatch.setattr("breakwater.jobs.commands.submit._send", keep)
    monkeypatch.setenv("BREAKWATER_URL", "http://127.0.0.1:9")

    def send(*arguments: str, stdin: str = "", code: int = ExitCode.UNDECIDED) -> dict[str, Any]:
        monkeypatch.setattr(sys, "stdin", stdin_of(stdin.encode()))
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


def test_rules_of_the_job_are_flags_and_win_over_those_of_its_file(sent: Sent, tmp_path: Path) -> None:
    options = "--preset migration-safety --breaker-consecutive 3 --set guard.max_iterations=5 --set breaker.errors=off"
    job = sent("writer", "hi", *options.split())
    assert job["breaker"] == {"preset": "migration-safety", "consecutive_failures": 3, "errors": "off"}
    assert job["guard"] == {"max_iterations": 5}
    assert "retry" not in job
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"agent": "writer", "prompt": "hi", "breaker": {"same_error": 2, "errors": 9}}))
    job = sent("--job", str(file), "--breaker-same-error", "1", "--set", "retry.max_attempts=1")
    assert (job["breaker"], job["retry"]) == ({"same_error": 1, "errors": 9}, {"max_attempts": 1})


def test_what_is_set_must_be_a_rule(sent: Sent) -> None:
    for rule in ("timeout_s=5", "guard=5", "budget.daily_usd=5"):
        sent("writer", "hi", code=ExitCode.UNDECIDED)
        with pytest.raises(AssertionError, match=r"is not a rule.*guard\.max_iterations=5"):
            sent("writer", "hi", "--set", rule)


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


@each_row(
    ("arguments", "said"),
    [
        (["writer"], "the job has no input"),
        (["--job", "nope.json"], "can't be read"),
        (["--job", "-"], "is not JSON"),
        (["writer", "hi", "--param", "x"], "is not KEY=JSON"),
        (["writer", "hi", "--param", 'x={"a"'], "is not JSON"),
        (["writer", "hi", "--message-file", "x"], "exclude each other"),
        (["writer", "--message-file", "x"], "can't be read"),
        ([], "the agent is missing"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin_of(b"{"))
    ran = run("submit", *arguments)
    assert ran.code == ExitCode.USAGE
    assert said in ran.err


@each_row(
    ("arguments", "stdin", "said"),
    [
        (["writer", "-"], b"a\xff", "stdin is not UTF-8 text: byte 0xff at position 1"),
        (["--job", "-"], b"\xfe", "stdin is not UTF-8 text"),
        (["writer", "--message-file", "latin1"], b"", "latin1 is not UTF-8 text"),
        (["--job", "latin1"], b"", "--job latin1 is not UTF-8 text"),
        (["writer", "\udcff"], b"", "prompt is not UTF-8 text"),
        (["writer", "hi", "--metadata", "a=\udcff"], b"", "metadata is not UTF-8 text"),
        (["--job", "-"], rb'{"agent": "writer", "prompt": "\ud800"}', "prompt is not UTF-8 text"),
        (["writer", "-"], b"", "stdin is empty"),
        (["--job", "-"], b" \n", "stdin is empty"),
    ],
)
def test_what_is_no_text_is_said_with_its_place(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], stdin: bytes, said: str
) -> None:
    (tmp_path / "latin1").write_bytes("größer".encode("latin1"))
    monkeypatch.setattr(sys, "stdin", stdin_of(stdin))
    ran = run("submit", *arguments)
    assert ran.code == ExitCode.USAGE
    assert said in ran.err


def test_a_value_that_is_no_json_is_reported_and_taken_as_text(run: Run, sent: Sent) -> None:
    ran = run("submit", "writer", "hi", "--param", "stream=tru", "--param", "seed=1", "--no-wait")
    assert ran.err == "--param stream: 'tru' is not JSON; it is used as text\naccepted\n"


def test_an_answer_from_the_record_is_distinguished_from_a_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime(2026, 11, 21, 10, 0, 5, tzinfo=UTC)
    for second in (4, 5, 6):
        note_if_recorded({"job_id": "j", "queued_at": f"2026-11-21T10:00:0{second}.500Z"}, now)
    assert capsys.readouterr().err == ""
    note_if_recorded({"job_id": "j", "queued_at": "2026-11-21T10:00:03.500Z"}, now)
    assert "answered from the record: j was submitted at 2026-11-21T10:00:03.500Z" in capsys.readouterr().err


def refused(status: int, error: dict[str, Any] | str, again: str = "") -> CliError:
    """What ends the command where the API refuses so; a text is nothing of Breakwater's."""
    if isinstance(error, str):
        cause: ApiError = UnexpectedResponseError(status, f"{error} ({status})")
    else:
        details = tuple((one["path"], one["message"]) for one in error.get("details", ()))
        cause = (ApiKeyRefusedError if status == 401 else ApiRefusedError)(
            status, error["code"], error["message"], details
        )
    with pytest.raises(CliError) as raised, api_errors(unanswered="", again=again):
        raise cause
    return raised.value


def test_what_a_refusal_says_is_said_once() -> None:
    body: dict[str, Any] = {
        "code": "unknown_agent",
        "message": "no agent 'x'",
        "details": [{"path": "agent", "message": "no agent 'x'"}],
    }
    assert refused(404, body).remedy == ""
    body["details"] = [{"path": "agent", "message": "configured are a, b"}]
    assert refused(404, body).remedy == "agent: configured are a, b"
    body["message"] = "agent 'x' is not configured; known are a, b"
    assert refused(404, body).remedy == ""


def test_an_agent_that_is_unavailable_is_no_outage_and_it_is_said_until_when() -> None:
    details = [{"path": "agent", "message": "no call to 'm' before 2026-11-21T10:00:00.000Z"}]
    body = {"code": "agent_unavailable", "message": "agent 'w' is temporarily unavailable", "details": details}
    error = refused(503, body, again="Try again.")
    assert (error.code, error.exit_code) == ("agent_unavailable", ExitCode.FAILED)
    assert error.remedy == "agent: no call to 'm' before 2026-11-21T10:00:00.000Z"


def test_a_job_that_nobody_waited_for_shows_its_id(run: Run, sent: Sent) -> None:
    ran = run("submit", "writer", "hi", "--job-id", "j", "--no-wait")
    assert (ran.code, ran.out, ran.err) == (ExitCode.OK, "j\n", "accepted\n")
    ran = run("submit", "writer", "hi", "--job-id", "j", "--wait-s", "2")
    assert ran.code == ExitCode.UNDECIDED
    assert "breakwater executions j" in ran.err


@each_row(
    ("status", "body", "code", "exit_code", "said"),
    [
        (404, {"code": "unknown_agent", "message": "no such agent"}, "unknown_agent", 1, "no such agent"),
        (401, {"code": "unauthorized", "message": "a key is needed"}, "unauthorized", 1, "a key is needed"),
        (403, {"code": "forbidden", "message": "this takes the scope submit"}, "forbidden", 1, "the scope submit"),
        (503, {"code": "unavailable", "message": "NATS is away"}, "unavailable", 4, "NATS is away"),
        (422, {"code": "invalid_job", "message": "2 mistakes"}, "invalid_job", 2, "2 mistakes"),
        (502, "<html>", "http", 1, "502"),
    ],
)
def test_a_refusal_is_reported_in_the_interfaces_own_words(
    status: int, body: Any, code: str, exit_code: int, said: str
) -> None:
    error = refused(status, body)
    assert (error.code, error.exit_code) == (code, exit_code)
    assert said in error.message


def test_a_key_that_may_not_is_to_be_exchanged_for_another_one() -> None:
    body: dict[str, Any] = {
        "code": "forbidden",
        "message": "this takes an API key with the scope submit",
        "details": [],
    }
    error = refused(403, body)
    assert error.remedy == "Pass another one with --api-key or BREAKWATER_API_KEY."
    assert refused(403, "<html>").code == "http"


@pytest.mark.parametrize("reason", ["length", "stop", None])
def test_an_answer_that_is_cut_off_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    now = datetime.now(UTC)
    times = dict.fromkeys(("queued_at", "dispatched_at", "completed_at"), now)
    decided = Result(
        job_id="j", execution_id="j", agent="writer", status="succeeded", output="Once", duration_ms=9,
        finish_reason=reason, **times,
    )  # fmt: skip

    async def answer(_client: object, _job: dict[str, Any], *, wait_s: float) -> dict[str, Any]:
        return {**decided.model_dump(mode="json"), "waited_s": wait_s}

    monkeypatch.setattr("breakwater.jobs.commands.submit._send", answer)
    monkeypatch.setenv("BREAKWATER_URL", "http://127.0.0.1:9")
    ran = run("submit", "writer", "hi")
    assert ran.out == "Once\n"
    assert ("truncated by the output limit" in ran.err) == (reason == "length")


def test_what_stopped_a_job_is_said_with_its_statistics(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    times = dict.fromkeys(("queued_at", "dispatched_at", "completed_at"), datetime.now(UTC))
    counts = {"consecutive_failures": 3, "total_failures": 5, "unique_errors": 2, "reason": "3 consecutive failures"}
    known = {"job_id": "j", "execution_id": "j", "agent": "writer", "duration_ms": 9, **times}
    refused = {"status": "dead_lettered", "reason": "guard_tripped", "statistics": counts}
    decided = Result.model_validate(known | refused)

    async def answer(_client: object, _job: dict[str, Any], *, wait_s: float) -> dict[str, Any]:
        return {**decided.model_dump(mode="json"), "waited_s": wait_s}

    monkeypatch.setattr("breakwater.jobs.commands.submit._send", answer)
    monkeypatch.setenv("BREAKWATER_URL", "http://127.0.0.1:9")
    ran = run("submit", "writer", "hi")
    assert "stopped: 3 consecutive failures (5 failures in all, 2 different errors)" in ran.err


def test_nothing_listening_is_said_with_its_address(run: Run) -> None:
    ran = run("submit", "writer", "hi", "--url", "http://127.0.0.1:9")
    assert ran.code == ExitCode.UNREACHABLE
    assert "127.0.0.1:9" in ran.err
    ran = run("submit", "writer", "hi", "--url", "nonsense")
    assert ran.code == ExitCode.USAGE
    assert "http://host:port" in ran.err
