"""Servers that check what those of Azure and Google check of a caller: the protocols of tokens, and their ends."""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import RSAKey


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
        token = f"tok.{secrets.token_hex(12)}"
        self.ends[token] = time.time() + self.lifetime_s
        whole_s = int(self.lifetime_s)
        return web.json_response({"access_token": token, "token_type": "Bearer", "expires_in": whole_s, **more})

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


async def _relay(
    client: aiohttp.ClientSession, request: web.Request, url: str, body: dict[str, Any], headers: Mapping[str, str]
) -> web.StreamResponse:
    """The answer of another server to a body, as it comes."""
    async with client.post(url, json=body, headers=headers) as answer:
        relayed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await relayed.prepare(request)
        async for piece in answer.content.iter_any():
            await relayed.write(piece)
        return relayed


@asynccontextmanager
async def app_service(issuer: TokenIssuer, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    """The managed identity of an app service, which demands its header."""

    async def token(request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-IDENTITY-HEADER") != "of-the-app" or request.query["api-version"] != "2019-08-01":
            return web.json_response({"statusCode": 400, "message": "no"}, status=400)
        expires_on = {"expires_on": str(int(time.time() + issuer.lifetime_s)), "resource": "r"}
        return issuer.issue(request.query, **expires_on)

    async with serving({"GET /msi/token": token}) as origin:
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{origin}/msi/token")
        monkeypatch.setenv("IDENTITY_HEADER", "of-the-app")
        yield


@asynccontextmanager
async def azure(issuer: TokenIssuer, sim_url: str) -> AsyncGenerator[str]:
    """An Azure OpenAI resource without keys in front of the simulated provider, which has its deployments."""

    async def chat(request: web.Request) -> web.StreamResponse:
        if (refusal := issuer.refusal(request)) is not None:
            return refusal
        return await _relay(client, request, f"{sim_url}/chat/completions", await request.json(), {})

    async with (
        aiohttp.ClientSession() as client,
        serving({"POST /openai/v1/chat/completions": chat}) as origin,
    ):
        yield origin


@asynccontextmanager
async def vertex(issuer: TokenIssuer, sim_url: str, refused: list[str]) -> AsyncGenerator[str]:
    """Vertex AI in front of the simulated provider, which has its models: checks what Google checks before.

    Args:
        issuer: of the tokens that it takes.
        sim_url: the simulated provider's URL, up to /v1.
        refused: gets the reason of each refusal.
    """
    client = aiohttp.ClientSession()

    def refuse(status: int, name: str, text: str) -> web.Response:
        refused.append(text)
        return web.json_response({"error": {"code": status, "message": text, "status": name}}, status=status)

    async def relay(request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() == "anthropic-beta"}
        headers["anthropic-version"] = "2023-06-01"
        return await _relay(client, request, f"{sim_url}{path}", body, headers)

    async def predict(request: web.Request) -> web.StreamResponse:
        if (refusal := issuer.refusal(request)) is not None:
            refused.append("no valid token")
            return refusal
        body = await request.json()
        model, _, operation = request.match_info["model"].partition(":")
        if "model" in body:
            return refuse(400, "INVALID_ARGUMENT", "model: Extra inputs are not permitted")
        if body.pop("anthropic_version", None) != "vertex-2023-10-16" or "anthropic-version" in request.headers:
            return refuse(400, "INVALID_ARGUMENT", "anthropic_version: Field required")
        if operation != ("streamRawPredict" if body.get("stream") else "rawPredict"):
            return refuse(400, "INVALID_ARGUMENT", f"{operation} does not fit stream: {body.get('stream')}")
        return await relay(request, "/messages", {**body, "model": model})

    async def chat(request: web.Request) -> web.StreamResponse:
        if (refusal := issuer.refusal(request)) is not None:
            refused.append("no valid token")
            return refusal
        body = await request.json()
        publisher, slash, model = str(body.get("model")).partition("/")
        if not slash or publisher != "google":
            return refuse(400, "INVALID_ARGUMENT", f"Malformed publisher model `{body.get('model')}`")
        return await relay(request, "/chat/completions", {**body, "model": model})

    place = "/v1/projects/my-project/locations/europe-west4"
    routes = {
        f"POST {place}/publishers/anthropic/models/{{model}}": predict,
        f"POST {place}/endpoints/openapi/chat/completions": chat,
    }
    try:
        async with serving(routes) as origin:
            yield origin
    finally:
        await client.close()


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
