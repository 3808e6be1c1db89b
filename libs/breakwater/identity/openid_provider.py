"""The OpenID provider: its metadata, the codes that it redeems, and the ID tokens that it issues, checked.

Its answers are bounded in time and size, and no redirect is followed. Endpoints on other hosts than the issuer's have
to be at public addresses, unless the config allows a network: so its metadata causes no request to addresses that
only this machine can reach.
"""

from __future__ import annotations

import asyncio
import json
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
from joserfc.jwk import KeySet, KeySetSerialization
from joserfc.jws import JWSRegistry
from pydantic import AfterValidator, TypeAdapter, ValidationError
from yarl import URL

from breakwater.config import OpenId
from breakwater.identity.rules.sign_in import SignInFlow
from breakwater.identity.settings import secure_url
from breakwater.kernel.http.problems import RequestError, unavailable
from breakwater.kernel.security.addresses import ANYWHERE
from breakwater.kernel.security.guarded_http import AddressRefusedError, RedirectError, guarded_session
from breakwater.kernel.surrogates import whole_value
from breakwater.kernel.types import Event

TIMEOUT_S = 5.0
"""For each request."""
COMPLETE_WITHIN_S = 12.0
"""For all requests of a sign-in: the console waits for 15 s."""
KEPT_S = 3_600.0
"""Time for which the provider's metadata and keys are used without asking again."""
LOGOUT_S = 600
"""The highest age of a logout token."""
KEYS_AGAIN_S = 30.0
"""Time until its keys are read again for a logout token of another key, which needs no key to send."""
LEEWAY_S = 60
"""The largest difference of its clock and ours."""
MAX_AT_ONCE = 20
"""Codes that are redeemed at the same time. The beginning of a sign-in takes no place."""

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
"""Signatures with a key pair. Never `none`, and none by a shared secret."""

_Endpoint = Annotated[str, AfterValidator(secure_url)]
_LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
_CODE = re.compile(r"[a-z_]{1,64}\Z")


class ProviderMetadata(Event):
    """The used part of a provider's metadata."""

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
    """Of the ID token, and those of userinfo that it lacks."""


@dataclass(frozen=True, slots=True)
class SignedOut:
    """A person who has signed out at the provider."""

    token_id: str
    subject: str | None
    """All sessions of the person; None if only the provider's session is named."""
    session: str | None
    """The provider's session, and those here that have come from it; None for all of the person."""


