"""JSON Web Tokens in place of API keys: each request's is verified, and names the user and the team of its calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from joserfc import jwt
from joserfc.errors import (
    BadSignatureError,
    ExpiredTokenError,
    InvalidClaimError,
    InvalidKeyIdError,
    JoseError,
    MissingClaimError,
    UnsupportedAlgorithmError,
)
from joserfc.jwk import KeySet

from breakwater.identity.json_web_tokens import (
    ALGORITHMS,
    KEYS_AGAIN_S,
    LEEWAY_S,
    REUSE_S,
    IssuerUnavailableError,
    ask_issuer,
    keys_in,
    signed_claims,
)
from breakwater.identity.rules.callers import Caller, UnusableClaimError, holder_of_token
from breakwater.identity.settings import TokenSettings
from breakwater.kernel.http.problems import RequestError, unauthorized_error, unavailable
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.security.addresses import ANYWHERE

STALE_S = 86_400.0
"""Time for which known keys are used while the issuer is unavailable."""
LONGEST_TOKEN = 8_192


class ApiTokens:
    """The verifier of the tokens of one issuer.

    Args:
        settings: the config's `identity.jwt`.
        now: the clock, in seconds since the epoch.
    """

    def __init__(self, settings: TokenSettings, now: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._now = now
        self._keys: KeySet | None = None
        self._read_at = 0.0
        """When the keys were read."""
        self._asked_at = 0.0
        """When the issuer was last asked for them."""
        self._unavailable: IssuerUnavailableError | None = None
        """The failure of the last request for them."""
        self._outage = Outage(f"keys of identity.jwt at {settings.jwks_url}")
        self._asking = asyncio.Lock()

    async def caller(self, token: str) -> Caller:
        """Returns the holder of a token.

        Raises:
            RequestError: 401, the token is not valid; 503, the keys of the issuer can't be read. The message never
                contains a part of the token.
        """
        try:
            claims = await self._verify(token)
            return holder_of_token(claims, self._settings, self._now())
        except UnusableClaimError as error:
            raise _refusal(str(error)) from None
        except (JoseError, ValueError) as error:
            raise _refusal(self._in_words(error)) from None

    async def _verify(self, token: str) -> dict[str, Any]:
        if len(token) > LONGEST_TOKEN:
            raise UnusableClaimError(f"it has more than {LONGEST_TOKEN} characters")
        try:
            claims = signed_claims(token, await self._read_keys())
        except InvalidKeyIdError:
            # The issuer may have a new key.
            claims = signed_claims(token, await self._read_keys(again=True))
        jwt.JWTClaimsRegistry(
            int(self._now()),
            LEEWAY_S,
            iss={"essential": True, "value": self._settings.issuer},
            aud={"essential": True, "value": self._settings.audience},
            sub={"essential": True},
            exp={"essential": True},
        ).validate(claims)
        return claims

    async def _read_keys(self, *, again: bool = False) -> KeySet:
        """Returns the issuer's keys. One request at a time reads them again, and others use the known ones meanwhile.

        Args:
            again: a token names a key that is not among them.
        """
        keys, age_s = self._keys, time.monotonic() - self._read_at
        if keys is not None and not again and (age_s < REUSE_S or (age_s < STALE_S and self._asking.locked())):
            return keys
        async with self._asking:
            now = time.monotonic()
            if self._keys is not None and now - self._read_at < (KEYS_AGAIN_S if again else REUSE_S):
                return self._keys
            if self._unavailable is None or now - self._asked_at >= KEYS_AGAIN_S:
                await self._ask()
            if self._keys is not None and now - self._read_at < STALE_S:
                return self._keys
            message = f"tokens can't be verified: the keys of their issuer can't be read: {self._unavailable}"
            raise unavailable("identity_unavailable", f"{message}. Try again later; API keys still work")

    async def _ask(self) -> None:
        self._asked_at = time.monotonic()
        try:
            self._keys = await _published_keys(self._settings.jwks_url)
        except IssuerUnavailableError as error:
            self._unavailable = error
            self._outage.note_failure(str(error) if error.__cause__ is None else f"{error}: {error.__cause__!r}")
        else:
            self._unavailable = None
            self._outage.note_success()
            self._read_at = self._asked_at

    def _in_words(self, error: Exception) -> str:
        """Returns the reason why a token is not valid."""
        match error:
            case BadSignatureError():
                return "its signature is wrong"
            case InvalidKeyIdError():
                return "it names no key (kid) that its issuer publishes (identity.jwt.jwks_url)"
            case UnsupportedAlgorithmError():
                return f"its algorithm (alg) is not one of {', '.join(ALGORITHMS)}"
            case ExpiredTokenError():
                return "it has expired"
            case InvalidClaimError(claim="iss"):
                return f"its issuer (iss) is not {self._settings.issuer!r}"
            case InvalidClaimError(claim="aud"):
                return f"its audience (aud) is not {self._settings.audience!r}"
            case InvalidClaimError(claim="nbf" | "iat"):
                return f"it is not valid yet, by the plane's clock, which may differ by {LEEWAY_S} s"
            case MissingClaimError() | InvalidClaimError():
                problem = "is missing" if isinstance(error, MissingClaimError) else "is invalid"
                return f"its claim {error.claim!r} {problem}"
            case _:
                return "it can't be read"


async def _published_keys(url: str) -> KeySet:
    # The operator has named the host, so it may have a private address.
    status, document = await ask_issuer("GET", url, ANYWHERE)
    if status != 200:
        raise IssuerUnavailableError(f"it answers with HTTP {status}")
    try:
        return keys_in(document)
    except ValueError as error:
        raise IssuerUnavailableError(f"it answers with {error}") from None


def _refusal(why: str) -> RequestError:
    return unauthorized_error(f"this JSON Web Token is not accepted: {why}", error="invalid_token")
