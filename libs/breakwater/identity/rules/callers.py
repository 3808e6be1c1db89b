"""Callers of the HTTP API and their rights: holders of API keys (`bw_<id>_<secret>`), and persons with roles.

Only the SHA-256 digest of a key's secret is stored. Slow hashes protect what people choose and others can guess; a
secret of 256 random bits can't be guessed at any speed, and a slow hash on every request would only make the API easy
to overload.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, Self, cast, get_args

from pydantic import AfterValidator, Field, model_validator

from breakwater.identity.contract import KEY_SCOPES, CallerKind, KeyScope, PersonRole
from breakwater.kernel.types import Identifier, Message, Timestamp, is_identifier

PREFIX = "bw"
SESSION_PREFIX = "bws"
LINK_PREFIX = "bwl"
"""Prefix of the tokens of sessions, which belong to a key or a person."""
ID_BYTES = 6
SECRET_BYTES = 32
ENTROPY_BYTES = ID_BYTES + SECRET_BYTES

_API = "/api/v1/"
_JOBS = "/api/v1/jobs"
_PLANS = "/api/v1/plans"
_SESSIONS = "/api/v1/sessions"
_OPENID = "/api/v1/openid"
_APPROVALS = frozenset(
    {"/api/v1/alerts/ack", "/api/v1/alerts/resolve", "/api/v1/guards/reset", "/api/v1/budgets/raise"}
)
"""Paths that decide on what a limit has stopped, or a person was called to."""
OPEN_TO_ALL = frozenset({f"{_OPENID}/begin", f"{_OPENID}/complete", f"{_OPENID}/backchannel-logout"})
"""Paths that take no key, as neither a person who signs in nor the OpenID provider has one."""


def _in_order(scopes: tuple[KeyScope, ...]) -> tuple[KeyScope, ...]:
    return tuple(scope for scope in KEY_SCOPES if scope in scopes)


class ApiKey(Message):
    """Record of a key."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$", description="Public: names the key in lists and logs.")
    name: Identifier = Field(description="User of the key.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Digest of the secret.")
    created_at: Timestamp
    # Keys that were made before there were scopes open everything, as they did.
    scopes: Annotated[tuple[KeyScope, ...], AfterValidator(_in_order)] = Field(
        default=KEY_SCOPES, min_length=1, description="Permitted uses, sorted."
    )
    tenants: tuple[Identifier, ...] = Field(default=(), description="Tenants it may submit jobs for; empty: any.")
    agents: tuple[Identifier, ...] = Field(default=(), description="Agents it may submit jobs for; empty: all.")

    @model_validator(mode="after")
    def _bound_to_submitting(self) -> Self:
        if (self.tenants or self.agents) and self.scopes != ("submit",):
            raise ValueError("a key that is bound to tenants or agents has the scope submit alone")
        return self


def mint(
    name: str,
    *,
    entropy: bytes,
    at: datetime,
    scopes: tuple[KeyScope, ...] = KEY_SCOPES,
    tenants: tuple[str, ...] = (),
    agents: tuple[str, ...] = (),
) -> tuple[str, ApiKey]:
    """Makes a key from `ENTROPY_BYTES` random bytes.

    Returns:
        The key as its holder sends it, which is shown once and stored nowhere, and what is kept of it.

    Raises:
        ValueError: too little entropy, a name that is empty, over 128 characters or has control characters in it, or
            no scope, or tenants or agents with another scope than `submit`.
    """
    if len(entropy) != ENTROPY_BYTES:
        raise ValueError(f"a key takes {ENTROPY_BYTES} random bytes, not {len(entropy)}")
    key_id = entropy[:ID_BYTES].hex()
    secret = urlsafe_b64encode(entropy[ID_BYTES:]).rstrip(b"=").decode()
    kept = ApiKey(
        id=key_id, name=name, sha256=_digest(secret), created_at=at, scopes=scopes, tenants=tenants, agents=agents
    )
    return f"{PREFIX}_{key_id}_{secret}", kept


def split(text: str) -> tuple[str, str] | None:
    """The id and the secret of a key as it was sent, or None where it has another form."""
    prefix, _, rest = text.partition("_")
    key_id, _, secret = rest.partition("_")
    return (key_id, secret) if prefix == PREFIX and key_id and secret else None


def is_session(text: str) -> bool:
    """True if a text has the form of a session's token."""
    return text.startswith(f"{SESSION_PREFIX}_") and text.isascii() and text.isprintable()


def is_link(text: str) -> bool:
    """True if a text has the form of a sign-in link's token."""
    return text.startswith(f"{LINK_PREFIX}_") and text.isascii() and text.isprintable()


def opens(key: ApiKey, secret: str) -> bool:
    """True if the secret is the key's, compared in constant time."""
    return hmac.compare_digest(key.sha256, _digest(secret))


