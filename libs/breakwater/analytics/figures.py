"""How the plane did in a window of time: in all, step by step, by agent; what failed, what was wasted, who spent what.

Executions count by when they ended, calls by when they began; dry runs are left out. What was spent is the cost of
calls. What was wasted is counted by executions, as only their end says what each call was good for: the causes of
`waste` add up to it. Money is in nano-dollars: a lower bound where amounts are unknown, None where nothing but zero is
known and something is not.

Everything is read with FINAL. What leaves much out stands in PREWHERE, which is applied before rows are replaced: that
is right, as all versions of a row are the same message, stored twice. Quantiles are those of a random sample of 8,192
where there are more: exact ones of a million take twice as long. In sums, `attempts.cost` is the column: a bare `cost`
could be the name of a sum.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal

from breakwater.analytics.client import Analytics
from breakwater.analytics.window import Window
from breakwater.contracts.types import ms_from_time

EPOCH = datetime.fromtimestamp(0, UTC)
SPARKS = 24
"""Points of an agent's small chart."""

# An execution's waste is the known part of it too. With a call of unknown cost, that call was wasted where there is no
# answer, or where the answer's cost is known: it is what the total has besides the waste.
EXECUTIONS = """
WITH
    quantiles(0.5, 0.95)(duration_ms) AS times,
    executions.wasted_cost IS NULL
        OR cost_basis = 'unknown' AND (status != 'succeeded' OR total_cost > executions.wasted_cost) AS unclear
SELECT
    if({by_agent:Bool}, agent, '') AS name,
    intDiv((toUnixTimestamp64Milli(completed_at) - {start_ms:Int64}) * {steps:Int64}, {length_ms:Int64}) AS step,
    grouping(step) AS in_all,
    count() AS executions,
    countIf(status = 'succeeded') AS succeeded,
    countIf(status = 'dead_lettered') AS dead_lettered,
    countIf(cache_hit) AS cache_hits,
    accurateCastOrNull(round(times[1]), 'UInt64') AS p50_ms,
    accurateCastOrNull(round(times[2]), 'UInt64') AS p95_ms,
    countIf(unclear) AS unknown_waste,
    if(unknown_waste = 0, ifNull(sum(executions.wasted_cost), 0), nullIf(sum(executions.wasted_cost), 0)) AS wasted
FROM executions FINAL
PREWHERE completed_at >= {start:DateTime64(3, 'UTC')} AND completed_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT dry_run
GROUP BY GROUPING SETS ((name), (name, step))
"""

ATTEMPTS = """
SELECT
    if({by_agent:Bool}, agent, '') AS name,
    intDiv((toUnixTimestamp64Milli(started_at) - {start_ms:Int64}) * {steps:Int64}, {length_ms:Int64}) AS step,
    grouping(step) AS in_all,
    countIf(NOT short_circuited) AS calls,
    countIf(NOT short_circuited AND outcome != 'success') AS failed_calls,
    countIf(cause = 'retry') AS retries,
    countIf(cause = 'fallback') AS fallbacks,
    countIf(short_circuited) AS short_circuits,
    countIf(NOT short_circuited AND attempts.cost IS NULL) AS unknown_costs,
    if(unknown_costs = 0, ifNull(sum(attempts.cost), 0), nullIf(sum(attempts.cost), 0)) AS spend
FROM attempts FINAL
PREWHERE started_at >= {start:DateTime64(3, 'UTC')} AND started_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
GROUP BY GROUPING SETS ((name), (name, step))
"""


@dataclass(frozen=True, slots=True)
class WindowTotals:
    """All that happened in a window, or in a step of it."""

    executions: int = 0
    succeeded: int = 0
    dead_lettered: int = 0
    """Neither of the two are those that were cancelled."""
    calls: int = 0
    """Attempts that called a model."""
    failed_calls: int = 0
    retries: int = 0
    fallbacks: int = 0
    short_circuits: int = 0
    """Attempts that were refused before they called."""
    cache_hits: int = 0
    p50_ms: int | None = None
    """From an execution's queueing to its end; None without executions, as `p95_ms`."""
    p95_ms: int | None = None
    spend: int | None = 0
    wasted: int | None = 0
    unknown_costs: int = 0
    """Calls whose cost is unknown; `spend` is a lower bound where there are any."""
    unknown_waste: int = 0
    """Executions that wasted an unknown amount; `wasted` is a lower bound where there are any."""

    @property
    def decided(self) -> int:
        """Executions that succeeded or failed."""
        return self.succeeded + self.dead_lettered

    @property
    def success_rate(self) -> float | None:
        """Of those that succeeded or failed, from 0 to 1; None without any."""
        return self.succeeded / self.decided if self.decided else None


