"""The health of agents and of their models."""

from __future__ import annotations

from breakwater.breakers.contract import AgentHealth, ModelHealth
from breakwater.breakers.views import open_until
from breakwater.kernel.columns import Cell, Column, tone_of


def _name(row: AgentHealth | ModelHealth) -> Cell:
    return f"  {row.model}" if isinstance(row, ModelHealth) else (row.agent_id, "bold")


def _breaker(row: AgentHealth | ModelHealth) -> Cell:
    if not isinstance(row, ModelHealth):
        return ""
    return ("off", "faint") if row.breaker is None else (row.breaker, tone_of(row.breaker))


def _open_until(row: AgentHealth | ModelHealth) -> str:
    if isinstance(row, ModelHealth):
        until = row.circuit_open_until  # also of the lease of a half-open breaker's probe
        return open_until(row.breaker, until, held_until=row.held_until, probe_until=until)
    return "" if row.circuit_open_until is None else open_until("open", row.circuit_open_until)


HEALTH: tuple[Column[AgentHealth | ModelHealth], ...] = (
    Column("agent, models", _name),
    Column("health", lambda row: row.health, "state"),
    Column("breaker", _breaker),
    Column("fails", lambda row: row.consecutive_failures, "count", drop=1),
    Column("last failure", lambda row: row.last_failure_at, "time", drop=2),
    Column("last success", lambda row: row.last_success_at, "time", drop=3),
    Column("open until", _open_until),
    Column("reason", lambda row: row.health_reason, below=True),
)
