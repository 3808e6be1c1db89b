"""Servers that check what those of Azure and Google check of a caller: the protocols of tokens, and their ends."""

from __future__ import annotations

import json
import re
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_type_hints

import aiohttp
import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import RSAKey
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter, ValidationError

from tests.strict_chat import refusal, with_additions


@dataclass(slots=True)
class TokenIssuer:
    """Issues tokens and remembers when they end.

    Attributes:
        lifetime_s: how long the next ones last.
        problem: the status and the body of its answer instead of a token.
        requests: the fields of each request for a token.
    """

    lifetime_s: float = 3600
    problem: tuple[int, Any] | None = None
    requests: list[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    ends: dict[str, float] = field(default_factory=dict[str, float])

    def issue(self, asked: Mapping[str, str], **more: Any) -> web.Response:
        self.requests.append(dict(asked))
        if self.problem is not None:
            status, body = self.problem
            return web.json_response(body, status=status)
        whole_s = int(self.lifetime_s)
        answer = {"access_token": self.new_token(), "token_type": "Bearer", "expires_in": whole_s, **more}
        return web.json_response(answer)

    def new_token(self, lifetime_s: float | None = None) -> str:
        token = f"tok.{secrets.token_hex(12)}"
        self.ends[token] = time.time() + (self.lifetime_s if lifetime_s is None else lifetime_s)
        return token

    def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a caller whose token is unknown or has ended."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme == "Bearer" and self.ends.get(token, 0.0) > time.time():
            return None
        error = {"code": 401, "message": "Request had invalid authentication credentials.", "status": "UNAUTHENTICATED"}
        return web.json_response({"error": error}, status=401)

    def revoke(self) -> None:
        """Ends all tokens before their time."""
        self.ends.clear()


@asynccontextmanager
async def serving(
    routes: Mapping[str, Any], authority: trustme.CA | None = None, host: str = "localhost"
) -> AsyncGenerator[str]:
    """A server of these handlers by `METHOD path`; gives its origin. With an authority, it speaks TLS."""
    app = web.Application()
    for route, handler in routes.items():
        method, path = route.split(" ")
        app.router.add_route(method, path, handler)
    context = None
    if authority is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(host).configure_cert(context)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0, ssl_context=context).start()
        yield f"{'http' if context is None else 'https'}://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class _RefusedError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, text: str, name: str = "INVALID_ARGUMENT") -> None:
        super().__init__(text)
        self.status = status
        self.name = name


@dataclass(slots=True)
class _Relay:
    """A cloud in front of the simulated provider, which has its models.

    Attributes:
        issuer: of the tokens that it takes.
        sim_url: the simulated provider's URL, up to /v1.
        refused: gets the reason of each refusal.
    """

    issuer: TokenIssuer
    sim_url: str
    refused: list[str]
    _client: aiohttp.ClientSession = field(default_factory=aiohttp.ClientSession)

    @asynccontextmanager
    async def serve(self, routes: Mapping[str, Any]) -> AsyncGenerator[str]:
        """Serves these routes, whose handlers return where a request goes, its body, and how lines come back."""
        try:
            async with serving({route: partial(self._answer, handler) for route, handler in routes.items()}) as origin:
                yield origin
        finally:
            await self._client.close()

    def check_token(self, request: web.BaseRequest) -> None:
        if self.issuer.refusal(request) is not None:
            raise _RefusedError(401, "Request had invalid authentication credentials.", "UNAUTHENTICATED")

    async def _answer(self, handler: Any, request: web.Request) -> web.StreamResponse:
        try:
            path, body, rewritten = await handler(request)
        except _RefusedError as refusal:
            self.refused.append(f"{request.path}: {refusal}")
            error = {"code": refusal.status, "message": str(refusal), "status": refusal.name}
            return web.json_response({"error": error}, status=refusal.status)
        headers = {name: value for name, value in request.headers.items() if name.lower() == "anthropic-beta"}
        headers["anthropic-version"] = "2023-06-01"
        async with self._client.post(f"{self.sim_url}{path}", json=body, headers=headers) as answer:
            relayed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            await relayed.prepare(request)
            async for line in answer.content:
                await relayed.write(rewritten(line) if answer.status == 200 else line)
            return relayed


def _as_it_is(line: bytes) -> bytes:
    return line


