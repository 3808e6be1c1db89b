"""The client of the OpenID provider: reads its metadata, redeems its codes and verifies its ID tokens.

Responses are limited in time and size, and redirects are not followed. Endpoints on other hosts than the issuer's must
be at public addresses, unless the config allows a network. So the provider's metadata can't cause requests to addresses
that only this machine can reach.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, cast
from urllib.parse import quote_plus, urlsplit

import aiohttp
import structlog
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidClaimError, InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from pydantic import AfterValidator, ValidationError
from yarl import URL

from breakwater.identity.json_web_tokens import (
    KEYS_AGAIN_S,
    LEEWAY_S,
    REUSE_S,
    IssuerUnavailableError,
    ask_issuer,
    keys_in,
    signed_claims,
)
from breakwater.identity.rules.sign_in import SignInFlow
from breakwater.identity.settings import OpenId, secure_url
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.security.addresses import ANYWHERE
from breakwater.kernel.surrogates import whole_value
from breakwater.kernel.types import Event

COMPLETE_WITHIN_S = 12.0
"""Time limit of all requests of a sign-in. The console waits for 15 s."""
LOGOUT_S = 600
"""The greatest age of a logout token."""
MAX_AT_ONCE = 20
"""The most codes that are redeemed at the same time. Beginning a sign-in is not limited."""

_Endpoint = Annotated[str, AfterValidator(secure_url)]
_LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
_CODE = re.compile(r"[a-z_]{1,64}\Z")


class ProviderMetadata(Event):
    """The fields of a provider's metadata that are used."""

    issuer: str
    authorization_endpoint: _Endpoint
    token_endpoint: _Endpoint
    jwks_uri: _Endpoint
    userinfo_endpoint: _Endpoint | None = None
    end_session_endpoint: _Endpoint | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class _Tokens(Event):
    id_token: str
    access_token: str | None = None


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A person who has signed in at the provider."""

    id_token: str
    claims: Mapping[str, Any]
    """The claims of the ID token, and those of userinfo that it lacks."""


@dataclass(frozen=True, slots=True)
class SignedOut:
    """A person who has signed out at the provider."""

    token_id: str
    subject: str | None
    """The person, all of whose sessions end; None if only the provider's session is named."""
    session: str | None
    """The provider's session, whose sessions here end; None if the person's are to end."""


