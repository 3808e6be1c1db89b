"""A conversation with tools, of a job in a trace, and two plans: what the demo's jobs lack for the pages to show."""

import json
import time
import urllib.error
from collections.abc import Callable
from typing import Any

TALK = "talk-about-harbours"
"""An execution whose messages have all that is rendered."""
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
MESSAGES = [
    {"role": "system", "content": "You are **kind**.\n\n| port | ships |\n|---|--:|\n| Hamburg | 3 |"},
    {
        "role": "user",
        "content": [
            {
                "type": "text",
                "text": "See <script>hacked = 1</script> [this](javascript:hacked=1):\n```sql\nSELECT 1\n```",
            },
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "tides", "arguments": '{"days": 20}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"tides": [{"day": day} for day in range(20)]})},
    {"role": "user", "content": "So? " * 1_100},
]


def submit_talk(ask: Callable[..., Any]) -> None:
    """Submits all of it by the HTTP API, and waits until it is recorded."""
    job = {"agent": "content-writer", "job_id": TALK, "messages": MESSAGES, "params": {"temperature": 0.25}}
    ask("POST", "/api/v1/jobs?wait_s=60", job | {"stream": True}, traceparent=f"00-{TRACE_ID}-{'1' * 16}-01")
    jobs = [
        {"agent": "content-writer", "job_id": "report-draft", "prompt": "Draft a report."},
        {
            "agent": "content-writer",
            "job_id": "report-title",
            "prompt": "Find a title.",
            "depends_on": ["report-draft"],
        },
    ]
    for plan_id, of_plan in (("report-47", jobs), ("report-48", [])):
        ask("POST", "/api/v1/plans", {"plan_id": plan_id, "jobs": of_plan})
    until = time.monotonic() + 60
    for execution_id in (TALK, "report-draft", "report-title"):
        while not _is_recorded(ask, execution_id):
            assert time.monotonic() < until, f"{execution_id} is not recorded"
            time.sleep(0.1)


def _is_recorded(ask: Callable[..., Any], execution_id: str) -> bool:
    try:
        ask("GET", f"/api/v1/executions/{execution_id}")
    except urllib.error.HTTPError:
        return False
    return True
