"""The sections `console`, `identity` and `programs` of the config: signing in, users and teams, and NATS users."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from breakwater.identity.contract import MAX_TAGS, CostTag, PersonRole, Priority, Weight
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.addresses import NetworkSetting
from breakwater.kernel.security.secret_refs import Secret
from breakwater.kernel.types import Identifier, Message, Name, Region

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_OPENID_SCOPE = r"^[\x21\x23-\x5b\x5d-\x7e]+$"
"""A scope by RFC 6749."""


def secure_url(url: str) -> str:
    """Checks that a URL is usable and, off this machine, encrypted. Raises ValueError."""
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0 and parts.username is None
        usable = usable and url.isprintable() and " " not in url
        secure = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _THIS_MACHINE)
    except ValueError:
        usable = secure = False
    if not usable or not secure:
        raise ValueError("must be a URL with https:// and a host; http:// is for this machine only")
    return url


def _no_more_than_a_host(url: str) -> str:
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("must end after the host and port, because the console's pages begin at /")
    return url.rstrip("/")


def _no_query(url: str) -> str:
    if "?" in url or "#" in url:
        raise ValueError("must have neither a query nor a fragment")
    return url


ClaimValue = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class OpenId(Message):
    """Signing in with OpenID Connect, by the authorization code flow with PKCE."""

    issuer: Annotated[str, AfterValidator(secure_url), AfterValidator(_no_query)] = Field(
        description=(
            "The issuer, exactly as the provider states it; all other settings come from its "
            "`/.well-known/openid-configuration`."
        )
    )
    client_id: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    client_secret: Secret | None = Field(
        default=None, description="Omit it for a public client. Only `request` needs it, and reads it at its start."
    )
    label: Identifier | None = Field(
        default=None, description='Name in the button "Sign in with …"; default: the issuer\'s host.'
    )
    scopes: tuple[Annotated[str, StringConstraints(pattern=_OPENID_SCOPE)], ...] = Field(
        default=("profile", "email"), description="Scopes that are requested in addition to `openid`."
    )
    name_claim: str = Field(
        default="email",
        min_length=1,
        description=(
            "The claim that identifies a person in the audit log. If it is missing, or is an "
            "unverified address, `sub` is used."
        ),
    )
    roles_claim: str = Field(
        default="groups",
        min_length=1,
        description="The claim that contains the roles, a text or a list; `a.b` means `b` inside `a`.",
    )
    roles: dict[PersonRole, tuple[ClaimValue, ...]] = Field(
        default_factory=dict, description="Values of the claim for each role. A person may have several roles."
    )
    default_role: PersonRole | None = Field(
        default=None, description="Role of everyone else who can sign in at the issuer; default: they are refused."
    )
    allow_networks: tuple[NetworkSetting, ...] = Field(
        default=(),
        description="Private networks in which the issuer's endpoints may be, such as `10.1.0.0/16`. On its own host "
        "they may be anywhere.",
    )

    @model_validator(mode="after")
    def _people_can_sign_in(self) -> Self:
        if not self.default_role and not any(self.roles.values()):
            raise ValueError("set `roles` or default_role: without them no user could sign in")
        return self

    @property
    def shown_as(self) -> str:
        """Text of the button."""
        return self.label or urlsplit(self.issuer).hostname or self.issuer

    @property
    def role_values(self) -> frozenset[str]:
        """All values of the claim that give a role."""
        return frozenset(value for values in self.roles.values() for value in values)

    def secret(self) -> str | None:
        """Returns the client's secret; None for a public client. Raises ConfigError if it can't be read."""
        try:
            return None if self.client_secret is None else self.client_secret.read()
        except ConfigError as error:
            raise ConfigError(f"console.openid.client_secret: {error}") from error


class ConsoleSettings(Message):
    """The console."""

    url: Annotated[str, AfterValidator(secure_url), AfterValidator(_no_more_than_a_host)] | None = Field(
        default=None,
        description="The URL in people's browsers, such as `https://breakwater.example.com`. Needed for `openid`.",
    )
    openid: OpenId | None = None

    @model_validator(mode="after")
    def _the_provider_knows_where_to_send_people(self) -> Self:
        if self.openid is not None and self.url is None:
            raise ValueError("openid needs url, the address to which the provider redirects people")
        return self


_HEADER_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
"""A header's name by RFC 9110."""


