"""Settings that are changed in the text of a config, whose comments and order stay."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.config.edit import SettingPath, with_settings
from breakwater.kernel.errors import ConfigError
from tests.tables import each_row

CONFIG = """\
# of Zoë's team
agents:
  writer:   # writes
    model: m/small
    timeout_s: 30   # seconds
    fallback_models:
      - m/dear   # the best
      # in between
      - "m/mini" # the least
    breaker: {cooldown_s: 60, same_error: off}
    guard:
      max_iterations: 10

      # ten dollars
      max_cost_usd: 10
    system_prompt: |
      Write well.

  # the other one
  'reader':
    model: m/small
    fallback_models: [m/dear, m/mini]   # two
limits: {}
budgets:
  limits:
    - {scope: plane, usd: 9, per: month}
    - scope: "team:*"   # each
      usd: 5   # for now
      per: day
"""


@each_row(
    ("path", "value", "before", "after"),
    [
        (("agents", "writer", "timeout_s"), 7.5, "timeout_s: 30   # seconds", "timeout_s: 7.5   # seconds"),
        (("agents", "writer", "breaker", "cooldown_s"), 15, "cooldown_s: 60,", "cooldown_s: 15,"),
        (("agents", "writer", "breaker", "errors"), 5, "same_error: off}", "same_error: off, errors: 5}"),
        (("budgets", "limits", "0", "usd"), 12, "usd: 9,", "usd: 12,"),
        (("budgets", "limits", "1", "usd"), 7.5, "usd: 5   # for now", "usd: 7.5   # for now"),
        (("limits", "streams"), 1, "limits: {}", "limits: {streams: 1}"),
        (
            ("agents", "writer", "guard", "max_tokens"),
            1000,
            "      max_cost_usd: 10\n",
            "      max_cost_usd: 10\n      max_tokens: 1000\n",
        ),
        (
            ("agents", "writer", "retry", "max_attempts"),
            5,
            "      Write well.\n",
            "      Write well.\n    retry: {max_attempts: 5}\n",
        ),
        (
            ("agents", "reader", "fallback_models"),
            ["m/mini", "m/dear"],
            "[m/dear, m/mini]   # two",
            "[m/mini, m/dear]   # two",
        ),
        (("agents", "reader", "fallback_models"), ["m/mini"], "[m/dear, m/mini]   # two", "[m/mini]   # two"),
        (
            ("agents", "writer", "fallback_models"),
            ["m/mini", "m/dear"],
            '- m/dear   # the best\n      # in between\n      - "m/mini" # the least',
            '- "m/mini" # the least\n      # in between\n      - m/dear   # the best',
        ),
    ],
)
def test_a_setting_is_changed_where_it_is_and_nothing_else(
    path: SettingPath, value: Any, before: str, after: str
) -> None:
    assert CONFIG.count(before) == 1
    assert with_settings(CONFIG, {path: value}) == CONFIG.replace(before, after)


@each_row(
    ("text", "path"),
    [
        ("a: &rules {x: 1}\nb: *rules\n", ("b", "x")),
        ("a: &value 1\nb: *value\n", ("a",)),
        ("a: [1, 2]\n", ("a", "x")),
        ("a: off\n", ("a", "x")),
        ("a:\n  - 1\n  - 2\n", ("a",)),
        ("a: [\n", ("a",)),
        ("", ("a",)),
    ],
)
def test_a_setting_that_cannot_be_changed_alone_is_left_to_a_person(text: str, path: SettingPath) -> None:
    with pytest.raises(ConfigError, match="can't be changed alone in this file; set it to"):
        with_settings(text, {path: [3]})


def test_a_key_that_is_merged_in_is_set_for_its_section_alone() -> None:
    text = "base: &base {x: 1, y: 2}\na:\n  <<: *base\nb:\n  <<: *base\n"
    assert yaml.safe_load(with_settings(text, {("a", "x"): 3}))["b"] == {"x": 1, "y": 2}
    assert yaml.safe_load(with_settings(text, {("a", "x"): 3}))["a"] == {"x": 3, "y": 2}


NAMES = st.sampled_from(["a", "b", "c d", "é", "on"])
DOCUMENTS = st.recursive(
    st.one_of(st.integers(0, 99), st.sampled_from(["x", "no", "zwölf", "two\nlines\n", "#1"])),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(st.sampled_from("xyz"), max_size=3, unique=True),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    st.dictionaries(NAMES, DOCUMENTS, min_size=1, max_size=3),
    st.lists(NAMES, min_size=1, max_size=3),
    st.integers(100, 200),
    st.sampled_from([None, True, False]),
)
def test_whatever_the_form_of_a_config_the_value_is_the_only_thing_that_changes(
    document: dict[str, Any], path: list[str], value: int, flow: bool | None
) -> None:
    text = yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True)
    try:
        changed = yaml.safe_load(with_settings(text, {tuple(path): value}))
    except ConfigError:
        section: Any = document
        for name in path[:-1]:
            section = section.get(name, {}) if isinstance(section, dict) else None
        assert not isinstance(section, dict) or isinstance(section.get(path[-1]), dict | list)
        return
    section = document
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value
    assert changed == document
