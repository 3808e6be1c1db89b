"""The simulated provider's HTTP server, and the course of a call from its arrival to the ledger."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import orjson
import structlog
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from breakwater.kernel.types import format_time
from breakwater.local.provider.anthropic import Anthropic, CountTokens
from breakwater.local.provider.behaviour import ChatRequest, Decision, ModelPlan, decide, make_plans
from breakwater.local.provider.embeddings import AzureEmbeddings, Embeddings
from breakwater.local.provider.ledger import CallLedger, LedgerCall
from breakwater.local.provider.openai import Azure, OpenAI, RequestRefusedError
from breakwater.local.provider.prompt_cache import PromptCaches
from breakwater.local.provider.reply import JSON, WireReply, reply_to
from breakwater.local.provider.responses import Responses
from breakwater.local.provider.script import ErrorText, Fault, ProviderScript, ScriptError, build_script, mistakes

MAX_BODY_BYTES = 64 * 2**20
NO_MODEL = "-"
WHOLE = Fraction(1)
LOOPBACK = "127.0.0.1"
OPENAI = OpenAI()
ANTHROPIC = Anthropic()
TOKEN_COUNT = CountTokens()
API_PATHS = {
    "/v1/chat/completions": OPENAI,
    "/v1/responses": Responses(),
    "/v1/embeddings": Embeddings(),
    "/v1/messages": ANTHROPIC,
}
_DEPLOYMENT = re.compile(r"/openai/deployments/(.+)/(chat/completions|embeddings)")
_DEPLOYED = {"chat/completions": Azure(), "embeddings": AzureEmbeddings()}
_FAULTS = TypeAdapter(dict[str, tuple[Fault, ...]])
_FOREVER_S = 86_400.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CLOSE_TIMEOUT_S = 60.0


class SimulatedProvider:
    """A model provider with scripted behaviour. It listens on the loopback alone, unless it has a name.

    ```python
    async with SimulatedProvider({"models": {"sim/fast": {"price": ...}}}) as provider:
        provider.url  # http://127.0.0.1:<port>/v1
        provider.ledger.totals.cost_nano
    ```

    Args:
        script: plain values or JSON.
        port: 0 takes a free one.
        name: of this host for other containers: it then listens on all addresses, and answers to that name, too.

    Raises:
        ScriptError: the script has mistakes.
    """

    def __init__(self, script: Mapping[str, object] | bytes, *, port: int = 0, name: str | None = None) -> None:
        self.port = port
        self._name = name
        self._stopping = False
        self._runner: web.ServerRunner | None = None
        self._apply(build_script(script))
        self.ledger = CallLedger()
        self._prompt_caches = PromptCaches()

    def _apply(self, script: ProviderScript) -> None:
        self._script = script
        self._plans: dict[str, ModelPlan] = make_plans(script)
        self.restart_clock()

    @property
    def url(self) -> str:
        """The base URL for an OpenAI client, with `/v1`."""
        return f"http://{LOOPBACK}:{self.port}/v1"

    @property
    def control_url(self) -> str:
        """The base URL of the controls."""
        return f"http://{LOOPBACK}:{self.port}/_sim"

    @property
    def models(self) -> list[str]:
        """Names of the models."""
        return list(self._plans)

    def use(self, script: Mapping[str, object] | bytes) -> None:
        """Replaces the script: the clock and the request numbers restart, the ledger stays.

        Raises:
            ScriptError: the script has mistakes; the old one stays.
        """
        self._apply(build_script(script))
        self.ledger.restart_numbers()

    def restart_clock(self) -> None:
        """Makes now second 0 of the faults' windows."""
        self._clock_zero = time.monotonic()

    async def start(self) -> None:
        """Listens. Raises OSError: the port is taken."""
        loop = asyncio.get_running_loop()
        server = web.Server(
            self._dispatch,
            # A client that leaves must be noticed immediately: the cost of a hang depends on it.
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
        host = LOOPBACK if self._name is None else "0.0.0.0"  # noqa: S104  in a container, for others of its network
        site = web.TCPSite(self._runner, host, self.port, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening. Calls in progress are neither answered nor billed."""
        self._stopping = True
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        # A page in a browser, whose own name may resolve to the loopback, can't send another name.
        if urlsplit(f"//{request.host}").hostname not in ("localhost", LOOPBACK, "::1", self._name or LOOPBACK):
            return _refusal(421, "This simulator answers to localhost only.")
        match request.method, request.path:
            case "POST", "/v1/messages/count_tokens":
                return await self._count(request)
            case "POST", path if dialect := API_PATHS.get(path):
                return await self._chat(request, dialect)
            case "POST", path if deployment := _DEPLOYMENT.fullmatch(path):
                return await self._chat(request, _DEPLOYED[deployment[2]], deployment[1])
            case "GET", "/v1/models":
                return _json(OPENAI.models(self._plans)) if self._is_authorized(OPENAI, request) else _refusal(401)
            case "GET", "/_sim/health":
                return _json({"status": "ok", "models": self.models})
            case "GET", "/_sim/ledger":
                return _json(self.ledger.report())
            case "POST", "/_sim/script":
                return await self._replace_script(request)
            case "POST", "/_sim/faults":
                return await self._inject(request)
            case "POST", "/_sim/start":
                self.restart_clock()
                return _json({})
            case method, path:
                return _refusal(404, f"There is no {method} {path}.")

    async def _replace_script(self, request: web.BaseRequest) -> web.Response:
        try:
            self.use(await request.read())
        except ScriptError as error:
            return _refusal(400, str(error))
        structlog.get_logger().info("provider_script_replaced", models=self.models)
        return _json({"models": self.models})

    async def _inject(self, request: web.BaseRequest) -> web.Response:
        """Puts faults before those of the models; without any, restores those of the script."""
        try:
            faults = _FAULTS.validate_json(await request.read())
        except ValidationError as error:
            return _refusal(400, "; ".join(mistakes(error)))
        plans = {name: plan for name in faults if (plan := self._plan(name)) is not None}
        if unknown := faults.keys() - plans.keys():
            return _refusal(
                404, f"The simulated provider has no model {', '.join(unknown)}; it has {', '.join(self.models)}."
            )
        if not faults:
            self._plans = make_plans(self._script)
        for name, plan in plans.items():
            script = plan.script.model_copy(update={"faults": (*faults[name], *plan.script.faults)})
            self._plans[plan.model] = replace(plan, script=script)
        return _json(
            {
                model: [fault.model_dump(mode="json", exclude_defaults=True) for fault in plan.script.faults]
                for model, plan in self._plans.items()
            }
        )

    def _is_authorized(self, dialect: OpenAI, request: web.BaseRequest) -> bool:
        return self._script.api_keys is None or dialect.key_of(request.headers) in self._script.api_keys

    def _plan(self, name: str) -> ModelPlan | None:
        """Returns the plan of a model, whose provider's name may be left out if the remaining name is unique."""
        if (plan := self._plans.get(name)) is not None:
            return plan
        candidates = [plan for model, plan in self._plans.items() if model.endswith(f"/{name}")]
        return candidates[0] if len(candidates) == 1 else None

    async def _chat(self, request: web.BaseRequest, dialect: OpenAI, model: str | None = None) -> web.StreamResponse:
        received = time.monotonic()
        call, decision = await self._receive(request, dialect, model, received)
        if (remaining_s := decision.delay_s - (time.monotonic() - received)) > 0:
            try:
                await asyncio.sleep(remaining_s)
            except asyncio.CancelledError:
                self._client_left(call, decision, decision.delay_s - (time.monotonic() - received))
                raise
        return await self._send(request, call, decision, reply_to(decision, dialect, f"req_{call.seq:016d}"))

    async def _count(self, request: web.BaseRequest) -> web.Response:
        """Answers with the tokens of a request, which is no call and costs nothing."""
        if not self._is_authorized(ANTHROPIC, request):
            return _json(ANTHROPIC.error(401), 401)
        try:
            ANTHROPIC.require(request)
            chat = TOKEN_COUNT.read(await request.read())
        except RequestRefusedError as error:
            return _json(ANTHROPIC.error(error.status, error.error), error.status)
        if (plan := self._plan(chat.model)) is None:
            return _json(ANTHROPIC.error(404, ANTHROPIC.unknown_model(chat.model)), 404)
        return _json({"input_tokens": plan.input_tokens(1, chat)})

    async def _receive(
        self, request: web.BaseRequest, dialect: OpenAI, named: str | None, received: float
    ) -> tuple[LedgerCall, Decision]:
        received_at = format_time(datetime.now(UTC))
        chat: ChatRequest | None = None
        refusal: RequestRefusedError | None = None
        model = named or NO_MODEL
        try:
            chat = dialect.read(await request.read(), named)
            model = chat.model
            dialect.require(request)
        except RequestRefusedError as error:
            model = error.model or model
            refusal = error
        plan = self._plan(model)
        name = model if plan is None else plan.model
        call = self.ledger.begin(name, received_at, request.headers.get("X-Client-Request-Id"))
        if not self._is_authorized(dialect, request):
            return call, Decision(401, "unauthorized")
        if refusal is not None:
            return call, Decision(refusal.status, "invalid_request", refusal.error)
        if plan is None or chat is None:
            return call, Decision(404, "unknown_model", dialect.unknown_model(model))
        if (chat.body.get("dimensions") or 0) > plan.script.dimensions:
            text = f"The embeddings of this model have at most {plan.script.dimensions} dimensions."
            return call, Decision(400, "invalid_request", ErrorText(message=text, param="dimensions"))
        chat = chat.model_copy(update={"key": dialect.key_of(request.headers)})
        if plan.script.prompt_cache is not None:
            cached = self._prompt_caches.read(plan.script.prompt_cache, plan.model, chat, received)
            chat = chat.model_copy(update={"cached_tokens": cached})
        return call, decide(plan, call.number, received - self._clock_zero, chat)

    def _client_left(self, call: LedgerCall, decision: Decision, remaining_s: float) -> None:
        if decision.rule.hang_s is not None:
            self._settle(call, replace(decision, status=None, billed=decision.rule.billed_when_abandoned))
        else:
            # A provider goes on to produce the answer, and bills it, without a listener.
            asyncio.get_running_loop().call_later(remaining_s, self._settle, call, decision)

    async def _send(
        self, request: web.BaseRequest, call: LedgerCall, decision: Decision, reply: WireReply
    ) -> web.StreamResponse:
        """Sends an answer. Of a stream, only the part that was sent is billed."""
        if reply.status is None:
            self._settle(call, decision)
            return await _close_midway(request, reset=True)
        if reply.length is not None and not reply.breaks:
            # Before it is sent: a client that has the answer finds it in the ledger.
            self._settle(call, decision, delivered=_listens(request))
            return web.Response(status=reply.status, body=reply.steps[0][1].data, headers=reply.headers)
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.content_length = reply.length
        due = time.monotonic()
        sent = 0
        delivered = False
        try:
            await response.prepare(request)
            for wait_s, event in reply.steps:
                due += wait_s
                if wait_s and (rest_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(rest_s)
                await response.write(event.data)
                sent += event.content
            delivered = reply.complete and _listens(request)
        finally:
            # Also where the client leaves: a provider stops then.
            share = Fraction(sent, reply.chunks) if sent < reply.chunks else WHOLE
            self._settle(call, decision, delivered=delivered, share=share)
        if reply.breaks:
            return await _close_midway(request)
        await response.write_eof()
        return response

    def _settle(
        self, call: LedgerCall, decision: Decision, *, delivered: bool = False, share: Fraction = WHOLE
    ) -> None:
        if not self._stopping:
            self.ledger.end(call, decision, delivered=delivered, share=share)


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(content), headers=JSON)


def _refusal(status: int, message: str | None = None) -> web.Response:
    """Returns an error outside any call; without a message, with the default one of its status."""
    return _json(OPENAI.error(status, ErrorText(message=message)), status)


def _listens(request: web.BaseRequest) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _close_midway(request: web.BaseRequest, *, reset: bool = False) -> web.StreamResponse:
    """Closes a connection in the middle of an answer."""
    if (transport := request.transport) is not None:
        if reset:
            # With no lingering the peer gets a reset instead of an orderly end.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            transport.abort()
        else:
            transport.close()
    # The server cancels the handler when the connection is gone; returning before that would write on to it.
    await asyncio.sleep(_CLOSE_TIMEOUT_S)
    raise RuntimeError(f"a connection that was closed is still open {_CLOSE_TIMEOUT_S:g} s later")
