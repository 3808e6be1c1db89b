"""The controls under `/_sim/`: for tests and the demo on the same machine, never for clients of the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Any, Protocol

import orjson
import structlog
from aiohttp import web

from breakwater.embedded.provider.delivery import JSON, refusal
from breakwater.embedded.provider.ledger import CallLedger
from breakwater.embedded.provider.script import ProviderScript, ScriptError, parse_script

PREFIX = "/_sim/"


class Controlled(Protocol):
    """What the controls need of a provider."""

    ledger: CallLedger

    @property
    def models(self) -> list[str]:
        """The models it serves."""
        ...

    @property
    def since_start_s(self) -> float:
        """Seconds on the clock of the faults' windows."""
        ...

    def use(self, script: ProviderScript) -> None:
        """Replaces the script."""
        ...

    def restart_clock(self) -> None:
        """Now is second 0."""
        ...


async def control(provider: Controlled, request: web.BaseRequest) -> web.StreamResponse:
    """Answers a request under `/_sim/`."""
    if not is_loopback(request.remote):
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


def _json(content: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type=JSON)


async def _health(provider: Controlled, _: web.BaseRequest) -> web.StreamResponse:
    return _json({"status": "ok", "models": provider.models, "since_start_s": round(provider.since_start_s, 3)})


async def _report(provider: Controlled, request: web.BaseRequest) -> web.StreamResponse:
    return _json(provider.ledger.report(with_calls=request.query.get("calls") == "1"))


async def _replace_script(provider: Controlled, request: web.BaseRequest) -> web.StreamResponse:
    try:
        provider.use(parse_script(await request.read(), is_json="yaml" not in request.content_type))
    except ScriptError as error:
        return refusal(400, str(error))
    structlog.get_logger().info("provider_script_replaced", models=provider.models)
    return _json({"models": provider.models})


async def _restart_clock(provider: Controlled, _: web.BaseRequest) -> web.StreamResponse:
    provider.restart_clock()
    return _json({"since_start_s": 0})


async def _reset(provider: Controlled, _: web.BaseRequest) -> web.StreamResponse:
    provider.ledger.reset()
    return _json(provider.ledger.report())


_ROUTES: dict[tuple[str, str], Callable[[Controlled, web.BaseRequest], Awaitable[web.StreamResponse]]] = {
    ("GET", "health"): _health,
    ("GET", "ledger"): _report,
    ("POST", "script"): _replace_script,
    ("POST", "start"): _restart_clock,
    ("POST", "reset"): _reset,
}
