"""The health of agents and of their models."""

from __future__ import annotations

from breakwater.contracts.breakers import AgentHealth, ModelHealth
from breakwater.views.breakers import open_until
from breakwater.views.columns import Cell, Column, tone_of


def _model(one: AgentHealth | ModelHealth) -> ModelHealth | None:
    return one if isinstance(one, ModelHealth) else None


def _name(one: AgentHealth | ModelHealth) -> Cell:
    model = _model(one)
    return f"  {model.model}" if model else (one.agent_id, "bold")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def _breaker(one: AgentHealth | ModelHealth) -> Cell:
    if (model := _model(one)) is None:
        return ""
    return ("off", "faint") if model.breaker is None else (model.breaker, tone_of(model.breaker))


def _open_until(one: AgentHealth | ModelHealth) -> str:
    if model := _model(one):
        return open_until(model.breaker, model.circuit_open_until, held=model.held_until)
    return "" if one.circuit_open_until is None else open_until("open", one.circuit_open_until)


HEALTH: tuple[Column[AgentHealth | ModelHealth], ...] = (
    Column("agent, models", _name),
    Column("health", lambda one: one.health, "state"),
    Column("breaker", _breaker),
    Column("fails", lambda one: one.consecutive_failures, "count", drop=1),
    Column("last failure", lambda one: one.last_failure_at, "time", drop=2),
    Column("last success", lambda one: one.last_success_at, "time", drop=3),
    Column("open until", _open_until),
    Column("reason", lambda one: one.health_reason, below=True),
)
