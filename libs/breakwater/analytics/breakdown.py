"""What went wrong in a window of time, and with whom: errors of calls, and how providers and streams did.

Calls count by when they began. How the tables are read is explained in `overview.py`. Money is in nano-dollars, None
where nothing of it is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from breakwater.analytics.client import Analytics
from breakwater.analytics.window import CALLED, SETTINGS, Window, known_sum, within
from breakwater.contracts.types import ms_from_time

# What the latest error says is looked up afterwards: to read the texts of all errors takes several times as long.
ERRORS = f"""
SELECT
    hash,
    any(kind) AS kind,
    any(class) AS class_name,
    sum(inner_calls) AS calls,
    sum(inner_cost) AS cost,
    sum(inner_unknown) AS unknown_costs,
    arraySort(groupUniqArray(50)(agent)) AS agents,
    arraySort(groupUniqArray(50)(model)) AS models,
    max((inner_last_at, agent)) AS latest
FROM (
    SELECT
        ifNull(error_hash, '') AS hash,
        any(error_kind) AS kind,
        any(error_class) AS class,
        agent,
        model,
        count() AS inner_calls,
        sum(attempts.cost) AS inner_cost,
        countIf(attempts.cost IS NULL) AS inner_unknown,
        max(started_at) AS inner_last_at
    {CALLED}
        AND NOT short_circuited AND error_kind IS NOT NULL
    GROUP BY hash, agent, model
)
GROUP BY hash
ORDER BY calls DESC, hash
LIMIT {{limit:UInt32}}
{SETTINGS}"""  # noqa: S608  of constants

PROVIDERS = f"""
SELECT
    provider,
    model,
    count() AS calls,
    countIf(outcome = 'success') AS succeeded,
    countIf(error_kind = 'rate_limit') AS rate_limited,
    countIf(error_kind = 'server') AS server_errors,
    countIf(error_kind = 'timeout') AS timeouts,
    countIf(error_kind = 'network') AS lost_connections,
    quantilesIf(0.5, 0.95)(duration_ms, outcome = 'success') AS times,
    sum(cost) AS spend,
    countIf(cost IS NULL) AS unknown_costs,
    maxIf(started_at, error_kind IS NOT NULL) AS last_error_at
{CALLED}
WHERE NOT short_circuited
GROUP BY provider, model
ORDER BY provider, model
{SETTINGS}"""

MESSAGES = """
SELECT agent, model, ifNull(error_hash, '') AS hash, started_at, error_message
FROM attempts FINAL
PREWHERE started_at IN (SELECT fromUnixTimestamp64Milli(arrayJoin({times_ms:Array(Int64)}), 'UTC'))
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT short_circuited AND error_kind IS NOT NULL
ORDER BY attempt_id
SETTINGS do_not_merge_across_partitions_select_final = 1
"""


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """One error, whatever varies from call to call in its text."""

    hash: str
    """Its identity; empty for calls whose error has none."""
    kind: str
    class_name: str
    message: str | None
    """The latest wording of it."""
    calls: int
    """That failed with it. Those that were refused before they called are left out."""
    cost: int | None
    unknown_costs: int
    """Calls whose cost is unknown; `cost` is a lower bound where there are any."""
    agents: tuple[str, ...]
    models: tuple[str, ...]
    last_at: datetime
    """When the latest of these calls began."""


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
    last_error: str | None

    @property
    def available_share(self) -> float:
        """From 0 to 1, as in the view `provider_health`: calls that did not fail by the provider's own fault."""
        return 1 - (self.server_errors + self.timeouts + self.lost_connections) / self.calls

    @property
    def others(self) -> int:
        """Calls that failed otherwise: answers that were no use, requests that were wrong, workers that died."""
        classified = self.rate_limited + self.server_errors + self.timeouts + self.lost_connections
        return self.calls - self.succeeded - classified


