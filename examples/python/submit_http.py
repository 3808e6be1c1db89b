"""Submits a job over HTTP and prints its result. Needs only Python.

Start with `make up`, then: python examples/python/submit_http.py [DATA_DIR]
"""

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

data = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / ".breakwater"
endpoints = json.loads((data / "endpoints.json").read_text())
key = Path(endpoints["api_key_file"]).read_text().strip()
job = {"agent": "content-writer", "prompt": "Write a haiku about harbours.", "metadata": {"from": "submit_http.py"}}


def call(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        endpoints["request_url"] + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


result = call("/api/v1/jobs?wait_s=20", job)
while result["status"] == "accepted":  # 202: it runs whether or not anyone waits
    time.sleep(1)
    result = call(f"/api/v1/jobs/{result['job_id']}")
if result["status"] != "succeeded":
    sys.exit(f"{result['status']}: {result['error']['message']}")
cost = "cost unknown" if result["total_cost"] is None else f"${result['total_cost']}"  # a decimal string: no float
print(result["output"])
print(f"{result['chosen_model']}, {result['attempts_count']} attempt(s), {cost}")
