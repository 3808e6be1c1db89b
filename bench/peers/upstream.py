"""The provider that all of them call: the same short answer after the same time, for every request.

python upstream.py PORT LATENCY_MS
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import web

ANSWER = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": "gpt-4o-mini",
    "choices": [{
        "index": 0, "finish_reason": "stop", "logprobs": None,
        "message": {"role": "assistant", "content": "You can return a parcel within 30 days.", "refusal": None},
    }],
    "usage": {"prompt_tokens": 14, "completion_tokens": 9, "total_tokens": 23},
}  # fmt: skip


def main() -> None:
    port, latency_s = int(sys.argv[1]), float(sys.argv[2]) / 1000

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(latency_s)
        return web.json_response(ANSWER)

    async def ready(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", ready)
    app.router.add_post("/v1/chat/completions", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
