"""Submitting over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import quote

import aiohttp

from breakwater.cli.errors import unreachable
from breakwater.cli.plane import Door
from breakwater.cli.submit_answer import refused

LONGEST_WAIT_S = 300.0
"""What the interface allows for one request."""

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 15.0
"""Beyond the wait that was asked for."""

ASK_AGAIN_S = 0.5


async def send(door: Door, job: dict[str, Any], *, wait_s: float) -> dict[str, Any] | None:
    """Submits a job, and waits for its result.

    Returns:
        The result; None while it is accepted and not decided.

    Raises:
        CliError: it was not accepted, or whether it was can't be told.
    """
    deadline = time.monotonic() + wait_s
    headers = {"Authorization": f"Bearer {door.api_key}"} if door.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(door.url + "/", headers=headers, timeout=timeout) as http:
        result = await _ask(http, "POST", "api/v1/jobs", min(wait_s, LONGEST_WAIT_S), job)
        while result is None and time.monotonic() < deadline:
            await asyncio.sleep(ASK_AGAIN_S)
            result = await _ask(http, "GET", f"api/v1/jobs/{quote(job['job_id'], safe='')}", 0, None)
    return result


async def _ask(
    http: aiohttp.ClientSession, method: str, path: str, wait_s: float, job: dict[str, Any] | None
) -> dict[str, Any] | None:
    parameters = {"wait_s": f"{wait_s:g}"} if wait_s else {}
    body = None if job is None else json.dumps(job, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json"} if body else {}
    try:
        async with (
            asyncio.timeout(wait_s + ANSWER_TIMEOUT_S),
            http.request(method, path, params=parameters, data=body, headers=headers) as response,
        ):
            status, answer = response.status, await response.read()
    except aiohttp.ClientConnectorError as error:
        raise unreachable(
            f"nothing answers at {error.host}:{error.port}: {error.strerror or error}",
            "Is the request service running? `breakwater doctor` tells what answers and what does not.",
        ) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise unreachable(
            f"no answer came: {error or type(error).__name__}",
            "Whether the job was accepted is not known; submit it again with the same --job-id"
            + (f" ({job['job_id']})." if job else "."),
        ) from error
    if status == 202:
        return None
    if status != 200:
        raise refused(status, answer)
    return json.loads(answer)
