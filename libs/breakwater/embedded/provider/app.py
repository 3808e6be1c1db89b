"""The simulated provider's HTTP server: its life, and the course of a call from its arrival to the ledger."""

from __future__ import annotations

import asyncio
import codecs
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import orjson
import structlog
from aiohttp import web

from breakwater.contracts.types import format_time
from breakwater.embedded.provider import dialects, wire
from breakwater.embedded.provider.behaviour import ModelPlan, decide, make_plans, partly, refuse
from breakwater.embedded.provider.dialects import Dialect
from breakwater.embedded.provider.ledger import CallLedger, LedgerCall
from breakwater.embedded.provider.script import ErrorText, Pace, ProviderScript, ScriptError, build_script, parse_script
from breakwater.embedded.provider.streaming import course_of
from breakwater.embedded.provider.wire import Decision

MAX_BODY_BYTES = 64 * 2**20
NO_MODEL = "-"
PREFIX = "/_sim/"
JSON = "application/json"
_FOREVER_S = 86_400.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CLOSE_TIMEOUT_S = 60.0


class SimulatedProvider:
    """A model provider with scripted behaviour.

    ```python
    async with SimulatedProvider({"models": {"sim/fast": {"price": ...}}}) as provider:
        provider.url  # http://127.0.0.1:<port>/v1
        provider.ledger.totals.cost_nano
    ```
    """

    def __init__(
        self,
        script: ProviderScript | Mapping[str, object],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ledger_file: Path | None = None,
        api_keys: Collection[str] = (),
    ) -> None:
        """Prepares; nothing listens until `start`.

        Args:
            script: what to answer.
            host: the address to listen on.
            port: 0 takes a free one.
            ledger_file: keeps the ledger, and is continued from if it exists.
            api_keys: accepted besides the script's own, and kept when the script is replaced.

        Raises:
            ScriptError: the script has mistakes.
            LedgerFileError: the ledger's file can't be used.
        """
        self._host, self._port = host, port
        self._own_keys = frozenset(api_keys)
        self._stopping = False
        self._runner: web.ServerRunner | None = None
        self._apply(build_script(script))
        self.ledger = CallLedger(ledger_file)

    def _apply(self, script: ProviderScript) -> None:
        self._plans: dict[str, ModelPlan] = make_plans(script)
        self._keys = self._own_keys.union(script.api_keys or ())
        self.restart_clock()

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return self._port

    @property
    def url(self) -> str:
        """The base URL that an OpenAI client takes, `/v1` included."""
        return f"http://{self._host}:{self._port}/v1"

    @property
    def control_url(self) -> str:
        """The base URL of the controls."""
        return f"http://{self._host}:{self._port}/_sim"

    @property
    def models(self) -> list[str]:
        """The models it serves."""
        return list(self._plans)

    @property
    def since_start_s(self) -> float:
        """Seconds on the clock of the faults' windows."""
        return time.monotonic() - self._clock_zero

    def use(self, script: ProviderScript | Mapping[str, object]) -> None:
        """Replaces the script: the clock and the request numbers restart, the ledger stays.

        Raises:
            ScriptError: the script has mistakes; the old one stays.
        """
        self._apply(build_script(script))
        self.ledger.restart_numbers()

    def restart_clock(self) -> None:
        """Now is second 0 of the faults' windows."""
        self._clock_zero = time.monotonic()

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: the address is taken or not this machine's.
        """
        loop = asyncio.get_running_loop()
        server = web.Server(
            self._dispatch,
            # A client that leaves must be seen at once: it decides what a hang costs.
            handler_cancellation=True,
            request_factory=lambda message, payload, protocol, writer, task: web.BaseRequest(
                message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES
            ),
            access_log=None,
            # Closing an idle connection races with the next request on it; only faults may break connections here.
            keepalive_timeout=_FOREVER_S,
        )
        # Calls in progress are dropped when it stops, as by a provider that goes down: nothing to wait for.
        self._runner = web.ServerRunner(server, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=4096)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening and closes the ledger's file. Calls in progress are neither answered nor billed."""
        self._stopping = True
        if self._runner is not None:
            await self._runner.cleanup()
        self.ledger.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        if names_loopback(self._host) and not names_loopback(request.host):
            return refusal(421, "This simulator answers to localhost only.")
        found = dialects.find(request.path) if request.method == "POST" else None
        if found is not None:
            return await self._chat(request, *found)
        match request.method, request.path:
            case "GET", "/v1/models":
                if not self._authorized(dialects.OPENAI, request):
                    return refusal(401)
                return web.Response(body=wire.write_models(self._plans), content_type=JSON)
            case _, path if path.startswith(PREFIX):
                return await control(self, request)
            case method, path:
                return refusal(404, f"There is no {method} {path}.")

    def _authorized(self, dialect: Dialect, request: web.BaseRequest) -> bool:
        return not self._keys or dialect.key_of(request.headers) in self._keys

    def _plan(self, name: str) -> ModelPlan | None:
        """The plan of a model; its provider's name before the last slashes may be left out where no other ends so."""
        if (plan := self._plans.get(name)) is not None:
            return plan
        close = [plan for model, plan in self._plans.items() if model.endswith(f"/{name}")]
        return close[0] if len(close) == 1 else None

    async def _chat(self, request: web.BaseRequest, dialect: Dialect, model: str | None) -> web.StreamResponse:
        received_at, received = format_time(datetime.now(UTC)), time.monotonic()
        call, decision = await self._receive(request, dialect, model, received_at, received)
        remaining = decision.delay_s - (time.monotonic() - received)
        if remaining > 0:
            try:
                await asyncio.sleep(remaining)
            except asyncio.CancelledError:
                self._client_left(call, decision, decision.delay_s - (time.monotonic() - received))
                raise
        if decision.status == 200 and decision.streamed is not None:
            return await self._stream(request, call, decision, dialect, decision.streamed)
        transport = request.transport
        listening = transport is not None and not transport.is_closing()
        whole = decision.broken not in ("reset", "truncated")
        self._settle(call, decision, delivered=listening and whole)
        return await deliver(request, call, decision, dialect)

    async def _stream(
        self, request: web.BaseRequest, call: LedgerCall, decision: Decision, dialect: Dialect, pace: Pace
    ) -> web.StreamResponse:
        """Sends the answer in chunks. What was sent is billed, whoever ends the stream."""
        course, sent = course_of(decision, dialect, call.model, pace), 0
        response = web.StreamResponse(headers={dialect.id_header: f"req_{call.seq:016d}", "Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        due, delivered = time.monotonic(), False
        try:
            await response.prepare(request)
            for wait_s, event in course.steps:
                due += wait_s
                if wait_s and (rest_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(rest_s)
                await response.write(event.data)
                sent += event.content
            delivered = course.whole and request.transport is not None and not request.transport.is_closing()
        finally:
            # Also where the client leaves, as a provider stops then.
            self._settle(call, partly(decision, sent, course.chunks), delivered)
        if course.breaks and request.transport is not None:
            request.transport.close()
            return await _until_closed()
        await response.write_eof()
        return response

    async def _receive(
        self, request: web.BaseRequest, dialect: Dialect, named: str | None, received_at: str, received: float
    ) -> tuple[LedgerCall, Decision]:
        model, chat, refused = named or NO_MODEL, None, None
        try:
            chat = dialect.read_request(await request.read(), named)
            model = chat.model
        except wire.RequestRefusedError as error:
            model = error.model or model
            refused = refuse(400, "invalid_request", error.error)
        except web.HTTPRequestEntityTooLarge:
            refused = refuse(413, "invalid_request")
        plan, headers = self._plan(model), request.headers
        call = self.ledger.begin(
            plan.model if plan is not None else model,
            received_at,
            headers.get("X-Client-Request-Id"),
            headers.get("Idempotency-Key"),
        )
        if not self._authorized(dialect, request):
            return call, refuse(401, "unauthorized")
        if (missing := dialect.missing(request)) is not None:
            return call, missing
        if refused is not None:
            return call, refused
        if plan is None or chat is None:
            return call, refuse(404, "unknown_model", dialect.unknown_model(model))
        return call, decide(plan, call.number, received - self._clock_zero, chat)

    def _client_left(self, call: LedgerCall, decision: Decision, remaining_s: float) -> None:
        if decision.hangs:
            self._settle(call, replace(decision, status=None, billed=decision.billed_when_abandoned))
        else:
            # A provider goes on to produce the answer, and bills it, with nobody listening.
            asyncio.get_running_loop().call_later(remaining_s, self._settle, call, decision)

    def _settle(self, call: LedgerCall, decision: Decision, delivered: bool = False) -> None:
        if self._stopping:
            return
        self.ledger.end(
            call,
            status=decision.status,
            fault=decision.fault,
            answered_at=None if decision.status is None else format_time(datetime.now(UTC)),
            delivered=delivered,
            billed=decision.billed,
            usage=decision.usage,
            cost_nano=decision.cost_nano,
        )


async def control(provider: SimulatedProvider, request: web.BaseRequest) -> web.StreamResponse:
    """Answers a request under `/_sim/`."""
    if not is_loopback(request.remote) or not names_loopback(request.host):
        return refusal(403, "The controls answer to this machine only.")
    route = _ROUTES.get((request.method, request.path.removeprefix(PREFIX)))
    if route is None:
        known = ", ".join(f"{method} {PREFIX}{name}" for method, name in _ROUTES)
        return refusal(404, f"There is no {request.method} {request.path}; there are: {known}.")
    return await route(provider, request)


def is_loopback(remote: str | None) -> bool:
    """Whether a peer's address is this machine's loopback; an IPv4 address inside an IPv6 one counts as itself."""
    if remote is None:
        return False
    address = ip_address(remote.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def names_loopback(host: str) -> bool:
    """Whether a Host header is a name of this machine's loopback.

    A page in a browser, whose own name may resolve to the loopback, can't send another.
    """
    name = urlsplit(f"//{host}").hostname
    try:
        return name == "localhost" or is_loopback(name)
    except ValueError:
        return False


def _json(content: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type=JSON)


async def _health(provider: SimulatedProvider, _: web.BaseRequest) -> web.StreamResponse:
    return _json({"status": "ok", "models": provider.models, "since_start_s": round(provider.since_start_s, 3)})


async def _report(provider: SimulatedProvider, request: web.BaseRequest) -> web.StreamResponse:
    return _json(provider.ledger.report(with_calls=request.query.get("calls") == "1"))


async def _replace_script(provider: SimulatedProvider, request: web.BaseRequest) -> web.StreamResponse:
    try:
        provider.use(parse_script(await request.read(), is_json="yaml" not in request.content_type))
    except ScriptError as error:
        return refusal(400, str(error))
    structlog.get_logger().info("provider_script_replaced", models=provider.models)
    return _json({"models": provider.models})


async def _restart_clock(provider: SimulatedProvider, _: web.BaseRequest) -> web.StreamResponse:
    provider.restart_clock()
    return _json({"since_start_s": 0})


async def _reset(provider: SimulatedProvider, _: web.BaseRequest) -> web.StreamResponse:
    provider.ledger.reset()
    return _json(provider.ledger.report())


_ROUTES: dict[tuple[str, str], Callable[[SimulatedProvider, web.BaseRequest], Awaitable[web.StreamResponse]]] = {
    ("GET", "health"): _health,
    ("GET", "ledger"): _report,
    ("POST", "script"): _replace_script,
    ("POST", "start"): _restart_clock,
    ("POST", "reset"): _reset,
}


def refusal(status: int, message: str | None = None) -> web.Response:
    """An error outside any call; without a message, with the status' default one."""
    error = None if message is None else ErrorText(message=message)
    return web.Response(status=status, body=wire.write_error(status, error), content_type=JSON)


async def deliver(
    request: web.BaseRequest, call: LedgerCall, decision: Decision, dialect: Dialect
) -> web.StreamResponse:
    """Makes the answer to a call; the breaking of connections happens here, that of bodies too."""
    headers = {dialect.id_header: f"req_{call.seq:016d}"}
    if decision.status is None:
        return await _reset_connection(request)
    if decision.status >= 300:
        headers |= {**dialect.error_headers(decision.status, decision.retry_after_s), **decision.headers}
        body = dialect.write_error(decision.status, decision.error)
        return web.Response(status=decision.status, body=body, headers=headers, content_type=JSON)
    body = _body(call, decision, dialect)
    if decision.broken == "truncated":
        return await _send_half(request, body, headers)
    return web.Response(status=decision.status, body=body, headers=headers, content_type=JSON)


def _body(call: LedgerCall, decision: Decision, dialect: Dialect) -> bytes:
    if decision.broken == "empty_body":
        return b""
    if decision.broken == "error_in_200":
        return dialect.write_error(500, decision.error)
    body = dialect.write_completion(decision, call.model)
    if decision.broken == "byte_order_mark":
        return codecs.BOM_UTF8 + body
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
