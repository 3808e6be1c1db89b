from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from aiohttp import web
from dotenv import dotenv_values
from structlog.testing import capture_logs

from breakwater.calls.providers.base import CallError, Streaming
from breakwater.calls.providers.credentials import (
    RETRY_S,
    Credential,
    CredentialError,
    Issued,
    SecretSource,
    read_now,
)
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security import secret_refs
from breakwater.kernel.security.secret_refs import ENV_FILE, SecretRef, variable
from tests.calls.providers.kit import answering, call, settings, silent

OLD, NEW = "sk-old-secret-1", "sk-new-secret-2"
PRINT = """
import sys, time
secret, takes_s, reads = sys.argv[1:]
time.sleep(float(takes_s))
open(reads, "a").write("x")
print(open(secret).read())
"""


class Source:
    """Where a secret comes from, of one of the kinds; its value can be changed."""

    def __init__(self, kind: str, directory: Path, setenv: Callable[[str, str], None], takes_s: float = 0) -> None:
        self._file, self._reads, self._setenv = directory / "secret", directory / "reads", setenv
        command = (sys.executable, "-c", PRINT, str(self._file), str(takes_s), str(self._reads))
        self.ref = {
            "env": SecretRef(env="A_KEY"),
            "env file": SecretRef(env="A_KEY"),
            "file": SecretRef(file=self._file),
            "command": SecretRef(command=command),
        }[kind]
        self._variables = directory / "variables"
        if kind == "env file":
            setenv(ENV_FILE, str(self._variables))
            self._setenv = lambda name, value: self._variables.write_text(f"# ours\nexport {name}='{value}'\nB=$A\n")
        self.becomes(OLD)

    def becomes(self, value: str) -> None:
        self._setenv("A_KEY", value)
        self._file.write_text(f"{value}\n")

    def vanishes(self) -> None:
        self._setenv("A_KEY", "")
        self._file.unlink()

    @property
    def reads(self) -> int:
        """How often the command ran."""
        return len(self._reads.read_text())


