"""The provider that all of them call: the same short answer after the same time, for every request.

python -m bench.peers.upstream PORT LATENCY_MS
"""

from __future__ import annotations

import asyncio
import sys

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

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