class OpenIdProvider:
    """The client of one provider. Its methods raise RequestError, whose text is for the person who signs in.

    Args:
        settings: of the config.
        secret: the client's; None for a public client.
        redirect_uri: to which the provider sends browsers back.
        now: seconds since the epoch.
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
        """The last failure to read its metadata, and its time."""

    async def authorization_url(self, flow: SignInFlow) -> str:
        """The URL at which a browser begins to sign in."""
        metadata = await self._read_metadata()
        asked = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(dict.fromkeys(("openid", *self._settings.scopes))),
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": flow.challenge,
            "code_challenge_method": "S256",
        }
        return str(URL(metadata.authorization_endpoint).update_query(asked))

    async def redeem(self, flow: SignInFlow, code: str, issuer: str | None) -> SignedIn:
        """Redeems the code that a browser has brought back. `issuer`: its parameter `iss` (RFC 9207)."""
        async with self._bounded():
            metadata = await self._read_metadata()
            if issuer != metadata.issuer and (issuer or metadata.authorization_response_iss_parameter_supported):
                raise self._invalid("the response is not from this issuer")
            tokens = await self._redeem(metadata, flow, code)
            claims = await self._verified(metadata, tokens.id_token, flow)
            completed = await self._completed(metadata, claims, tokens.access_token)
            # A name that its provider has cut off may end in half of a surrogate pair, which no session can hold.
            return SignedIn(tokens.id_token, whole_value(completed))

    async def end_session_url(self, id_token: str | None, then: str) -> str | None:
        """The URL at which a browser signs out of the provider, too; None if there is none, or no response."""
        try:
            metadata = await self._read_metadata()
        except RequestError:
            return None
        if metadata.end_session_endpoint is None:
            return None
        query = {"client_id": self._settings.client_id, "post_logout_redirect_uri": then}
        hint = {} if id_token is None else {"id_token_hint": id_token}
        return str(URL(metadata.end_session_endpoint).update_query({**hint, **query}))

    async def signed_out(self, logout_token: str) -> SignedOut:
        """The person of a logout token. Raises RequestError: 400, it is not valid."""
        metadata = await self._read_metadata()
        try:
            async with self._bounded():
                claims = await self._signed(metadata, logout_token, again_after_s=KEYS_AGAIN_S)
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
    async def _bounded(self) -> AsyncGenerator[None]:
        if self._places.locked():
            raise unavailable("openid_busy", f"{MAX_AT_ONCE} people are signing in at the same time; try again")
        try:
            async with self._places, asyncio.timeout(COMPLETE_WITHIN_S):
                yield
        except TimeoutError:
            raise self._unavailable(f"it took over {COMPLETE_WITHIN_S:g} s") from None

    async def _read_metadata(self) -> ProviderMetadata:
        """One request at a time asks for it: those that wait meanwhile get the same, also a failure."""
        came = time.monotonic()
        async with self._reading:
            if self._metadata is not None and time.monotonic() - self._metadata[0] < KEPT_S:
                return self._metadata[1]
            if self._failed is not None and self._failed[0] >= came:
                raise self._failed[1].with_traceback(None)
            try:
                return await self._ask_metadata()
            except RequestError as problem:
                self._failed = time.monotonic(), problem
                raise

    async def _ask_metadata(self) -> ProviderMetadata:
        url = self._settings.issuer.rstrip("/") + "/.well-known/openid-configuration"
        _, document = await self._ask("GET", url, only=200)
        try:
            found = ProviderMetadata.model_validate(document)
        except ValidationError as error:
            mistake = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in mistake["loc"])
            raise self._unavailable(f"its openid-configuration is invalid: {where}: {mistake['msg']}") from None
        if found.issuer != self._settings.issuer:
            raise self._unavailable(f"it states the issuer {found.issuer!r}, which differs from console.openid.issuer")
        self._metadata = time.monotonic(), found
        return found

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
        given = cast("dict[str, object]", document) if isinstance(document, dict) else {}
        if status != 200:
            raise self._not_redeemed(status, str(given.get("error", "")))
        try:
            return _Tokens.model_validate(given)
        except ValidationError:
            raise self._invalid("its response has no ID token") from None

    async def _verified(self, metadata: ProviderMetadata, id_token: str, flow: SignInFlow) -> dict[str, Any]:
        try:
            claims = await self._signed(metadata, id_token)
            self._check(metadata, claims, flow)
        except JoseError as error:
            # The value of a wrong claim stays out: it may name a person.
            raise self._invalid(str(error)) from None
        return claims

    async def _signed(self, metadata: ProviderMetadata, token: str, again_after_s: float = 0.0) -> dict[str, Any]:
        """The claims of a token that the provider has signed. Raises JoseError, or RequestError."""
        try:
            return self._decoded(token, await self._read_keys(metadata))
        except InvalidKeyIdError:
            # The provider has a new key. Asked once: a second time it would say the same.
            return self._decoded(token, await self._read_keys(metadata, kept_s=again_after_s))

    def _decoded(self, id_token: str, keys: KeySet) -> dict[str, Any]:
        # Headers that the library does not know are no mistake, unless `crit` names them.
        registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
        try:
            return jwt.decode(id_token, keys, algorithms=ALGORITHMS, registry=registry).claims
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
            raise self._skewed(f"its ID token expired {now - int(claims['exp'])} s ago") from None
        except InvalidClaimError as error:
            ahead = claims.get(error.claim, 0) if error.claim in ("iat", "nbf") else 0
            if isinstance(ahead, int | float) and ahead > now + LEEWAY_S:
                raise self._skewed(f"its ID token was issued {int(ahead) - now} s in the future") from None
            raise
        others = isinstance(claims["aud"], list) and len(cast("list[str]", claims["aud"])) > 1
        if claims.get("azp", None if others else client_id) != client_id:
            raise self._invalid("its ID token was issued to another client")
        subject = claims["sub"]
        if not (subject.isascii() and subject.isprintable() and len(subject) <= 255):
            raise self._invalid("its ID token has no usable subject: sub")

    async def _read_keys(self, metadata: ProviderMetadata, *, kept_s: float = KEPT_S) -> KeySet:
        if self._keys is not None and time.monotonic() - self._keys[0] < kept_s:
            return self._keys[1]
        _, document = await self._ask("GET", metadata.jwks_uri, only=200)
        try:
            found = TypeAdapter(dict[str, list[dict[str, Any]]]).validate_python(document)
            signing = [key for key in found["keys"] if key.get("use", "sig") == "sig"]
            keys = KeySet.import_key_set(cast(KeySetSerialization, {"keys": signing}))
        except (ValidationError, KeyError, ValueError, JoseError):
            raise self._unavailable("its keys (jwks_uri) can't be read") from None
        self._keys = time.monotonic(), keys
        return keys

    async def _completed(
        self, metadata: ProviderMetadata, claims: dict[str, Any], access_token: str | None
    ) -> dict[str, Any]:
        """The claims, with those of userinfo where the ID token lacks one that is needed."""
        roots = (self._settings.name_claim, self._settings.roles_claim)
        missing = any(name not in claims and name.partition(".")[0] not in claims for name in roots)
        if not missing or metadata.userinfo_endpoint is None or access_token is None:
            return claims
        headers = {"Authorization": f"Bearer {access_token}"}
        _, document = await self._ask("GET", metadata.userinfo_endpoint, headers=headers, only=200)
        more = cast("dict[str, Any]", document) if isinstance(document, dict) else {}
        if more.get("sub") != claims["sub"]:
            raise self._invalid("its userinfo belongs to another person")
        return {**more, **claims}

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        data: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        only: int | None = None,
    ) -> tuple[int, object]:
        """The status and the JSON of an answer. `only`: the one status that is no mistake."""
        allowed = ANYWHERE if urlsplit(url).hostname == self._host else self._settings.allow_networks
        sent = {"Accept": "application/json", **(headers or {})}
        try:
            async with (
                guarded_session(allowed, TIMEOUT_S) as http,
                http.request(method, url, data=data, headers=sent) as response,
            ):
                status = response.status
                body = await response.read()
            document: object = json.loads(body) if body else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unavailable(_reason(error), url=url, error=repr(error)) from error
        if only is not None and status != only:
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

    def _skewed(self, why: str) -> RequestError:
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
    named = [claims[name] for name in ("jti", "sub", "sid") if name in claims]
    if len(named) < 2 or not all(isinstance(one, str) and 0 < len(one) <= 255 for one in named):
        raise InvalidClaimError("jti, and sub or sid")


def _reason(error: Exception) -> str:
    """The reason why there is no answer, without addresses: the request needs no key. The log has the rest."""
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
