"""A workflow of one step in DBOS, in the program that asks for it: `python with_dbos.py POSTGRES_URL UPSTREAM_URL`."""

import asyncio
import sys

import aiohttp
from asking import CHAT, JSON_BODY, answer_lines
from dbos import DBOS  # pyright: ignore[reportMissingImports]  in an environment of its own


async def main() -> None:
    postgres, upstream = sys.argv[1:]
    async with aiohttp.ClientSession(headers=JSON_BODY, connector=aiohttp.TCPConnector(limit=0)) as http:

        @DBOS.step()
        async def call(chat: str) -> str:
            async with http.post(f"{upstream}/chat/completions", data=chat) as response:
                return await response.text()

        @DBOS.workflow()
        async def job(chat: str) -> str:
            return await call(chat)

        DBOS(config={"name": "peers", "system_database_url": postgres, "log_level": "ERROR", "run_admin_server": False})
        DBOS.launch()
        await answer_lines(lambda: job(CHAT))


asyncio.run(main())
