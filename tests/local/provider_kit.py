"""What the tests of the simulated provider share: scripts, requests, and waiting for a condition."""

from __future__ import annotations

from typing import Any

import aiohttp

MODEL = "sim/fast:1.0"
PRICE = {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60", "cached_input_usd_per_mtok": "0.075"}
USAGE = {"input_tokens": 120, "output_tokens": 40, "cached_tokens": 20}
COST_NANO = 100 * 150 + 20 * 75 + 40 * 600


def script(*faults: dict[str, Any], seed: int = 7, **model: Any) -> dict[str, Any]:
    return {"seed": seed, "models": {MODEL: {"price": PRICE, "usage": USAGE, "faults": list(faults), **model}}}


def chat(prompt: str = "hello", **extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], **extra}


async def post(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Status, parsed body, headers with names in lower case."""
    async with session.post(f"{url}/chat/completions", json=body or chat(), headers=headers) as response:
        parsed = await response.json()
        return response.status, parsed, {name.lower(): value for name, value in response.headers.items()}
