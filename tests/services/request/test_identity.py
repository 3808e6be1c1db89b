"""Whose call it is, by a token of an issuer or by the headers of a trusted proxy, over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from joserfc import jws
from joserfc.jwk import ECKey
from nats.aio.msg import Msg

from breakwater.kernel.nats.delivery import name_in
from breakwater.kernel.nats.subjects import Header
from tests.helpers import until
from tests.services.request.conftest import CONFIG, HttpApi, StartApi, new_id
from tests.services.request.test_ownership import key, submit

KEY = ECKey.generate_key("P-256", {"kid": "ours"})
IDENTITY = """
identity:
  jwt:
    {{issuer: us, audience: plane, jwks_url: "{url}", team: "groups[0]", tags: {{project: project}}, agents: [writer]}}
  headers: {{user: X-User, team: X-Team, networks: [127.0.0.1/32]}}
cost_tags: [project]
"""
CHAT: dict[str, Any] = {"model": "writer", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}


def token(**claims: Any) -> str:
    stated = {"iss": "us", "aud": "plane", "sub": "u-1", "exp": int(time.time()) + 60, "groups": ["search"], **claims}
    return jws.serialize_compact({"alg": "ES256", "kid": "ours"}, json.dumps(stated).encode(), KEY)


async def names(api: HttpApi) -> tuple[str | None, ...]:
    """Who sent the last job, whose it is, and its user and team."""
    message: Msg = await api.last_job()
    headers = (Header.SUBMITTED_BY, Header.OWNER, Header.USER, Header.TEAM)
    return tuple(name_in(message.headers or {}, header) for header in headers)


@asynccontextmanager
async def issuing(start_api: StartApi, identity: str = IDENTITY) -> AsyncGenerator[HttpApi]:
    async def keys(_: web.Request) -> web.Response:
        return web.json_response({"keys": [KEY.as_dict(private=False)]})

    app = web.Application()
    app.router.add_get("/keys", keys)
    async with TestServer(app) as issuer, start_api(CONFIG + identity.format(url=issuer.make_url("/keys"))) as api:
        yield api


async def test_the_calls_of_a_token_stay_in_the_region_that_it_claims(start_api: StartApi) -> None:
    claims = "agents: [writer]", "agents: [writer], residency: geo.region"
    async with issuing(start_api, IDENTITY.replace(*claims)) as api:
        ours = {"Authorization": f"Bearer {token(geo={'region': 'eu'})}"}
        assert (await api.ask("GET", "/api/v1/key", headers=ours)).json["residency"] == "eu"
        for path, body in (("/api/v1/jobs", {"agent": "writer", "prompt": "x"}), ("/v1/chat/completions", CHAT)):
            before = await api.bus.jetstream().stream_info("JOBS")
            asking = asyncio.create_task(api.ask("POST", path, json=body, headers=ours))
            await until(lambda last=before.state.last_seq: _stored(api, last), "the job")
            message: Msg = await api.last_job()
            assert (message.headers or {})[Header.RESIDENCY.value] == "eu"
            asking.cancel()
        for wrong, words in (
            ({}, "its claim 'geo.region' is missing"),
            ({"geo": {"region": "Europe (all)"}}, "its claim 'geo.region' is no region, such as eu"),
            ({"geo": {"region": ["eu"]}}, "its claim 'geo.region' is a list"),
        ):
            refused = await submit(api, {"Authorization": f"Bearer {token(**wrong)}"})
            assert refused.status == 401
            assert words in refused.message


async def _stored(api: HttpApi, last_seq: int) -> bool:
    return (await api.bus.jetstream().stream_info("JOBS")).state.last_seq > last_seq


async def test_tokens_and_headers_of_a_proxy_say_whose_call_it_is(start_api: StartApi) -> None:
    async with issuing(start_api) as api:
        ours = {"Authorization": f"Bearer {token(project='ranking')}"}
        shown = (await api.ask("GET", "/api/v1/key", headers=ours)).json
        assert (shown["kind"], shown["name"], shown["user"], shown["team"]) == ("token", "jwt:u-1", "u-1", "search")
        assert (shown["scopes"], shown["agents"], shown["tags"]) == (["submit"], ["writer"], {"project": "ranking"})
        assert (await api.ask("GET", "/api/v1/agents", headers=ours)).status == 403
        assert (await submit(api, ours, agent="reader")).status == 403

        job_id = (await submit(api, ours, job_id=new_id())).json["job_id"]
        assert await names(api) == ("jwt:u-1", "jwt:u-1", "u-1", "search")
        assert (await api.ask("GET", f"/api/v1/jobs/{job_id}", headers=ours)).status == 202
        another = {"Authorization": f"Bearer {token(sub='u-2')}"}
        assert (await api.ask("GET", f"/api/v1/jobs/{job_id}", headers=another)).status == 404
        cancelled = await api.ask("POST", f"/api/v1/jobs/{job_id}/cancel", json={}, headers=ours)
        assert cancelled.status == 202

        teamless = {"Authorization": f"Bearer {token(groups=[], project=None)}"}
        for metadata, status in ({"team": "ads"}, 403), ({"project": "ads"}, 403), ({"region": "eu"}, 202):
            assert (await submit(api, teamless, metadata=metadata)).status == status
        assert await names(api) == ("jwt:u-1", "jwt:u-1", "u-1", None)
        refused = await submit(api, teamless, metadata={"team": "ads"})
        assert (refused.code, refused.paths) == ("forbidden", ["metadata.team"])
        assert "the token of 'jwt:u-1' names no team" in refused.message

        expired = token(exp=1)
        for path, code, header in (
            ("/api/v1/jobs", "unauthorized", {"Authorization": f"Bearer {expired}"}),
            ("/v1/chat/completions", "invalid_api_key", {"Authorization": f"Bearer {expired}"}),
            ("/v1/messages", "authentication_error", {"Authorization": "", "x-api-key": expired}),
        ):
            async with aiohttp.ClientSession() as http:
                sent = {name: value for name, value in header.items() if value}
                async with http.post(api.url + path, json=CHAT, headers=sent) as response:
                    text = await response.text()
            assert response.status == 401
            assert code in text
            assert "it has expired" in text
            assert expired not in text

        proxied = {"X-User": "Zoë", "X-Team": "ads"}
        free, bound = key(api, "free"), key(api, "bound", user="ada")
        stated = {"user": "eve", "team": "eve's"}
        for headers, metadata, expected in (
            ({**free, **proxied}, stated, ("Zoë", "ads")),
            ({**free, "X-Team": "ads"}, stated, ("eve", "ads")),
            ({**free, "X-User": ""}, {}, (None, None)),
            ({**bound, "X-User": "ada", "X-Team": "ads"}, {}, ("ada", "ads")),
        ):
            assert (await submit(api, headers, metadata=metadata)).status == 202
            assert (await names(api))[2:] == expected
        refused = await submit(api, {**bound, "X-User": "eve"})
        assert (refused.status, refused.code, refused.paths) == (403, "forbidden", ["X-User"])
        assert refused.message == "X-User: names 'eve', and 'bound' is bound to 'ada'"
        for wrong, status, path in (({"X-User": "u" * 129}, 422, "X-User"), ({"X-Team": "a\x85b"}, 422, "X-Team")):
            answer = await submit(api, {**free, **wrong})
            assert (answer.status, answer.paths) == (status, [path])
        secret = {**free, "X-Team": "sk-ant-api03-0123456789abcdefghijklmnopqrstuv"}
        assert (await submit(api, secret)).paths == ["team"], "names are not redacted"
        chat = await api.ask("POST", "/v1/chat/completions", json=CHAT, headers={**bound, "X-User": "eve"})
        assert (chat.status, chat.json["error"]["param"]) == (403, "X-User")

        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=elsewhere) as http,
            http.post(
                f"{api.url}/api/v1/jobs", json={"agent": "writer", "prompt": "x"}, headers={**free, **proxied}
            ) as response,
        ):
            assert response.status == 202
        assert (await names(api))[2:] == (None, None)
