"""Figures of a window of time: totals, steps, agents, failures, waste, providers, spenders. Statements: `figures.sql`.

Executions count by when they ended, calls by when they began; dry runs are left out. Spend is the cost of calls. Waste
is counted by executions, as only their end says what each call was good for: the causes of `waste` add up to it. Money
is in nano-dollars: a lower bound where amounts are unknown, None where nothing but zero is known and something is not.

All functions raise as `Analytics.query` does.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal

from breakwater.kernel.clickhouse.client import Analytics, statements
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import ms_from_time

SQL = statements(__file__)
EPOCH = datetime.fromtimestamp(0, UTC)
SPARKS = 24
"""Points of an agent's small chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackFigures:
    """The answers of fallback models among those that models gave."""

    answered: int = 0
    """Executions that a model answered: neither failed, nor answered from the cache."""
    fell_back: int = 0
    """Those of them that another model than the requested one answered."""
    fallback_cost: int = 0
    """The cost of the answers of fallbacks whose `requested_model_cost` is known."""
    requested_model_cost: int = 0
    """The cost that the same answers would have had on the requested model."""

    @property
    def fallback_share(self) -> float | None:
        """The share of `answered` that fallbacks answered, from 0 to 1; None without any."""
        return self.fell_back / self.answered if self.answered else None

    @property
    def fallback_cost_factor(self) -> float | None:
        """The cost of the answers of fallbacks as a multiple of that on the requested model; None if unknown."""
        return self.fallback_cost / self.requested_model_cost if self.requested_model_cost else None


@dataclass(frozen=True, slots=True)
class WindowTotals(FallbackFigures):
    """Totals of a window, or of a step of it."""

    executions: int = 0
    succeeded: int = 0
    dead_lettered: int = 0
    """Cancelled executions count as neither."""
    calls: int = 0
    """Attempts that called a model."""
    failed_calls: int = 0
    retries: int = 0
    fallbacks: int = 0
    short_circuits: int = 0
    """Attempts that were refused before they called."""
    cache_hits: int = 0
    p50_ms: int | None = None
    """The time from the queueing of an execution to its end; None, as `p95_ms` is, without executions."""
    p95_ms: int | None = None
    spend: int | None = 0
    wasted: int | None = 0
    unknown_costs: int = 0
    """The number of calls of unknown cost; with any, `spend` is a lower bound."""
    unknown_waste: int = 0
    """The number of executions that wasted an unknown amount; with any, `wasted` is a lower bound."""

    @property
    def decided(self) -> int:
        """Executions that succeeded or failed."""
        return self.succeeded + self.dead_lettered

    @property
    def success_rate(self) -> float | None:
        """The share of `decided` that succeeded, from 0 to 1; None without any."""
        return self.succeeded / self.decided if self.decided else None


@dataclass(frozen=True, slots=True)
class History:
    """A window, of all agents or of one."""

    totals: WindowTotals
    steps: tuple[WindowTotals, ...]
    """Equal parts of the window, the earliest first; empty ones are included."""


async def history(analytics: Analytics, window: TimeWindow, *, agent: str | None = None) -> History:
    """The window's totals and steps, of all agents or of one."""
    histories = await _histories(analytics, {**within(window, agent), "steps": window.buckets, "by_agent": False})
    return histories[""] if histories else History(WindowTotals(), (WindowTotals(),) * window.buckets)


async def agents(analytics: Analytics, window: TimeWindow) -> dict[str, History]:
    """The history of every agent that was active, by name, each with `SPARKS` steps."""
    return await _histories(analytics, {**within(window, None), "steps": SPARKS, "by_agent": True})


async def _histories(analytics: Analytics, parameters: dict[str, Any]) -> dict[str, History]:
    queries = [analytics.read(dict[str, Any], SQL[name], parameters) for name in ("executions", "attempts")]
    merged_rows: dict[tuple[str, int | None], dict[str, Any]] = defaultdict(dict)
    for row in chain(*await asyncio.gather(*queries)):
        name = row.pop("name")
        step = row.pop("step")
        of_whole_window = row.pop("in_all")
        merged_rows[name, None if of_whole_window else step] |= row
    sums = {key: WindowTotals(**row) for key, row in merged_rows.items()}
    steps = range(parameters["steps"])
    return {
        name: History(sums[name, None], tuple(sums.get((name, step), WindowTotals()) for step in steps))
        for name in sorted({name for name, _ in sums})
    }


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """The calls that failed with the same error, though its text varies from call to call; without refused calls."""

    hash: str
    """The error's identity; empty for calls whose error has none."""
    kind: str
    class_name: str
    calls: int
    cost: int | None
    unknown_costs: int
    """The number of calls of unknown cost; with any, `cost` is a lower bound."""
    agents: tuple[str, ...]
    models: tuple[str, ...]
    last_at: datetime
    """Beginning of the latest of these calls."""
    last_agent: str
    message: str | None = None
    """The error's latest wording."""


