"""Caps that are edited in the file while a service runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from breakwater.config import LiveCaps, load_config

TEXT = """
providers: {p: {base_url: "http://127.0.0.1:1"}}
agents: {a: {model: m, budget: {daily_usd: 1, enforcement: hard}}}
budgets: {timezone: Europe/Berlin, tenants: {acme: {monthly_usd: 5}}}
"""
USD = 10**9


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "breakwater.yaml"
    path.write_text(TEXT)
    return path


def write(file: Path, text: str) -> None:
    """As an editor does: another file in its place."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def daily(caps: LiveCaps) -> int | None:
    return caps().counter("agent:a", "daily").limit


def looked(caps: LiveCaps) -> list[Any]:
    """What is reported when a file that changes no more was seen twice."""
    with capture_logs() as logs:
        caps.look()
        caps.look()
    return [(entry["event"], entry["log_level"]) for entry in logs]


@pytest.mark.parametrize(("cap", "nano"), [("2.5", 5 * USD // 2), ("0.25", USD // 4)])
def test_a_cap_that_is_raised_or_lowered_in_the_file_holds(file: Path, cap: str, nano: int) -> None:
    caps = LiveCaps(load_config(file), file)
    assert looked(caps) == []
    write(file, TEXT.replace("daily_usd: 1", f"daily_usd: {cap}").replace("monthly_usd: 5", "monthly_usd: 7"))
    assert looked(caps) == [("caps_changed", "info")]
    assert daily(caps) == nano
    assert caps().counter("tenant:acme", "monthly").limit == 7 * USD
    assert looked(caps) == []


@pytest.mark.parametrize(
    "text", [TEXT.replace("daily_usd: 1", "dayly_usd: 1"), "agents: {", "", TEXT.replace("Europe/Berlin", "UTC")]
)
def test_a_file_that_is_wrong_or_moves_the_days_changes_nothing_and_is_reported_once(file: Path, text: str) -> None:
    caps = LiveCaps(load_config(file), file)
    before = caps()
    write(file, text)
    assert looked(caps) == [("config_not_taken_over", "warning")]
    assert caps() is before
    assert looked(caps) == []
    write(file, TEXT.replace("daily_usd: 1", "daily_usd: 3"))
    looked(caps)
    assert daily(caps) == 3 * USD


def test_what_else_has_changed_is_reported_to_need_a_restart(file: Path) -> None:
    caps = LiveCaps(load_config(file), file)
    write(file, TEXT.replace("daily_usd: 1", "daily_usd: 2").replace("model: m,", "model: m2,"))
    assert looked(caps) == [("caps_changed", "info"), ("config_changed", "warning")]
    assert daily(caps) == 2 * USD


def test_a_file_that_is_gone_for_a_moment_changes_nothing(file: Path) -> None:
    caps = LiveCaps(load_config(file), file)
    file.unlink()
    assert looked(caps) == []
    assert daily(caps) == USD


def test_an_agent_that_is_gone_from_the_file_keeps_its_cap(file: Path) -> None:
    caps = LiveCaps(load_config(file), file)
    write(file, TEXT.replace("agents: {a:", "agents: {b:"))
    looked(caps)
    assert caps().counter("agent:a", "daily").hard_limit == USD
    assert caps().counter("agent:b", "daily").hard_limit == USD
    write(file, TEXT.replace("agents: {a:", "agents: {b:").replace("daily_usd: 1", "daily_usd: 2"))
    looked(caps)
    assert caps().counter("agent:a", "daily").hard_limit == USD
    assert caps().counter("agent:b", "daily").hard_limit == 2 * USD


def test_an_edit_between_the_reading_of_the_config_and_the_first_look_is_taken_over(file: Path) -> None:
    config = load_config(file)
    write(file, TEXT.replace("daily_usd: 1", "daily_usd: 2"))
    caps = LiveCaps(config, file)
    assert daily(caps) == USD
    assert looked(caps) == [("caps_changed", "info")]
    assert daily(caps) == 2 * USD


def test_a_file_that_is_still_being_written_is_taken_over_when_it_changes_no_more(file: Path) -> None:
    caps = LiveCaps(load_config(file), file)
    for cap in (2, 23, 234):
        file.write_text(TEXT.replace("daily_usd: 1", f"daily_usd: {cap}"))
        caps.look()
        assert daily(caps) == USD
    caps.look()
    assert daily(caps) == 234 * USD
