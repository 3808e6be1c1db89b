"""The simulated provider takes what programs send to the makers' own APIs."""

from __future__ import annotations

import aiohttp

from breakwater.local.provider import SimulatedProvider
from tests.recorded import Recorded, recorded
from tests.tables import each_row

from .provider_kit import PRICE


@each_row("one", [one for one in recorded() if "thread" not in one.body], ids=lambda one: one.name)
async def test_a_recorded_request_is_answered(one: Recorded) -> None:
    script = {"models": {one.body["model"]: {"price": PRICE, "answer": "Done"}}}
    async with SimulatedProvider(script) as sim, aiohttp.ClientSession() as session:
        url = sim.url.removesuffix("/v1") + one.path
        async with session.post(url, json=one.body, headers=one.headers) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            assert "Done" in text
