"""What `breakwater doctor` finds of the OpenID provider: as `request` would read it, from this machine."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from breakwater.cli.doctor_checks import CONNECT_TIMEOUT_S, Finding, slow

if TYPE_CHECKING:
    from breakwater.config import Config, OpenId

_AREA = "openid"
_PARTS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
"""What each kind of a public key consists of."""
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


async def openid_findings(config: Config) -> list[Finding]:
    """Whether people can sign in at the provider; nothing where the config names none."""
    openid = config.console.openid
    if openid is None:
        return []
    url = openid.issuer.rstrip("/") + "/.well-known/openid-configuration"
    begun = time.perf_counter()
    document, problem = await _read(openid, url)
    if problem is not None:
        remedy = (
            "Check console.openid.issuer, name resolution and the firewall: `request` must reach it. API keys work "
            "meanwhile."
        )
        return [Finding(_AREA, "fail", f"{url}: {problem}", remedy)]
    took_ms = (time.perf_counter() - begun) * 1000
    if document.get("issuer") != openid.issuer:
        text = f"{url} is of the issuer {document.get('issuer')!r}, and console.openid.issuer is {openid.issuer!r}"
        remedy = "Write the issuer exactly as the provider names itself, with or without a slash at its end."
        return [Finding(_AREA, "fail", text, remedy)]
    if missing := [name for name in _ENDPOINTS if not isinstance(document.get(name), str)]:
        text = f"{url} does not say {', '.join(missing)}"
        return [Finding(_AREA, "fail", text, "Is that an OpenID Connect provider, and the right path of it?")]
    keys, problem = await _read(openid, document["jwks_uri"])
    signing = 0 if problem is not None else _signing(keys)
    if not signing:
        text = f"{document['jwks_uri']}: {problem or 'there is no key in it that ID tokens could be signed with'}"
        remedy = (
            "Without the provider's keys nobody can sign in. Is it at a private address? Then allow its network with "
            "console.openid.allow_networks."
        )
        return [Finding(_AREA, "fail", text, remedy)]
    logout = "" if document.get("backchannel_logout_supported") else "; it does not end sessions here (back-channel)"
    known = f"{openid.issuer} answers in {took_ms:.0f} ms and is what it should be, with {signing} keys{logout}"
    return [Finding(_AREA, slow(took_ms), known, "Signing in takes several such requests.")]


async def _read(openid: OpenId, url: str) -> tuple[dict[str, Any], str | None]:
    """A JSON object of the provider's, and what is wrong with it."""
    import aiohttp

    from breakwater.guarded_http import AddressRefused, guarded_session
    from breakwater.policy.addresses import ANYWHERE

    own = urlsplit(url).hostname == urlsplit(openid.issuer).hostname
    status = 0
    try:
        allowed = ANYWHERE if own else openid.allow_networks
        async with guarded_session(allowed, CONNECT_TIMEOUT_S) as http, http.get(url) as response:
            status, body = response.status, await response.read()
        document: object = json.loads(body)
    except aiohttp.ClientConnectorError as error:
        return {}, "it is at an address that is not public" if isinstance(error.os_error, AddressRefused) else str(
            error
        )
    except TimeoutError:
        return {}, f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return {}, str(error) or type(error).__name__
    except ValueError:
        return {}, f"HTTP {status}, and no JSON"
    if status != 200 or not isinstance(document, dict):
        return {}, f"HTTP {status}" if status != 200 else "no JSON object"
    return cast("dict[str, Any]", document), None


def _signing(document: dict[str, Any]) -> int:
    """How many keys it has that ID tokens may be signed with."""
    listed = document.get("keys")
    keys = [one for one in cast("list[Any]", listed if isinstance(listed, list) else []) if isinstance(one, dict)]
    return sum(_is_signing(cast("dict[str, Any]", key)) for key in keys)


def _is_signing(key: dict[str, Any]) -> bool:
    parts = _PARTS.get(str(key.get("kty")), ())
    return key.get("use", "sig") == "sig" and bool(parts) and all(isinstance(key.get(part), str) for part in parts)
