"""TensorZero's gateway, embedded in the program that calls it: it has no proxy in the registries.

    python with_tensorzero.py UPSTREAM_URL WARM_UP REQUESTS IN_FLIGHT

Prints a line of JSON: the seconds that each request took, and the CPU of this process for all of them in ms, which
includes the client.
"""

import asyncio
import json
import os
import sys
import tempfile
import time

from tensorzero import AsyncTensorZeroGateway  # pyright: ignore[reportMissingImports]  in an environment of its own

CONFIG = """
[gateway]
observability.enabled = false

[models.small]
routing = ["upstream"]

[models.small.providers.upstream]
type = "openai"
model_name = "gpt-4o-mini"
api_base = "{url}/"
api_key_location = "env::OPENAI_API_KEY"
"""


async def main() -> None:
    url, warm_up, requests, in_flight = sys.argv[1], *map(int, sys.argv[2:])
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(CONFIG.format(url=url))
        config.flush()
        gateway = await AsyncTensorZeroGateway.build_embedded(config_file=config.name)
    slots = asyncio.Semaphore(in_flight)
    question = {"messages": [{"role": "user", "content": "How do I return a parcel?"}]}

    async def one() -> float:
        async with slots:
            began = time.perf_counter()
            await gateway.inference(model_name="small", input=question)
            return time.perf_counter() - began

    await asyncio.gather(*(one() for _ in range(warm_up)))
    before, began = os.times(), time.perf_counter()
    took = await asyncio.gather(*(one() for _ in range(requests)))
    wall_s, after = time.perf_counter() - began, os.times()
    cpu_ms = (after.user - before.user + after.system - before.system) * 1000
    print(json.dumps({"took_s": took, "cpu_ms": cpu_ms, "wall_s": wall_s}))


asyncio.run(main())
