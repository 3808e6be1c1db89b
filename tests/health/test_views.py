"""What is shown of the health of agents and of their models."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.breakers.contract import AgentHealth
from breakwater.health.views import HEALTH
from breakwater.kernel.columns import clock
from breakwater.kernel.types import format_time
from tests.api_documents import health, model
from tests.columns import texts, tones

NOW = datetime.now(UTC)
FAILED = NOW - timedelta(minutes=3)
SUCCEEDED = NOW - timedelta(seconds=5)
LATER = NOW + timedelta(hours=2)


def agent(*models: dict[str, Any], **fields: Any) -> AgentHealth:
    times = {"last_failure_at": format_time(FAILED), "last_success_at": format_time(SUCCEEDED)}
    return AgentHealth.model_validate(health("writer", "degraded", *models) | times | fields)


def test_an_agent_shows_its_health_and_each_of_its_models_that_of_its_breaker() -> None:
    opened = model("a/large", "open", "unhealthy") | {
        "consecutive_failures": 3,
        "last_success_at": None,
        "circuit_open_until": format_time(LATER),
    }
    writer = agent(opened, model("a/small"), model("b/x", "isolated", "unhealthy"), model("tool", None))
    assert texts(HEALTH, writer) == {
        "agent, models": "writer",
        "health": "degraded",
        "fails": "0",
        "last failure": clock(FAILED),
        "last success": clock(SUCCEEDED),
        "reason": "it is degraded",
    }
    large, small, isolated, off = (texts(HEALTH, row) for row in writer.models)
    assert large["open until"].startswith(f"{clock(LATER)}, ")
    del large["open until"]
    assert large == {
        "agent, models": "  a/large",
        "health": "unhealthy",
        "breaker": "open",
        "fails": "3",
        "reason": "it is unhealthy",
    }
    assert (small["breaker"], isolated["breaker"], off["breaker"]) == ("closed", "isolated", "off")
    assert (isolated["open until"], "open until" in small, "open until" in off) == ("until reset", False, False)
    assert tones(HEALTH, writer.models[0]) == {"health": "bad", "breaker": "bad"}
    assert tones(HEALTH, writer.models[3]) == {"health": "good", "breaker": "faint"}
    assert tones(HEALTH, writer) == {"agent, models": "bold", "health": "warn"}


def test_an_agent_none_of_whose_models_may_be_called_shows_until_when() -> None:
    closed = agent(circuit_open_until=format_time(LATER))
    assert texts(HEALTH, closed)["open until"].startswith(f"{clock(LATER)}, ")


def test_a_held_model_shows_until_when_its_provider_is_left_alone() -> None:
    held = agent(model("a/large") | {"held_until": format_time(LATER)})
    assert texts(HEALTH, held.models[0])["open until"].startswith(f"held until {clock(LATER)}, ")
