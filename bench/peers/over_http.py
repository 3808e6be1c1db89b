"""Asks a system that is asked over HTTP: `python over_http.py URL MODEL BEARER_TOKEN [HEADER=VALUE ...]`."""

import json
import sys

import aiohttp
import uvloop
from asking import CHAT, JSON_BODY, answer_lines


async def main() -> None:
    url, model, token, *headers = sys.argv[1:]
    body = json.dumps({**json.loads(CHAT), "model": model}).encode()
    sent_headers = {**JSON_BODY, "Authorization": f"Bearer {token}", **dict(header.split("=", 1) for header in headers)}
    # No connection is used that the system may have closed: uvicorn does after 5 s.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1)
    async with aiohttp.ClientSession(headers=sent_headers, connector=connector) as http:

        async def ask() -> str:
            async with http.post(url, data=body) as response:
                return await response.text()

        await answer_lines(ask)


uvloop.run(main())