@dataclass(frozen=True, slots=True)
class History:
    """A window, of all or of one agent."""

    totals: WindowTotals
    steps: tuple[WindowTotals, ...]
    """Equal parts of the window, the earliest first, and the empty ones included."""


async def history(analytics: Analytics, window: Window, *, agent: str | None = None) -> History:
    """All that happened, or what happened to one agent, by the window's steps. Raises as `Analytics.query` does."""
    found = await _histories(analytics, {**within(window, agent), "steps": window.buckets, "by_agent": False})
    return found[""] if found else History(WindowTotals(), (WindowTotals(),) * window.buckets)


async def agents(analytics: Analytics, window: Window) -> dict[str, History]:
    """Every agent that did something, by name, each with `SPARKS` steps. Raises as `Analytics.query` does."""
    return await _histories(analytics, {**within(window, None), "steps": SPARKS, "by_agent": True})


async def _histories(analytics: Analytics, parameters: dict[str, Any]) -> dict[str, History]:
    asked = [analytics.read(dict[str, Any], sql, parameters) for sql in (EXECUTIONS, ATTEMPTS)]
    found: dict[tuple[str, int | None], dict[str, Any]] = defaultdict(dict)
    for row in chain(*await asyncio.gather(*asked)):
        name, step, in_all = row.pop("name"), row.pop("step"), row.pop("in_all")
        found[name, None if in_all else step] |= row
    sums = {key: WindowTotals(**row) for key, row in found.items()}
    steps = range(parameters["steps"])
    return {
        name: History(sums[name, None], tuple(sums.get((name, step), WindowTotals()) for step in steps))
        for name in sorted({name for name, _ in sums})
    }


# What the latest error says is looked up afterwards: to read the texts of all errors takes several times as long.
ERRORS = """
WITH max((inner_last_at, agent)) AS latest
SELECT
    hash,
    any(inner_kind) AS kind,
    any(inner_class) AS class_name,
    sum(inner_calls) AS calls,
    sum(inner_unknown) AS unknown_costs,
    if(unknown_costs = 0, ifNull(sum(inner_cost), 0), nullIf(sum(inner_cost), 0)) AS cost,
    arraySort(groupUniqArray(50)(agent)) AS agents,
    arraySort(groupUniqArray(50)(model)) AS models,
    latest.1 AS last_at,
    latest.2 AS last_agent
FROM (
    SELECT
        ifNull(error_hash, '') AS hash,
        agent,
        model,
        any(error_kind) AS inner_kind,
        any(error_class) AS inner_class,
        count() AS inner_calls,
        sum(attempts.cost) AS inner_cost,
        countIf(attempts.cost IS NULL) AS inner_unknown,
        max(started_at) AS inner_last_at
    FROM attempts FINAL
    PREWHERE started_at >= {start:DateTime64(3, 'UTC')} AND started_at < {end:DateTime64(3, 'UTC')}
        AND ({agent:String} = '' OR agent = {agent:String}) AND NOT short_circuited AND error_kind IS NOT NULL
    GROUP BY hash, agent, model
)
GROUP BY hash
ORDER BY calls DESC, hash
LIMIT {limit:UInt32}
"""

MESSAGES = """
SELECT agent, model, ifNull(error_hash, '') AS hash, started_at, error_message
FROM attempts FINAL
PREWHERE started_at IN (SELECT fromUnixTimestamp64Milli(arrayJoin({times_ms:Array(Int64)}), 'UTC'))
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT short_circuited AND error_kind IS NOT NULL
ORDER BY attempt_id
"""


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """One error, whatever varies from call to call in its text."""

    hash: str
    """Its identity; empty for calls whose error has none."""
    kind: str
    class_name: str
    calls: int
    """That failed with it. Those that were refused before they called are left out."""
    cost: int | None
    unknown_costs: int
    """Calls whose cost is unknown; `cost` is a lower bound where there are any."""
    agents: tuple[str, ...]
    models: tuple[str, ...]
    last_at: datetime
    """When the latest of these calls began."""
    last_agent: str
    message: str | None = None
    """The latest wording of it."""


