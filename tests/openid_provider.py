"""An OpenID provider: oidc-provider-mock, behind a proxy that demands what it does not, and changes what it says.

The proxy checks PKCE and the client's secret, counts what is asked, and may issue other ID tokens with keys of its own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import warnings
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import unquote_plus

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from joserfc import jws
from joserfc.jwk import RSAKey
from yarl import URL

CLIENT, SECRET = "breakwater", "a+secret/of the client"
DISCOVERY, AUTHORIZE, TOKEN, JWKS = "/.well-known/openid-configuration", "/oauth2/authorize", "/oauth2/token", "/jwks"
_HOP = {"Content-Length", "Transfer-Encoding", "Connection", "Date", "Server", "Content-Encoding"}


@dataclass(slots=True)
class RunningProvider:
    """A provider. The first fields are put back by `reset`."""

    asked: list[str] = field(default_factory=list[str])
    """The paths of what it was asked."""
    keys: list[RSAKey] = field(default_factory=list[RSAKey])
    """Published beside its own."""
    claims: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the ID token, instead of the right ones; None removes one."""
    sign: Callable[[dict[str, Any]], str] | None = None
    """How the ID token is made from its claims; None: the provider's own is passed on."""
    answers: dict[str, Any] = field(default_factory=dict[str, Any])
    """By path: a response instead of the right one, or fields of a document that are others."""
    held: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    """By path: what a response to it waits for."""
    issuer: str = ""
    url: str = ""
    _challenges: dict[str, str] = field(default_factory=dict[str, str])

    def reset(self) -> None:
        """Makes it a provider without faults again."""
        self.asked.clear()
        self.keys.clear()
        self.claims.clear()
        self.answers.clear()
        self.held.clear()
        self.sign = None

    async def put_person(self, sub: str, **claims: Any) -> None:
        """Somebody who may sign in."""
        async with aiohttp.ClientSession() as http, http.put(f"{self.url}/users/{sub}", json=claims) as response:
            assert response.status == 204

    async def sign_in(self, url: str, sub: str, **form: str) -> URL:
        """Somebody at a browser, who was sent to the provider's page and signs in. Where they are sent back to."""
        async with (
            aiohttp.ClientSession() as http,
            http.post(URL(url, encoded=True), data={"sub": sub, **form}, allow_redirects=False) as response,
        ):
            assert response.status == 302, await response.text()
            return URL(response.headers["Location"], encoded=True)

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if (holds := self.held.get(request.path)) is not None:
            await holds.wait()
        changed = self.answers.get(request.path)
        if isinstance(changed, web.Response):
            return web.Response(status=changed.status, headers=changed.headers, body=changed.body)
        body = await request.read()
        if request.path == TOKEN and (refused := self._refused(request, body)) is not None:
            return refused
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                request.method, self.url + request.path_qs, headers=request.headers, data=body, allow_redirects=False
            ) as response,
        ):
            status, content = response.status, await response.read()
            headers = {name: value for name, value in response.headers.items() if name not in _HOP}
        if request.path == AUTHORIZE and "Location" in headers:
            back = URL(headers["Location"])
            self._challenges[back.query.get("code", "")] = request.query.get("code_challenge", "")
            # What it leaves out where somebody refuses, and RFC 6749 demands.
            headers["Location"] = str(back.update_query(state=request.query["state"]))
        if response.content_type == "application/json" and status == 200:
            document = json.loads(content) | (changed or {})
            if request.path == JWKS:
                document["keys"] += [key.as_dict(private=False, use="sig") for key in self.keys]
            if request.path == TOKEN and self.sign is not None:
                document["id_token"] = self.sign(self._claims_of(document["id_token"]))
            content = json.dumps(document).encode()
        return web.Response(status=status, headers=headers, body=content)

    def _claims_of(self, id_token: str) -> dict[str, Any]:
        payload = id_token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))) | self.claims
        return {name: value for name, value in claims.items() if value is not None}

    def _refused(self, request: web.Request, body: bytes) -> web.Response | None:
        sent = dict(URL(f"/?{body.decode()}", encoded=True).query)
        login = aiohttp.BasicAuth.decode(request.headers["Authorization"])
        if (unquote_plus(login.login), unquote_plus(login.password)) != (CLIENT, SECRET):
            return web.json_response({"error": "invalid_client"}, status=401)
        verifier = sent.get("code_verifier", "").encode()
        if _encoded(hashlib.sha256(verifier).digest()) != self._challenges.get(sent["code"]):
            return web.json_response({"error": "invalid_grant"}, status=400)
        return None


def new_key(kid: str) -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": kid})


def signed(claims: dict[str, Any], key: RSAKey | bytes, alg: str = "RS256", **header: Any) -> str:
    """An ID token, however wrong it is. By a secret (HS256) and by nothing (`none`) as no library would."""
    payload = json.dumps(claims).encode()
    if isinstance(key, RSAKey) and alg != "none":
        return jws.serialize_compact({"alg": alg, "kid": key.kid, **header}, payload, key, algorithms=[alg])
    text = f"{_encoded(json.dumps({'alg': alg, **header}).encode())}.{_encoded(payload)}"
    return f"{text}.{'' if alg == 'none' else _encoded(hmac.digest(key, text.encode(), 'sha256'))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@asynccontextmanager
async def running_provider() -> AsyncGenerator[RunningProvider]:
    with warnings.catch_warnings():
        # Imported here: it takes half a second, and warns of its own libraries.
        warnings.simplefilter("ignore")
        from authlib.oidc.core.grants import code
        from oidc_provider_mock import run_server_in_thread
    import_key = cast("Any", code).import_any_key

    @cache
    def imported(key: str) -> Any:
        return import_key(json.loads(key))

    def import_once(key: object) -> Any:
        return imported(json.dumps(key))

    provider = RunningProvider()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", provider.handle)
    server = TestServer(app, host="localhost")
    with (
        # It imports its key for each token, and has its primes tested each time: 30 ms.
        patch.object(code, "import_any_key", import_once),
        run_server_in_thread() as real,
    ):
        provider.url = f"http://localhost:{real.server_port}"
        await server.start_server()
        provider.issuer = str(server.make_url("")).rstrip("/")
        try:
            yield provider
        finally:
            await server.close()
