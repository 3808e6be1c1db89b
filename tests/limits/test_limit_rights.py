"""Who may change limits and make keys: nobody escapes a limit on his own key who may not raise it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.identity.rules.callers import Caller
from breakwater.limits.rules.limit import Limit
from breakwater.limits.rules.limit_changes import LimitRefusedError, check_rights, objection_to_keys
from breakwater.limits.rules.scopes import parse_scope
from tests.tables import each_row


def caller(*more_scopes: Any, kind: Any = "key", **bound: Any) -> Caller:
    return Caller(kind, "id", "lead", ("submit", "limits", *more_scopes), datetime.now(UTC), **bound)


def limit(scope: str, **fields: Any) -> Limit:
    settings: dict[str, Any] = {"unit": "usd", "window": "month", "amount": 9, "action": "refuse", **fields}
    return Limit(f"{scope}.{settings['unit']}.month", parse_scope(scope), **settings)


OWN, EACH_KEY = limit("key:lead"), limit("key:*")
TEAM = limit("team:search")


@each_row(
    ("maker", "limits", "held_by"),
    [
        (caller(), [], None),
        (caller(), [limit("key:other"), limit("plane"), limit("user:*")], None),
        (caller(), [OWN], OWN),
        (caller(), [EACH_KEY], EACH_KEY),
        (caller(), [limit("key:* within model:m")], limit("key:* within model:m")),
        (caller(), [limit("user:* within key:lead")], limit("user:* within key:lead")),
        (caller(), [limit("key:other within model:m")], None),
        (caller(), [limit("key:lead", action="alert")], None),
        (caller(), [limit("key:lead", unit="requests", window="minute")], None),
        (caller(), [EACH_KEY, limit("key:lead", action="count")], None),
        (caller(), [limit("key:*", window="day"), limit("key:lead", action="count")], limit("key:*", window="day")),
        (caller("approve"), [OWN], None),
        (caller("operate"), [EACH_KEY], None),
        (caller(kind="person"), [OWN], None),
        (caller(team="search"), [OWN], OWN),
        (caller(team="search"), [OWN, TEAM], None),
        (caller(team="search"), [OWN, limit("team:*")], None),
        (caller(team="search"), [OWN, limit("team:ads")], OWN),
        (caller(team="search"), [OWN, limit("team:*"), limit("team:search", action="alert")], OWN),
        (caller(team="search"), [OWN, limit("user:* within team:search")], OWN),
        (caller(team="search", user="ada"), [OWN, limit("user:* within team:search")], None),
        (caller(tags={"pool": "a"}), [OWN, limit("tag:pool=a")], None),
        (caller(), [limit("key:*", unit="tokens")], limit("key:*", unit="tokens")),
        (
            caller(),
            [limit("key:lead", unit="requests", window="day")],
            limit("key:lead", unit="requests", window="day"),
        ),
        (caller(), [limit("key:*", unit="tokens"), limit("key:lead", action="count")], limit("key:*", unit="tokens")),
        (caller(team="search"), [OWN, limit("team:search", unit="tokens")], OWN),
        (caller(team="search"), [limit("key:*", unit="tokens"), limit("team:search", unit="tokens")], None),
    ],
)
def test_the_keys_of_a_limited_key_count_for_a_limit_that_it_is_bound_to_or_it_makes_none(
    maker: Caller, limits: list[Limit], held_by: Limit | None
) -> None:
    objection = objection_to_keys(maker, limits)
    assert (objection is None) == (held_by is None)
    assert held_by is None or f"'lead' is limited itself ({held_by.id})" in str(objection)


@each_row(
    ("changer", "scope", "is_refused"),
    [
        (caller(), "key:lead", True),
        (caller(), "key:*", True),
        (caller(), "key:* within model:m", True),
        (caller(), "key:other", False),
        (caller(), "plane", False),
        (caller("approve"), "key:lead", False),
        (caller("operate"), "key:*", False),
        (caller(kind="person"), "key:lead", False),
        (caller(team="search"), "key:lead within team:search", True),
        (caller(team="search"), "user:* within team:search", False),
    ],
)
def test_nobody_changes_a_limit_on_his_own_key_who_may_not_raise_it(
    changer: Caller, scope: str, is_refused: bool
) -> None:
    if not is_refused:
        check_rights(changer, parse_scope(scope))
        return
    with pytest.raises(LimitRefusedError, match="own key"):
        check_rights(changer, parse_scope(scope))