def scopes_for(method: str, path: str, sent: str | None = None) -> tuple[KeyScope, ...]:
    """The scopes that let a request pass: a key needs one of them. Where any valid key will do, these are all.

    What is not named here is decided by its method, so that a new path is never open to more than it should be.

    Args:
        method: HTTP's, in capitals.
        path: of something that takes a key, decoded, as it is routed.
        sent: the path as it came, encoded still; the same where it is left out. It distinguishes the progress of
            the job `a`, `a/progress`, from the job `a/progress`, which is sent as `a%2Fprogress`.

    Returns:
        At least one; the one that opens the least comes first.
    """
    looks = method in ("GET", "HEAD")
    if path == "/metrics" or path.startswith("/metrics/"):
        return ("read",)
    if path.startswith("/v1/responses/"):
        return ("submit",)  # as a job's answer, below
    if path.startswith("/v1/"):
        return ("read", "submit") if looks else ("submit",)
    if not path.startswith(_API) or (looks and path == "/api/v1/key"):
        return KEY_SCOPES
    if method == "POST" and path in (_JOBS, _PLANS):
        return ("submit",)
    if method == "POST" and path in (_SESSIONS, f"{_SESSIONS}/end"):
        return ("read",) if path == _SESSIONS else KEY_SCOPES
    if path in _APPROVALS and not looks:
        return ("approve", "operate")
    if not looks:
        return ("submit", "operate") if path.startswith(f"{_JOBS}/") and path.endswith("/cancel") else ("operate",)
    if path.startswith(f"{_PLANS}/"):
        return ("read", "submit")
    if not path.startswith(f"{_JOBS}/"):
        return ("read",)
    # A job's answer is not redacted, so only who submits reads it; its progress is. A job may be called `progress`.
    name = path.removeprefix(f"{_JOBS}/")
    encoded = path if sent is None else sent
    progress = name.endswith("/progress") and encoded.endswith("/progress")
    return ("read", "submit") if progress else ("submit",)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


SCOPES: Mapping[PersonRole, tuple[KeyScope, ...]] = MappingProxyType(
    {
        "viewer": ("read",),
        "operator": ("read", "operate"),
        "approver": ("read", "approve"),
        "admin": KEY_SCOPES,
    }
)
"""Scopes of each role. `scopes_for` says what each scope opens."""

ROLES: tuple[PersonRole, ...] = get_args(PersonRole)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    kind: CallerKind
    id: str
    """Id of the API key; of a person the provider's `sub`."""
    name: str
    """The name that their actions are recorded under."""
    scopes: tuple[KeyScope, ...]
    created_at: datetime
    """Time at which the key was made, or the person signed in."""
    tenants: tuple[str, ...] = ()
    """Tenants they submit for; empty: any."""
    agents: tuple[str, ...] = ()
    """Agents they submit for; empty: all."""
    roles: tuple[PersonRole, ...] = ()
    """Roles of a person."""

    def may(self, needed: Collection[KeyScope]) -> bool:
        """True if they have one of the scopes at least."""
        return any(scope in needed for scope in self.scopes)


def holder_of_key(key: ApiKey) -> Caller:
    """The holder of a key."""
    return Caller("key", key.id, key.name, key.scopes, key.created_at, key.tenants, key.agents)


def person(subject: str, name: str, roles: tuple[PersonRole, ...], signed_in_at: datetime) -> Caller:
    """A person who has signed in, with the scopes of all of their roles."""
    scopes: tuple[KeyScope, ...] = tuple(scope for scope in KEY_SCOPES if any(scope in SCOPES[role] for role in roles))
    return Caller("person", subject, name, scopes, signed_in_at, roles=roles)


def roles_of(
    values: Collection[str], by_role: Mapping[PersonRole, Sequence[str]], default: PersonRole | None
) -> tuple[PersonRole, ...]:
    """The roles of a person.

    Args:
        values: of the claim that roles are read from.
        by_role: the values that give each role.
        default: the role of those whom no value gives one; None for none.
    """
    given: tuple[PersonRole, ...] = tuple(
        role for role in ROLES if any(value in values for value in by_role.get(role, ()))
    )
    return given or (() if default is None else (default,))


def roles_that_may(needed: Collection[KeyScope]) -> tuple[PersonRole, ...]:
    """The roles that have one of the scopes at least."""
    return tuple(role for role in ROLES if any(scope in needed for scope in SCOPES[role]))


def claim_values(claims: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The texts of a claim, which holds one or a list; none where it is missing or of another form.

    Args:
        claims: of an ID token.
        name: the claim's, or the path to one inside others: `realm_access.roles`. Claims that are named by a URL
            have dots, too, so the whole name comes first.
    """
    found: object = claims.get(name)
    if found is None:
        found = claims
        for part in name.split("."):
            found = cast("dict[str, object]", found).get(part) if isinstance(found, dict) else None
    if isinstance(found, str):
        return (found,)
    listed = cast("Iterable[object]", found) if isinstance(found, list) else ()
    return tuple(value for value in listed if isinstance(value, str))


def name_of(claims: Mapping[str, Any], name_claim: str) -> str:
    """The name that a person acts under: a claim; their `sub` where that is missing or no name.

    An address that the provider has not verified is not used: anyone who can register there could take a colleague's.
    """
    value = claims.get(name_claim)
    verified = name_claim != "email" or claims.get("email_verified") is not False
    subject = str(claims["sub"])[:128]
    return value if isinstance(value, str) and verified and is_identifier(value) else subject
