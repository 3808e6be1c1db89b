"""What is taken from an OpenID provider, and what is not: codes, ID tokens, keys, and what it says of itself."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from breakwater.identity import json_web_tokens
from breakwater.identity.openid_provider import LEEWAY_S, OpenIdProvider, SignedIn
from breakwater.identity.rules.sign_in import SignInFlow
from breakwater.identity.settings import OpenId
from breakwater.kernel.http.problems import RequestError
from breakwater.local.ports import free_port
from tests.openid_provider import (
    CLIENT,
    DISCOVERY,
    JWKS,
    SECRET,
    TOKEN,
    RunningProvider,
    new_key,
    running_provider,
    signed,
)
from tests.tables import each_row

CALLBACK = "https://console.example/sign-in/openid/callback"
OURS, STRANGERS = new_key("new-1"), new_key("strange")


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def provider_here() -> AsyncGenerator[RunningProvider]:
    async with running_provider() as running:
        await running.put_person("zoe", email="zoe@example.com", groups=["sre"])
        yield running


@pytest.fixture
def provider(provider_here: RunningProvider) -> RunningProvider:
    provider_here.reset()
    return provider_here


def client(provider: RunningProvider, *, secret: str | None = SECRET, **settings: Any) -> OpenIdProvider:
    given = {"issuer": provider.issuer, "client_id": CLIENT, "default_role": "viewer", **settings}
    return OpenIdProvider(OpenId.model_validate(given), secret, CALLBACK)


async def code_for(provider: RunningProvider, asking: OpenIdProvider, flow: SignInFlow, sub: str = "zoe") -> str:
    back = await provider.sign_in(await asking.authorization_url(flow), sub)
    assert (str(back.with_query(None)), back.query["state"]) == (CALLBACK, flow.state)
    return back.query["code"]


async def sign_in(provider: RunningProvider, asking: OpenIdProvider, flow: SignInFlow | None = None) -> SignedIn:
    flow = flow or SignInFlow("a secret of the browser")
    return await asking.redeem(flow, await code_for(provider, asking, flow), None)


async def refusal(provider: RunningProvider, asking: OpenIdProvider) -> RequestError:
    with pytest.raises(RequestError) as raised:
        await sign_in(provider, asking)
    return raised.value


async def test_a_claim_with_half_of_a_surrogate_pair_is_one_that_a_session_can_hold(provider: RunningProvider) -> None:
    provider.keys.append(OURS)
    provider.sign = lambda claims: signed(claims, OURS)
    provider.claims = {"email": "zo\ud83d"}
    assert (await sign_in(provider, client(provider))).claims["email"] == "zo\ufffd"


async def test_who_signs_in_is_known_by_what_the_provider_has_signed(provider: RunningProvider) -> None:
    signed_in = await sign_in(provider, client(provider))
    named = {name: signed_in.claims[name] for name in ("sub", "email", "groups")}
    assert named == {"sub": "zoe", "email": "zoe@example.com", "groups": ["sre"]}
    assert provider.asked.count(JWKS) == 1


async def test_a_code_is_redeemed_once_and_only_by_the_browser_that_asked_for_it(provider: RunningProvider) -> None:
    asking, flow = client(provider), SignInFlow("mine")
    code = await code_for(provider, asking, flow)
    for wrong, sent in ((SignInFlow("another's"), code), (flow, "made-up")):
        with pytest.raises(RequestError, match="used or is too old") as raised:
            await asking.redeem(wrong, sent, None)
        assert (raised.value.status, raised.value.code) == (403, "openid_refused")
    assert (await asking.redeem(flow, code, None)).claims["sub"] == "zoe"
    with pytest.raises(RequestError, match="used or is too old"):
        await asking.redeem(flow, code, None)


async def test_a_wrong_secret_is_a_mistake_of_the_config(provider: RunningProvider) -> None:
    problem = await refusal(provider, client(provider, secret="wrong"))
    assert (problem.status, problem.code) == (502, "openid_client_refused")
    assert "check console.openid" in problem.message


def from_now(claims: dict[str, Any]) -> dict[str, Any]:
    """Times as they stand in a token, which are given in seconds from now."""
    return {name: int(time.time()) + one if isinstance(one, int) else one for name, one in claims.items()}


WRONG_CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "another audience": ({"aud": "another"}, "openid_invalid"),
    "audiences without us": ({"aud": ["a", "b"]}, "openid_invalid"),
    "issued to another client": ({"aud": [CLIENT, "a"], "azp": "a"}, "openid_invalid"),
    "several audiences, and nobody says to whom": ({"aud": [CLIENT, "a"], "azp": None}, "openid_invalid"),
    "no audience": ({"aud": None}, "openid_invalid"),
    "another issuer": ({"iss": "https://evil.example"}, "openid_invalid"),
    "another nonce": ({"nonce": "another"}, "openid_invalid"),
    "no nonce": ({"nonce": None}, "openid_invalid"),
    "nobody": ({"sub": None}, "openid_invalid"),
    "an empty name": ({"sub": ""}, "openid_invalid"),
    "a name with controls": ({"sub": "a\nb"}, "openid_invalid"),
    "no end": ({"exp": None}, "openid_invalid"),
    "an end that is none": ({"exp": "tomorrow"}, "openid_invalid"),
    "expired": ({"exp": -LEEWAY_S - 5}, "openid_clock_skew"),
    "from the future": ({"iat": LEEWAY_S + 60}, "openid_clock_skew"),
    "not valid yet": ({"nbf": LEEWAY_S + 60}, "openid_clock_skew"),
}


async def test_an_id_token_with_a_wrong_claim_signs_nobody_in(
    provider: RunningProvider, subtests: pytest.Subtests
) -> None:
    provider.keys.append(OURS)
    provider.sign = lambda claims: signed(claims, OURS)
    asking = client(provider)
    for name, (claims, code) in WRONG_CLAIMS.items():
        with subtests.test(name):
            provider.claims = from_now(claims)
            problem = await refusal(provider, asking)
            assert (problem.status, problem.code) == (403, code), problem.message
            assert ("NTP" in problem.message) is (code == "openid_clock_skew")
    provider.claims.clear()
    assert (await sign_in(provider, asking)).claims["sub"] == "zoe"


async def test_clocks_may_differ_by_a_minute(provider: RunningProvider) -> None:
    provider.keys.append(OURS)
    provider.sign = lambda claims: signed(claims, OURS)
    provider.claims = from_now({"iat": LEEWAY_S - 10, "exp": -LEEWAY_S + 30})
    assert (await sign_in(provider, client(provider))).claims["sub"] == "zoe"


WRONG_SIGNATURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "none": lambda claims: signed(claims, OURS, "none"),
    "none, with the id of a key": lambda claims: signed(claims, OURS, "none", kid=OURS.kid),
    "the client's secret": lambda claims: signed(claims, SECRET.encode(), "HS256", kid=OURS.kid),
    "the public key as a secret": lambda claims: signed(claims, OURS.as_pem(private=False), "HS256", kid=OURS.kid),
    "another key under the same id": lambda claims: signed(claims, STRANGERS, kid=OURS.kid),
    "another payload": lambda claims: ".".join(
        signed(one, OURS).split(".")[part] for one, part in ((claims, 0), ({**claims, "sub": "root"}, 1), (claims, 2))
    ),
    "no token": lambda _: "not.a.token",
    "two parts": lambda claims: signed(claims, OURS).rpartition(".")[0],
}


async def test_an_id_token_that_the_provider_has_not_signed_signs_nobody_in(
    provider: RunningProvider, subtests: pytest.Subtests
) -> None:
    provider.keys.append(OURS)
    asking = client(provider)
    for name, sign in WRONG_SIGNATURES.items():
        with subtests.test(name):
            provider.sign = sign
            problem = await refusal(provider, asking)
            assert (problem.status, problem.code) == (403, "openid_invalid"), problem.message


async def test_a_new_key_is_asked_for_once_and_one_that_stays_unknown_signs_nobody_in(
    provider: RunningProvider,
) -> None:
    asking = client(provider)
    await sign_in(provider, asking)
    provider.keys.append(OURS)
    provider.sign = lambda claims: signed(claims, OURS)
    for _ in range(2):
        await sign_in(provider, asking)
        assert provider.asked.count(JWKS) == 2, "once at first, and once for the new key"
    provider.sign = lambda claims: signed(claims, STRANGERS)
    assert (await refusal(provider, asking)).code == "openid_invalid"
    assert provider.asked.count(JWKS) == 3


async def test_a_claim_that_the_id_token_lacks_is_asked_of_userinfo_and_only_of_the_same_person(
    provider: RunningProvider,
) -> None:
    provider.keys.append(OURS)
    provider.sign = lambda claims: signed(claims, OURS)
    provider.claims = {"groups": None}
    assert (await sign_in(provider, client(provider))).claims["groups"] == ["sre"]
    provider.answers["/userinfo"] = {"sub": "max"}
    assert (await refusal(provider, client(provider))).code == "openid_invalid"


async def test_an_answer_of_another_issuer_is_not_redeemed(provider: RunningProvider) -> None:
    asking, flow = client(provider), SignInFlow("mine")
    code = await code_for(provider, asking, flow)
    with pytest.raises(RequestError, match="not from this issuer"):
        await asking.redeem(flow, code, "https://evil.example")
    assert (await asking.redeem(flow, code, provider.issuer)).claims["sub"] == "zoe"
    provider.answers[DISCOVERY] = {"authorization_response_iss_parameter_supported": True}
    asking = client(provider)
    with pytest.raises(RequestError, match="not from this issuer"):
        await asking.redeem(flow, await code_for(provider, asking, flow), None)


def _long(_: Any = None) -> web.Response:
    return web.Response(text=" " * 200_000, content_type="application/json")


UNUSABLE: dict[str, tuple[str, Any, str]] = {
    "calls itself otherwise": (DISCOVERY, {"issuer": "https://evil.example"}, "states the issuer"),
    "has no token endpoint": (DISCOVERY, {"token_endpoint": None}, "token_endpoint"),
    "has an endpoint in plain text": (DISCOVERY, {"token_endpoint": "http://provider.example/token"}, "token_endpoint"),
    "has an endpoint that is a script": (DISCOVERY, {"end_session_endpoint": "javascript:alert(1)"}, "end_session"),
    "has its keys in our network": (DISCOVERY, {"jwks_uri": "https://10.1.2.3/keys"}, "private address"),
    "redeems where clouds keep credentials": (
        DISCOVERY,
        {"token_endpoint": "https://169.254.169.254/"},
        "private address",
    ),
    "sends elsewhere": (DISCOVERY, web.Response(status=302, headers={"Location": "http://127.0.0.1/"}), "redirect"),
    "sends too much": (DISCOVERY, _long(), "too long"),
    "sends no JSON": (DISCOVERY, web.Response(text="<html>"), "JSON"),
    "sends a list": (DISCOVERY, web.json_response([]), "openid-configuration is invalid"),
    "fails": (JWKS, web.Response(status=500, text="{}"), "HTTP 500"),
    "has no keys": (JWKS, web.json_response({"keys": []}), "keys"),
    "has odd keys": (JWKS, web.json_response({"keys": [{"kty": "RSA", "n": "?", "e": 7}]}), "keys"),
    "redeems for too much": (TOKEN, _long(), "too long"),
}


@each_row(("path", "answer", "why"), UNUSABLE.values(), ids=UNUSABLE)
async def test_a_provider_that_can_not_be_used_is_no_sign_in_and_the_message_says_why(
    provider: RunningProvider, path: str, answer: Any, why: str
) -> None:
    provider.reset()
    provider.answers[path] = answer
    problem = await refusal(provider, client(provider))
    assert (problem.status, problem.code) == (503, "openid_unavailable"), problem.message
    assert why in problem.message
    assert "10.1.2.3" not in problem.message


async def test_a_provider_that_does_not_respond_is_waited_for_a_while(
    provider: RunningProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = RunningProvider(issuer=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RequestError, match="no connection can be made"):
        await client(nowhere).authorization_url(SignInFlow("x"))
    monkeypatch.setattr(json_web_tokens, "TIMEOUT_S", 0.001)
    with pytest.raises(RequestError, match="does not respond within"):
        await client(provider).authorization_url(SignInFlow("x"))


async def test_signing_out_leads_to_the_provider_where_it_offers_that(provider: RunningProvider) -> None:
    url = await client(provider).end_session_url("hint", "https://console.example/sign-in")
    assert url is not None
    assert url.startswith(f"{provider.issuer}/oauth2/end_session?")
    assert "id_token_hint=hint" in url
    provider.answers[DISCOVERY] = {"end_session_endpoint": None}
    assert await client(provider).end_session_url("hint", "https://console.example/sign-in") is None
    provider.answers[DISCOVERY] = web.Response(status=500)
    assert await client(provider).end_session_url("hint", "https://console.example/sign-in") is None
