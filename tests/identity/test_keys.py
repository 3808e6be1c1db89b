"""The rules of keys that the plane keeps: who may give what, how many there may be, and when they end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.identity.key_log import PlaneKey
from breakwater.identity.rules.callers import ENTROPY_BYTES, SECRET_BYTES, Caller, digest_of, mint, split
from breakwater.identity.rules.keys import MAX_KEYS, KeyRecord, KeyRefusedError, check_creation, grant_objection
from tests.tables import each_row

AT = datetime(2026, 11, 29, 10, tzinfo=UTC)
HOUR = timedelta(hours=1)
BY = {"by": "ops", "reason": None}


def key(**fields: Any) -> tuple[str, KeyRecord]:
    text, made = mint("acme-bot", entropy=b"e" * ENTROPY_BYTES, at=AT, **{"scopes": ("submit",), **fields})
    return text, KeyRecord(key=made, change="created", at=AT, **BY)


@each_row(
    ("of_caller", "of_key", "words"),
    [
        ({}, {}, None),
        ({"scopes": ("submit", "limits")}, {"scopes": ("submit", "limits")}, None),
        ({"scopes": ("limits",)}, {}, "lacks the scope submit"),
        ({}, {"scopes": ("read", "audit", "submit")}, "lacks the scope audit"),
        ({"tenants": ("a", "b")}, {"tenants": ("b",)}, None),
        ({"tenants": ("a", "b")}, {"tenants": ("b", "c")}, "bound to the tenant a and b"),
        ({"tenants": ("a",)}, {}, "bound to the tenant a"),
        ({"agents": ("a",)}, {"agents": ("b",)}, "bound to the agent a"),
        ({"models": ("m",)}, {}, "bound to the model m"),
        ({"models": ("m",)}, {"models": ("m",)}, None),
        ({"user": "ada"}, {}, "bound to the user 'ada'"),
        ({"team": "search"}, {"team": "ads"}, "bound to the team 'search'"),
        ({"user": "ada", "team": "search"}, {"user": "ada", "team": "search"}, None),
        ({"tags": {"project": "web"}}, {}, "have the tag project=web"),
        ({"tags": {"project": "web"}}, {"tags": {"project": "app"}}, "have the tag project=web"),
        ({"tags": {"project": "web"}}, {"tags": {"project": "web", "region": "eu"}}, None),
        ({"expires_at": AT + HOUR}, {}, "must not outlive it"),
        ({}, {"weight": 2}, "the weight 1, and so those of its keys have at most that"),
        ({"weight": 3}, {"weight": 3}, None),
        ({"residency": "eu"}, {}, "must not leave 'eu', and so must those of its keys"),
        ({"residency": "eu"}, {"residency": "us"}, "must not leave 'eu'"),
        ({"residency": "eu"}, {"residency": "eu-west"}, None),
        ({"residency": "eu-west"}, {"residency": "eu"}, "must not leave 'eu-west'"),
        ({"weight": 3}, {"weight": 4}, "the weight 3"),
        ({"scopes": ("submit", "limits", "operate")}, {"weight": 100}, None),
        ({"kind": "person", "scopes": ("submit", "limits")}, {"weight": 100}, None),
    ],
)
def test_a_caller_gives_a_key_no_right_that_it_lacks(
    of_caller: dict[str, Any], of_key: dict[str, Any], words: str | None
) -> None:
    rights: dict[str, Any] = {"scopes": ("submit", "read", "limits"), **of_caller}
    kind = rights.pop("kind", "key")
    objection = grant_objection(Caller(kind, "id", "maker", created_at=AT, **rights), key(**of_key)[1].key, None)
    assert (objection is None) is (words is None)
    assert (words or "") in (objection or "")


def test_there_are_so_many_keys_and_no_more() -> None:
    names = {f"key {number}" for number in range(MAX_KEYS - 1)}
    check_creation("one more", names)
    with pytest.raises(KeyRefusedError, match="10,000 keys, which is the most"):
        check_creation("one more", names | {"another"})


def test_each_secret_of_a_rotated_key_is_valid_until_its_own_end() -> None:
    first, record = key()
    second, rotated = record.rotate(b"s" * SECRET_BYTES, HOUR, at=AT, **BY)
    ending = rotated.expire(AT + 2 * HOUR, at=AT, **BY)
    plane_key = PlaneKey.of(ending, ending.json_bytes())
    assert plane_key.record == ending

    def is_valid(text: str, after: timedelta) -> bool:
        parts = split(text)
        assert parts is not None
        return plane_key.holder_by(digest_of(parts[1]), (AT + after).timestamp()) is not None

    moments = (timedelta(0), HOUR * 0.99, HOUR, 2 * HOUR)
    assert [is_valid(first, after) for after in moments] == [True, True, False, False]
    assert [is_valid(second, after) for after in moments] == [True, True, True, False]
    assert not is_valid(f"{second}x", timedelta(0))
    slow_clock = (AT - HOUR).timestamp()
    for ended in (ending.revoke(at=AT, **BY), ending.expire(AT - HOUR, at=AT, **BY)):
        assert ended.state(AT) == "revoked"
        assert not PlaneKey.of(ended, ended.json_bytes()).is_active(slow_clock)
        assert PlaneKey.of(ending, ending.json_bytes()).is_active(slow_clock)
        with pytest.raises(KeyRefusedError, match="was revoked"):
            ended.rotate(b"s" * SECRET_BYTES, HOUR, at=AT, **BY)
    replaced = record.rotate(b"s" * SECRET_BYTES, timedelta(0), at=AT, **BY)[1]
    first_parts = split(first)
    assert first_parts is not None
    assert PlaneKey.of(replaced, replaced.json_bytes()).holder_by(digest_of(first_parts[1]), slow_clock) is None
    with pytest.raises(KeyRefusedError, match="has expired"):
        ending.expire(None, at=AT + 2 * HOUR, **BY)


def test_a_record_is_kept_a_month_beyond_its_end_however_far_that_is() -> None:
    record = key()[1]
    assert record.kept_s is None
    assert record.expire(AT + HOUR, at=AT, **BY).kept_s == 30 * 86_400 + 3_600
    assert record.revoke(at=AT, **BY).kept_s == 30 * 86_400
    assert record.expire(datetime.max.replace(tzinfo=UTC), at=AT, **BY).kept_s is None
