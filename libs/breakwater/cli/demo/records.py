"""What the run left behind, read back: the provider's ledger, Redis' counters, ClickHouse's rows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, TypeVar

import aiohttp

from breakwater.analytics.client import Analytics
from breakwater.analytics.queries import AgentSummary, agent_summaries
from breakwater.cli.demo.reconciliation import ProviderCall, RedisCounters
from breakwater.cli.errors import unreachable
from breakwater.contracts.types import nano_from_usd
from breakwater.policy.budget import periods_since
from breakwater.policy.ledger import Figures
from breakwater.state.budget_counters import BudgetCounters

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=10)


@dataclass(frozen=True, slots=True)
class ExecutionRow:
    """A row of `executions`."""

    execution_id: str
    agent: str
    status: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """A row of `attempts`. `cost` in nano-dollars, None where it is unknown."""

    attempt_id: str
    execution_id: str
    number: int
    agent: str
    model: str
    cost: int | None
    cost_basis: str
    outcome: str
    short_circuited: bool
    cause: str
    backoff_ms: int
    error_kind: str | None
    error_status_code: int | None


@dataclass(frozen=True, slots=True)
class TransitionRow:
    """A row of `breaker_transitions`."""

    agent: str
    model: str
    to_state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rows:
    """What ClickHouse holds. Transitions are in order for each breaker, attempts for each execution."""

    agents: tuple[AgentSummary, ...]
    executions: tuple[ExecutionRow, ...]
    attempts: tuple[AttemptRow, ...]
    transitions: tuple[TransitionRow, ...]
    incident_ids: frozenset[str]


async def read_rows(analytics: Analytics) -> Rows:
    """Reads ClickHouse. Raises AnalyticsError."""
    attempts = await _select(analytics, AttemptRow, "attempts", "execution_id, number")
    return Rows(
        agents=await agent_summaries(analytics),
        executions=await _select(analytics, ExecutionRow, "executions", "execution_id"),
        attempts=tuple(
            replace(row, cost=None if row.cost is None else nano_from_usd(str(row.cost))) for row in attempts
        ),
        transitions=await _select(analytics, TransitionRow, "breaker_transitions", "agent, model, version, at"),
        incident_ids=frozenset(row[0] for row in (await analytics.query("SELECT incident_id FROM incidents")).rows),
    )


async def _select(analytics: Analytics, kind: type[T], table: str, order: str) -> tuple[T, ...]:
    columns = ", ".join(field.name for field in fields(kind))  # pyright: ignore[reportArgumentType]  # is a dataclass
    found = await analytics.query(f"SELECT {columns} FROM {table} FINAL ORDER BY {order}")  # noqa: S608  constants
    return tuple(kind(*row) for row in found.rows)


async def count_executions(analytics: Analytics) -> int:
    """How many executions ClickHouse holds. Raises AnalyticsError."""
    answer = await analytics.query("SELECT count() FROM executions FINAL")
    return int(answer.rows[0][0])


@dataclass(frozen=True, slots=True)
class ProviderLedger:
    """The provider's ledger: the calls that have ended, and how many have not."""

    calls: tuple[ProviderCall, ...]
    in_progress: int


async def read_ledger(control_url: str) -> ProviderLedger:
    """Asks the simulated provider. Raises CliError."""
    report = await _provider("GET", f"{control_url}/_sim/ledger")
    ended = [call for call in report["calls"] if call["delivered"] is not None]
    calls = tuple(ProviderCall(call["client_request_id"], call["model"], call["cost_nano"]) for call in ended)
    return ProviderLedger(calls, report["totals"]["in_progress"])


async def start_clock(control_url: str) -> None:
    """Begins the provider's windows of trouble now. Raises CliError."""
    await _provider("POST", f"{control_url}/_sim/start")


async def _provider(method: str, url: str) -> Any:
    try:
        async with (
            aiohttp.ClientSession(raise_for_status=True, timeout=_TIMEOUT) as session,
            session.request(method, url) as response,
        ):
            return await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise unreachable(
            f"the simulated provider does not answer {url}: {str(error) or type(error).__name__}"
        ) from error


async def read_counters(counters: BudgetCounters, begun: datetime, now: datetime) -> dict[str, RedisCounters]:
    """Redis' counters by budget key (`global`, `agent:<name>`), over the run's days. Raises StateUnavailable."""
    # A run across midnight has two days.
    days = [period for period in periods_since(begun, now, counters.zone) if period.window == "daily"]
    snapshot = await counters.snapshot(days)
    sums: dict[str, RedisCounters] = {}
    for counted in snapshot.periods:
        for key in {*counted.figures, *counted.reserved}:
            known, added = sums.get(key, RedisCounters()), counted.figures.get(key, Figures())
            sums[key] = RedisCounters(
                calls=known.calls + added.calls,
                spent=known.spent + added.spent,
                reserved=known.reserved + counted.reserved.get(key, 0),
            )
    return sums
