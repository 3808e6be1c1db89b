"""Reading a request's body, and no more of it than is allowed."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from services.request.problems import Problem

READ_TIMEOUT_S = 30.0

_A_JOB = (
    "a job may have at most {limit:,} bytes (limits.max_body_bytes in Breakwater's config); "
    "keep large inputs elsewhere and send a reference to them"
)


async def read_body(request: Request, limit: int, too_large: str = _A_JOB) -> bytes:
    """The whole body, at most `limit` bytes.

    What is left of a body that is too large is not kept: the server discards it while the answer goes out.

    Args:
        request: whose.
        limit: in bytes.
        too_large: what to say of a larger one; `{limit}` stands for the limit.

    Raises:
        Problem: 413 for a larger body, told by its Content-Length or found while reading; 408 for one that stalls.
        ClientDisconnect: nobody is there any more.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise Problem(413, "body_too_large", too_large.format(limit=limit))
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(request, limit, too_large)
    except TimeoutError:
        raise Problem(
            408, "body_timeout", f"the body did not arrive within {READ_TIMEOUT_S:g} s", headers={"Connection": "close"}
        ) from None


async def _read(request: Request, limit: int, too_large: str) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise Problem(413, "body_too_large", too_large.format(limit=limit))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