def _chat_objection(body: Mapping[str, Any], *, extra: Collection[str] = ()) -> str | None:
    """Why OpenAI's types refuse a chat; None if they do not. They, and not a list of ours, say which fields there are.

    Args:
        body: the chat.
        extra: fields of messages and calls that a provider has beside OpenAI's.
    """
    params = get_type_hints(CompletionCreateParamsBase).keys() | {"stream"}
    if unknown := sorted(body.keys() - params):
        return f"Unknown parameter: '{unknown[0]}'."
    for number, message in enumerate(body["messages"]):
        role = _ROLES.get(message.get("role"))
        if role is None:
            return f"Invalid value: '{message.get('role')}' at 'messages[{number}].role'."
        # Of an answer that comes back as it was, which OpenAI takes.
        if unknown := sorted(message.keys() - get_type_hints(role).keys() - {"annotations", *extra}):
            return f"Unknown parameter: 'messages[{number}].{unknown[0]}'."
        for call in message.get("tool_calls") or ():
            if unknown := sorted(call.keys() - {"id", "type", "function", *extra}):
                return f"Unknown parameter: 'messages[{number}].tool_calls[0].{unknown[0]}'."
        try:
            TypeAdapter(role).validate_python(message)
        except ValidationError as error:
            return f"Invalid 'messages[{number}]': {error.errors(include_url=False)[0]}"
    return None


_ROLES: Mapping[str, Any] = {
    "system": ChatCompletionSystemMessageParam,
    "developer": ChatCompletionDeveloperMessageParam,
    "user": ChatCompletionUserMessageParam,
    "assistant": ChatCompletionAssistantMessageParam,
    "tool": ChatCompletionToolMessageParam,
}


@asynccontextmanager
async def vertex(issuer: TokenIssuer, sim_url: str, refused: list[str]) -> AsyncGenerator[str]:
    """Vertex AI in front of the simulated provider: checks what Google checks before. `_Relay` has the arguments.

    Gemini shows no thoughts at this endpoint; its calls of tools have a signature, without which it refuses them.
    """
    cloud = _Relay(issuer, sim_url, refused)

    async def predict(request: web.Request) -> Any:
        cloud.check_token(request)
        body = await request.json()
        model, _, operation = request.match_info["model"].partition(":")
        if "model" in body:
            raise _RefusedError(400, "model: Extra inputs are not permitted")
        # Google documents the first; Anthropic's own client sends a date.
        version = str(body.pop("anthropic_version", None))
        if not re.fullmatch(r"vertex-2023-10-16|\d{4}-\d\d-\d\d", version):
            raise _RefusedError(400, "anthropic_version: Field required")
        if operation != ("streamRawPredict" if body.get("stream") else "rawPredict"):
            raise _RefusedError(400, f"{operation} does not fit stream: {body.get('stream')}")
        return "/messages", {**body, "model": model}, _as_it_is

    async def chat(request: web.Request) -> Any:
        cloud.check_token(request)
        body = await request.json()
        publisher, slash, model = str(body.get("model")).partition("/")
        if not slash or publisher != "google":
            raise _RefusedError(400, f"Malformed publisher model `{body.get('model')}`")
        efforts = ("high", "low", "medium", "minimal")
        if body.get("reasoning_effort", "low") not in efforts:
            raise _RefusedError(400, f"Expected 'reasoning_effort' to be one of: {', '.join(map(repr, efforts))}")
        # Params that it does not know are ignored.
        objection = _chat_objection({"messages": body["messages"]}, extra=("extra_content",))
        reasons = (refusal("gemini", message, number, thinks=False) for number, message in enumerate(body["messages"]))
        if (reason := next(filter(None, (objection, *reasons)), None)) is not None:
            raise _RefusedError(400, reason)
        earlier = sum(len(message.get("tool_calls") or ()) for message in body["messages"])
        rewritten = partial(with_additions, "gemini", earlier=earlier)
        return "/chat/completions", {**body, "model": model}, rewritten

    place = "/v1/projects/my-project/locations/{location:europe-west4|global}"
    routes = {
        f"POST {place}/publishers/anthropic/models/{{model}}": predict,
        f"POST {place}/endpoints/openapi/chat/completions": chat,
    }
    async with cloud.serve(routes) as origin:
        yield origin


_UNFILTERED = {name: {"filtered": False, "severity": "safe"} for name in ("hate", "self_harm", "sexual", "violence")}


def _filtered(line: bytes) -> bytes:
    """A line of a chat's answer as Azure writes it: with what its filter says of each choice, and no thoughts."""
    prefix, document = (b"data: ", line[6:]) if line.startswith(b"data: ") else (b"", line)
    if not document.startswith(b"{"):
        return line
    content = json.loads(document)
    content["prompt_filter_results"] = [{"prompt_index": 0, "content_filter_results": _UNFILTERED}]
    for choice in content.get("choices") or ():
        (choice.get("delta") or choice.get("message") or {}).pop("reasoning_content", None)
        choice["content_filter_results"] = _UNFILTERED
    return prefix + json.dumps(content).encode() + b"\n"


