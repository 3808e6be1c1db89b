from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from breakwater.local.provider import SimulatedProvider
from breakwater.local.provider.behaviour import Decision
from breakwater.local.provider.ledger import CallLedger
from breakwater.local.provider.script import ScriptError
from tests.tables import each_row

from .provider_kit import COST_NANO, MODEL, post, script


async def spawn(*arguments: str) -> Process:
    command = [sys.executable, "-m", "breakwater.local.provider", *arguments]
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


async def test_it_serves_until_it_is_terminated(tmp_path: Path) -> None:
    content = script({"requests": [1, 1], "status": 503})
    async with aiohttp.ClientSession() as session, running(tmp_path, content) as (process, url):
        assert [(await post(session, url))[0] for _ in range(2)] == [503, 200]
        async with session.get(url.removesuffix("/v1") + "/_sim/ledger") as response:
            report = await response.json()
        process.terminate()
        assert await process.wait() == 0
    assert [(call["seq"], call["number"], call["status"]) for call in report["calls"]] == [(1, 1, 503), (2, 2, 200)]
    assert report["totals"]["cost_nano"] == COST_NANO


async def test_with_a_name_it_answers_to_that_too_and_to_no_other(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session, running(tmp_path, script(), "--name", "simulator") as (_, url):
        for host, status in (("simulator:8090", 200), ("127.0.0.1", 200), ("evil.example", 421)):
            async with session.get(url + "/models", headers={"Host": host}) as response:
                assert response.status == status, host


async def test_a_mistake_in_the_script_ends_the_process_with_2_and_names_the_file(tmp_path: Path) -> None:
    wrong, missing = tmp_path / "wrong.json", tmp_path / "missing.json"
    wrong.write_text(json.dumps(script({"status": 1})))
    processes = {path: await spawn("--port", "0", "--script", str(path)) for path in (wrong, missing)}
    for path, reported in ((wrong, "faults.0.status"), (missing, "No such file")):
        _, stderr = await asyncio.wait_for(processes[path].communicate(), 60)
        assert processes[path].returncode == 2
        said = json.loads(stderr)
        assert (reported in said["error"], said["script"]) == (True, str(path))


@each_row(
    ("text", "reported"), [('{"models": {}}', "models: "), ("models: [", "Invalid JSON"), ("", "script: ")], ids=str
)
def test_a_mistake_in_the_script_is_named(text: str, reported: str) -> None:
    with pytest.raises(ScriptError, match=reported):
        SimulatedProvider(text.encode())


def test_old_calls_are_not_kept_and_stay_in_the_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.local.provider.ledger.KEPT_CALLS", 2)
    ledger = CallLedger()
    for _ in range(5):
        ledger.end(ledger.begin(MODEL, "2026-11-21T10:00:00.000Z"), Decision(200), delivered=True, share=Fraction(1))
    assert ([call.seq for call in ledger.calls], ledger.totals.calls) == ([4, 5], 5)
