from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import JsonValue, TypeAdapter, ValidationError

from breakwater.calls.providers import child as child_module
from breakwater.calls.providers.base import Answer, CallError, Provider
from breakwater.calls.providers.process import ProcessProvider
from breakwater.calls.providers.registry import LOCAL_KINDS, ProcessSettings, ProviderEntry
from breakwater.calls.rules.classify import Classification, classify
from breakwater.kernel.errors import ConfigError
from breakwater.prices.rules.usage import Usage
from breakwater.redaction.settings import RedactionRules
from tests.calls.providers.kit import local_call as call
from tests.helpers import until
from tests.tables import each_row

OK = """printf '{"status":"success","code":0,"result":"ok"}'"""
PYTHON = (sys.executable, "-I", "-S", "-c")
ECHO = """
import json, sys
print(json.dumps({"status": "success", "code": 0, "result": json.load(sys.stdin)}))
"""
Opener = Callable[..., ProcessProvider]
ON_BOTH_LOOPS = True


def settings(*command: str, **more: Any) -> ProcessSettings:
    return ProcessSettings(command=command, **more)


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def pipes() -> set[str]:
    """The pipes and process descriptors that are open here."""
    found: set[str] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(entry.readlink())
            if target.startswith("pipe:") or "pidfd" in target:
                found.add(f"{entry.name} {target}")
    return found


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


@pytest.fixture
async def opened() -> AsyncGenerator[Opener]:
    """Opens providers, and sees to it that nothing of them is left."""
    before = pipes(), children(), len(asyncio.all_tasks())
    providers: list[Provider] = []

    def open_(*command: str, **more: Any) -> ProcessProvider:
        provider = settings(*command, **more).open()
        assert isinstance(provider, ProcessProvider)
        providers.append(provider)
        return provider

    yield open_
    for provider in providers:
        await provider.close()
    assert pipes() <= before[0]
    assert children() <= before[1]
    assert len(asyncio.all_tasks()) == before[2]


