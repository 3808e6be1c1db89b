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
import structlog

from breakwater.local.provider import SimulatedProvider
from breakwater.local.provider.__main__ import main as provider_main
from breakwater.local.provider.behaviour import Decision
from breakwater.local.provider.ledger import CallLedger
from breakwater.local.provider.script import ScriptError
from tests.tables import each_row

from .provider_kit import COST_NANO, MODEL, post, script


@asynccontextmanager
async def running(folder: Path, content: dict[str, Any], *more: str) -> AsyncGenerator[tuple[Process, str]]:
    path = folder / "script.json"
    path.write_text(json.dumps(content))
    command = [sys.executable, "-m", "breakwater.local.provider", "--port", "0", "--script", str(path), *more]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    try:
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), 60)
        yield process, json.loads(line)["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_it_serves_by_its_names_and_by_no_other_until_it_is_terminated(tmp_path: Path) -> None:
    content = script({"requests": [1, 1], "status": 503})
    async with aiohttp.ClientSession() as session, running(tmp_path, content, "--name", "simulator") as (process, url):
        assert [(await post(session, url))[0] for _ in range(2)] == [503, 200]
        for host, status in (("simulator:8090", 200), ("127.0.0.1", 200), ("evil.example", 421)):
            async with session.get(url + "/models", headers={"Host": host}) as response:
                assert response.status == status, host
        async with session.get(url.removesuffix("/v1") + "/_sim/ledger") as response:
            report = await response.json()
        process.terminate()
        assert await process.wait() == 0
    assert [(call["seq"], call["number"], call["status"]) for call in report["calls"]] == [(1, 1, 503), (2, 2, 200)]
    assert report["totals"]["cost_nano"] == COST_NANO


@each_row(
    ("content", "reported"),
    [(script({"status": 1}), "faults.0.status"), (None, "No such file")],
    ids=["wrong", "missing"],
)
def test_a_mistake_in_the_script_ends_the_process_with_2_and_names_the_file(
    tmp_path: Path, content: dict[str, Any] | None, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{reported}.json"
    if content is not None:
        path.write_text(json.dumps(content))
    logging = structlog.get_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["provider", "--port", "0", "--script", str(path)])
        try:
            assert provider_main() == 2
        finally:
            structlog.configure(**logging)
    said = json.loads(capsys.readouterr().err)
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
