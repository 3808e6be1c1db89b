"""Which of a job's metadata its costs are grouped by."""

from __future__ import annotations

from pydantic import JsonValue

from breakwater.limits.rules.ledger import MAX_LENGTH, cost_tags
from tests.tables import each_row


@each_row(
    ("value", "tag"),
    [
        ("growth", "growth"),
        ("  growth\n", "growth"),
        (4711, "4711"),
        (0, "0"),
        (2.5, "2.5"),
        (True, "true"),
        (False, "false"),
        ("é" * 200, "é" * MAX_LENGTH),
        (10**400, "1" + "0" * (MAX_LENGTH - 1)),
        ("", None),
        ("   ", None),
        (None, None),
        (float("nan"), None),
        ([1], None),
        ({"team": "growth"}, None),
    ],
)
def test_a_value_as_a_tag(value: JsonValue, tag: str | None) -> None:
    assert cost_tags(("team",), {"team": value, "other": "x"}) == ({} if tag is None else {"team": tag})


def test_only_the_keys_of_the_config_are_kept_in_its_order() -> None:
    metadata: dict[str, JsonValue] = {"project": "p", "note": "hello", "team": "t"}
    assert list(cost_tags(("team", "project", "region"), metadata).items()) == [("team", "t"), ("project", "p")]