async def errors(
    analytics: Analytics, window: TimeWindow, *, agent: str | None = None, limit: int = 20
) -> tuple[ErrorLine, ...]:
    """The errors of calls, the most frequent first."""
    lines = await analytics.read(ErrorLine, SQL["errors"], {**within(window, agent), "limit": limit})
    messages = await _messages(analytics, (line.last_at for line in lines), agent)
    texts = {
        (message["agent"], message["hash"], message["started_at"]): message["error_message"] for message in messages
    }
    return tuple(replace(line, message=texts.get((line.last_agent, line.hash, line.last_at))) for line in lines)


async def _messages(analytics: Analytics, times: Iterable[datetime], agent: str | None) -> tuple[dict[str, Any], ...]:
    """The error messages of failed calls that began at the given moments."""
    times_ms = sorted({ms_from_time(at) for at in times})
    if not times_ms:
        return ()
    return await analytics.read(dict[str, Any], SQL["messages"], {"times_ms": times_ms, "agent": agent or ""})


@dataclass(frozen=True, slots=True)
class ProviderLine:
    """The calls of a provider's model, without those that the plane refused itself."""

    provider: str
    model: str
    calls: int
    succeeded: int
    rate_limited: int
    server_errors: int
    timeouts: int
    lost_connections: int
    p50_ms: int | None
    """The latency of calls that succeeded; None, as `p95_ms` is, without any."""
    p95_ms: int | None
    spend: int | None
    unknown_costs: int
    """The number of calls of unknown cost; with any, `spend` is a lower bound."""
    last_error_at: datetime | None
    """Beginning of the latest call that failed."""
    last_error: str | None = None

    @property
    def available_share(self) -> float:
        """The share of calls that did not fail by the provider's own fault, from 0 to 1, as in `provider_health`.

        0 without a success: a provider that refuses all calls, such as those with a wrong key, is not available.
        """
        return self.succeeded and 1 - (self.server_errors + self.timeouts + self.lost_connections) / self.calls

    @property
    def others(self) -> int:
        """Calls that failed for other reasons: useless answers, wrong requests, workers that died."""
        classified = self.rate_limited + self.server_errors + self.timeouts + self.lost_connections
        return self.calls - self.succeeded - classified


async def providers(analytics: Analytics, window: TimeWindow, *, agent: str | None = None) -> tuple[ProviderLine, ...]:
    """Every model that was called, by provider."""
    lines = await analytics.read(ProviderLine, SQL["providers"], within(window, agent))
    messages = await _messages(analytics, (line.last_error_at for line in lines if line.last_error_at), agent)
    texts = {(message["model"], message["started_at"]): message["error_message"] for message in messages}
    return tuple(replace(line, last_error=texts.get((line.model, line.last_error_at))) for line in lines)


@dataclass(frozen=True, slots=True)
class RefusalLine:
    """The attempts of an agent that one cause held back."""

    agent: str
    kind: str
    """`breakwater.jobs.contract.execution.ErrorKind`; empty where it is unknown."""
    by: str | None
    """The budget or limit that had no room, such as `agent:writer/daily`; None if it was neither."""
    called: bool
    """True if the provider refused the call; False if no call was made."""
    attempts: int
    last_at: datetime
    """Beginning of the latest of them."""


async def refusals(analytics: Analytics, window: TimeWindow, *, agent: str | None = None) -> tuple[RefusalLine, ...]:
    """Attempts that were held back, the most frequent refusal first."""
    return await analytics.read(RefusalLine, SQL["refusals"], within(window, agent))


@dataclass(frozen=True, slots=True)
class StreamLine:
    """The streamed answers of a model that had begun to arrive."""

    model: str
    streams: int
    broken_off: int
    """Streams that failed after they had begun."""
    first_token_p50_ms: int
    first_token_p95_ms: int
    tokens_per_s: float | None
    """The median of `Attempt.tokens_per_s`; None if no answer has it."""


async def streams(analytics: Analytics, window: TimeWindow, *, agent: str) -> tuple[StreamLine, ...]:
    """An agent's streamed answers, the model with most of them first."""
    return await analytics.read(StreamLine, SQL["streams"], within(window, agent))


