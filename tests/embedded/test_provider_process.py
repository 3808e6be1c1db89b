from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from breakwater.embedded.provider import CallLedger, ScriptError, SimulatedProvider, load_script
from breakwater.embedded.provider.ledger import LedgerFileError
from breakwater.embedded.provider.wire import AnswerUsage

from .provider_kit import COST_NANO, MODEL, post, script


async def spawn(*arguments: str) -> Process:
    command = [sys.executable, "-m", "breakwater.embedded.provider", *arguments]
    return await asyncio.create_subprocess_exec(*command, stderr=PIPE)


@asynccontextmanager
async def running(folder: Path, content: dict[str, Any], *more: str) -> AsyncGenerator[tuple[Process, str]]:
    path = folder / "script.json"
    path.write_text(json.dumps(content))
    process = await spawn("--port", "0", "--script", str(path), *more)
    try:
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), 60)
        yield process, json.loads(line)["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_every_answer_a_client_got_is_in_the_ledger_of_a_killed_provider(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    answered = 0
    async with running(tmp_path, script(), "--ledger", str(file)) as (process, url):

        async def ask(session: aiohttp.ClientSession) -> None:
            nonlocal answered
            try:
                while True:
                    assert (await post(session, url))[0] == 200
                    answered += 1
                    if answered == 300:
                        process.kill()
            except aiohttp.ClientError:
                return

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*[ask(session) for _ in range(8)])
        assert await process.wait() == -signal.SIGKILL
    ledger = CallLedger(file)
    totals = ledger.totals
    ledger.close()
    # Up to one call a client may have been billed without its answer getting out.
    assert answered <= totals.calls <= answered + 8
    assert totals.cost_nano == totals.calls * COST_NANO


async def test_a_restarted_provider_goes_on_with_the_ledger_and_the_numbers(tmp_path: Path) -> None:
    content = script({"requests": [1, 3], "status": 503})
    arguments = ("--ledger", str(tmp_path / "ledger.jsonl"))
    async with aiohttp.ClientSession() as session:
        async with running(tmp_path, content, *arguments) as (process, url):
            assert [(await post(session, url))[0] for _ in range(2)] == [503, 503]
            process.terminate()
            assert await process.wait() == 0
        async with running(tmp_path, content, *arguments) as (_, url):
            assert [(await post(session, url))[0] for _ in range(2)] == [503, 200]
            async with session.get(url.removesuffix("/v1") + "/_sim/ledger?calls=1") as response:
                report = await response.json()
    assert [(call["seq"], call["number"], call["status"]) for call in report["calls"]] == [
        (1, 1, 503),
        (2, 2, 503),
        (3, 3, 503),
        (4, 4, 200),
    ]
    assert report["totals"]["cost_nano"] == COST_NANO


async def test_keys_come_from_a_file_and_the_seed_from_an_option(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n\nsk-two\n")
    content = script(seed=7, usage={"output_tokens": [1, 10**9]})

    async def tokens(url: str) -> int:
        _, body, _ = await post(session, url, headers={"Authorization": "Bearer sk-two"})
        return body["usage"]["completion_tokens"]

    async with aiohttp.ClientSession() as session:
        async with running(tmp_path, content, "--api-key-file", str(keys), "--seed", "1") as (_, url):
            given = await tokens(url)
            assert (await post(session, url))[0] == 401
        async with SimulatedProvider(content | {"seed": 1}) as same, SimulatedProvider(content) as other:
            assert given == await tokens(same.url) != await tokens(other.url)


@pytest.mark.parametrize(
    ("text", "reported"),
    [("models: {}", "models: "), ("models: [", "readable as YAML"), ("", "script: "), (None, "can't read")],
)
def test_a_mistake_in_a_script_file_names_the_file(tmp_path: Path, text: str | None, reported: str) -> None:
    path = tmp_path / "script.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ScriptError, match=reported) as raised:
        load_script(path)
    assert str(path) in str(raised.value)


async def test_an_empty_key_file_ends_the_process_with_2_instead_of_letting_everybody_in(tmp_path: Path) -> None:
    path, keys = tmp_path / "script.json", tmp_path / "keys"
    path.write_text(json.dumps(script()))
    keys.write_text("\n")
    process = await spawn("--port", "0", "--script", str(path), "--api-key-file", str(keys))
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert "has no key in it" in json.loads(stderr)["error"]


def settle(ledger: CallLedger, times: int = 1) -> None:
    for _ in range(times):
        call = ledger.begin(MODEL, "2026-11-21T10:00:00.000Z", "e:1", None)
        ledger.end(
            call,
            status=200,
            fault=None,
            answered_at="2026-11-21T10:00:00.001Z",
            delivered=True,
            billed=True,
            usage=AnswerUsage(120, 40, 20),
            cost_nano=COST_NANO,
        )


def test_a_line_cut_short_by_a_kill_is_dropped_and_writing_goes_on_after_it(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    ledger = CallLedger(file)
    settle(ledger, 3)
    ledger.close()
    file.write_bytes(file.read_bytes()[:-20])
    for expected in (2, 3):
        ledger = CallLedger(file)
        assert (ledger.totals.calls, ledger.totals.cost_nano) == (expected, expected * COST_NANO)
        settle(ledger)
        ledger.close()
    assert [json.loads(line)["seq"] for line in file.read_text().splitlines()] == [1, 2, 3, 4]


def test_numbers_go_on_from_the_last_script(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    ledger = CallLedger(file)
    settle(ledger, 2)
    ledger.restart_numbers()
    settle(ledger)
    ledger.close()
    ledger = CallLedger(file)
    settle(ledger)
    assert [call.number for call in ledger.calls] == [1, 2, 1, 2]
    ledger.reset()
    ledger.close()
    assert file.read_bytes() == b""


def test_old_calls_leave_memory_and_stay_in_the_totals() -> None:
    ledger = CallLedger(kept_calls=2)
    settle(ledger, 5)
    report = ledger.report(with_calls=True)
    assert ([call.seq for call in report["calls"]], report["calls_left_out"]) == ([4, 5], 3)
    assert report["totals"].calls == 5


def test_two_providers_can_not_share_a_ledger_file(tmp_path: Path) -> None:
    ledger = CallLedger(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerFileError, match="in use by another provider"):
        SimulatedProvider(script(), ledger_file=tmp_path / "ledger.jsonl")
    ledger.close()


@pytest.mark.parametrize("text", ['{"a": 1}\n', "not json\n", "not json", '{"a": 1}'])
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    for _ in range(2):
        with pytest.raises(LedgerFileError, match="a ledger file"):
            CallLedger(file)
    assert file.read_text() == text
