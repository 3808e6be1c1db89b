"""One task of celery on Redis, acknowledged after it, and what asks for it: `python with_celery.py`.

The worker is `celery -A with_celery worker`; both read REDIS_URL and UPSTREAM_URL.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import urllib3
from asking import CHAT, JSON_BODY, answer_lines
from celery import Celery  # pyright: ignore[reportMissingImports]  in an environment of its own

MOST_IN_FLIGHT = 64

app = Celery("with_celery", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
http = urllib3.PoolManager(maxsize=MOST_IN_FLIGHT)


@app.task
def call(chat: str) -> str:
    """Calls the provider."""
    url = f"{os.environ['UPSTREAM_URL']}/chat/completions"
    return http.request("POST", url, body=chat.encode(), headers=JSON_BODY).data.decode()


async def main() -> None:
    threads = ThreadPoolExecutor(MOST_IN_FLIGHT)

    async def ask() -> str:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: call.delay(CHAT).get(timeout=60))

    await answer_lines(ask)


if __name__ == "__main__":
    asyncio.run(main())