async def failure(provider: Provider, **more: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        await provider.perform(call(**more))
    return caught.value


def program_in(directory: Path, name: str, script: str) -> Path:
    file = directory / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def look_into(directory: Path) -> tuple[list[str], int] | None:
    """The names of the files in a directory and its mode; None where there is none."""
    if not directory.exists():
        return None
    return [file.name for file in directory.iterdir()], directory.stat().st_mode & 0o777


def verdict(failed: CallError) -> Classification:
    return classify(failed.failure, datetime.now(UTC))


async def pids_in(file: Path, count: int) -> list[int]:
    def found() -> list[int]:
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    await until(lambda: len(found()) == count)
    return found()


def has_ended(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        # What has lost its parent is reaped by the system, in its own time; a zombie of ours would be a leak.
        return process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid()
    except psutil.NoSuchProcess:
        return True


def hold_up_until_ended(child: int) -> None:
    """Blocks the event loop meanwhile."""
    while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


async def gone(pids: list[int]) -> None:
    await until(lambda: all(has_ended(pid) for pid in pids))


def a_family(file: Path, then: str) -> str:
    """A program that reports its pid and that of a process it starts, which would run for ever."""
    return f"sleep 3600 & echo $$ $! > {file}.new; mv {file}.new {file}; {then}"


# What it is asked, and what it answers


async def test_a_program_is_asked_in_json_and_its_result_is_the_output(opened: Opener) -> None:
    provider = opened(*PYTHON, ECHO)
    answer = await provider.perform(
        call(agent="a", tenant="t", task_id="run", timeout_s=9.5, traceparent="00-1-2-01", params={"n": 10**30})
    )
    assert answer == Answer(
        {
            "execution_id": "j",
            "job_id": "j",
            "attempt_id": "j:1",
            "agent": "a",
            "model": "m",
            "tenant": "t",
            "task_id": "run",
            "timeout_s": 9.5,
            "traceparent": "00-1-2-01",
            "stream": False,
            "input": {"question": "why"},
            "params": {"n": 10**30},
        },
        Usage(None, None),
    )


@pytest.mark.one_loop
async def test_a_conversation_is_asked_as_messages(opened: Opener) -> None:
    said = [{"role": "user", "content": "wave 🌊 \n"}]
    asked = (await opened(*PYTHON, ECHO).perform(call(input=None, messages=said))).output
    assert isinstance(asked, dict)
    assert asked["messages"] == said
    assert "input" not in asked


@pytest.mark.one_loop
async def test_a_correction_comes_beside_the_input_that_it_belongs_to(opened: Opener) -> None:
    wrong = [{"role": "user", "content": "the answer lacks a title"}]
    asked = (await opened(*PYTHON, ECHO).perform(call(messages=wrong))).output
    assert isinstance(asked, dict)
    assert (asked["input"], asked["messages"]) == ({"question": "why"}, wrong)


@pytest.mark.one_loop
@each_row(
    ("reported", "per_call", "usage", "cost"),
    [
        ("", None, Usage(None, None), None),
        ("", "0.25", Usage(None, None), 250_000_000),
        (', "cost_usd": "0.0123"', "0.25", Usage(None, None), 12_300_000),
        (', "cost_usd": 0', "0.25", Usage(None, None), 0),
        (', "cost_usd": 0.30000000000000004', None, Usage(None, None), 300_000_000),
        (', "cost_usd": null, "usage": null', None, Usage(None, None), None),
        (', "usage": {"input_tokens": 7, "total_tokens": 9}', None, Usage(7, None), None),
        (
            ', "usage": {"input_tokens": 7, "output_tokens": 5, "cached_tokens": 2, "reasoning_tokens": 1}',
            None,
            Usage(7, 5, cached_tokens=2, reasoning_tokens=1),
            None,
        ),
    ],
)
async def test_a_program_may_say_what_it_took(
    opened: Opener, reported: str, per_call: str | None, usage: Usage, cost: int | None
) -> None:
    script = f"""printf '{{"status":"success","code":0,"result":[1,null]{reported}}}'"""
    assert await opened(*sh(script), cost_per_call_usd=per_call).perform(call()) == Answer([1, None], usage, cost)


@pytest.mark.one_loop
async def test_a_program_may_begin_with_a_byte_order_mark(opened: Opener) -> None:
    script = r"""printf '\357\273\277{"status":"success","code":0,"result":"ok"}'"""
    assert (await opened(*sh(script)).perform(call())).output == "ok"


@pytest.mark.one_loop
@each_row(
    ("status", "code", "kind", "name", "seen"),
    [
        ("error", 400, "client", "InvalidRequestError", 400),
        ("error", 404, "client", "InvalidRequestError", 404),
        ("error", 429, "client", "InvalidRequestError", 429),
        ("error", 499, "client", "InvalidRequestError", 499),
        ("error", 500, "server", "BackendFailureError", 500),
        ("error", 501, "client", "ActionNotSupportedError", 501),
        ("error", 503, "server", "BackendFailureError", 503),
        ("error", 504, "timeout", "TimeoutError", 504),
        ("error", 0, "server", "BackendFailureError", None),
        ("error", -7, "server", "BackendFailureError", None),
        ("error", 10**12, "server", "BackendFailureError", None),
        ("success", 3, "server", "BackendFailureError", None),
        ("success", 422, "client", "InvalidRequestError", 422),
    ],
)
async def test_the_code_of_an_answer_that_is_no_success_says_what_it_means(
    opened: Opener, status: str, code: int, kind: str, name: str, seen: int | None
) -> None:
    script = f"""printf '{{"status":"{status}","code":{code},"error":"no such ticket","usage":{{"input_tokens":3}}}}'"""
    failed = await failure(opened(*sh(script)))
    again = kind != "client"
    assert verdict(failed) == Classification(kind, name, "no such ticket", seen, again, again)  # type: ignore[arg-type]
    assert failed.maybe_billed
    assert failed.usage == Usage(3, None)


@pytest.mark.one_loop
async def test_an_error_without_a_text_shows_status_and_code(opened: Opener) -> None:
    failed = await failure(opened(*sh("""printf '{"status":"busy","code":7}'""")))
    assert verdict(failed).message == "answered 'busy' with 7"


# What programs get wrong


@pytest.mark.one_loop
@each_row(
    ("script", "message"),
    [
        ("echo one >&2; echo two words >&2; echo >&2; exit 3", "exited with 3: two words"),
        ("exit 3", "exited with 3"),
        (f"{OK}; exit 1", "exited with 1"),
        ("kill -TERM $$", "was killed by SIGTERM"),
        ("kill -40 $$", "was killed by signal 40"),
        ("", "printed nothing"),
        ("echo", "printed nothing"),
        ("echo Hello", "printed no JSON (expected value at line 1 column 1): Hello"),
        (f"{OK}; echo; echo done", "printed no JSON (trailing characters at line 2 column 1)"),
        ("""printf '{"status":"success","code":0,"result":NaN}'""", "printed no JSON (expected value at"),
        (r"""printf '{"status":"success","code":0,"result":"\377"}'""", "printed no JSON (invalid unicode"),
        ("echo '[]'", "printed JSON that is not a valid response: "),
        ("""echo '{"answer": 42}'""", "printed JSON that is not a valid response: status: Field required"),
        ("""echo '{"status":"success"}'""", "printed JSON that is not a valid response: code: Field required"),
        ("""echo '{"status":"success","code":"0"}'""", "printed JSON that is not a valid response: code: "),
        ("""echo '{"status":"success","code":false}'""", "printed JSON that is not a valid response: code: "),
        (
            """echo '{"status":"success","code":0,"usage":{"input_tokens":-1}}'""",
            "printed JSON that is not a valid response: usage.input_tokens: ",
        ),
        (
            """echo '{"status":"success","code":0,"cost_usd":"a lot"}'""",
            "printed JSON that is not a valid response: cost_usd: ",
        ),
        (
            """echo '{"status":"success","code":0,"cost_usd":"-1"}'""",
            "printed JSON that is not a valid response: cost_usd: ",
        ),
    ],
)
async def test_what_is_no_response_is_a_failure_of_the_program(opened: Opener, script: str, message: str) -> None:
    failed = await failure(opened(*sh(script)))
    found = verdict(failed)
    assert (found.kind, found.class_name, found.status_code) == ("server", "BackendFailureError", None)
    assert found.message.startswith(message)
    assert found.retryable
    assert found.counts_for_breaker
    assert failed.maybe_billed


@pytest.mark.one_loop
async def test_json_that_is_nested_deeper_than_a_record_can_hold_is_a_failure(opened: Opener) -> None:
    script = """print('{"status":"success","code":0,"result":' + "[" * 250 + "]" * 250 + "}")"""
    assert verdict(await failure(opened(*PYTHON, script))).message.startswith("printed no JSON (recursion limit")


@pytest.mark.parametrize("stream", [1, 2])
async def test_no_more_than_500_characters_of_a_program_are_shown(opened: Opener, stream: int) -> None:
    script = f"import os, sys; os.write({stream}, b'word ' * 2000); sys.exit({stream - 1})"
    message = verdict(await failure(opened(*PYTHON, script))).message
    assert message.endswith(" word…")
    assert len(message) < 600


async def test_a_flood_is_killed_and_is_a_failure(opened: Opener, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    started = time.monotonic()
    failed = await failure(opened(*sh(a_family(file, "exec yes")), max_output_bytes=100_000))
    assert verdict(failed).message == "printed more than 100000 bytes, and was killed"
    assert verdict(failed).kind == "server"
    assert time.monotonic() - started < 20
    await gone(await pids_in(file, 2))


async def test_the_last_byte_that_is_allowed_is_no_flood(opened: Opener) -> None:
    size = len('{"status":"success","code":0,"result":"ok"}')
    assert (await opened(*sh(OK), max_output_bytes=size).perform(call())).output == "ok"
    assert "printed more than" in verdict(await failure(opened(*sh(OK), max_output_bytes=size - 1))).message


async def test_complaining_without_end_never_blocks_a_program(opened: Opener) -> None:
    script = "import os\nfor _ in range(200): os.write(2, b'x' * 100_000)\nos.write(2, b'\\nthe end\\n'); os._exit(9)"
    assert verdict(await failure(opened(*PYTHON, script))).message == "exited with 9: the end"


# Its end


@pytest.mark.parametrize("ignoring", ["", "trap '' TERM INT HUP; "])
async def test_a_program_that_hangs_is_killed_with_all_that_it_started(
    opened: Opener, tmp_path: Path, ignoring: str
) -> None:
    file = tmp_path / "pids"
    provider = opened(*sh(ignoring + a_family(file, "wait")))
    started = time.monotonic()
    failed = await failure(provider, timeout_s=2.0)
    took = time.monotonic() - started
    assert verdict(failed) == Classification(
        "timeout", "TimeoutError", "no answer within 2 s; the program was killed", None, True, True
    )
    assert failed.maybe_billed
    assert 1.99 <= took < 30
    pids = await pids_in(file, 2)
    assert not psutil.pid_exists(pids[0]), "it must have been reaped, too"
    await gone(pids)


async def test_a_call_that_is_cancelled_takes_its_program_with_it(opened: Opener, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    task = asyncio.create_task(opened(*sh(a_family(file, "wait"))).perform(call()))
    pids = await pids_in(file, 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pids[0])
    await gone(pids)


async def test_a_call_that_is_cancelled_twice_leaves_nothing_either(opened: Opener, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    task = asyncio.create_task(opened(*sh(a_family(file, "wait"))).perform(call()))
    pids = await pids_in(file, 2)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(pids)


async def test_what_a_program_leaves_behind_holding_its_output_is_killed_and_not_waited_for(
    opened: Opener, tmp_path: Path
) -> None:
    file = tmp_path / "pids"
    started = time.monotonic()
    answer = await opened(*sh(a_family(file, OK))).perform(call())
    assert answer.output == "ok"
    assert time.monotonic() - started < 20
    await gone(await pids_in(file, 2))


async def test_what_a_program_leaves_behind_silently_is_killed(opened: Opener, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    script = f"sleep 3600 <&- >&- 2>&- & echo $! > {file}; {OK}"
    assert (await opened(*sh(script)).perform(call())).output == "ok"
    await gone(await pids_in(file, 1))


async def test_a_program_that_closes_its_output_is_waited_for(opened: Opener) -> None:
    message = verdict(await failure(opened(*sh(f"{OK}; exec >&- 2>&-; sleep 0.3; exit 4")))).message
    assert message == "exited with 4"


async def test_a_loop_that_was_held_up_still_reads_what_was_printed(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "GRACE_S", 0)
    monkeypatch.setattr(child_module, "_CHUNK", 4096)
    script = 'import sys; sys.stdout.write(\'{"status":"success","code":0,"result":"\' + \'x\' * 60_000 + \'"}\')'
    provider = opened(*PYTHON, script)
    await provider.perform(call())
    before = children()
    task = asyncio.create_task(provider.perform(call()))
    await asyncio.sleep(0)
    [child] = children() - before
    hold_up_until_ended(child)
    assert (await task).output == "x" * 60_000


async def test_where_no_descriptor_is_left_to_watch_a_program_its_end_is_polled(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    assert (await opened(*sh(OK)).perform(call())).output == "ok"
    assert verdict(await failure(opened("sleep", "60"), timeout_s=0.2)).kind == "timeout"


# Its input


async def test_a_program_need_not_read_what_it_is_asked(opened: Opener) -> None:
    large = {"text": "x" * 2_000_000}
    assert (await opened(*sh(OK)).perform(call(input=large))).output == "ok"
    assert (await opened(*sh(f"exec <&-; sleep 0.1; {OK}")).perform(call(input=large))).output == "ok"


async def test_much_may_go_both_ways_at_once(opened: Opener) -> None:
    # It prints all before it reads anything, and then reads all: who does one after the other waits for ever.
    script = """
import json, sys
sys.stdout.write('{"status":"success","code":0,"result":["' + "y" * 2_000_000 + '",')
sys.stdout.flush()
sys.stdout.write(str(len(json.load(sys.stdin)["input"])) + "]}")
"""
    answer = await opened(*PYTHON, script).perform(call(input="x" * 2_000_000))
    assert answer.output == ["y" * 2_000_000, 2_000_000]


# Its surroundings


async def test_a_program_inherits_nothing_but_what_it_needs(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKWATER_REDIS_URL", "redis://:password@localhost")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("TOKEN_OF_AGENT", "from the environment")
    (tmp_path / "key").write_text("from a file\n")
    script = """
import json, os
print(json.dumps({"status": "success", "code": 0, "result": dict(os.environ)}))
"""
    env = {"REGION": "eu", "TOKEN": {"env": "TOKEN_OF_AGENT"}, "KEY": {"file": str(tmp_path / "key")}}
    seen = (await opened(*PYTHON, script, env=env).perform(call())).output
    assert isinstance(seen, dict)
    assert {name: seen.pop(name) for name in ("REGION", "TOKEN", "KEY", "LANG", "PATH")} == {
        "REGION": "eu",
        "TOKEN": "from the environment",
        "KEY": "from a file",
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
    }
    assert set(seen) <= {"HOME", "TMPDIR", "LC_CTYPE"}, "LC_CTYPE is set by Python itself"


async def test_a_program_inherits_no_open_file(opened: Opener, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        script = """
import json, os
print(json.dumps({"status": "success", "code": 0, "result": os.listdir("/proc/self/fd")}))
"""
        seen = (await opened(*PYTHON, script).perform(call())).output
    assert isinstance(seen, list)
    assert len(seen) == 4, "stdin, stdout, stderr and the listing itself"


async def test_its_secrets_are_in_no_error_and_in_no_repr(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_AGENT", "tiger-42-swordfish")
    env = {"TOKEN": {"env": "TOKEN_OF_AGENT"}}
    for script in (
        "echo my token is $TOKEN >&2; exit 1",
        "echo my token is $TOKEN",
        """echo '{"status":"error","code":400,"error":"my token is '$TOKEN'"}'""",
    ):
        provider = opened(*sh(script), env=env)
        failed = await failure(provider)
        assert "my token is [REDACTED]" in verdict(failed).message
        assert "swordfish" not in repr(failed) + repr(provider) + repr(vars(provider))


async def test_the_placeholder_is_that_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_AGENT", "tiger-42-swordfish")
    chosen = settings(*sh("echo $TOKEN >&2; exit 1"), env={"TOKEN": {"env": "TOKEN_OF_AGENT"}})
    provider = chosen.open(RedactionRules(placeholder="(gone)"))
    try:
        assert "exited with 1: (gone)" in verdict(await failure(provider)).message
    finally:
        await provider.close()


@pytest.mark.parametrize("padding", ["", " x" * 2_000, " x" * 2_034])
async def test_a_secret_of_two_lines_is_in_no_error(
    opened: Opener, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_AGENT", "tiger-42\nsword fish")
    env = {"TOKEN": {"env": "TOKEN_OF_AGENT"}}
    script = f"""printf '%s' "bad token $TOKEN{padding}" >&2; exit 1"""
    message = verdict(await failure(opened(*sh(script), env=env))).message
    assert "fish" not in message
    assert "sword" not in message


@pytest.mark.parametrize(
    ("stderr", "words"),
    [("3 done", "exited with 1: 3 done"), ("Password:\\nkept-elsewhere", "exited with 1: [REDACTED]")],
)
async def test_an_error_is_redacted_before_it_is_cut_and_short_secrets_mangle_nothing(
    opened: Opener, stderr: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_AGENT", "0")
    provider = opened(*sh(f"printf '{stderr}' >&2; exit 1"), env={"N": {"env": "TOKEN_OF_AGENT"}})
    assert words in verdict(await failure(provider)).message


async def test_a_program_has_an_empty_directory_of_its_own_until_it_is_closed(opened: Opener) -> None:
    script = f"""{ECHO.replace("json.load(sys.stdin)", "[os.getcwd(), os.listdir()]")}open("left", "w")"""
    provider = opened(*PYTHON, "import os" + script)
    output: JsonValue = (await provider.perform(call())).output
    assert isinstance(output, list)
    directory = Path(str(output[0]))
    assert output[1] == []
    assert look_into(directory) == (["left"], 0o700)
    await provider.close()
    assert look_into(directory) is None


async def test_a_program_runs_where_it_is_configured_and_is_found_from_there(opened: Opener, tmp_path: Path) -> None:
    program_in(tmp_path, "agent.sh", """printf '{"status":"success","code":0,"result":"%s"}' "$PWD" """)
    answer = await opened("./agent.sh", cwd=tmp_path).perform(call())
    assert answer.output == str(tmp_path)
    assert look_into(tmp_path) is not None


async def test_a_program_is_found_in_the_path_that_it_is_given(opened: Opener, tmp_path: Path) -> None:
    program_in(tmp_path, "a-rare-name", OK)
    assert (await opened("a-rare-name", env={"PATH": f"{tmp_path}:/bin"}).perform(call())).output == "ok"
    with pytest.raises(ConfigError, match="'a-rare-name' can't be run: there is no such executable file in its PATH"):
        settings("a-rare-name").open()


def test_what_is_not_there_is_said_when_the_provider_is_opened(tmp_path: Path) -> None:
    for wrong, words in (
        (settings("/no/such/program"), "'/no/such/program' can't be run: there is no such executable file at /no/such"),
        (settings("./agent", cwd=tmp_path), f"'./agent' can't be run: there is no such executable file at {tmp_path}"),
        (settings("sh", cwd=tmp_path / "none"), f"there is no directory {tmp_path / 'none'}"),
        (settings("sh", env={"KEY": {"env": "NO_SUCH_VARIABLE"}}), "NO_SUCH_VARIABLE is not set"),
    ):
        with pytest.raises(ConfigError) as caught:
            wrong.open()
        assert words in str(caught.value)


@each_row(
    "wrong",
    [
        {"command": []},
        {"command": ["sh", "a\0b"]},
        {"command": ["sh"], "env": {"A=B": "c"}},
        {"command": ["sh"], "env": {"A": "b\0c"}},
        {"command": ["sh"], "max_output_bytes": 0},
        {"command": ["sh"], "max_output_bytes": 64 * 1024 * 1024 + 1},
        {"command": ["sh"], "shell": True},
    ],
)
def test_settings_that_could_not_work_are_refused(wrong: dict[str, Any]) -> None:
    entry: TypeAdapter[Any] = TypeAdapter(ProviderEntry)
    with pytest.raises(ValidationError):
        entry.validate_python({"kind": "process", **wrong})
    assert entry.validate_python({"kind": "process", "command": ["sh"]}) == settings("sh")
    assert "process" in LOCAL_KINDS


async def test_a_program_that_can_no_longer_be_started_has_cost_nothing(opened: Opener, tmp_path: Path) -> None:
    program = program_in(tmp_path, "agent.sh", OK)
    provider = opened(str(program))
    program.unlink()
    failed = await failure(provider)
    assert verdict(failed) == Classification(
        "network", "IoError", "could not be started: No such file or directory", None, True, True
    )
    assert not failed.maybe_billed


# Many, and the end of the worker


async def test_fifty_run_at_once_and_each_has_its_own_answer(opened: Opener) -> None:
    provider = opened(*sh("""read -r x; printf '{"status":"success","code":0,"result":%s}' "$x" """))
    warm = await provider.perform(call())
    assert warm.output
    before = pipes()
    answers = await asyncio.gather(*(provider.perform(call(input=number + 1)) for number in range(50)))
    assert [answer.output["input"] for answer in answers if isinstance(answer.output, dict)] == list(range(1, 51))
    assert pipes() == before


async def test_closing_kills_what_runs_and_starts_no_more(opened: Opener, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    provider = opened(*sh(a_family(file, "wait")))
    running = asyncio.create_task(failure(provider))
    pids = await pids_in(file, 2)
    await provider.close()
    assert verdict(await running).message == "was killed by SIGKILL"
    await gone(pids)
    failed = await failure(provider)
    assert verdict(failed).message == "could not be started: the worker is stopping"
    assert not failed.maybe_billed


async def test_there_is_no_key_to_read_again(opened: Opener) -> None:
    assert not await opened("sh").refresh_credential(None)


WORKER = """
import asyncio, sys
from breakwater.calls.providers.base import Call
from breakwater.calls.providers.registry import (ProcessSettings)

async def main():
    provider = ProcessSettings(command=("sh", "-c", sys.argv[1])).open()
    await provider.perform(Call("j:1", "m", [], {}, 600.0, input=1))

asyncio.run(main())
"""


def test_a_worker_that_is_killed_leaves_no_program_behind(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    # Its programs' directory is all that it leaves behind.
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, "read -r request; " + a_family(file, "wait")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        pids = asyncio.run(pids_in(file, 2))
        [guard] = [one.pid for one in psutil.Process(worker.pid).children() if one.pid not in pids]
        os.kill(guard, signal.SIGTERM)  # as a service manager would, to all processes of the worker at once
    finally:
        worker.kill()
        worker.wait()
    asyncio.run(gone([*pids, guard]))


GUARDED = """
import subprocess, sys, psutil
from breakwater.calls.providers.orphans import OrphanGuard

def start():
    return subprocess.Popen(["sleep", "3600"], stdin=-1, start_new_session=True)

guard, first = OrphanGuard(), start()
guard.watch(first.pid)
[process] = [child for child in psutil.Process().children() if child.pid != first.pid]
process.kill()
while process.status() != psutil.STATUS_ZOMBIE:
    pass
second, forgotten = start(), start()
guard.watch(second.pid)
guard.watch(forgotten.pid)
guard.forget(forgotten.pid)
print(first.pid, second.pid, forgotten.pid, flush=True)
sys.stdin.read()
"""


def test_a_guard_that_was_killed_is_replaced_and_reported_what_runs() -> None:
    worker = subprocess.Popen([sys.executable, "-c", GUARDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with worker:
        assert worker.stdout is not None
        first, second, forgotten = (int(pid) for pid in worker.stdout.readline().split())
        worker.kill()
    try:
        asyncio.run(gone([first, second]))
        assert not has_ended(forgotten), "its number may be another's by now"
    finally:
        os.kill(forgotten, signal.SIGKILL)


LIMITS = """
import json, resource, sys
json.load(sys.stdin)
names = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_NOFILE")
limits = {name: resource.getrlimit(getattr(resource, name)) for name in names}
print(json.dumps({"status": "success", "code": 0, "result": limits}))
"""
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose another one's limits")


@ON_LINUX
async def test_a_program_starts_within_its_limits(opened: Opener) -> None:
    limits = {"memory_mb": 500, "cpu_s": 7, "processes": 200, "open_files": 40}
    provider = opened(*PYTHON, LIMITS, limits=limits)
    answer = await provider.perform(call())
    assert answer.output == {
        "RLIMIT_AS": [500 << 20] * 2,
        "RLIMIT_CPU": [7, 8],
        "RLIMIT_NPROC": [200, 200],
        "RLIMIT_NOFILE": [40, 40],
    }


@ON_LINUX
@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("limits", "script", "said"),
    [
        ({"memory_mb": 100}, "x = bytearray(400 << 20)", "MemoryError"),
        ({"cpu_s": 1}, "while True: pass", "was killed by SIGXCPU"),
        ({"open_files": 20}, "files = [open('/dev/null') for _ in range(30)]", "Too many open files"),
    ],
)
async def test_a_program_that_takes_more_fails(opened: Opener, limits: dict[str, int], script: str, said: str) -> None:
    with pytest.raises(CallError, match=said):
        await opened(*PYTHON, script, limits=limits).perform(call())


@ON_LINUX
async def test_what_a_program_starts_is_limited_too_and_the_request_comes_whole(opened: Opener) -> None:
    script = (
        """printf '{"status":"success","code":0,"result":{"files":%s,"request":%s}}' $(sh -c 'ulimit -n') "$(cat)" """
    )
    asked = {"text": "\n\nafter two lines", "number": 1}
    answer = await opened(*sh(script), limits={"open_files": 30}).perform(call(input=asked))
    assert isinstance(answer.output, dict)
    assert answer.output["files"] == 30
    assert isinstance(answer.output["request"], dict)
    assert answer.output["request"]["input"] == asked


async def test_a_wrapper_runs_the_command(opened: Opener, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\nexport WRAPPED="$1"\nshift\nexec "$@"\n')
    wrapper.chmod(0o755)
    script = """cat > /dev/null; printf '{"status":"success","code":0,"result":"%s"}' "$WRAPPED" """
    answer = await opened(*sh(script), wrapper=[str(wrapper), "tightly"]).perform(call())
    assert answer.output == "tightly"


def test_a_wrapper_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="the program 'no-such-jail' can't be run"):
        settings("sh", wrapper=["no-such-jail", "--"]).open()
