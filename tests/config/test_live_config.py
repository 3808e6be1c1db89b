"""The config of a running service, replaced as a whole; and what is said of the difference."""

from __future__ import annotations

import pytest

from breakwater.config import Config, LiveConfig, changes, parse_config, require_reloadable
from breakwater.kernel.errors import ConfigError

TEXT = """
providers: {p: {base_url: "http://127.0.0.1:1", api_key: {env: SOME_KEY}}}
models: {m: {price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}
agents:
  a: {model: m, system_prompt: Be kind., budget: {daily_usd: 1, enforcement: hard}}
  b: {model: m}
budgets: {timezone: Europe/Berlin, tenants: {acme: {monthly_usd: 5}}}
"""
USD = 10**9


def edited(*replacements: tuple[str, str]) -> Config:
    text = TEXT
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return parse_config(text)


@pytest.mark.parametrize(("cap", "nano"), [("2.5", 5 * USD // 2), ("0.25", USD // 4)])
def test_a_cap_that_is_raised_or_lowered_holds(cap: str, nano: int) -> None:
    live = LiveConfig(parse_config(TEXT))
    live.reload(edited(("daily_usd: 1", f"daily_usd: {cap}"), ("monthly_usd: 5", "monthly_usd: 7")))
    assert live.limits().counter("agent:a", "daily").limit == nano
    assert live.limits().counter("tenant:acme", "monthly").limit == 7 * USD


def test_an_agent_that_is_removed_stays_under_its_cap() -> None:
    live = LiveConfig(parse_config(TEXT))
    live.reload(edited(("  a: {model", "  c: {model")))
    assert live.limits().counter("agent:a", "daily").limit == USD


def test_another_time_zone_is_no_reload() -> None:
    require_reloadable(parse_config(TEXT), edited(("daily_usd: 1", "daily_usd: 2")))
    with pytest.raises(ConfigError, match="timezone"):
        require_reloadable(parse_config(TEXT), edited(("Europe/Berlin", "UTC")))


def test_a_version_is_that_of_the_settings_and_not_of_their_text() -> None:
    version = parse_config(TEXT).version
    assert parse_config(TEXT + "# a comment\n").version == version
    assert edited(("  b: {model: m}", "  b: {model: m, timeout_s: 30}")).version == version  # as it is by default
    assert edited(("  b: {model: m}", "  b: {model: m, timeout_s: 31}")).version != version
    assert edited(("Be kind.", "Be short.")).version != version


def test_changes_are_listed_without_prompts_and_addresses() -> None:
    after = edited(
        ("Be kind.", "Be short."),
        ("http://127.0.0.1:1", "http://127.0.0.1:2/s3cret"),
        ("input_usd_per_mtok: 1", "input_usd_per_mtok: 3"),
        ("  b: {model: m}", "  c: {model: m, max_tokens: 5}"),
    )
    assert changes(parse_config(TEXT), after) == (
        "providers.p.base_url: changed",
        "models.m.price.input_usd_per_mtok: 1.000000000 → 3.000000000",
        "agents.a.system_prompt: changed",
        "agents.b: removed",
        "agents.c: added",
    )
    assert changes(after, after) == ()
