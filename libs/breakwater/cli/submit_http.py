"""Submitting over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import quote

import aiohttp

from breakwater.cli import api
from breakwater.cli.plane import Door

LONGEST_WAIT_S = 300.0
"""What the interface allows for one request."""

ASK_AGAIN_S = 0.5


async def send(door: Door, job: dict[str, Any], *, wait_s: float) -> dict[str, Any] | None:
    """Submits a job, and waits for its result.

    Returns:
        The result; None while it is accepted and not decided.

    Raises:
        CliError: it was not accepted, or whether it was can't be told.
    """
    deadline = time.monotonic() + wait_s
    async with api.session(door) as http:
        result = await _ask(http, "POST", "api/v1/jobs", min(wait_s, LONGEST_WAIT_S), job)
        while result is None and time.monotonic() < deadline:
            await asyncio.sleep(ASK_AGAIN_S)
            result = await _ask(http, "GET", f"api/v1/jobs/{quote(job['job_id'], safe='')}", 0, None)
    return result


async def _ask(
    http: aiohttp.ClientSession, method: str, path: str, wait_s: float, job: dict[str, Any] | None
) -> dict[str, Any] | None:
    same = f" ({job['job_id']})" if job else ""
    unanswered = f"Whether the job was accepted is not known; submit it again with the same --job-id{same}."
    status, answer = await api.request(http, method, path, body=job, wait_s=wait_s, unanswered=unanswered)
    if status == 202:
        return None
    if status != 200:
        raise api.refused(status, answer, again="Try again with the same --job-id.")
    return json.loads(answer)
