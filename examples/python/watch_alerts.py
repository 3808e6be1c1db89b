"""Prints alerts and breaker transitions as they happen, until Ctrl-C. Needs nats-py, which is in .venv.

Start with `make up`, then: python examples/python/watch_alerts.py [DATA_DIR]
"""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

import nats
from nats.aio.msg import Msg

data = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / ".breakwater"
endpoints = json.loads((data / "endpoints.json").read_text())


async def show(message: Msg) -> None:
    event = json.loads(message.data)  # an event can arrive twice, with the same `ce-id` header
    if message.subject.startswith("bw.alerts."):
        line = f"{event['severity']}, {event['change']}: {event['title']}. {event['text']}"
    else:
        line = f"{event['agent']} on {event['model']}: {event['to_state']}, {event['reason']}"
    print(f"{event['at']}  {line}", flush=True)


async def main() -> None:
    client = await nats.connect(endpoints["nats_url"], max_reconnect_attempts=-1)
    for subject in ("bw.alerts.>", "bw.breakers.>"):
        await client.subscribe(subject, cb=show)
    await client.flush()
    print("watching", flush=True)
    await asyncio.Event().wait()


with suppress(KeyboardInterrupt):
    asyncio.run(main())