@pytest.mark.parametrize("kind", ["env", "env file", "file", "command"])
async def test_a_source_that_changed_gives_a_newer_version_and_one_that_did_not_none(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(kind, tmp_path, monkeypatch.setenv)
    credential = read_now(source.ref)
    assert (credential.value, credential.version) == (OLD, 1)
    assert await credential.refresh(1) is False
    source.becomes(NEW)
    assert await credential.refresh(1) is True
    assert (credential.value, credential.version) == (NEW, 2)
    assert await credential.refresh(2) is False
    source.becomes(OLD)
    assert await credential.refresh(None) is True
    assert (credential.value, credential.version) == (OLD, 3)


@pytest.mark.parametrize("kind", ["env", "env file", "file", "command"])
async def test_a_source_that_fails_is_reported_once_and_the_key_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(kind, tmp_path, monkeypatch.setenv)
    credential = read_now(source.ref)
    source.vanishes()
    with capture_logs() as logs:
        assert [await credential.refresh(None) for _ in range(3)] == [False] * 3
        assert (credential.value, credential.version) == (OLD, 1)
        source.becomes(NEW)
        assert await credential.refresh(None) is True
        source.vanishes()
        assert await credential.refresh(2) is False
    assert [entry["event"] for entry in logs] == [
        "credential_unreadable",
        "credential_readable",
        "credential_changed",
        "credential_unreadable",
    ]
    assert logs[0]["log_level"] == "warning"
    assert logs[2]["source"] == {
        "file": f"the secret file {tmp_path / 'secret'}",
        "command": "the output of the secret command",
    }.get(kind, "the environment variable A_KEY")
    assert OLD not in str(logs)
    assert NEW not in str(logs)


async def test_a_command_that_fails_is_run_again_after_a_pause_and_not_for_each_refused_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("command", tmp_path, monkeypatch.setenv)
    now = [1_000.0]
    of_key = SecretSource(source.ref)
    credential = Credential(of_key, of_key.fetch(), clock=lambda: now[0])
    source.vanishes()
    assert [await credential.refresh(1) for _ in range(20)] == [False] * 20
    assert source.reads == 2
    source.becomes(NEW)
    now[0] += RETRY_S
    assert await credential.refresh(1) is True
    source.vanishes()
    assert await credential.refresh(2) is False
    source.becomes(OLD)
    assert await credential.refresh(None) is True, "an operator's reload asks at once"


@pytest.mark.parametrize("value", [OLD, NEW])
async def test_all_who_wait_at_the_same_time_share_one_reading(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("command", tmp_path, monkeypatch.setenv, takes_s=0.1)
    credential = read_now(source.ref)
    source.becomes(value)
    answers = await asyncio.gather(*(credential.refresh(1) for _ in range(50)))
    assert answers == [value == NEW] * 50
    assert source.reads == 2
    assert await credential.refresh(0) is True
    assert source.reads == 2, "a version newer than the one refused needs no reading"


async def test_one_who_gives_up_does_not_take_the_reading_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("command", tmp_path, monkeypatch.setenv, takes_s=0.2)
    credential = read_now(source.ref)
    source.becomes(NEW)
    first, second = (asyncio.create_task(credential.refresh(1)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is True
    assert credential.value == NEW


async def test_reading_does_not_hold_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("command", tmp_path, monkeypatch.setenv, takes_s=0.2)
    credential = read_now(source.ref)
    reading, turns = asyncio.create_task(credential.refresh(1)), 0
    while not reading.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert turns > 2


def test_a_file_of_variables_precedes_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "of the environment")
    monkeypatch.setenv("OTHER", "other")
    file = tmp_path / "variables"
    monkeypatch.setenv(ENV_FILE, str(file))
    with pytest.raises(ConfigError, match="which BREAKWATER_ENV_FILE names, can't be read: No such file"):
        variable("A_KEY")
    file.write_text("# keys\nA_KEY = 'of $the file'\nEMPTY=\n")
    assert [variable(name) for name in ("A_KEY", "OTHER", "EMPTY")] == ["of $the file", "other", ""]


async def test_whatever_a_library_raises_is_a_credential_that_can_not_be_had() -> None:
    class Broken:
        def __str__(self) -> str:
            return "a source"

        def fetch(self) -> Issued[str]:
            raise RuntimeError(f"{OLD} has expired")

    credential = Credential[str](Broken())
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(CredentialError, match=r"^a source gives no credential: RuntimeError$"):
                await credential.current()
    assert len(logs) == 1
    assert OLD not in str(logs)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_token_that_is_refused_again_and_again_is_asked_for_no_more_often(fails: bool) -> None:
    now = [1_000.0]

    class Tokens:
        asked = 0

        def __str__(self) -> str:
            return "a source"

        def fetch(self) -> Issued[str]:
            self.asked += 1
            if fails and self.asked > 1:
                raise ConfigError("none")
            return Issued(f"token-{self.asked}", renew_at=now[0] + 1_800, ends_at=now[0] + 3_600)

    source = Tokens()
    credential = Credential[str](source, clock=lambda: now[0])
    await credential.current()
    # The first refusal may be of a token that was taken back; another one so soon is not the token's.
    assert await credential.refresh(credential.version) is not fails
    assert [await credential.refresh(credential.version) for _ in range(20)] == [False] * 20
    assert source.asked == 2
    now[0] += RETRY_S
    assert await credential.refresh(credential.version) is not fails
    assert source.asked == 3
    await credential.refresh(None)
    assert source.asked == 4, "an operator's reload asks at once"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_key_is_kept_secret_in_the_answer_of_its_call_however_often_it_is_rotated_meanwhile(
    streamed: bool, tmp_path: Path
) -> None:
    arrived, rotated = asyncio.Event(), asyncio.Event()

    async def quote(request: web.BaseRequest) -> web.StreamResponse:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        if key == OLD:
            arrived.set()
            await rotated.wait()
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if not streamed:
            return web.json_response({"choices": [{**choice, "message": {"content": f"you sent {key}"}}]})
        chunk = json.dumps({"choices": [{**choice, "delta": {"content": f"you sent {key}"}}]})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    file = tmp_path / "key"
    file.write_text(OLD)
    chunks = list[Any]()

    async def take(arriving: Any) -> None:
        chunks.extend(arriving)

    async with answering(quote) as origin:
        provider = settings("openai", origin, api_key=SecretRef(file=file)).open()
        streaming = Streaming(take, idle_timeout_s=5, total_timeout_s=20) if streamed else None
        first = asyncio.create_task(provider.perform(call(streaming=streaming)))
        await arrived.wait()
        for number in range(2):
            file.write_text(f"{NEW}-{number}")
            assert await provider.refresh_credential(None) is True
            await provider.perform(call())
        rotated.set()
        answer = await first
        await provider.close()
    assert "you sent " in str(answer.output)
    assert OLD not in f"{answer}{chunks}"


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_wait_for_a_credential_is_part_of_the_time_of_a_call(streamed: bool) -> None:
    async def take(_: Any) -> None: ...

    async with silent() as port:
        auth = {"command": ["sh", "-c", "sleep 1; echo sk-late"], "refresh_s": 60}
        provider = settings("openai", f"http://127.0.0.1:{port}", api_key=None, auth=auth).open()
        streaming = Streaming(take, idle_timeout_s=5, total_timeout_s=2) if streamed else None
        began = time.monotonic()
        with pytest.raises(CallError) as caught:
            await provider.perform(call(timeout_s=2.0, streaming=streaming))
        took_s = time.monotonic() - began
        await provider.close()
    assert caught.value.maybe_billed, "it was sent"
    assert took_s < 2.7


async def test_no_key_needs_no_source() -> None:
    credential = read_now(None)
    assert credential.value is None
    assert await credential.refresh(1) is False


@pytest.mark.parametrize("kind", ["env", "file", "command"])
def test_a_repr_names_the_source_and_not_the_secret(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credential = read_now(Source(kind, tmp_path, monkeypatch.setenv).ref)
    assert kind in repr(credential)
    assert OLD not in repr(credential)


@pytest.mark.parametrize("value", ["two\nlines", "tab\there", "schlüssel", "nul\x7f"])
async def test_a_key_that_no_header_can_carry_is_refused(value: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(value)
    with pytest.raises(ConfigError, match="not allowed in an HTTP header") as caught:
        read_now(SecretRef(file=file))
    assert value not in str(caught.value)
    file.write_text(OLD)
    credential = read_now(SecretRef(file=file))
    file.write_text(value)
    assert await credential.refresh(1) is False
    assert credential.value == OLD


def test_a_missing_key_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        read_now(SecretRef(env="NO_SUCH_KEY"))


def test_a_file_of_variables_is_parsed_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def parse(stream: IO[str], **options: Any) -> Any:
        parsed.append(stream.name)
        return dotenv_values(stream=stream, **options)

    monkeypatch.setattr("dotenv.dotenv_values", parse)
    file = tmp_path / "variables"
    monkeypatch.setenv(ENV_FILE, str(file))
    file.write_text("A_KEY=one\n")
    assert [variable("A_KEY") for _ in range(3)] == ["one"] * 3
    assert len(parsed) == 3, "of a file that has just been written, a change may not show yet"
    monkeypatch.setattr(secret_refs, "_SETTLED_S", -1.0)
    assert [variable(name) for name in ("A_KEY", "B_KEY", "A_KEY")] == ["one", "", "one"]
    assert len(parsed) == 4
    file.write_text("A_KEY=three\n")
    assert [variable("A_KEY") for _ in range(3)] == ["three"] * 3
    replacement = tmp_path / "replacement"
    replacement.write_text("A_KEY=THREE\n")
    replacement.replace(file)
    assert variable("A_KEY") == "THREE"
    assert len(parsed) == 6