async def errors(
    analytics: Analytics, window: Window, *, agent: str | None = None, limit: int = 20
) -> tuple[ErrorLine, ...]:
    """The errors of calls, the most frequent first. Raises as `Analytics.query` does."""
    lines = await analytics.read(ErrorLine, ERRORS, {**within(window, agent), "limit": limit})
    messages = await _messages(analytics, (line.last_at for line in lines), agent)
    texts = {(one["agent"], one["hash"], one["started_at"]): one["error_message"] for one in messages}
    return tuple(replace(line, message=texts.get((line.last_agent, line.hash, line.last_at))) for line in lines)


async def _messages(analytics: Analytics, times: Iterable[datetime], agent: str | None) -> tuple[dict[str, Any], ...]:
    """What failed calls said that began at some moments."""
    times_ms = sorted({ms_from_time(at) for at in times})
    if not times_ms:
        return ()
    return await analytics.read(dict[str, Any], MESSAGES, {"times_ms": times_ms, "agent": agent or ""})


PROVIDERS = """
WITH quantilesIf(0.5, 0.95)(duration_ms, outcome = 'success') AS times
SELECT
    provider,
    model,
    count() AS calls,
    countIf(outcome = 'success') AS succeeded,
    countIf(error_kind = 'rate_limit') AS rate_limited,
    countIf(error_kind = 'server') AS server_errors,
    countIf(error_kind = 'timeout') AS timeouts,
    countIf(error_kind = 'network') AS lost_connections,
    accurateCastOrNull(round(times[1]), 'UInt64') AS p50_ms,
    accurateCastOrNull(round(times[2]), 'UInt64') AS p95_ms,
    countIf(attempts.cost IS NULL) AS unknown_costs,
    if(unknown_costs = 0, ifNull(sum(attempts.cost), 0), nullIf(sum(attempts.cost), 0)) AS spend,
    maxOrNullIf(started_at, error_kind IS NOT NULL) AS last_error_at
FROM attempts FINAL
PREWHERE started_at >= {start:DateTime64(3, 'UTC')} AND started_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT short_circuited
GROUP BY provider, model
ORDER BY provider, model
"""


@dataclass(frozen=True, slots=True)
class ProviderLine:
    """How a model of a provider did. Calls that were refused here are none of its doing, and left out."""

    provider: str
    model: str
    calls: int
    succeeded: int
    rate_limited: int
    server_errors: int
    timeouts: int
    lost_connections: int
    p50_ms: int | None
    """Of calls that succeeded; None without any, as `p95_ms`."""
    p95_ms: int | None
    spend: int | None
    unknown_costs: int
    """Calls whose cost is unknown; `spend` is a lower bound where there are any."""
    last_error_at: datetime | None
    """When the latest call that failed began."""
    last_error: str | None = None

    @property
    def available_share(self) -> float:
        """From 0 to 1, as in the view `provider_health`: calls that did not fail by the provider's own fault."""
        return 1 - (self.server_errors + self.timeouts + self.lost_connections) / self.calls

    @property
    def others(self) -> int:
        """Calls that failed otherwise: answers that were no use, requests that were wrong, workers that died."""
        classified = self.rate_limited + self.server_errors + self.timeouts + self.lost_connections
        return self.calls - self.succeeded - classified


async def providers(analytics: Analytics, window: Window, *, agent: str | None = None) -> tuple[ProviderLine, ...]:
    """Every model that was called, by provider. Raises as `Analytics.query` does."""
    lines = await analytics.read(ProviderLine, PROVIDERS, within(window, agent))
    messages = await _messages(analytics, (line.last_error_at for line in lines if line.last_error_at), agent)
    texts = {(one["model"], one["started_at"]): one["error_message"] for one in messages}
    return tuple(replace(line, last_error=texts.get((line.model, line.last_error_at))) for line in lines)


REFUSALS = """
SELECT
    agent,
    ifNull(error_kind, '') AS kind,
    refused_by AS by,
    NOT short_circuited AS called,
    count() AS attempts,
    max(started_at) AS last_at
FROM attempts FINAL
PREWHERE started_at >= {start:DateTime64(3, 'UTC')} AND started_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String}) AND (short_circuited OR error_kind = 'rate_limit')
GROUP BY agent, kind, by, called
ORDER BY attempts DESC, agent, kind, by
"""


@dataclass(frozen=True, slots=True)
class RefusalLine:
    """The attempts of an agent that were held back by one thing."""

    agent: str
    kind: str
    """`breakwater.contracts.execution.ErrorKind`; empty where it is unknown."""
    by: str | None
    """The budget or the limit that had no room, such as `agent:writer/daily`; None where it was neither."""
    called: bool
    """Whether the provider was asked, and refused; else nothing was called."""
    attempts: int
    last_at: datetime
    """When the latest of them began."""


