"""Putting a decision on the wire: whole answers, errors, and answers broken on purpose."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

from aiohttp import web

from breakwater.embedded.provider import errors
from breakwater.embedded.provider.behaviour import Decision
from breakwater.embedded.provider.dialects import Dialect
from breakwater.embedded.provider.ledger import OpenCall
from breakwater.embedded.provider.script import ErrorText

JSON = "application/json"
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CLOSE_TIMEOUT_S = 60.0


def refusal(status: int, message: str | None = None) -> web.Response:
    """An error outside any call; without a message, with the status' usual one."""
    error = None if message is None else ErrorText(message=message)
    return web.Response(status=status, body=errors.write_error(status, error), content_type=JSON)


async def deliver(request: web.BaseRequest, call: OpenCall, decision: Decision, dialect: Dialect) -> web.StreamResponse:
    """Makes the answer to a call; the breaking of connections happens here, that of bodies too."""
    headers = {dialect.id_header: f"req_{call.seq:016d}"}
    if decision.status is None:
        return await _reset_connection(request)
    if decision.status != 200:
        headers |= dialect.error_headers(decision.status, decision.retry_after_s)
        body = dialect.write_error(decision.status, decision.error)
        return web.Response(status=decision.status, body=body, headers=headers, content_type=JSON)
    body = _body(call, decision, dialect)
    if decision.broken == "truncated":
        return await _send_half(request, body, headers)
    return web.Response(body=body, headers=headers, content_type=JSON)


def _body(call: OpenCall, decision: Decision, dialect: Dialect) -> bytes:
    if decision.broken == "empty_body":
        return b""
    if decision.broken == "error_in_200":
        return dialect.write_error(500, decision.error)
    body = dialect.write_completion(
        completion_id=decision.completion_id,
        model=call.model,
        created=int(time.time()),
        content=decision.content,
        tool_calls=decision.tool_calls,
        finish_reason=decision.finish_reason,
        usage=decision.usage if decision.report_usage else None,
        with_choices=decision.broken != "no_choices",
    )
    return body[: len(body) // 2] if decision.broken == "malformed_json" else body


async def _reset_connection(request: web.BaseRequest) -> web.StreamResponse:
    transport = request.transport
    if transport is not None:
        # With no lingering the peer gets a reset instead of an orderly end.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()
    return await _until_closed()


async def _send_half(request: web.BaseRequest, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    response.content_type = JSON
    response.content_length = len(body)
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return await _until_closed()


async def _until_closed() -> web.StreamResponse:
    # The server cancels the handler when the connection is gone; returning before that would write on to it.
    await asyncio.sleep(_CLOSE_TIMEOUT_S)
    raise RuntimeError(f"a connection that was closed is still open {_CLOSE_TIMEOUT_S:g} s later")