async def errors(
    analytics: Analytics, window: Window, *, agent: str | None = None, limit: int = 20
) -> tuple[ErrorLine, ...]:
    """The errors of calls, the most frequent first. Raises as `Analytics.query` does."""
    rows = (await analytics.query(ERRORS, {**within(window, agent), "limit": limit})).named()
    found = [(row, *row["latest"]) for row in rows]
    messages = await _messages(analytics, (at for _, at, _ in found), agent)
    texts = {(one["agent"], one["hash"], one["started_at"]): one["error_message"] for one in messages}
    return tuple(
        ErrorLine(
            hash=row["hash"],
            kind=row["kind"],
            class_name=row["class_name"],
            message=texts.get((last_agent, row["hash"], last_at)),
            calls=row["calls"],
            cost=known_sum(row["cost"], row["unknown_costs"]),
            unknown_costs=row["unknown_costs"],
            agents=tuple(row["agents"]),
            models=tuple(row["models"]),
            last_at=last_at,
        )
        for row, last_at, last_agent in found
    )


async def providers(analytics: Analytics, window: Window, *, agent: str | None = None) -> tuple[ProviderLine, ...]:
    """Every model that was called, by provider. Raises as `Analytics.query` does."""
    found = list((await analytics.query(PROVIDERS, within(window, agent))).named())
    failing = [row for row in found if row["calls"] > row["succeeded"]]
    messages = await _messages(analytics, (row["last_error_at"] for row in failing), agent)
    texts = {(one["model"], one["started_at"]): one["error_message"] for one in messages}
    return tuple(_provider(row, texts) for row in found)


async def _messages(analytics: Analytics, times: Iterable[datetime], agent: str | None) -> list[dict[str, Any]]:
    """What failed calls said that began at some moments."""
    times_ms = sorted({ms_from_time(at) for at in times})
    if not times_ms:
        return []
    return list((await analytics.query(MESSAGES, {"times_ms": times_ms, "agent": agent or ""})).named())


def _provider(row: dict[str, Any], texts: dict[tuple[str, datetime], str | None]) -> ProviderLine:
    last_at: datetime | None = row["last_error_at"] if row["calls"] > row["succeeded"] else None
    p50_ms, p95_ms = (round(ms) for ms in row["times"]) if row["succeeded"] else (None, None)
    return ProviderLine(
        provider=row["provider"],
        model=row["model"],
        calls=row["calls"],
        succeeded=row["succeeded"],
        rate_limited=row["rate_limited"],
        server_errors=row["server_errors"],
        timeouts=row["timeouts"],
        lost_connections=row["lost_connections"],
        p50_ms=p50_ms,
        p95_ms=p95_ms,
        spend=known_sum(row["spend"], row["unknown_costs"]),
        unknown_costs=row["unknown_costs"],
        last_error_at=last_at,
        last_error=None if last_at is None else texts.get((row["model"], last_at)),
    )


REFUSALS = f"""
SELECT
    agent,
    ifNull(error_kind, '') AS kind,
    refused_by AS by,
    NOT short_circuited AS called,
    count() AS attempts,
    max(started_at) AS last_at
{CALLED}
    AND (short_circuited OR error_kind = 'rate_limit')
GROUP BY agent, kind, by, called
ORDER BY attempts DESC, agent, kind, by
{SETTINGS}"""


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
    found = await analytics.query(REFUSALS, within(window, agent))
    return tuple(RefusalLine(**row) for row in found.named())


STREAMS = f"""
SELECT
    model,
    count() AS streams,
    countIf(outcome != 'success') AS broken_off,
    quantiles(0.5, 0.95)(first_token_ms) AS first_tokens,
    quantileOrNull(0.5)(tokens_per_s) AS rate
{CALLED}
WHERE first_token_ms IS NOT NULL
GROUP BY model
ORDER BY streams DESC, model
{SETTINGS}"""


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
    found: list[StreamLine] = []
    for row in (await analytics.query(STREAMS, within(window, agent))).named():
        p50_ms, p95_ms = (round(ms) for ms in row["first_tokens"])
        found.append(StreamLine(row["model"], row["streams"], row["broken_off"], p50_ms, p95_ms, row["rate"]))
    return tuple(found)