async def refusals(analytics: Analytics, window: Window, *, agent: str | None = None) -> tuple[RefusalLine, ...]:
    """What was held back, the most frequent first. Raises as `Analytics.query` does."""
    return await analytics.read(RefusalLine, REFUSALS, within(window, agent))


STREAMS = """
WITH quantiles(0.5, 0.95)(first_token_ms) AS first_tokens
SELECT
    model,
    count() AS streams,
    countIf(outcome != 'success') AS broken_off,
    accurateCastOrNull(round(first_tokens[1]), 'UInt64') AS first_token_p50_ms,
    accurateCastOrNull(round(first_tokens[2]), 'UInt64') AS first_token_p95_ms,
    quantileOrNull(0.5)(attempts.tokens_per_s) AS tokens_per_s
FROM attempts FINAL
PREWHERE started_at >= {start:DateTime64(3, 'UTC')} AND started_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE first_token_ms IS NOT NULL
GROUP BY model
ORDER BY streams DESC, model
"""


@dataclass(frozen=True, slots=True)
class StreamLine:
    """The streamed answers of a model, from their beginning on."""

    model: str
    streams: int
    broken_off: int
    """Of these, the ones that failed after they had begun."""
    first_token_p50_ms: int
    first_token_p95_ms: int
    tokens_per_s: float | None
    """The median of `Attempt.tokens_per_s`; None where it is known of none."""


async def streams(analytics: Analytics, window: Window, *, agent: str) -> tuple[StreamLine, ...]:
    """How an agent's answers were streamed, the model with most of them first. Raises as `Analytics.query` does."""
    return await analytics.read(StreamLine, STREAMS, within(window, agent))


WASTE = """
SELECT agent, cause, sum(amount) AS cost, count() AS executions
FROM executions FINAL
ARRAY JOIN mapKeys(wasted_by_cause) AS cause, mapValues(wasted_by_cause) AS amount
PREWHERE completed_at >= {start:DateTime64(3, 'UTC')} AND completed_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT dry_run
GROUP BY agent, cause
ORDER BY cost DESC, agent, cause
"""


@dataclass(frozen=True, slots=True)
class WasteLine:
    """What an agent paid for nothing, for one reason."""

    agent: str
    cause: str
    """Such as `retry`: `breakwater.contracts.execution.Waste`."""
    cost: int
    """The known part of it."""
    executions: int
    """That wasted something so. One may have wasted for several reasons, and counts in each."""


async def waste(analytics: Analytics, window: Window, *, agent: str | None = None) -> tuple[WasteLine, ...]:
    """What was paid for nothing, by agent and cause, the dearest first. Raises as `Analytics.query` does."""
    return await analytics.read(WasteLine, WASTE, within(window, agent))


RETRIES = """
SELECT
    countIf(calls_by_cause['retry'] > 0) AS retried,
    countIf(calls_by_cause['retry'] > 0 AND status = 'succeeded') AS saved,
    sum(cost_by_cause['retry']) AS cost,
    countIf(calls_by_cause['fallback'] > 0) AS fell_back,
    countIf(calls_by_cause['fallback'] > 0 AND status = 'succeeded') AS saved_by_fallback
FROM executions FINAL
PREWHERE completed_at >= {start:DateTime64(3, 'UTC')} AND completed_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT dry_run
"""


@dataclass(frozen=True, slots=True)
class RetryFigures:
    """Whether trying again helped. By executions that ended in the window."""

    retried: int
    """Executions that called a model again after a failure."""
    saved: int
    """Of those, how many succeeded."""
    cost: int
    """What the calls that were retries cost: the known part of it."""
    fell_back: int
    """Executions that called another model."""
    saved_by_fallback: int
    """Of those, how many succeeded."""

    @property
    def rate(self) -> float | None:
        """How many of those that retried succeeded, from 0 to 1; None where none did retry."""
        return self.saved / self.retried if self.retried else None

    @property
    def fallback_rate(self) -> float | None:
        """The same of those that fell back."""
        return self.saved_by_fallback / self.fell_back if self.fell_back else None


async def retries(analytics: Analytics, window: Window, *, agent: str | None = None) -> RetryFigures:
    """Whether trying again helped, and what it cost. Raises as `Analytics.query` does."""
    (found,) = await analytics.read(RetryFigures, RETRIES, within(window, agent))
    return found


