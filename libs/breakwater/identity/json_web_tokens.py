"""JSON Web Tokens of an issuer: requests to it, its public keys, and the signatures that are accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import aiohttp
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet, KeySetSerialization
from joserfc.jws import JWSRegistry
from pydantic import TypeAdapter, ValidationError

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.security.addresses import IpNetwork
from breakwater.kernel.security.guarded_http import AddressRefusedError, RedirectError, guarded_session

TIMEOUT_S = 5.0
"""Time limit of each request."""
REUSE_S = 3_600.0
"""Time for which an issuer's keys are used before they are read again."""
KEYS_AGAIN_S = 30.0
"""Interval at which tokens with an unknown key may cause the keys to be read again: anyone can send them."""
LEEWAY_S = 60
"""The largest accepted difference between the issuer's clock and ours."""

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Accepted signatures, all of them with a key pair: never `none`, never with a shared secret."""


class IssuerUnavailableError(BreakwaterError):
    """An issuer does not respond as it should. The text has no addresses, as anyone may read it."""


async def ask_issuer(
    method: str,
    url: str,
    allowed: Sequence[IpNetwork],
    *,
    data: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, object]:
    """Returns the status and the JSON of a response. Raises IssuerUnavailableError; its cause has the details."""
    request_headers = {"Accept": "application/json", **(headers or {})}
    try:
        async with (
            guarded_session(allowed, TIMEOUT_S) as http,
            http.request(method, url, data=data, headers=request_headers) as response,
        ):
            status = response.status
            body = await response.read()
        return status, json.loads(body) if body else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise IssuerUnavailableError(_reason(error)) from error


def keys_in(document: object) -> KeySet:
    """Returns the keys for signatures in a JSON Web Key Set. Raises ValueError: it is invalid."""
    try:
        key_set = TypeAdapter(dict[str, list[dict[str, Any]]]).validate_python(document)
        signing = [key for key in key_set["keys"] if key.get("use", "sig") == "sig"]
        return KeySet.import_key_set(cast(KeySetSerialization, {"keys": signing}))
    except (ValidationError, KeyError, ValueError, JoseError):
        raise ValueError("no JSON Web Key Set") from None


def signed_claims(token: str, keys: KeySet) -> dict[str, Any]:
    """Returns the claims of a token that one of the keys has signed. Raises JoseError, or ValueError: no such token."""
    # Unknown headers are permitted, unless `crit` names them.
    registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
    try:
        return jwt.decode(token, keys, algorithms=ALGORITHMS, registry=registry).claims
    except TypeError as error:
        raise ValueError("a header has the wrong type") from error  # `crit`, which is used before it is checked


def _reason(error: Exception) -> str:
    """Returns the reason why there is no response. It has no addresses, as anyone may read it; the log has them."""
    match error:
        case RedirectError():
            return f"it answers with a redirect ({error.status})"
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return "its certificate is not trusted here"
        case aiohttp.ClientConnectorError(os_error=AddressRefusedError()) | AddressRefusedError():
            return "one of its endpoints has a private address (console.openid.allow_networks)"
        case aiohttp.ClientConnectorError():
            return "no connection can be made"
        case TimeoutError():
            return f"it does not respond within {TIMEOUT_S:g} s"
        case aiohttp.ClientPayloadError():
            return "its response is too long, or incomplete"
        case ValueError():
            return "it does not answer with JSON"
        case _:
            return "the connection broke"
