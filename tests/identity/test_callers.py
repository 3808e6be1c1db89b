"""Roles: which claims give them, what they may do, and under which name a person acts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from breakwater.identity.contract import KeyScope, PersonRole
from breakwater.identity.rules.callers import claim_values, name_of, person, roles_of, roles_that_may
from tests.tables import each_row

NOW = datetime(2026, 11, 24, tzinfo=UTC)
BY_ROLE: dict[PersonRole, tuple[str, ...]] = {
    "admin": ("platform",),
    "operator": ("sre", "on-call"),
    "approver": ("finance",),
}


@each_row(
    ("roles", "scopes"),
    [
        (("viewer",), ("read",)),
        (("operator",), ("read", "operate")),
        (("approver",), ("read", "approve")),
        (("operator", "approver"), ("read", "operate", "approve")),
        (("admin",), ("submit", "read", "operate", "approve", "audit", "limits")),
        ((), ()),
    ],
)
def test_a_person_has_the_scopes_of_all_of_their_roles(
    roles: tuple[PersonRole, ...], scopes: tuple[KeyScope, ...]
) -> None:
    zoe = person("zoe", "Zoë", roles, NOW)
    assert zoe.scopes == scopes
    assert zoe.may(scopes) is bool(scopes)
    assert not zoe.may(())


@each_row(
    ("values", "default", "roles"),
    [
        ((), None, ()),
        ((), "viewer", ("viewer",)),
        (("other",), None, ()),
        (("SRE",), None, ()),
        (("on-call", "other"), "viewer", ("operator",)),
        (("finance", "sre"), "viewer", ("operator", "approver")),
        (("platform",), None, ("admin",)),
    ],
)
def test_roles_are_those_of_the_claims_values_and_the_default_is_for_all_others(
    values: tuple[str, ...], default: PersonRole | None, roles: tuple[PersonRole, ...]
) -> None:
    assert roles_of(values, BY_ROLE, default) == roles


def test_a_refusal_names_the_roles_that_may() -> None:
    assert roles_that_may(("approve", "operate")) == ("operator", "approver", "admin")
    assert roles_that_may(("audit",)) == ("admin",)


@each_row(
    ("claims", "name", "values"),
    [
        ({"groups": ["a", "b"]}, "groups", ("a", "b")),
        ({"groups": "a"}, "groups", ("a",)),
        ({"groups": ["a", 1, None, ["b"]]}, "groups", ("a",)),
        ({"groups": {"a": True}}, "groups", ()),
        ({"groups": True}, "groups", ()),
        ({}, "groups", ()),
        ({"realm_access": {"roles": ["a"]}}, "realm_access.roles", ("a",)),
        ({"realm_access": ["roles"]}, "realm_access.roles", ()),
        ({"https://example.com/roles": ["a"]}, "https://example.com/roles", ("a",)),
        ({"a.b": ["whole"], "a": {"b": ["path"]}}, "a.b", ("whole",)),
    ],
)
def test_the_values_of_a_claim_are_found_by_its_name_or_its_path(
    claims: dict[str, Any], name: str, values: tuple[str, ...]
) -> None:
    assert claim_values(claims, name) == values


@each_row(
    ("claims", "name"),
    [
        ({"email": "zoe@example.com", "email_verified": True}, "zoe@example.com"),
        ({"email": "zoe@example.com"}, "zoe@example.com"),
        ({"email": "zoe@example.com", "email_verified": "true"}, "zoe@example.com"),
        ({"email": "zoe@example.com", "email_verified": False}, "s-1"),
        ({"email": "zoe@example.com", "email_verified": "false"}, "s-1"),
        ({}, "s-1"),
        ({"email": "zoe\nroot"}, "s-1"),
        ({"email": ""}, "s-1"),
        ({"email": ["zoe@example.com"]}, "s-1"),
        ({"email": "z" * 200}, "s-1"),
    ],
)
def test_a_name_is_a_verified_one_that_can_stand_in_a_record(claims: dict[str, Any], name: str) -> None:
    assert name_of({"sub": "s-1", **claims}, "email") == name