SPEND_BY = """
WITH sumIf(attempts.cost, outcome != 'success') AS of_failed
SELECT
    {by:Identifier} AS key,
    count() AS calls,
    countIf(attempts.cost IS NULL) AS unknown_costs,
    countIf(outcome != 'success' AND attempts.cost IS NULL) AS unknown_waste,
    if(unknown_costs = 0, ifNull(sum(attempts.cost), 0), nullIf(sum(attempts.cost), 0)) AS spend,
    if(unknown_waste = 0, ifNull(of_failed, 0), nullIf(of_failed, 0)) AS wasted
FROM attempts FINAL
PREWHERE started_at >= {start:DateTime64(3, 'UTC')} AND started_at < {end:DateTime64(3, 'UTC')}
WHERE NOT short_circuited
GROUP BY key
ORDER BY spend DESC NULLS LAST, key
LIMIT {limit:UInt32}
"""

Spender = Literal["agent", "tenant", "model"]


@dataclass(frozen=True, slots=True)
class SpendLine:
    """What calls cost, of one agent, tenant or model."""

    key: str | None
    """None for calls without a tenant."""
    spend: int | None
    wasted: int | None
    """What calls that did not succeed cost."""
    calls: int
    unknown_costs: int
    """Calls whose cost is unknown; `spend` is a lower bound where there are any."""
    unknown_waste: int
    """Those of them that did not succeed; the same of `wasted`."""


async def spend_by(analytics: Analytics, window: Window, by: Spender, limit: int = 20) -> tuple[SpendLine, ...]:
    """Who spent most on calls that began in the window. Raises as `Analytics.query` does."""
    return await analytics.read(SpendLine, SPEND_BY, {**within(window, None), "by": by, "limit": limit})


SUMMARIES_OF_EXECUTIONS = """
SELECT
    agent,
    count() AS executions,
    countIf(status = 'succeeded') AS succeeded,
    quantileExact(0.5)(duration_ms) AS p50_ms,
    quantileExact(0.95)(duration_ms) AS p95_ms
FROM executions FINAL
WHERE NOT dry_run AND completed_at >= {since:DateTime64(3, 'UTC')}
GROUP BY agent
"""

SUMMARIES_OF_ATTEMPTS = """
SELECT
    agent,
    count() AS attempts,
    countIf(cause = 'retry') AS retries,
    countIf(cause = 'fallback') AS fallbacks,
    countIf(short_circuited) AS short_circuits,
    countIf(NOT short_circuited AND attempts.cost IS NULL) AS unknown_costs,
    if(countIf(NOT short_circuited) = 0, 0, sum(attempts.cost)) AS spend,
    if(countIf(NOT short_circuited AND outcome != 'success') = 0, 0, sumIf(attempts.cost, outcome != 'success'))
        AS wasted
FROM attempts FINAL
WHERE started_at >= {since:DateTime64(3, 'UTC')}
GROUP BY agent
"""


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """How an agent did, for `breakwater agents`. Attempts count by when they began, executions by when they ended."""

    agent: str
    executions: int = 0
    succeeded: int = 0
    p50_ms: int | None = None
    """None without executions, as `p95_ms`."""
    p95_ms: int | None = None
    attempts: int = 0
    """Refused admissions included."""
    retries: int = 0
    fallbacks: int = 0
    short_circuits: int = 0
    unknown_costs: int = 0
    """Calls whose cost is unknown; `spend` is a lower bound where there are any."""
    spend: int | None = 0
    wasted: int | None = 0
    """What calls that did not succeed cost; 0 where all did."""

    @property
    def success_rate(self) -> float | None:
        """From 0 to 1; None without executions."""
        return self.succeeded / self.executions if self.executions else None


async def agent_summaries(analytics: Analytics, *, since: datetime = EPOCH) -> tuple[AgentSummary, ...]:
    """Every agent that ran since a time, by name. Raises as `Analytics.query` does."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for sql in (SUMMARIES_OF_EXECUTIONS, SUMMARIES_OF_ATTEMPTS):
        for row in await analytics.read(dict[str, Any], sql, {"since": since}):
            found[row["agent"]] |= row
    return tuple(AgentSummary(**row) for _, row in sorted(found.items()))


def within(window: Window, agent: str | None) -> dict[str, Any]:
    """The parameters that all statements over a window have."""
    return {
        "start": window.start,
        "end": window.end,
        "start_ms": window.start_ms,
        "length_ms": window.end_ms - window.start_ms,
        "agent": agent or "",
    }
