"""Publishes a job to NATS and prints its result. Needs nats-py, which is in .venv.

Start with `make up`, then: python examples/python/submit_nats.py [DATA_DIR]
"""

import asyncio
import json
import sys
import uuid
from pathlib import Path

import nats

data = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / ".breakwater"
endpoints = json.loads((data / "endpoints.json").read_text())


async def main() -> None:
    client = await nats.connect(endpoints["nats_url"])
    inbox = client.new_inbox()
    results = await client.subscribe(inbox)
    job = {
        "agent": "content-writer",
        "job_id": str(uuid.uuid4()),  # if no acknowledgement arrives, publish again with this id: it runs once
        "prompt": "Write a haiku about harbours.",
        "reply_to": inbox,
    }
    # A plain publish would be fire and forget; once JetStream's returns, the job is accepted.
    await client.jetstream().publish("bw.jobs.content-writer", json.dumps(job).encode(), timeout=5)
    result = json.loads((await results.next_msg(timeout=60)).data)
    await client.close()
    if result["status"] != "succeeded":
        sys.exit(f"{result['status']}: {result['error']['message']}")
    cost = "cost unknown" if result["total_cost"] is None else f"${result['total_cost']}"  # a decimal string: no float
    print(result["output"])
    print(f"{result['chosen_model']}, {result['attempts_count']} attempt(s), {cost}")


asyncio.run(main())
