"""What the doctor finds of the OpenID provider."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from breakwater.cli import doctor_findings
from breakwater.cli.doctor_checks import identity_findings, openid_findings
from breakwater.config import parse_config
from breakwater.local.plane import PlaneLocation
from breakwater.local.ports import free_port
from tests.tables import each_row

CONFIG = """
providers: {{local: {{base_url: "http://127.0.0.1:9/v1"}}}}
agents: {{writer: {{model: m}}}}
console:
  url: https://console.example
  openid: {{issuer: "{issuer}", client_id: breakwater, default_role: viewer}}
"""
DISCOVERY, KEYS = "/.well-known/openid-configuration", "/keys"
KEY = {"kty": "RSA", "use": "sig", "n": "AQAB", "e": "AQAB"}


@asynccontextmanager
async def provider(answers: Mapping[str, Any]) -> AsyncGenerator[str]:
    """A provider, at its issuer. What it answers otherwise: by path, a response or fields."""
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        changed = answers.get(request.path, {})
        if isinstance(changed, web.Response):
            return changed
        issuer = str(request.url.origin())
        endpoints = dict.fromkeys(("authorization_endpoint", "token_endpoint"), f"{issuer}/x")
        known = {DISCOVERY: {"issuer": issuer, "jwks_uri": issuer + KEYS, **endpoints}, KEYS: {"keys": [KEY]}}
        return web.json_response({**known[request.path], **changed})

    app.router.add_get("/{path:.*}", answer)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def found(answers: Mapping[str, Any], suffix: str = "") -> tuple[str, str, str]:
    async with provider(answers) as issuer:
        [finding] = [
            one
            async for one in openid_findings(PlaneLocation(None), parse_config(CONFIG.format(issuer=issuer + suffix)))
        ]
    assert finding.area == "openid"
    return finding.verdict, finding.text, finding.remedy


async def test_a_provider_that_is_as_it_should_be_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_findings, "SLOW_MS", 60_000.0)  # a busy machine is no fault of the provider
    verdict, text, _ = await found({DISCOVERY: {"backchannel_logout_supported": True}})
    assert (verdict, "is valid, with 1 keys" in text, "back-channel" in text) == ("ok", True, False)
    assert "it does not end sessions here (back-channel)" in (await found({}))[1]


@each_row(
    ("answers", "said", "to_do"),
    [
        ({DISCOVERY: {"issuer": "https://another.example"}}, "'https://another.example'", "exactly as"),
        ({DISCOVERY: {"issuer": None}}, "belongs to the issuer None", "exactly as"),
        ({DISCOVERY: web.Response(status=404)}, "HTTP 404", "console.openid.issuer"),
        ({DISCOVERY: web.Response(status=302, headers={"Location": "/"})}, "redirected (302)", "console.openid.issuer"),
        ({DISCOVERY: web.Response(text="<html>")}, "no JSON", "console.openid.issuer"),
        ({DISCOVERY: web.Response(text="[]")}, "no JSON object", "console.openid.issuer"),
        ({DISCOVERY: web.Response(text="x" * 100_000)}, "too long", "console.openid.issuer"),
        ({DISCOVERY: {"token_endpoint": None}}, "does not state token_endpoint", "path correct"),
        ({DISCOVERY: {"jwks_uri": "http://127.0.0.2:9/"}}, "not public", "allow_networks"),
        ({KEYS: web.Response(status=500)}, "HTTP 500", "people can"),
        ({KEYS: {"keys": []}}, "it has no key", "people can"),
        ({KEYS: {"keys": [{**KEY, "use": "enc"}, {**KEY, "n": 7}, {"kty": "oct", "k": "x"}, 7]}}, "no key", "people"),
        ({KEYS: {"keys": 7}}, "no key", "people"),
    ],
)
async def test_what_keeps_people_from_signing_in_is_named_with_what_to_do(
    answers: Mapping[str, Any], said: str, to_do: str
) -> None:
    verdict, text, remedy = await found(answers)
    assert (verdict, said in text, to_do in remedy) == ("fail", True, True), (text, remedy)


async def test_the_keys_of_json_web_tokens_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_findings, "SLOW_MS", 60_000.0)
    config = CONFIG.format(issuer="https://x").partition("console:")[0]
    for replies, verdict, said in (
        ({}, "ok", "with 1 keys"),
        ({KEYS: {"keys": []}}, "fail", "it has no key"),
        ({KEYS: web.Response(status=500)}, "fail", "HTTP 500"),
    ):
        async with provider(replies) as issuer:
            tokens = f"identity: {{jwt: {{issuer: us, audience: plane, jwks_url: '{issuer}{KEYS}'}}}}"
            [finding] = [one async for one in identity_findings(PlaneLocation(None), parse_config(config + tokens))]
        assert (finding.area, finding.verdict, said in finding.text) == ("identity", verdict, True), finding.text
    assert [one async for one in identity_findings(PlaneLocation(None), parse_config(config))] == []


async def test_a_slash_too_many_and_a_provider_that_is_away_are_reported() -> None:
    assert "console.openid.issuer is" in (await found({}, "/"))[1]
    config = CONFIG.format(issuer=f"http://127.0.0.1:{free_port()}")
    [finding] = [one async for one in openid_findings(PlaneLocation(None), parse_config(config))]
    assert (finding.verdict, "Connect call failed" in finding.text) == ("fail", True), finding.text


async def test_nothing_is_reported_where_people_sign_in_with_keys_alone() -> None:
    config = parse_config(CONFIG.format(issuer="https://x").partition("console:")[0])
    assert [one async for one in openid_findings(PlaneLocation(None), config)] == []
