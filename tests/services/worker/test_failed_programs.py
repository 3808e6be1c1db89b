"""What a program says with a failure."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker

PROGRAM = """
import json, sys
asked = json.load(sys.stdin)["input"]
if "depth" in asked:
    asked["result"] = json.loads("[" * asked["depth"] + "]" * asked["depth"])
print(json.dumps({"status": "error", "code": asked["code"], "error": "no", "result": asked.get("result")}))
"""
RESULT = {"missing": ["name"], "rows": [1, None]}


async def test_the_result_of_a_failed_program_is_the_output_of_its_job(
    start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    once = {"provider": "program", "breaker": "off", "retry": {"max_attempts": 2, "base_s": 0.01}}
    agents = {"tool": once, "delegated": {**once, "on_error": "message"}}
    program = {"kind": "process", "command": [sys.executable, "-c", PROGRAM]}
    rows: dict[str, tuple[dict[str, Any], Any]] = {
        "a failure that is final": ({"code": 422, "result": RESULT}, RESULT),
        "a failure that is tried again": ({"code": 500, "result": RESULT}, RESULT),
        "a falsy result": ({"code": 422, "result": 0}, 0),
        "no result": ({"code": 422}, None),
        "a result that readers of JSON refuse": ({"code": 422, "depth": 150}, None),
        "a result that no message holds": ({"code": 422, "result": "x" * 3_200_000}, None),
    }
    async with start_worker({"sim/m": model()}, agents, more_providers={"program": program}, fake_clock=True) as plane:
        for number, (case, (asked, output)) in enumerate(rows.items()):
            with subtests.test(case):
                job = {"agent": "tool", "job_id": f"j{number}", "input": asked}
                result = await plane.run(job)
                assert (result["status"], result["error"]["message"]) == ("dead_lettered", "no")
                assert (result["output"], result["response"]) == (output, None)
                record = await plane.last("EVENTS", f"bw.executions.tool.j{number}")
                assert record is not None
                assert record["output"] == output
                result = await plane.run(job | {"job_id": f"r{number}", "include_response": True})
                said = None if output is None and len(asked) > 1 else {"result": output, "code": asked["code"]}
                assert (result["response"] and {name: result["response"][name] for name in said or ()}) == said
        with subtests.test("an agent whose parent reads a message"):
            job = {"agent": "delegated", "job_id": "d", "input": {"code": 422, "result": RESULT}}
            result = await plane.run(job)
            assert result["output"] == result["error"]["user_message"]