def _no_option(header: str) -> str:
    if header.lower().startswith("x-breakwater-"):
        raise ValueError("names a header that begins with x-breakwater-, as options of calls do; choose another")
    return header


HeaderName = Annotated[
    str, StringConstraints(min_length=1, max_length=100, pattern=_HEADER_NAME), AfterValidator(_no_option)
]


class ProxyHeaders(Message):
    """Headers in which a proxy names the user and the team of each request."""

    user: HeaderName | None = Field(default=None, description="Header with the user, such as `X-Forwarded-User`.")
    team: HeaderName | None = Field(default=None, description="Header with the team.")
    networks: tuple[NetworkSetting, ...] = Field(
        min_length=1,
        description="Addresses of the proxy, such as `10.0.0.0/8`. From all others the headers are ignored. The proxy "
        "must remove the headers that its clients send.",
    )

    @model_validator(mode="after")
    def _names_a_header(self) -> Self:
        if self.user is None and self.team is None:
            raise ValueError("set user, team or both: the headers to read")
        return self


ClaimPath = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class TokenSettings(Message):
    """JSON Web Tokens of an issuer, which clients may send in place of an API key, to submit jobs."""

    issuer: ClaimValue = Field(description="The issuer, exactly as the claim `iss` states it.")
    audience: ClaimValue = Field(description="What the claim `aud` must contain.")
    jwks_url: Annotated[str, AfterValidator(secure_url)] = Field(description="URL of the issuer's public keys.")
    user: ClaimPath = Field(
        default="sub", description="The claim with the user, which every token must have; `a.b` means `b` inside `a`."
    )
    team: ClaimPath | None = Field(
        default=None, description="The claim with the team, such as `groups[0]`, the first of a list."
    )
    tags: dict[CostTag, ClaimPath] = Field(
        default_factory=dict, max_length=MAX_TAGS, description="Claims with values of `cost_tags`."
    )
    residency: ClaimPath | None = Field(
        default=None,
        description="The claim with the region that a token's calls must not leave, such as `eu`; every token must "
        "have it then.",
    )
    metadata_may_name: bool = Field(
        default=False,
        description="True: a job's metadata may name the team, and the `tags` above, where its token has no such "
        "claim. By default such a job is refused, as its sender would choose who pays.",
    )
    agents: tuple[Identifier, ...] = Field(default=(), description="Agents that tokens may be used for; empty: all.")
    tenants: tuple[Name, ...] = Field(
        default=(),
        description="Tenants that tokens may be used for; empty: any. If there is exactly one, jobs without a tenant "
        "get it.",
    )


class IdentitySettings(Message):
    """The sources of the user and the team of a call, beside its API key."""

    jwt: TokenSettings | None = None
    headers: ProxyHeaders | None = None


class NatsProgram(Message):
    """A program that connects to NATS with a user of its own, `program-<name>`, and may use some agents only."""

    agents: tuple[Identifier, ...] = Field(min_length=1, description="Agents that the program may use.")
    tenants: tuple[Name, ...] = Field(
        default=(),
        description=(
            "Tenants that the program may submit jobs for; empty: any. If there is exactly one, "
            "jobs without a tenant get it."
        ),
    )
    priority: Priority | None = Field(
        default=None,
        description="Priority of its jobs, and the highest that they may ask for, as `priority` of an API key.",
    )
    weight: Weight = Field(default=1, description="Its share of what callers wait for, as `weight` of an API key.")
    residency: Region | None = Field(
        default=None,
        description="The region that its calls must not leave, such as `eu`, in addition to that of the agent.",
    )
