from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from breakwater.jobs.rules.ownership import cache_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=3,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)
QUESTIONS = st.fixed_dictionaries(
    {
        "agent": st.text(max_size=6),
        "tenant": st.none() | st.text(max_size=6),
        "requested_model": st.text(max_size=6),
        "messages": st.lists(OBJECTS, max_size=3),
        "input": JSON,
        "params": OBJECTS,
        "schema": JSON,
    }
)
PLAIN: dict[str, Any] = {
    "agent": "a", "tenant": None, "requested_model": "m", "messages": [], "input": None, "params": {}, "schema": None,
}  # fmt: skip


def written(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def turned(value: Any) -> Any:
    """The same JSON with the keys of every object in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(item) for key, item in reversed(value.items())}
    return [turned(item) for item in value] if isinstance(value, list) else value


@given(QUESTIONS)
def test_the_order_of_keys_does_not_matter(question: dict[str, Any]) -> None:
    assert cache_key(**question) == cache_key(**turned(question))


@given(QUESTIONS, QUESTIONS, st.sampled_from(sorted(PLAIN)))
def test_any_other_part_is_another_key(one: dict[str, Any], two: dict[str, Any], part: str) -> None:
    assume(written(one[part]) != written(two[part]))
    assert cache_key(**one) != cache_key(**(one | {part: two[part]}))


@given(QUESTIONS, QUESTIONS)
def test_two_questions_have_one_key_exactly_if_they_are_the_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert (cache_key(**one) == cache_key(**two)) == (written(one) == written(two))


def test_parts_do_not_run_into_each_other() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ('a","tenant":"b', "c")]
    assert len({cache_key(**(PLAIN | {"agent": agent, "requested_model": model})) for agent, model in pairs}) == 4


def test_what_is_written_differently_is_different() -> None:
    temperatures: list[Any] = [
        {"t": 1},
        {"t": 1.0},
        {"t": True},
        {"t": "1"},
        {"t": None},
        {},
        {"t": 0.1 + 0.2},
        {"t": 0.3},
    ]
    assert len({cache_key(**(PLAIN | {"params": params})) for params in temperatures}) == len(temperatures)
    tenants = [None, "", "null", "None"]
    assert len({cache_key(**(PLAIN | {"tenant": tenant})) for tenant in tenants}) == len(tenants)
    assert cache_key(**(PLAIN | {"messages": [{"a": 1}, {"b": 1}]})) != cache_key(
        **(PLAIN | {"messages": [{"b": 1}, {"a": 1}]})
    )


def test_a_key_stays_what_it_is_from_one_version_to_the_next() -> None:
    question: dict[str, Any] = PLAIN | {
        "messages": [{"role": "user", "content": "schön \ud800"}],
        "params": {"n": 10**30},
    }
    assert cache_key(**question) == "v1:58ae76266d039d1f236fffefb942873750456c0f3b4e679ad6caf57be39305cf"
    assert re.fullmatch(r"v1:[0-9a-f]{64}", cache_key(**PLAIN))
