"""Agents that are programs or callables, through the whole worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

from tests.flow.fixtures import StartPlane
from tests.flow.kit import model

AGENT = {"retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.01}, "breaker": "off", "timeout_s": 60}

PROGRAM = """
import json, os, subprocess, sys, time
request = json.load(sys.stdin)
what = request["input"]["do"]
if what == "answer":
    answer = {"status": "success", "code": 0, "result": {"agent": request["agent"], "leaked": [
        name for name in os.environ if name.startswith("BREAKWATER")]}, "cost_usd": "0.0021"}
    print(json.dumps(answer))
elif what == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(request["input"]["pids"], "a").write(f"{os.getpid()} {child.pid} ")
    time.sleep(600)
elif what == "fork":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(request["input"]["pids"], "a").write(f"{child.pid} ")
    print(json.dumps({"status": "success", "code": 0, "result": "done"}))
elif what == "flood":
    while True:
        sys.stdout.write("x" * 65536)
elif what == "exit":
    sys.stderr.write("the disk is gone\\n")
    sys.exit(3)
elif what == "prose":
    print("I did it!")
elif what == "code":
    print(json.dumps({"status": "error", "code": request["input"]["code"], "error": "no", "cost_usd": "0.0004"}))
"""

CALLABLE = """
import asyncio
from breakwater.calls.providers.python import NonRetryableError

async def double(request):
    if request["input"] == "refuse":
        raise NonRetryableError("not today", status=422)
    if request["input"] == "crash":
        raise RuntimeError("lost my way")
    if request["input"] == "hang":
        await asyncio.sleep(600)
    return {"doubled": request["input"] * 2}
"""


async def test_a_program_is_an_agent_and_every_way_it_fails_is_a_clear_attempt_error(
    start_plane: StartPlane, tmp_path: Path
) -> None:
    program, pids = tmp_path / "tool.py", tmp_path / "pids"
    program.write_text(PROGRAM)
    providers = {"tool": {"kind": "process", "command": [sys.executable, str(program)], "max_output_bytes": 1_000_000}}
    agents = {
        "tool": {**AGENT, "provider": "tool"},
        # Long enough for it to begin, also on a busy machine.
        "hasty": {**AGENT, "provider": "tool", "timeout_s": 3},
        "chat": {**AGENT, "provider": "sim", "model": "sim/m"},
    }
    # What to do, how it ends: class, kind, status code, attempts.
    cases = {
        "hang": ({"do": "hang", "pids": str(pids)}, ("TimeoutError", "timeout", None, 2)),
        "flood": ({"do": "flood"}, ("BackendFailureError", "server", None, 2)),
        "exit": ({"do": "exit"}, ("BackendFailureError", "server", None, 2)),
        "prose": ({"do": "prose"}, ("BackendFailureError", "server", None, 2)),
        "invalid": ({"do": "code", "code": 404}, ("InvalidRequestError", "client", 404, 1)),
        "unsupported": ({"do": "code", "code": 501}, ("ActionNotSupportedError", "client", 501, 1)),
        "late": ({"do": "code", "code": 504}, ("TimeoutError", "timeout", 504, 2)),
        "failed": ({"do": "code", "code": 500}, ("BackendFailureError", "server", 500, 2)),
    }
    async with start_plane({"sim/m": model()}, agents, services=("worker",), more_providers=providers) as plane:
        for name, (given, _) in cases.items():
            await plane.publish({"agent": "hasty" if name == "hang" else "tool", "job_id": name, "input": given})
        await plane.publish({"agent": "tool", "job_id": "fork", "input": {"do": "fork", "pids": str(pids)}})
        await plane.publish({"agent": "tool", "job_id": "answer", "input": {"do": "answer"}})
        await plane.publish({"agent": "chat", "job_id": "wrong", "input": {"do": "answer"}})
        for name, (_, expected) in cases.items():
            result = await plane.result(name)
            error = result["error"]
            found = (error["class"], error["kind"], error["status_code"], result["attempts_count"])
            assert (result["status"], found) == ("dead_lettered", expected), (name, error)
            assert error["user_message"], name
        assert "the disk is gone" in (await plane.result("exit"))["error"]["message"]
        assert (await plane.result("fork"))["output"] == "done"
        assert (await plane.result("failed"))["wasted_by_cause"] == {"retry": "0.000400000", "failed": "0.000400000"}
        answer = await plane.result("answer")
        assert (answer["output"], answer["total_cost"]) == ({"agent": "tool", "leaked": []}, "0.002100000")
        assert (await plane.result("wrong"))["reason"] == "invalid"
        assert plane.processes["worker"].poll() is None
    assert [pid for pid in map(int, pids.read_text().split()) if _runs(pid)] == []


def _runs(pid: int) -> bool:
    try:
        # One that nobody has reaped yet runs no more: its parent is gone, and not every container has an init.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_callable_is_an_agent(start_plane: StartPlane, tmp_path: Path) -> None:
    (tmp_path / "my_agents.py").write_text(CALLABLE)
    providers: dict[str, Any] = {
        "double": {"kind": "python", "callable": "my_agents:double", "cost_per_call_usd": "0.001"}
    }
    agents = {"double": {**AGENT, "provider": "double"}, "hasty": {**AGENT, "provider": "double", "timeout_s": 0.5}}
    async with start_plane(
        {"sim/m": model()},
        agents,
        services=("worker",),
        more_providers=providers,
        environment={"PYTHONPATH": str(tmp_path)},
    ) as plane:
        for given in (21, "refuse", "crash", "hang"):
            await plane.publish(
                {"agent": "hasty" if given == "hang" else "double", "job_id": str(given), "input": given}
            )
        results = {given: await plane.result(given) for given in ("21", "refuse", "crash", "hang")}
    assert (results["21"]["output"], results["21"]["total_cost"]) == ({"doubled": 42}, "0.001000000")
    assert [(r["error"]["class"], r["attempts_count"]) for r in (results["refuse"], results["crash"])] == [
        ("InvalidRequestError", 1),
        ("RuntimeError", 2),
    ]
    assert results["hang"]["error"]["kind"] == "timeout"
