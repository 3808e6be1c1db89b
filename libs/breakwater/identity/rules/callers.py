"""Callers of the HTTP API and their rights: holders of API keys (`bw_<id>_<secret>`), and persons with roles.

Only the SHA-256 digest of a key's secret is stored. Slow hashes protect passwords, which can be guessed; a secret of
256 random bits can't be guessed at any speed, and a slow hash on every request would make the API easy to overload.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Self, cast, get_args

from pydantic import AfterValidator, Field, model_validator

from breakwater.identity.contract import KEY_SCOPES, CallerKind, KeyScope, KeyTags, PersonRole, Priority, Weight
from breakwater.identity.settings import TokenSettings
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.immutable import immutable
from breakwater.kernel.types import (
    Identifier,
    Message,
    ModelId,
    Region,
    Timestamp,
    is_identifier,
    is_region,
    of_any_version,
)

PREFIX = "bw"
SESSION_PREFIX = "bws"
LINK_PREFIX = "bwl"
"""The prefix of the tokens of sign-in links."""
JWT_PREFIX = "jwt:"
"""The prefix of the names of those who send JSON Web Tokens. No key has it: jobs belong to names."""
ID_BYTES = 6
SECRET_BYTES = 32
ENTROPY_BYTES = ID_BYTES + SECRET_BYTES

OPENAI = "/v1"
"""The root of the APIs of providers."""
_API = "/api/v1/"
_JOBS = "/api/v1/jobs"
_PLANS = "/api/v1/plans"
_QUERY = "/api/v1/query"
_SESSIONS = "/api/v1/sessions"
_OPENID = "/api/v1/openid"
_KEYS = "/api/v1/keys"
_LIMITS = "/api/v1/limits"
_APPROVALS = frozenset(
    {"/api/v1/alerts/ack", "/api/v1/alerts/resolve", "/api/v1/guards/reset", "/api/v1/budgets/raise"}
)
"""Paths of approvals: they answer an alert, or let work that a limit has stopped go on."""
OPEN_TO_ALL = frozenset({f"{_OPENID}/begin", f"{_OPENID}/complete", f"{_OPENID}/backchannel-logout"})
"""Paths that need no key, because neither a person who is signing in nor the OpenID provider has one."""


def _in_order(scopes: tuple[KeyScope, ...]) -> tuple[KeyScope, ...]:
    return tuple(scope for scope in KEY_SCOPES if scope in scopes)


class ApiKey(Message):
    """The record of a key."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$", description="Public: names the key in lists and logs.")
    name: Identifier = Field(description="User of the key.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Digest of the secret.")
    created_at: Timestamp
    # Keys that were created before there were scopes still have all of them.
    scopes: Annotated[tuple[KeyScope, ...], AfterValidator(_in_order)] = Field(
        default=KEY_SCOPES, min_length=1, description="Permitted uses, sorted."
    )
    tenants: tuple[Identifier, ...] = Field(default=(), description="Tenants it may submit jobs for; empty: any.")
    agents: tuple[Identifier, ...] = Field(default=(), description="Agents it may submit jobs for; empty: all.")
    models: tuple[ModelId, ...] = Field(default=(), description="Models its jobs may ask for; empty: any.")
    user: Identifier | None = Field(default=None, description="User of its jobs; null: it is not bound to one.")
    team: Identifier | None = Field(default=None, description="Team of its jobs; null: it is not bound to one.")
    tags: KeyTags = Field(default_factory=dict, description="Cost tags of its jobs.")
    priority: Priority | None = Field(default=None, description="Highest priority of its jobs; null: not bound to one.")
    weight: Weight = Field(default=1, description="Its share of what callers wait for.")
    residency: Region | None = Field(default=None, description="Region that its calls must not leave; null for none.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if (self.tenants or self.agents or self.models) and self.scopes != ("submit",):
            raise ValueError("a key that is bound to tenants, agents or models has the scope submit alone")
        return self


StoredApiKey = Annotated[ApiKey, of_any_version(ApiKey, binding=True)]
"""A key in the file or the stream of keys."""


def mint(
    name: str,
    *,
    entropy: bytes,
    at: datetime,
    scopes: tuple[KeyScope, ...] = KEY_SCOPES,
    tenants: tuple[str, ...] = (),
    agents: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
    user: str | None = None,
    team: str | None = None,
    tags: Mapping[str, str] | None = None,
    priority: Priority | None = None,
    weight: int = 1,
    residency: str | None = None,
) -> tuple[str, ApiKey]:
    """Creates a key from `ENTROPY_BYTES` random bytes.

    Returns:
        The key as its holder sends it, which is shown once and never stored, and its record.

    Raises:
        ValueError: the entropy has another length; a name is empty, longer than 128 characters or has control
            characters; there is no scope; or there are tenants, agents or models with another scope than `submit`.
    """
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key takes {ENTROPY_BYTES} random bytes, not {len(entropy)}")
    if name.startswith(JWT_PREFIX):
        raise ValueError(f"names that begin with {JWT_PREFIX} are those of JSON Web Tokens; choose another")
    key_id = entropy[:ID_BYTES].hex()
    secret = secret_of(entropy[ID_BYTES:])
    record = ApiKey(
        id=key_id,
        name=name,
        sha256=digest_of(secret),
        created_at=at,
        scopes=scopes,
        tenants=tenants,
        agents=agents,
        models=models,
        user=user,
        team=team,
        tags=dict(tags or {}),
        priority=priority,
        weight=weight,
        residency=residency,
    )
    return f"{PREFIX}_{key_id}_{secret}", record


def split(text: str) -> tuple[str, str] | None:
    """Splits a key, as it was sent, into its id and its secret. None if it has another form."""
    prefix, _, id_and_secret = text.partition("_")
    key_id, _, secret = id_and_secret.partition("_")
    return (key_id, secret) if prefix == PREFIX and key_id and secret else None


def is_session(text: str) -> bool:
    """Returns True if a text has the form of a session's token."""
    return text.startswith(f"{SESSION_PREFIX}_") and text.isascii() and text.isprintable()


def is_link(text: str) -> bool:
    """Returns True if a text has the form of a sign-in link's token."""
    return text.startswith(f"{LINK_PREFIX}_") and text.isascii() and text.isprintable()


def is_token(text: str) -> bool:
    """Returns True if a text has the form of a signed JSON Web Token."""
    return text.startswith("eyJ") and text.count(".") == 2


def opens(key: ApiKey, secret: str) -> bool:
    """Returns True if the secret is the key's, compared in constant time."""
    return hmac.compare_digest(key.sha256, digest_of(secret))


def is_openai(path: str) -> bool:
    """Returns True for a path of OpenAI's or Anthropic's API."""
    return path == OPENAI or path.startswith(f"{OPENAI}/")


def scopes_for(method: str, path: str, sent: str | None = None) -> tuple[KeyScope, ...]:
    """Returns the scopes of which a key needs one to make a request. All scopes: any valid key will do.

    Paths that are not listed here are decided by their method, so that a new path is never open to too many.

    Args:
        method: the HTTP method, in capitals.
        path: the decoded path, which needs a key.
        sent: the path as it was sent, still encoded; by default `path`. It distinguishes the progress of the job `a`,
            at `a/progress`, from the job `a/progress`, which is sent as `a%2Fprogress`.

    Returns:
        One scope or more; the scope with the fewest rights comes first.
    """
    only_reads = method in ("GET", "HEAD")
    if path == "/metrics" or path.startswith("/metrics/"):
        return ("read",)
    if path.startswith("/v1/responses/"):
        return ("submit",)  # as for a job's answer, below
    if path.startswith("/v1/"):
        return ("read", "submit") if only_reads else ("submit",)
    if not path.startswith(_API) or (only_reads and path == "/api/v1/key"):
        return KEY_SCOPES
    if method == "POST" and path in (_JOBS, _PLANS):
        return ("submit",)
    if method == "POST" and path in (_SESSIONS, f"{_SESSIONS}/end"):
        return ("read",) if path == _SESSIONS else KEY_SCOPES
    if method == "POST" and path == _QUERY:
        return ("read",)
    if path in _APPROVALS and not only_reads:
        return ("approve", "operate")
    if path.startswith(f"{_LIMITS}/") and path.endswith("/raise") and method == "POST":
        return ("approve", "operate", "limits")
    if any(path == root or path.startswith(f"{root}/") for root in (_KEYS, _LIMITS)):
        return ("read", "limits") if only_reads else ("limits",)
    if not only_reads:
        return ("submit", "operate") if path.startswith(f"{_JOBS}/") and path.endswith("/cancel") else ("operate",)
    if path.startswith(f"{_PLANS}/"):
        return ("read", "submit")
    if path == _JOBS:
        return ("read", "submit")  # submitters see their own jobs
    if not path.startswith(f"{_JOBS}/"):
        return ("read",)
    # A job's answer is not redacted, so only submitters may read it; its progress is. A job may be called `progress`.
    name = path.removeprefix(f"{_JOBS}/")
    encoded = path if sent is None else sent
    progress = name.endswith("/progress") and encoded.endswith("/progress")
    return ("read", "submit") if progress else ("submit",)


def secret_of(entropy: bytes) -> str:
    """Returns the secret of a key, as its holder sends it, made of `SECRET_BYTES` random bytes."""
    return urlsafe_b64encode(entropy).rstrip(b"=").decode()


def digest_of(secret: str) -> str:
    """Returns the digest of a secret, which is what is stored of it."""
    return hashlib.sha256(secret.encode()).hexdigest()


SCOPES: Mapping[PersonRole, tuple[KeyScope, ...]] = MappingProxyType(
    {
        "viewer": ("read",),
        "operator": ("read", "operate"),
        "approver": ("read", "approve"),
        "admin": KEY_SCOPES,
    }
)
"""The scopes of each role. `scopes_for` defines what each scope permits."""

ROLES: tuple[PersonRole, ...] = get_args(PersonRole)


@immutable()
class Attribution:
    """The user and the team whose call something is; None if unknown."""

    user: str | None = None
    team: str | None = None


NOBODY = Attribution()


@immutable()
class Caller:
    """The sender of a request.

    Attributes:
        kind: the holder of an API key or of a JSON Web Token, or a person.
        id: the id of the API key; for a person, the OpenID provider's `sub`; for a token, the name.
        name: the name that the caller's actions are recorded under.
        scopes: the caller's scopes.
        created_at: the time at which the key was created, or the person signed in.
        tenants: the tenants that the caller may submit jobs for; empty: any.
        agents: the agents that the caller may submit jobs for; empty: all.
        models: the models that the caller's jobs may ask for; empty: any.
        roles: the roles of a person.
        user: the user of all jobs that the caller submits; None if the caller is not bound to one.
        team: the team of all jobs that the caller submits; None if the caller is not bound to one.
        tags: cost tags of all jobs that the caller submits.
        forwarded: the names that a trusted proxy has set on the request.
        priority: the priority of the caller's jobs, and the highest that they may ask for; None for no such limit.
        weight: the caller's share of what callers wait for.
        residency: the region that the caller's calls must not leave; None for no such bound.
        expires_at: the time at which the caller loses its access; None if the key does not expire.
        digest: the digest of the secret that the holder of a key has proved.
        forbidden_metadata: what the metadata of the caller's jobs must not name, as its token should have named it.
    """

    kind: CallerKind
    id: str
    name: str
    scopes: tuple[KeyScope, ...]
    created_at: datetime
    tenants: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    roles: tuple[PersonRole, ...] = ()
    user: str | None = None
    team: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    models: tuple[str, ...] = ()
    forwarded: Attribution = NOBODY
    priority: Priority | None = None
    weight: int = 1
    expires_at: datetime | None = None
    digest: str = ""
    forbidden_metadata: tuple[str, ...] = ()
    residency: str | None = None

    def may(self, needed: Collection[KeyScope]) -> bool:
        """Returns True if the caller has at least one of the scopes."""
        return not set(needed).isdisjoint(self.scopes)


def holder_of_key(key: ApiKey, expires_at: datetime | None = None) -> Caller:
    """Returns the caller that a key belongs to, whose access may end at a time."""
    return Caller(
        "key",
        key.id,
        key.name,
        key.scopes,
        key.created_at,
        key.tenants,
        key.agents,
        user=key.user,
        team=key.team,
        tags=key.tags,
        models=key.models,
        priority=key.priority,
        weight=key.weight,
        expires_at=expires_at,
        digest=key.sha256,
        residency=key.residency,
    )


class UnusableClaimError(BreakwaterError):
    """A claim of a JSON Web Token is missing or can't be a name. The text does not contain its value."""


def holder_of_token(claims: Mapping[str, Any], settings: TokenSettings, now: float) -> Caller:
    """Returns the holder of a verified JSON Web Token, who may submit jobs.

    Raises:
        UnusableClaimError: a claim can't be used.
    """
    subject = _claimed_name(claims, "sub")
    name = f"{JWT_PREFIX}{subject}"
    if not is_identifier(name):
        raise UnusableClaimError(f"its claim 'sub' has more than {128 - len(JWT_PREFIX)} characters")
    user = _claimed_name(claims, settings.user)
    if user is None or subject is None:
        raise UnusableClaimError(f"its claim {settings.user if subject else 'sub'!r} is missing")
    if settings.user == "email" and _is_unverified(claims):
        raise UnusableClaimError("its e-mail address is not verified")
    team = None if settings.team is None else _claimed_name(claims, settings.team)
    residency = None if settings.residency is None else _claimed_region(claims, settings.residency)
    tags = {tag: _claimed_name(claims, path) for tag, path in settings.tags.items()}
    missing = dict.fromkeys(name for name, value in (("team", team), *tags.items()) if value is None)
    return Caller(
        "token",
        name,
        name,
        ("submit",),
        datetime.fromtimestamp(int(now), UTC),
        settings.tenants,
        settings.agents,
        user=user,
        team=team,
        tags={tag: value for tag, value in tags.items() if value is not None},
        forbidden_metadata=() if settings.metadata_may_name else tuple(missing),
        residency=residency,
    )


def person(subject: str, name: str, roles: tuple[PersonRole, ...], signed_in_at: datetime) -> Caller:
    """Returns a person who has signed in, with the scopes of all of their roles."""
    scopes: tuple[KeyScope, ...] = tuple(scope for scope in KEY_SCOPES if any(scope in SCOPES[role] for role in roles))
    return Caller("person", subject, name, scopes, signed_in_at, roles=roles)


def roles_of(
    values: Collection[str], by_role: Mapping[PersonRole, Sequence[str]], default: PersonRole | None
) -> tuple[PersonRole, ...]:
    """Returns the roles of a person.

    Args:
        values: the values of the claim that contains roles.
        by_role: the values that grant each role.
        default: the role of persons whom no value grants one; None for none.
    """
    roles: tuple[PersonRole, ...] = tuple(
        role for role in ROLES if any(value in values for value in by_role.get(role, ()))
    )
    return roles or (() if default is None else (default,))


def roles_that_may(needed: Collection[KeyScope]) -> tuple[PersonRole, ...]:
    """Returns the roles that have at least one of the scopes."""
    return tuple(role for role in ROLES if any(scope in needed for scope in SCOPES[role]))


def claim_values(claims: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns the strings of a claim that is a string or a list; empty if it is missing or of another type.

    Args:
        claims: the claims of an ID token.
        name: the claim's name, or the path to a nested one: `realm_access.roles`. The whole name is tried first,
            because claims that are named by a URL have dots, too.
    """
    value = _claim(claims, name)
    if isinstance(value, str):
        return (value,)
    listed = cast("Iterable[object]", value) if isinstance(value, list) else ()
    return tuple(text for text in listed if isinstance(text, str))


def _claim(claims: Mapping[str, Any], path: str) -> object:
    """Returns a claim by its name or path; None if it is missing. The whole name is tried first."""
    value: object = claims.get(path)
    if value is None:
        value = claims
        for part in path.split("."):
            value = cast("dict[str, object]", value).get(part) if isinstance(value, dict) else None
    return value


def _claimed_name(claims: Mapping[str, Any], path: str) -> str | None:
    """Returns the text or whole number of a claim; None if it is missing.

    Args:
        claims: the claims of a token.
        path: the claim's name or path. It may end in the place in a list: `groups[0]`.

    Raises:
        UnusableClaimError: it has another type, or can't be a name.
    """
    value = _claim(claims, path)
    if value is None and (indexed := _INDEXED.fullmatch(path)) is not None:
        listed = _claim(claims, indexed["path"])
        place = int(indexed["place"])
        items = cast("list[object]", listed) if isinstance(listed, list) else []
        value = items[place] if place < len(items) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        kind = (
            f"a list: name a place in it, such as {path}[0]" if isinstance(value, list) else "neither text nor number"
        )
        raise UnusableClaimError(f"its claim {path!r} is {kind}")
    if not is_identifier(name := str(value)):
        raise UnusableClaimError(f"its claim {path!r} is no name of 1 to 128 characters without control characters")
    return name


def _claimed_region(claims: Mapping[str, Any], path: str) -> str:
    """Returns the region of a claim. Raises UnusableClaimError: it is missing, or has no region."""
    region = _claimed_name(claims, path)
    if region is None:
        raise UnusableClaimError(f"its claim {path!r} is missing")
    if not is_region(region):
        raise UnusableClaimError(f"its claim {path!r} is no region, such as eu or eu-west-1")
    return region


_INDEXED = re.compile(r"(?P<path>.+)\[(?P<place>[0-9]{1,3})\]")


def name_of(claims: Mapping[str, Any], name_claim: str) -> str:
    """Returns the name that a person acts under: the claim's, or the `sub` if the claim is missing or invalid.

    An unverified e-mail address is not used: anyone who can register at the provider could claim a colleague's.
    """
    value = claims.get(name_claim)
    verified = name_claim != "email" or not _is_unverified(claims)
    subject = str(claims["sub"])[:128]
    return value if isinstance(value, str) and verified and is_identifier(value) else subject


def _is_unverified(claims: Mapping[str, Any]) -> bool:
    """Returns True if the issuer says that it has not verified the e-mail address. Some say so in a text."""
    return str(claims.get("email_verified", True)).casefold() == "false"
