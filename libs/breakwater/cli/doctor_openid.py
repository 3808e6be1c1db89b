"""The doctor's check of the OpenID provider: as `request` would read it, from this machine."""

from __future__ import annotations

import json
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp

from breakwater.cli.doctor_findings import CONNECT_TIMEOUT_S, Finding, Findings, check, slow, timed
from breakwater.cli.plane import PlaneLocation
from breakwater.config import Config, OpenId
from breakwater.guarded_http import AddressRefused, guarded_session
from breakwater.policy.addresses import ANYWHERE

_PARTS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
"""What each kind of a public key consists of."""
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


@check
async def openid_findings(_plane: PlaneLocation, config: Config | None) -> Findings:
    """Whether people can sign in at the provider; nothing where the config names none."""
    if config is None or (openid := config.console.openid) is None:
        return
    url = openid.issuer.rstrip("/") + "/.well-known/openid-configuration"
    text = remedy = ""
    (document, problem), took_ms = await timed(_read(openid, url))
    issuer = document.get("issuer")
    missing = [name for name in _ENDPOINTS if not isinstance(document.get(name), str)]
    if problem:
        text = f"{url}: {problem}"
        remedy = (
            "Check console.openid.issuer, name resolution and the firewall: `request` must reach it. API keys work "
            "meanwhile."
        )
    elif issuer != openid.issuer:
        text = f"{url} is of the issuer {issuer!r}, and console.openid.issuer is {openid.issuer!r}"
        remedy = "Write the issuer exactly as the provider names itself, with or without a slash at its end."
    elif missing:
        text = f"{url} does not say {', '.join(missing)}"
        remedy = "Is that an OpenID Connect provider, and the right path of it?"
    if text:
        yield Finding("openid", "fail", text, remedy)
        return
    keys, problem = await _read(openid, document["jwks_uri"])
    if not (signing := _signing_keys(keys)):
        text = f"{document['jwks_uri']}: {problem or 'there is no key in it that ID tokens could be signed with'}"
        remedy = (
            "Without the provider's keys nobody can sign in. Is it at a private address? Then allow its network with "
            "console.openid.allow_networks."
        )
        yield Finding("openid", "fail", text, remedy)
        return
    logout = "" if document.get("backchannel_logout_supported") else "; it does not end sessions here (back-channel)"
    text = f"{openid.issuer} answers in {took_ms:.0f} ms and is what it should be, with {signing} keys{logout}"
    yield Finding("openid", slow(took_ms), text, "Signing in takes several such requests.")


async def _read(openid: OpenId, url: str) -> tuple[dict[str, Any], str]:
    """A JSON object of the provider's, and what is wrong with it, if anything."""
    own = urlsplit(url).hostname == urlsplit(openid.issuer).hostname
    status = 0
    try:
        allowed = ANYWHERE if own else openid.allow_networks
        async with guarded_session(allowed, CONNECT_TIMEOUT_S) as http, http.get(url) as response:
            status, body = response.status, await response.read()
        document: object = json.loads(body)
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, AddressRefused)
        return {}, "it is at an address that is not public" if refused else str(error)
    except TimeoutError:
        return {}, f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return {}, str(error) or type(error).__name__
    except ValueError:
        return {}, f"HTTP {status}, and no JSON"
    if status != 200 or not isinstance(document, dict):
        return {}, f"HTTP {status}" if status != 200 else "no JSON object"
    return cast("dict[str, Any]", document), ""


def _signing_keys(document: dict[str, Any]) -> int:
    """How many keys a key set has that ID tokens may be signed with."""
    listed = document.get("keys")
    keys = cast(
        "list[dict[str, Any]]", [key for key in listed if isinstance(key, dict)] if isinstance(listed, list) else []
    )
    signing = [(key, _PARTS.get(str(key.get("kty")), ())) for key in keys if key.get("use", "sig") == "sig"]
    return sum(bool(parts) and all(isinstance(key.get(part), str) for part in parts) for key, parts in signing)
