"""Which breakers Prometheus is shown, and with which labels."""

from typing import Any

from breakwater.breakers.contract import BreakerState
from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.config import parse_config
from breakwater.services.breaker.handlers import states_by_labels

CONFIG = parse_config("""
providers: {local: {base_url: "http://127.0.0.1:9/v1"}, other: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {provider: local, model: m, allowed_models: ["*"]}
agents:
  writer: {fallback_models: [other/n]}
  unguarded: {breaker: off}
  by-provider: {model: any, breaker: {scope: provider}}
""")


def states(*known: tuple[str, str, BreakerState]) -> dict[tuple[str, str], Any]:
    return dict(states_by_labels(CONFIG, {BreakerKey(agent, model): state for agent, model, state in known}))


UNUSED = {("writer", "m"): "closed", ("writer", "other/n"): "closed", ("*", "local/*"): "closed"}


def test_a_breaker_that_was_never_used_is_closed_and_an_agent_without_one_has_none() -> None:
    assert states() == UNUSED


def test_each_has_the_state_that_it_is_in() -> None:
    known = states(("writer", "m", "open"), ("*", "local/*", "half_open"))
    assert known == UNUSED | {("writer", "m"): "open", ("*", "local/*"): "half_open"}


def test_models_that_only_jobs_name_are_one_and_the_worst_of_them_counts() -> None:
    known = states(
        ("writer", "x", "closed"),
        ("writer", "sk-secret", "isolated"),
        ("writer", "y", "open"),
        ("*", "never/*", "open"),
    )
    assert known == UNUSED | {("writer", "other"): "isolated", ("*", "other"): "open"}


def test_an_agent_that_is_configured_no_more_has_no_breakers() -> None:
    assert states(("gone", "m", "open")) == UNUSED