class OpenIdProvider:
    """The client of one provider. Its methods raise RequestError, whose text is for the person who signs in.

    Args:
        settings: the config's OpenID settings.
        secret: the client's secret; None for a public client.
        redirect_uri: the URL to which the provider sends browsers back.
        now: the clock, in seconds since the epoch.
    """

    def __init__(
        self, settings: OpenId, secret: str | None, redirect_uri: str, now: Callable[[], float] = time.time
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._redirect_uri = redirect_uri
        self._now = now
        self._host = urlsplit(settings.issuer).hostname or ""
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._metadata: tuple[float, ProviderMetadata] | None = None
        self._keys: tuple[float, KeySet] | None = None
        self._reading = asyncio.Lock()
        self._failed: tuple[float, RequestError] | None = None
        """The time and the error of the last failure to read the metadata."""

    async def authorization_url(self, flow: SignInFlow) -> str:
        """Returns the URL at which a browser begins to sign in."""
        metadata = await self._read_metadata()
        query = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(dict.fromkeys(("openid", *self._settings.scopes))),
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
        }
        return str(URL(metadata.authorization_endpoint).update_query(query))

    async def redeem(self, flow: SignInFlow, code: str, issuer: str | None) -> SignedIn:
        """Redeems the code that a browser has brought back.

        Args:
            flow: the sign-in.
            code: the code.
            issuer: the parameter `iss` (RFC 9207); None without it.
        """
        async with self._time_limit():
            metadata = await self._read_metadata()
            if issuer != metadata.issuer and (issuer or metadata.authorization_response_iss_parameter_supported):
                raise self._invalid("the response is not from this issuer")
            tokens = await self._redeem(metadata, flow, code)
            claims = await self._verify(metadata, tokens.id_token, flow)
            completed = await self._complete(metadata, claims, tokens.access_token)
            # A name that the provider has cut may end in half of a surrogate pair, which a session can't store.
            return SignedIn(tokens.id_token, whole_value(completed))

    async def end_session_url(self, id_token: str | None, then: str) -> str | None:
        """Returns the URL at which a browser signs out of the provider, too; None if there is none or it is unknown."""
        try:
            metadata = await self._read_metadata()
        except RequestError:
            return None
        if metadata.end_session_endpoint is None:
            return None
        query = {"client_id": self._settings.client_id, "post_logout_redirect_uri": then}
        hint = {} if id_token is None else {"id_token_hint": id_token}
        return str(URL(metadata.end_session_endpoint).update_query({**hint, **query}))

    async def read_logout_token(self, logout_token: str) -> SignedOut:
        """Returns the person or the session that a logout token names. Raises RequestError: 400, it is not valid."""
        metadata = await self._read_metadata()
        try:
            async with self._time_limit():
                claims = await self._claims_of(metadata, logout_token, again_after_s=KEYS_AGAIN_S)
            _check_logout(metadata, claims, self._settings.client_id, int(self._now()))
        except JoseError as error:
            raise self._no_logout(str(error)) from None
        except RequestError as problem:
            raise (self._no_logout(problem.message) if problem.status == 403 else problem) from None
        return SignedOut(claims["jti"], claims.get("sub"), claims.get("sid"))

    def _no_logout(self, why: str) -> RequestError:
        structlog.get_logger().warning("openid_logout_invalid", issuer=self._settings.issuer, why=why)
        return RequestError(400, "invalid_logout_token", f"this is not a logout token for this client: {why}")

    @asynccontextmanager
    async def _time_limit(self) -> AsyncGenerator[None]:
        if self._places.locked():
            raise unavailable("openid_busy", f"{MAX_AT_ONCE} people are signing in at the same time; try again")
        try:
            async with self._places, asyncio.timeout(COMPLETE_WITHIN_S):
                yield
        except TimeoutError:
            raise self._unavailable(f"it took over {COMPLETE_WITHIN_S:g} s") from None

    async def _read_metadata(self) -> ProviderMetadata:
        """Reads the metadata, one request at a time. Requests that wait meanwhile get the same metadata or failure."""
        started = time.monotonic()
        async with self._reading:
            if self._metadata is not None and time.monotonic() - self._metadata[0] < REUSE_S:
                return self._metadata[1]
            if self._failed is not None and self._failed[0] >= started:
                raise self._failed[1].with_traceback(None)
            try:
                return await self._ask_metadata()
            except RequestError as problem:
                self._failed = time.monotonic(), problem
                raise

    async def _ask_metadata(self) -> ProviderMetadata:
        url = self._settings.issuer.rstrip("/") + "/.well-known/openid-configuration"
        _, document = await self._ask("GET", url, expected_status=200)
        try:
            metadata = ProviderMetadata.model_validate(document)
        except ValidationError as error:
            mistake = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in mistake["loc"])
            raise self._unavailable(f"its openid-configuration is invalid: {where}: {mistake['msg']}") from None
        if metadata.issuer != self._settings.issuer:
            raise self._unavailable(
                f"it states the issuer {metadata.issuer!r}, which differs from console.openid.issuer"
            )
        self._metadata = time.monotonic(), metadata
        return metadata

    async def _redeem(self, metadata: ProviderMetadata, flow: SignInFlow, code: str) -> _Tokens:
        body = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": flow.verifier,
        }
        client_id = self._settings.client_id
        headers = dict[str, str]()
        if self._secret is None:
            body["client_id"] = client_id
        elif "client_secret_basic" in metadata.token_endpoint_auth_methods_supported:
            headers["Authorization"] = aiohttp.encode_basic_auth(quote_plus(client_id), quote_plus(self._secret))
        else:
            body |= {"client_id": client_id, "client_secret": self._secret}
        status, document = await self._ask("POST", metadata.token_endpoint, data=body, headers=headers)
        fields = cast("dict[str, object]", document) if isinstance(document, dict) else {}
        if status != 200:
            raise self._not_redeemed(status, str(fields.get("error", "")))
        try:
            return _Tokens.model_validate(fields)
        except ValidationError:
            raise self._invalid("its response has no ID token") from None

    async def _verify(self, metadata: ProviderMetadata, id_token: str, flow: SignInFlow) -> dict[str, Any]:
        try:
            claims = await self._claims_of(metadata, id_token)
            self._check(metadata, claims, flow)
        except JoseError as error:
            # The message has no values of claims, as they may name a person.
            raise self._invalid(str(error)) from None
        return claims

    async def _claims_of(self, metadata: ProviderMetadata, token: str, again_after_s: float = 0.0) -> dict[str, Any]:
        """Returns the claims of a token that the provider has signed. Raises JoseError, or RequestError."""
        try:
            return self._decode(token, await self._read_keys(metadata))
        except InvalidKeyIdError:
            # The provider may have a new key, so its keys are read again once.
            return self._decode(token, await self._read_keys(metadata, kept_s=again_after_s))

    def _decode(self, id_token: str, keys: KeySet) -> dict[str, Any]:
        try:
            return signed_claims(id_token, keys)
        except ValueError as error:
            raise self._invalid(f"its ID token can't be read: {error}") from None

    def _check(self, metadata: ProviderMetadata, claims: dict[str, Any], flow: SignInFlow) -> None:
        client_id = self._settings.client_id
        now = int(self._now())
        checks = jwt.JWTClaimsRegistry(
            now,
            LEEWAY_S,
            iss={"essential": True, "value": metadata.issuer},
            aud={"essential": True, "value": client_id},
            nonce={"essential": True, "value": flow.nonce},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
        )
        try:
            checks.validate(claims)
        except ExpiredTokenError:
            raise self._clock_skew_error(f"its ID token expired {now - int(claims['exp'])} s ago") from None
        except InvalidClaimError as error:
            ahead = claims.get(error.claim, 0) if error.claim in ("iat", "nbf") else 0
            if isinstance(ahead, int | float) and ahead > now + LEEWAY_S:
                raise self._clock_skew_error(f"its ID token was issued {int(ahead) - now} s in the future") from None
            raise
        has_several_audiences = isinstance(claims["aud"], list) and len(cast("list[str]", claims["aud"])) > 1
        if claims.get("azp", None if has_several_audiences else client_id) != client_id:
            raise self._invalid("its ID token was issued to another client")
        subject = claims["sub"]
        if not (subject.isascii() and subject.isprintable() and len(subject) <= 255):
            raise self._invalid("its ID token has no usable subject: sub")

    async def _read_keys(self, metadata: ProviderMetadata, *, kept_s: float = REUSE_S) -> KeySet:
        if self._keys is not None and time.monotonic() - self._keys[0] < kept_s:
            return self._keys[1]
        _, document = await self._ask("GET", metadata.jwks_uri, expected_status=200)
        try:
            keys = keys_in(document)
        except ValueError:
            raise self._unavailable("its keys (jwks_uri) can't be read") from None
        self._keys = time.monotonic(), keys
        return keys

    async def _complete(
        self, metadata: ProviderMetadata, claims: dict[str, Any], access_token: str | None
    ) -> dict[str, Any]:
        """Returns the claims, completed from userinfo if the ID token lacks one that is needed."""
        roots = (self._settings.name_claim, self._settings.roles_claim)
        missing = any(name not in claims and name.partition(".")[0] not in claims for name in roots)
        if not missing or metadata.userinfo_endpoint is None or access_token is None:
            return claims
        headers = {"Authorization": f"Bearer {access_token}"}
        _, document = await self._ask("GET", metadata.userinfo_endpoint, headers=headers, expected_status=200)
        userinfo = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        if userinfo.get("sub") != claims["sub"]:
            raise self._invalid("its userinfo belongs to another person")
        return {**userinfo, **claims}

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        data: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        expected_status: int | None = None,
    ) -> tuple[int, object]:
        """Returns the status and the JSON of a response. Raises RequestError: its status is not `expected_status`."""
        allowed = ANYWHERE if urlsplit(url).hostname == self._host else self._settings.allow_networks
        try:
            status, document = await ask_issuer(method, url, allowed, data=data, headers=headers)
        except IssuerUnavailableError as error:
            raise self._unavailable(str(error), url=url, error=repr(error.__cause__)) from error
        if expected_status is not None and status != expected_status:
            raise self._unavailable(f"it answers with HTTP {status}", url=url)
        return status, document

    def _not_redeemed(self, status: int, code: str) -> RequestError:
        code = code if _CODE.match(code) else f"HTTP {status}"
        structlog.get_logger().warning("openid_code_refused", issuer=self._settings.issuer, error=code)
        if code == "invalid_grant":
            return RequestError(
                403, "openid_refused", f"{self._host} says that this sign-in was used or is too old; sign in again"
            )
        if code in ("invalid_client", "unauthorized_client"):
            message = (
                f"{self._host} does not accept Breakwater as a client ({code}): check console.openid in the config"
            )
            return RequestError(502, "openid_client_refused", message)
        return RequestError(502, "openid_refused", f"{self._host} refused the sign-in: {code}")

    def _unavailable(self, why: str, **logged: str) -> RequestError:
        structlog.get_logger().warning("openid_unavailable", issuer=self._settings.issuer, why=why, **logged)
        return unavailable(
            "openid_unavailable",
            f"signing in at {self._host} is not possible now: {why}. Try again later; API keys still work",
        )

    def _invalid(self, why: str) -> RequestError:
        structlog.get_logger().warning("openid_invalid", issuer=self._settings.issuer, why=why)
        return RequestError(
            403, "openid_invalid", f"the response of {self._host} can't be trusted: {why}; sign in again"
        )

    def _clock_skew_error(self, why: str) -> RequestError:
        structlog.get_logger().warning("openid_clock_skew", issuer=self._settings.issuer, why=why)
        message = f"the clocks of {self._host} and of this plane differ: {why}, by the plane's clock. Check both (NTP)"
        return RequestError(403, "openid_clock_skew", message)


def _check_logout(metadata: ProviderMetadata, claims: dict[str, Any], client_id: str, now: int) -> None:
    """Checks the claims of a logout token (OpenID Connect Back-Channel Logout 1.0, 2.6). Raises JoseError."""
    jwt.JWTClaimsRegistry(
        now,
        LEEWAY_S,
        iss={"essential": True, "value": metadata.issuer},
        aud={"essential": True, "value": client_id},
        iat={"essential": True},
        jti={"essential": True},
        events={"essential": True},
    ).validate(claims)
    events = claims["events"]
    if not isinstance(events, dict) or not isinstance(cast("dict[str, object]", events).get(_LOGOUT_EVENT), dict):
        raise InvalidClaimError("events")
    if "nonce" in claims:  # which ID tokens have
        raise InvalidClaimError("nonce")
    if not isinstance(claims["iat"], int | float) or claims["iat"] < now - LOGOUT_S - LEEWAY_S:
        raise InvalidClaimError("iat")
    ids = [claims[name] for name in ("jti", "sub", "sid") if name in claims]
    if len(ids) < 2 or not all(isinstance(value, str) and 0 < len(value) <= 255 for value in ids):
        raise InvalidClaimError("jti, and sub or sid")
