"""A handler of one step in Restate, which reads UPSTREAM_URL: `hypercorn with_restate:app`."""

import os
from typing import Any

import aiohttp
import restate  # pyright: ignore[reportMissingImports]  in an environment of its own
from asking import JSON_BODY

calls = restate.Service("calls")
clients: list[aiohttp.ClientSession] = []


async def answer_of(chat: dict[str, Any]) -> dict[str, Any]:
    """Calls the provider."""
    if not clients:  # a client needs the running loop
        clients.append(aiohttp.ClientSession(headers=JSON_BODY, connector=aiohttp.TCPConnector(limit=0)))
    async with clients[0].post(f"{os.environ['UPSTREAM_URL']}/chat/completions", json=chat) as response:
        return await response.json()


@calls.handler()
async def call(context: restate.Context, chat: dict[str, Any]) -> dict[str, Any]:
    """A journal entry holds the answer, so it is not asked for again."""
    return await context.run_typed("call", answer_of, chat=chat)


app = restate.app([calls])
