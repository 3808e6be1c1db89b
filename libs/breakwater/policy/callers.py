"""Who sends a request to the HTTP API, and what they may do: the holder of an API key, or a person with roles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, cast, get_args

from breakwater.contracts.access import KEY_SCOPES, CallerKind, KeyScope, Role
from breakwater.contracts.types import is_identifier
from breakwater.policy.api_keys import ApiKey

SCOPES: Mapping[Role, tuple[KeyScope, ...]] = MappingProxyType(
    {
        "viewer": ("read",),
        "operator": ("read", "operate"),
        "approver": ("read", "approve"),
        "admin": KEY_SCOPES,
    }
)
"""What each role may do. `scopes_for` says what each scope opens."""

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    kind: CallerKind
    id: str
    """Of the API key; of a person the provider's `sub`."""
    name: str
    """What they do is recorded under it."""
    scopes: tuple[KeyScope, ...]
    created_at: datetime
    """When the key was made, or the person signed in."""
    tenants: tuple[str, ...] = ()
    """In whose name they submit; empty: in anyone's."""
    agents: tuple[str, ...] = ()
    """For which agents they submit; empty: for all."""
    roles: tuple[Role, ...] = ()
    """Of a person."""

    def may(self, needed: Collection[KeyScope]) -> bool:
        """Whether they have one of the scopes at least."""
        return any(scope in needed for scope in self.scopes)


def holder_of_key(key: ApiKey) -> Caller:
    """Whoever has a key."""
    return Caller("key", key.id, key.name, key.scopes, key.created_at, key.tenants, key.agents)


def person(subject: str, name: str, roles: tuple[Role, ...], signed_in_at: datetime) -> Caller:
    """Somebody who has signed in, with the scopes of all of their roles."""
    scopes: tuple[KeyScope, ...] = tuple(scope for scope in KEY_SCOPES if any(scope in SCOPES[role] for role in roles))
    return Caller("person", subject, name, scopes, signed_in_at, roles=roles)


def roles_of(values: Collection[str], by_role: Mapping[Role, Sequence[str]], default: Role | None) -> tuple[Role, ...]:
    """The roles of a person.

    Args:
        values: of the claim that roles are read from.
        by_role: the values that give each role.
        default: the role of those whom no value gives one; None for none.
    """
    given: tuple[Role, ...] = tuple(role for role in ROLES if any(value in values for value in by_role.get(role, ())))
    return given or (() if default is None else (default,))


def roles_that_may(needed: Collection[KeyScope]) -> tuple[Role, ...]:
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
    """Under which name a person acts: a claim; their `sub` where that is missing or can't name anybody.

    An address that the provider has not verified is not used: whoever may register there could take a colleague's.
    """
    value = claims.get(name_claim)
    verified = name_claim != "email" or claims.get("email_verified") is not False
    subject = str(claims["sub"])[:128]
    return value if isinstance(value, str) and verified and is_identifier(value) else subject
