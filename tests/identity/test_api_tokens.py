"""JSON Web Tokens in place of API keys: which are accepted, whose calls they make, and what the others are told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from joserfc import jws
from joserfc.jwk import ECKey
from starlette.requests import Request

from breakwater.identity import api_tokens
from breakwater.identity.api_keys import ApiKeysError, KeyRing, create_key
from breakwater.identity.api_tokens import ApiTokens
from breakwater.identity.auth import AcceptedTokens, KeyGuard, wait_until_refused
from breakwater.identity.json_web_tokens import KEYS_AGAIN_S, LEEWAY_S, REUSE_S
from breakwater.identity.rules.callers import Caller
from breakwater.identity.settings import TokenSettings
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import objection_to
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.http.server import Shares
from tests.helpers import until
from tests.openid_provider import signed as signed_otherwise
from tests.tables import each_row

ISSUER, AUDIENCE = "https://id.example", "breakwater"
OURS, NEXT, STRANGERS = (ECKey.generate_key("P-256", {"kid": kid}) for kid in ("ours", "next", "strange"))
MAPPED = {"user": "email", "team": "groups[0]", "tags": {"project": "work.project"}}


@dataclass
class Issuer:
    """An issuer that publishes keys."""

    url: str = ""
    published: list[Any] = field(default_factory=lambda: [OURS])
    asked: int = 0
    answer: web.Response | None = None
    hangs: asyncio.Event | None = None

    async def handle(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.hangs is not None:
            await self.hangs.wait()
        if self.answer is not None:
            return web.Response(status=self.answer.status, headers=self.answer.headers, body=self.answer.body)
        return web.json_response({"keys": [key.as_dict(private=False, use="sig") for key in self.published]})

    def settings(self, **changed: Any) -> TokenSettings:
        return TokenSettings.model_validate({"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": self.url, **changed})

    def tokens(self, **settings: Any) -> ApiTokens:
        return ApiTokens(self.settings(**settings))


@pytest_asyncio.fixture
async def issuer() -> AsyncGenerator[Issuer]:
    issuer = Issuer()
    app = web.Application()
    app.router.add_get("/keys", issuer.handle)
    async with TestServer(app) as server:
        issuer.url = str(server.make_url("/keys"))
        yield issuer


def claims(**changed: Any) -> dict[str, Any]:
    """The claims of a good token; times are given in seconds from now, and None removes a claim."""
    now = int(time.time())
    right: dict[str, Any] = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u-1", "exp": 300}
    stated = {name: value for name, value in {**right, **changed}.items() if value is not None}
    return {name: now + value if name in ("exp", "nbf", "iat") else value for name, value in stated.items()}


def signed(claims: Any, key: ECKey, **header: Any) -> str:
    payload = json.dumps(claims).encode()
    return jws.serialize_compact({"alg": "ES256", "kid": key.kid, **header}, payload, key, algorithms=["ES256"])


async def refusal(tokens: ApiTokens, token: str) -> RequestError:
    with pytest.raises(RequestError) as raised:
        await tokens.caller(token)
    # No part of the token is repeated, as messages are logged.
    assert not any(part in raised.value.message for part in token.split(".") if len(part) > 4)
    return raised.value


def named(caller: Caller) -> tuple[str, str | None, str | None, dict[str, str]]:
    return caller.name, caller.user, caller.team, dict(caller.tags)


@each_row(
    ("stated", "settings", "expected"),
    [
        ({}, {}, ("jwt:u-1", "u-1", None, {})),
        ({"aud": ["a", AUDIENCE]}, {}, ("jwt:u-1", "u-1", None, {})),
        ({"sub": 7}, {}, None),
        ({"exp": -LEEWAY_S + 20, "nbf": LEEWAY_S - 20, "iat": LEEWAY_S - 20}, {}, ("jwt:u-1", "u-1", None, {})),
        (
            {"email": "ada@example.com", "groups": ["search", "all"], "work": {"project": 12}},
            MAPPED,
            ("jwt:u-1", "ada@example.com", "search", {"project": "12"}),
        ),
        ({"email": "ada@example.com", "groups": []}, MAPPED, ("jwt:u-1", "ada@example.com", None, {})),
        (
            {"https://x.example/groups": ["a", "b"]},
            {"team": "https://x.example/groups[1]"},
            ("jwt:u-1", "u-1", "b", {}),
        ),
        ({"x[0]": "exact"}, {"team": "x[0]"}, ("jwt:u-1", "u-1", "exact", {})),
    ],
)
async def test_a_token_names_the_user_the_team_and_the_tags_of_its_calls(
    issuer: Issuer, stated: dict[str, Any], settings: dict[str, Any], expected: Any
) -> None:
    tokens = issuer.tokens(**settings)
    if expected is None:
        assert "'sub'" in (await refusal(tokens, signed(claims(**stated), OURS))).message
        return
    caller = await tokens.caller(signed(claims(**stated), OURS))
    assert named(caller) == expected
    assert (caller.kind, caller.scopes, caller.id) == ("token", ("submit",), caller.name)


@each_row(
    ("stated", "settings", "forbidden"),
    [
        ({}, {}, {"team"}),
        ({}, MAPPED, {"team", "project"}),
        ({"groups": ["search"]}, MAPPED, {"project"}),
        ({"groups": ["search"], "work": {"project": 12}}, MAPPED, set()),
        ({}, {"tags": {"team": "group"}}, {"team"}),
        ({}, {**MAPPED, "metadata_may_name": True}, set()),
    ],
)
async def test_the_holder_of_a_token_can_not_choose_who_pays_where_its_claims_should_say_so(
    issuer: Issuer, stated: dict[str, Any], settings: dict[str, Any], forbidden: set[str]
) -> None:
    tokens = issuer.tokens(**settings)
    caller = await tokens.caller(signed(claims(email="ada@example.com", **stated), OURS))
    assert set(caller.forbidden_metadata) == forbidden
    for name in ("team", "project", "region"):
        sent = Job(agent="writer", prompt="x", metadata={name: "search"})
        objection = objection_to(caller, sent, by_operator=False)
        assert (objection and objection.field) == (f"metadata.{name}" if name in forbidden else None)
    assert objection_to(caller, Job(agent="writer", prompt="x", metadata={"team": None}), by_operator=False) is None


REFUSED: list[tuple[Callable[[], str], str]] = [
    (lambda: signed(claims(iss="https://evil.example"), OURS), "its issuer (iss) is not 'https://id.example'"),
    (lambda: signed(claims(iss=None), OURS), "its claim 'iss' is missing"),
    (lambda: signed(claims(aud="another"), OURS), "its audience (aud) is not 'breakwater'"),
    (lambda: signed(claims(aud=["a", "b"]), OURS), "its audience (aud) is not 'breakwater'"),
    (lambda: signed(claims(aud=None), OURS), "its claim 'aud' is missing"),
    (lambda: signed(claims(exp=-LEEWAY_S - 5), OURS), "it has expired"),
    (lambda: signed(claims(exp=None), OURS), "its claim 'exp' is missing"),
    (lambda: signed({**claims(), "exp": "tomorrow"}, OURS), "its claim 'exp' is invalid"),
    (lambda: signed(claims(nbf=LEEWAY_S + 20), OURS), "it is not valid yet"),
    (lambda: signed(claims(iat=LEEWAY_S + 20), OURS), "it is not valid yet"),
    (lambda: signed(claims(sub=None), OURS), "its claim 'sub' is missing"),
    (lambda: signed(claims(sub="u" * 125), OURS), "its claim 'sub' has more than 124 characters"),
    (lambda: signed(claims(sub="a\nb"), OURS), "its claim 'sub' is no name"),
    (lambda: signed(claims(groups="\x00"), OURS), "its claim 'groups' is no name"),
    (lambda: signed(claims(groups=["a", "b"]), OURS), "its claim 'groups' is a list: name a place in it"),
    (lambda: signed(claims(groups={"a": "b"}), OURS), "its claim 'groups' is neither text nor number"),
    (lambda: signed(claims(), STRANGERS, kid=OURS.kid), "its signature is wrong"),
    (lambda: signed(claims(), STRANGERS), "it names no key (kid) that its issuer publishes"),
    (lambda: signed_otherwise(claims(), b"", "none", kid=OURS.kid), "its algorithm (alg) is not one of RS256"),
    (lambda: signed_otherwise(claims(), b"a secret", "HS256", kid=OURS.kid), "its algorithm (alg) is not one of RS256"),
    (
        lambda: signed_otherwise(claims(), OURS.as_pem(private=False), "HS256", kid=OURS.kid),
        "its algorithm (alg) is not one of",
    ),
    (lambda: "eyJhbGciOiAiUlMyNTYiLCAiY3JpdCI6IFsieCJdfQ.e30.x", "it can't be read"),
    (lambda: signed(claims(pad="x" * 9000), OURS), "more than 8192 characters"),
    (lambda: "eyJhbGciOiAiUlMyNTYifQ.e30.x", "it can't be read"),
    (lambda: "eyJjcml0IjogNX0.e30.x", "it can't be read"),
    (lambda: "eyJé..", "it can't be read"),
    (lambda: signed([], OURS), "it can't be read"),
]


@each_row(("make", "why"), REFUSED)
async def test_a_token_that_is_not_the_issuers_for_this_plane_and_for_now_is_told_so(
    issuer: Issuer, make: Callable[[], str], why: str
) -> None:
    problem = await refusal(issuer.tokens(team="groups"), make())
    assert (problem.status, problem.code) == (401, "unauthorized")
    assert problem.message.startswith("this JSON Web Token is not accepted: ")
    assert why in problem.message
    assert problem.headers["WWW-Authenticate"] == 'Bearer realm="breakwater", error="invalid_token"'


async def test_a_user_that_the_token_lacks_or_an_unverified_address_is_refused(issuer: Issuer) -> None:
    tokens = issuer.tokens(user="email")
    assert "its claim 'email' is missing" in (await refusal(tokens, signed(claims(), OURS))).message
    for no in (False, "false", "False"):
        unverified = claims(email="boss@example.com", email_verified=no)
        assert "its e-mail address is not verified" in (await refusal(tokens, signed(unverified, OURS))).message
    assert "iss,sub' is missing" in (await refusal(tokens, signed({}, OURS))).message


async def test_the_keys_of_the_issuer_are_kept_and_read_again_for_a_new_one(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = 0.0
    real = time.monotonic
    monkeypatch.setattr(api_tokens.time, "monotonic", lambda: real() + later_s)
    tokens = issuer.tokens()
    for _ in range(3):
        await tokens.caller(signed(claims(), OURS))
    assert issuer.asked == 1
    issuer.published.append(NEXT)
    for _ in range(3):
        # Anyone can send tokens with unknown keys.
        assert "names no key (kid)" in (await refusal(tokens, signed(claims(), NEXT))).message
    assert issuer.asked == 1
    later_s += KEYS_AGAIN_S
    await tokens.caller(signed(claims(), NEXT))
    assert issuer.asked == 2

    issuer.published.remove(OURS)
    await tokens.caller(signed(claims(), OURS))
    later_s += REUSE_S
    assert "names no key (kid)" in (await refusal(tokens, signed(claims(), OURS))).message
    assert issuer.asked == 3


async def test_while_the_issuer_is_unavailable_known_keys_are_used_for_a_day_and_it_is_not_asked_by_every_request(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_s = 0.0
    real = time.monotonic
    monkeypatch.setattr(api_tokens.time, "monotonic", lambda: real() + later_s)
    for answer, why in (
        (web.Response(status=500, text="{}"), "HTTP 500"),
        (web.Response(status=302, headers={"Location": "http://127.0.0.1/"}), "redirect"),
        (web.Response(text="<html>"), "JSON"),
        (web.json_response({"keys": [{"kty": "RSA", "n": "?"}]}), "no JSON Web Key Set"),
    ):
        issuer.answer = answer
        problem = await refusal(issuer.tokens(), signed(claims(), OURS))
        assert (problem.status, problem.code, problem.headers["Retry-After"]) == (503, "identity_unavailable", "1")
        assert why in problem.message
        assert issuer.url not in problem.message
    issuer.answer = None
    tokens = issuer.tokens()
    await tokens.caller(signed(claims(), OURS))
    issuer.answer, asked = web.Response(status=500), issuer.asked
    later_s += REUSE_S
    for _ in range(3):
        await tokens.caller(signed(claims(), OURS))
    assert issuer.asked == asked + 1
    issuer.hangs = asyncio.Event()
    later_s += KEYS_AGAIN_S
    who_asks = asyncio.create_task(tokens.caller(signed(claims(), OURS)))
    await until(lambda: issuer.asked == asked + 2, "the request for keys")
    await tokens.caller(signed(claims(), OURS))
    assert not who_asks.done()
    issuer.hangs.set()
    await who_asks
    later_s += api_tokens.STALE_S
    assert (await refusal(tokens, signed(claims(), OURS))).code == "identity_unavailable"
    issuer.answer = None
    later_s += KEYS_AGAIN_S
    await tokens.caller(signed(claims(), OURS))


def test_a_reload_that_changes_nothing_keeps_the_verifier_and_one_without_it_ends_access() -> None:
    settings = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "https://id.example/keys"}
    accepted = AcceptedTokens()
    accepted.reload(TokenSettings.model_validate(settings))
    verifier = accepted.current
    assert verifier is not None
    accepted.reload(TokenSettings.model_validate(settings))
    assert accepted.current is verifier
    accepted.reload(TokenSettings.model_validate({**settings, "audience": "another"}))
    assert accepted.current not in (None, verifier)
    accepted.reload(None)
    assert accepted.current is None


async def test_a_long_request_ends_when_its_token_expires_or_the_config_accepts_none(
    issuer: Issuer, tmp_path: Path
) -> None:
    accepted = AcceptedTokens()
    clock = [time.time()]

    def expire() -> None:
        clock[0] += 400

    def reload() -> None:
        accepted.reload(None)

    # The end of a token is found by a check, and the reload at once.
    for change, every_s, why in (
        (expire, 0.001, "it has expired"),
        (reload, 60, "JSON Web Tokens are not accepted here"),
    ):
        clock[0] = time.time()
        accepted.reload(issuer.settings())
        accepted.current = ApiTokens(issuer.settings(), lambda: clock[0])
        nothing = cast("Any", None)
        guard = KeyGuard(
            keys=KeyRing(tmp_path / "keys.json"),
            sessions=nothing,
            openid=None,
            tokens=accepted,
            proxy_headers=None,
            shares=Shares(),
        )
        headers = [(b"authorization", b"Bearer " + signed(claims(), OURS).encode())]
        scope = {"type": "http", "method": "GET", "path": "/api/v1/jobs/a/progress", "headers": headers}
        watch = await guard.admit(scope)
        change()
        async with asyncio.timeout(10):
            assert why in await wait_until_refused(Request(scope), every_s)
        guard.release(watch)
        assert not accepted.looks


def test_no_key_has_a_name_of_a_tokens_holder(tmp_path: Any) -> None:
    with pytest.raises(ApiKeysError, match="names that begin with jwt: are those of JSON Web Tokens"):
        create_key(tmp_path / "keys.json", "jwt:u-1")