@dataclass(frozen=True, slots=True)
class WasteLine:
    """Money that an agent paid for nothing, for one reason."""

    agent: str
    cause: str
    """Such as `retry`: `breakwater.jobs.contract.execution.Waste`."""
    cost: int
    """The known part of it."""
    executions: int
    """The executions that wasted money for this reason. An execution with several reasons counts in each."""


async def waste(analytics: Analytics, window: TimeWindow, *, agent: str | None = None) -> tuple[WasteLine, ...]:
    """Waste by agent and cause, the most expensive first."""
    return await analytics.read(WasteLine, SQL["waste"], within(window, agent))


@dataclass(frozen=True, slots=True)
class RetryFigures:
    """The success of retries and fallbacks, by executions that ended in the window."""

    retried: int
    """Executions that called a model again after a failure."""
    saved: int
    """Executions of `retried` that succeeded."""
    cost: int
    """Known cost of the calls that were retries."""
    fell_back: int
    """Executions that called another model."""
    saved_by_fallback: int
    """Executions of `fell_back` that succeeded."""

    @property
    def rate(self) -> float | None:
        """The share of `retried` that succeeded, from 0 to 1; None if no execution retried."""
        return self.saved / self.retried if self.retried else None

    @property
    def fallback_rate(self) -> float | None:
        """The share of `fell_back` that succeeded, from 0 to 1; None if no execution fell back."""
        return self.saved_by_fallback / self.fell_back if self.fell_back else None


async def retries(analytics: Analytics, window: TimeWindow, *, agent: str | None = None) -> RetryFigures:
    """The success and cost of retries and fallbacks."""
    (figures,) = await analytics.read(RetryFigures, SQL["retries"], within(window, agent))
    return figures


Spender = Literal["agent", "tenant", "model"]


@dataclass(frozen=True, slots=True)
class SpendLine:
    """The cost of the calls of one agent, tenant or model."""

    key: str | None
    """None for calls without a tenant."""
    spend: int | None
    wasted: int | None
    """Cost of calls that did not succeed."""
    calls: int
    unknown_costs: int
    """The number of calls of unknown cost; with any, `spend` is a lower bound."""
    unknown_waste: int
    """Those of them that did not succeed; with any, `wasted` is a lower bound."""


async def spend_by(analytics: Analytics, window: TimeWindow, by: Spender, limit: int = 20) -> tuple[SpendLine, ...]:
    """The largest spenders on calls that began in the window."""
    return await analytics.read(SpendLine, SQL["spend_by"], {**within(window, None), "by": by, "limit": limit})


async def first_begun(analytics: Analytics, *, since: datetime) -> datetime | None:
    """The time at which the first of the executions that ended since a time was queued; None if there are none."""
    return (await analytics.query(SQL["first_begun"], {"since": since})).rows[0][0]


@dataclass(frozen=True, slots=True)
class AgentSummary(FallbackFigures):
    """An agent's figures, for `breakwater agents`. Attempts count by when they began, executions by when they ended."""

    agent: str
    executions: int = 0
    succeeded: int = 0
    p50_ms: int | None = None
    """None, as `p95_ms` is, without executions."""
    p95_ms: int | None = None
    attempts: int = 0
    """Refused admissions included."""
    retries: int = 0
    fallbacks: int = 0
    short_circuits: int = 0
    unknown_costs: int = 0
    """The number of calls of unknown cost; with any, `spend` is a lower bound."""
    spend: int | None = 0
    wasted: int | None = 0
    """The cost of calls that did not succeed; 0 if all did."""

    @property
    def success_rate(self) -> float | None:
        """The share of executions that succeeded, from 0 to 1; None without executions."""
        return self.succeeded / self.executions if self.executions else None


async def agent_summaries(analytics: Analytics, *, since: datetime = EPOCH) -> tuple[AgentSummary, ...]:
    """Every agent that ran since a time, by name."""
    merged_rows: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in ("agent_executions", "agent_attempts"):
        for row in await analytics.read(dict[str, Any], SQL[name], {"since": since}):
            merged_rows[row["agent"]] |= row
    return tuple(AgentSummary(**row) for _, row in sorted(merged_rows.items()))


def within(window: TimeWindow, agent: str | None) -> dict[str, Any]:
    """The parameters that all statements over a window have."""
    return {
        "start": window.start,
        "end": window.end,
        "start_ms": window.start_ms,
        "length_ms": window.end_ms - window.start_ms,
        "agent": agent or "",
    }