@asynccontextmanager
async def azure(
    issuer: TokenIssuer, sim_url: str, refused: list[str] | None = None, key: str | None = None
) -> AsyncGenerator[str]:
    """An Azure OpenAI resource in front of the simulated provider. `_Relay` has the arguments; `key` is one of its own.

    Its dated versions name the deployment in the path, and have no Responses; its v1 in the body.
    """
    cloud = _Relay(issuer, sim_url, [] if refused is None else refused)

    def check_caller(request: web.Request) -> None:
        if "api-key" not in request.headers:
            cloud.check_token(request)
        elif request.headers["api-key"] != key:
            raise _RefusedError(401, "Access denied due to invalid subscription key or wrong API endpoint.")

    async def chat(request: web.Request) -> Any:
        check_caller(request)
        body = await request.json()
        deployment = request.match_info.get("deployment")
        if deployment is not None and not re.fullmatch(r"\d{4}-\d\d-\d\d(-preview)?", request.query["api-version"]):
            raise _RefusedError(404, "Resource not found")
        if (objection := _chat_objection(body)) is not None:
            raise _RefusedError(400, objection)
        return "/chat/completions", {**body, "model": deployment or body["model"]}, _filtered

    async def respond(request: web.Request) -> Any:
        check_caller(request)
        body = await request.json()
        if unknown := sorted(body.keys() - get_type_hints(ResponseCreateParamsBase).keys() - {"stream"}):
            raise _RefusedError(400, f"Unknown parameter: '{unknown[0]}'.")
        return "/responses", body, _as_it_is

    routes = {
        "POST /openai/deployments/{deployment}/chat/completions": chat,
        "POST /openai/v1/chat/completions": chat,
        "POST /openai/v1/responses": respond,
    }
    async with cloud.serve(routes) as origin:
        yield origin


@asynccontextmanager
async def managed_identity(issuer: TokenIssuer) -> AsyncGenerator[dict[str, str]]:
    """The managed identity of an app service, which demands its header; gives the variables that name it."""

    async def token(request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-IDENTITY-HEADER") != "of-the-app" or request.query["api-version"] != "2019-08-01":
            return web.json_response({"statusCode": 400, "message": "no"}, status=400)
        expires_on = {"expires_on": str(int(time.time() + issuer.lifetime_s)), "resource": "r"}
        return issuer.issue(request.query, **expires_on)

    async with serving({"GET /msi/token": token}) as origin:
        yield {"IDENTITY_ENDPOINT": f"{origin}/msi/token", "IDENTITY_HEADER": "of-the-app"}


@asynccontextmanager
async def app_service(issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    """The same, with these variables set."""
    async with managed_identity(issuer) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


class ServiceAccount:
    """A service account of Google's with its key, and the place where its signed requests become tokens."""

    EMAIL = "plane@my-project.iam.gserviceaccount.com"

    def __init__(self, issuer: TokenIssuer) -> None:
        self.issuer = issuer
        self._key = rsa.generate_private_key(65537, 2048)
        self.pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[dict[str, str]]:
        """Runs the place; gives the content of the key's file."""
        key = RSAKey.import_key(self.pem)

        async def token(request: web.Request) -> web.StreamResponse:
            form = await request.post()
            try:
                assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
                claims = jwt.decode(str(form["assertion"]), key, algorithms=["RS256"]).claims
                assert (claims["iss"], claims["aud"]) == (self.EMAIL, "https://oauth2.googleapis.com/token")
                assert claims["exp"] > time.time() > claims["iat"] - 60
                assert claims["exp"] - claims["iat"] <= 3600
            except (AssertionError, JoseError) as error:
                return web.json_response({"error": "invalid_grant", "error_description": repr(error)}, status=400)
            return self.issuer.issue({"scope": claims["scope"]})

        async with serving({"POST /token": token}) as origin:
            yield {
                "type": "service_account",
                "project_id": "my-project",
                "private_key_id": "k1",
                "private_key": self.pem,
                "client_email": self.EMAIL,
                "client_id": "1",
                "token_uri": f"{origin}/token",
            }


@asynccontextmanager
async def metadata_server(issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    """The metadata server of a machine at Google, which demands its header."""
    flavor = {"Metadata-Flavor": "Google"}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        path = request.path.removeprefix("/computeMetadata/v1")
        if path.endswith("/token"):
            response = issuer.issue(request.query)
        elif path == "/project/project-id":
            response = web.Response(text="my-project")
        elif path.startswith("/instance/service-accounts/"):
            response = web.json_response({"email": ServiceAccount.EMAIL, "scopes": [], "aliases": ["default"]})
        elif path in ("", "/"):
            response = web.Response(text="ok")
        else:
            response = web.Response(status=404)
        response.headers.update(flavor)
        return response

    async with serving({"GET /{path:.*}": answer}, host="127.0.0.1") as origin:
        address = origin.removeprefix("http://")
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
            monkeypatch.setenv(name, address)
        yield
