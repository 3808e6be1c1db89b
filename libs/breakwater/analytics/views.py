"""The views: figures that are right whatever was delivered twice, by the minute, the hour, the day and the opening.

Each is a plain view over FINAL, and not a table that a materialized view adds to: that one sees every insert and not
the rows that stay, so a batch that the bus delivers twice would count twice, in executions and in dollars. Computing it
when asked costs a read of the asked time only, as minutes, hours and days follow from the sorting key or an index.

The names are public: they stand in people's dashboards. Columns may be added. A sum is NULL where nothing of it is
known. Executions count in the minute in which they ended, without dry runs; attempts in the one in which they began.
"""

from __future__ import annotations

from breakwater.analytics.table import PLAIN, Layout

# In the views, `attempts.cost` is the column: a bare `cost` would be the sum of that name.

EXECUTIONS_PER_MINUTE = """
SELECT
    agent,
    toStartOfMinute(completed_at) AS minute,
    count() AS executions,
    countIf(status = 'succeeded') AS succeeded,
    countIf(status = 'dead_lettered') AS dead_lettered,
    sum(attempts_count) AS attempts,
    sum(total_tokens) AS tokens,
    sum(total_cost) AS cost,
    sum(executions.wasted_cost) AS wasted_cost,
    countIf(cost_basis = 'unknown') AS executions_of_unknown_cost,
    avg(duration_ms) AS average_duration_ms,
    quantileExact(0.5)(duration_ms) AS p50_ms,
    quantileExact(0.95)(duration_ms) AS p95_ms,
    countIf(cache_hit) AS cache_hits
FROM executions FINAL
WHERE NOT dry_run
GROUP BY agent, minute
"""

ATTEMPTS_PER_MINUTE = """
SELECT
    toStartOfMinute(started_at) AS minute,
    agent,
    provider,
    model,
    countIf(NOT short_circuited) AS calls,
    countIf(NOT short_circuited AND outcome = 'success') AS succeeded,
    countIf(NOT short_circuited AND outcome != 'success') AS failed,
    countIf(short_circuited) AS short_circuits,
    countIf(cause = 'retry') AS retries,
    countIf(cause = 'fallback') AS fallbacks,
    sum(attempts.input_tokens) AS input_tokens,
    sum(attempts.output_tokens) AS output_tokens,
    sum(attempts.cached_tokens) AS cached_tokens,
    if(calls = 0, toDecimal128(0, 9), sumIf(cost, NOT short_circuited)) AS spend,
    if(failed = 0, toDecimal128(0, 9), sumIf(cost, NOT short_circuited AND outcome != 'success')) AS wasted,
    countIf(NOT short_circuited AND cost IS NULL) AS unknown_costs,
    quantileExactOrNullIf(0.5)(duration_ms, NOT short_circuited) AS p50_ms,
    quantileExactOrNullIf(0.95)(duration_ms, NOT short_circuited) AS p95_ms,
    quantileExactOrNullIf(0.99)(duration_ms, NOT short_circuited) AS p99_ms,
    countIf(first_token_ms IS NOT NULL) AS streams,
    quantileExactOrNull(0.5)(first_token_ms) AS first_token_p50_ms,
    quantileExactOrNull(0.95)(first_token_ms) AS first_token_p95_ms,
    quantileExactOrNull(0.5)(tokens_per_s) AS p50_tokens_per_s
FROM attempts FINAL
GROUP BY minute, agent, provider, model
"""
"""`short_circuits` made no call: a breaker, a budget or a limit refused it. Where there were no others, times are NULL.

`wasted` is the cost of calls that failed. What was wasted by executions as a whole, answers that were thrown away
included, is in `waste_per_minute`."""

ERRORS_PER_MINUTE = """
SELECT
    toStartOfMinute(started_at) AS minute,
    agent,
    provider,
    model,
    ifNull(error_kind, 'unknown') AS kind,
    count() AS errors,
    sum(attempts.cost) AS cost,
    argMax(error_message, (started_at, attempt_id)) AS latest_message
FROM attempts FINAL
WHERE outcome != 'success'
GROUP BY minute, agent, provider, model, kind
"""
"""What was refused before it was called is among them, as `breaker_open`, `budget_exceeded` and so on."""

WASTE_PER_MINUTE = """
SELECT
    toStartOfMinute(completed_at) AS minute,
    agent,
    cause,
    sum(amount) AS cost,
    count() AS executions
FROM executions FINAL
ARRAY JOIN mapKeys(wasted_by_cause) AS cause, mapValues(wasted_by_cause) AS amount
WHERE NOT dry_run
GROUP BY minute, agent, cause
"""

RETRIES_PER_DAY = """
SELECT
    toDate(completed_at) AS day,
    agent,
    count() AS executions,
    countIf(calls_by_cause['retry'] > 0) AS retried,
    countIf(calls_by_cause['retry'] > 0 AND status = 'succeeded') AS saved,
    if(retried = 0, NULL, saved / retried) AS retry_success_rate,
    sum(cost_by_cause['retry']) AS cost_of_retries,
    countIf(calls_by_cause['fallback'] > 0) AS fell_back,
    countIf(calls_by_cause['fallback'] > 0 AND status = 'succeeded') AS saved_by_fallback,
    if(fell_back = 0, NULL, saved_by_fallback / fell_back) AS fallback_success_rate,
    sum(cost_by_cause['fallback']) AS cost_of_fallbacks
FROM executions FINAL
WHERE NOT dry_run
GROUP BY day, agent
"""
"""Of what calls were made; a retry that the breaker refused is none. Costs are their known part."""

BREAKER_OPENINGS = """
SELECT
    agent,
    model,
    scope,
    tupleElement(argMin((t.rule, t.reason), (at, version, event_sequence)) AS first, 1) AS rule,
    tupleElement(first, 2) AS reason,
    min(at) AS opened_at,
    maxOrNullIf(at, to_state = 'closed') AS closed_at,
    dateDiff('millisecond', opened_at, ifNull(closed_at, now64(3, 'UTC'))) AS open_ms
FROM
(
    SELECT *, countIf(to_state = 'closed') OVER earlier AS closings
    FROM breaker_transitions FINAL
    WINDOW earlier AS (
        PARTITION BY agent, model, scope
        ORDER BY at, version, event_sequence
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
) AS t
GROUP BY agent, model, scope, closings
HAVING countIf(to_state != 'closed') > 0
"""
"""One row for each time that a breaker opened or was isolated, with why. What it did until it closed, such as probes
that failed, is part of it; one that is open is so until now, and `closed_at` is NULL.

A tuple of rule and reason, as `argMin` alone passes over NULL and would return the rule of a later change."""

PROVIDER_HEALTH = """
SELECT
    toStartOfMinute(started_at) AS minute,
    provider,
    model,
    count() AS calls,
    1 - countIf(error_kind IN ('server', 'timeout', 'network')) / calls AS availability,
    countIf(error_kind = 'rate_limit') AS rate_limited,
    countIf(error_kind = 'server') AS server_errors,
    countIf(error_kind = 'timeout') AS timeouts,
    quantileExact(0.95)(duration_ms) AS p95_ms
FROM attempts FINAL
WHERE NOT short_circuited
GROUP BY minute, provider, model
"""
"""`availability`, from 0 to 1: the calls that did not fail by the provider's own fault, which errors of the server,
timeouts and lost connections are. A call that came too often was answered, and is counted beside."""

ESTIMATE_ACCURACY = """
SELECT
    toDate(started_at) AS day,
    agent,
    model,
    count() AS calls,
    sum(attempts.reserved) AS reserved,
    sum(attempts.cost) AS cost,
    if(reserved = 0, NULL, toFloat64(cost) / toFloat64(reserved)) AS ratio,
    countIf(attempts.cost > attempts.reserved) AS exceeded
FROM attempts FINAL
WHERE outcome = 'success' AND cost_basis = 'billed'
    AND attempts.cost IS NOT NULL AND attempts.reserved IS NOT NULL
GROUP BY day, agent, model
"""
"""What was held in the budgets for calls against what they cost. Only calls that were answered and billed count."""

SPEND_PER_HOUR = """
SELECT
    toStartOfHour(ifNull(reserved_at, started_at)) AS hour,
    agent,
    tenant,
    model,
    sum(cost) AS spend,
    count() AS calls
FROM attempts FINAL
WHERE NOT short_circuited
GROUP BY hour, agent, tenant, model
"""
"""By the moment that a call is charged at in its budgets, so that hours add up to what they count, in any time zone
whose offset is of whole hours."""

INCIDENTS = """
SELECT
    incident_id,
    key,
    event,
    severity,
    first_event,
    highest_severity,
    status,
    change,
    agent,
    model,
    tenant,
    title,
    text,
    payload,
    count,
    version,
    reminders,
    opened_at,
    last_at,
    ends_at,
    acknowledged_by,
    acknowledged_at,
    resolved_by,
    resolved_at,
    reason,
    at AS changed_at,
    dateDiff('millisecond', opened_at, resolved_at) AS duration_ms,
    dateDiff(
        'millisecond', opened_at, min(acknowledged_at) OVER (PARTITION BY incident_id)
    ) AS time_to_acknowledge_ms
FROM alerts FINAL
ORDER BY incident_id, version DESC
LIMIT 1 BY incident_id
"""
"""What is known of each incident: its newest change. An incident that was reopened was acknowledged when it was for the
first time; it has no duration until it is resolved again.

Not `argMax` of each column: it passes over NULL, and would give a reopened incident the end that it had before."""

COST_AND_USAGE = """
SELECT
    toStartOfFifteenMinutes(ifNull(reserved_at, started_at)) AS ChargePeriodStart,
    provider AS ProviderName,
    agent AS ResourceId,
    tenant AS SubAccountId,
    model AS SkuId,
    submitted_by AS x_SubmittedBy,
    cost_tags AS Tags,
    ChargePeriodStart + INTERVAL 15 MINUTE AS ChargePeriodEnd,
    toDateTime(toStartOfMonth(ChargePeriodStart), 'UTC') AS BillingPeriodStart,
    BillingPeriodStart + INTERVAL 1 MONTH AS BillingPeriodEnd,
    sum(attempts.cost) AS BilledCost,
    BilledCost AS EffectiveCost,
    BilledCost AS ListCost,
    BilledCost AS ContractedCost,
    'USD' AS BillingCurrency,
    ProviderName AS BillingAccountId,
    ProviderName AS BillingAccountName,
    SubAccountId AS SubAccountName,
    ProviderName AS PublisherName,
    ProviderName AS InvoiceIssuerName,
    'AI and Machine Learning' AS ServiceCategory,
    'Generative AI' AS ServiceSubcategory,
    'LLM inference' AS ServiceName,
    ResourceId AS ResourceName,
    'Agent' AS ResourceType,
    'Usage' AS ChargeCategory,
    CAST(NULL, 'Nullable(String)') AS ChargeClass,
    concat('Calls of ', SkuId, ' by agent ', ResourceId) AS ChargeDescription,
    'Usage-Based' AS ChargeFrequency,
    'Standard' AS PricingCategory,
    if(x_InputTokens IS NULL AND x_OutputTokens IS NULL, NULL, ifNull(x_InputTokens, 0) + ifNull(x_OutputTokens, 0))
        AS ConsumedQuantity,
    'Tokens' AS ConsumedUnit,
    ConsumedQuantity AS PricingQuantity,
    ConsumedUnit AS PricingUnit,
    sum(attempts.input_tokens) AS x_InputTokens,
    sum(attempts.output_tokens) AS x_OutputTokens,
    sum(attempts.cached_tokens) AS x_CachedTokens,
    count() AS x_Calls,
    countIf(outcome != 'success') AS x_FailedCalls,
    if(x_FailedCalls = 0, toDecimal128(0, 9), sumIf(attempts.cost, outcome != 'success')) AS x_WastedCost,
    ifNull(sumIf(attempts.cost, cost_basis = 'estimated'), toDecimal128(0, 9)) AS x_EstimatedCost,
    countIf(attempts.cost IS NULL) AS x_CallsOfUnknownCost
FROM attempts FINAL
WHERE NOT short_circuited
GROUP BY ChargePeriodStart, ProviderName, ResourceId, SubAccountId, SkuId, x_SubmittedBy, Tags
"""
"""The columns of FOCUS, the FinOps Open Cost and Usage Specification 1.2: all that it calls mandatory, and those of the
others that calls have something for. Those that begin with `x_` are ours, as it lays down.

By the moment that a call is charged at, as in `SPEND_PER_HOUR`; by quarters of an hour, as the offsets of all time
zones are whole numbers of those: so the rows add up to days and months anywhere."""

PLANS = """
SELECT
    plan_id,
    if(succeeded = jobs, 'succeeded', if(succeeded = 0, 'failed', 'partial')) AS outcome,
    count() AS jobs,
    countIf(status = 'succeeded') AS succeeded,
    countIf(status = 'dead_lettered') AS dead_lettered,
    countIf(status = 'cancelled') AS cancelled,
    sum(attempts_count) AS attempts,
    sum(total_tokens) AS tokens,
    sum(total_cost) AS cost,
    sum(executions.wasted_cost) AS wasted_cost,
    countIf(cost_basis = 'unknown') AS jobs_of_unknown_cost,
    countIf(cost_basis = 'estimated') AS jobs_of_estimated_cost,
    min(queued_at) AS first_queued_at,
    max(completed_at) AS last_completed_at
FROM executions FINAL
WHERE plan_id IS NOT NULL AND NOT dry_run
GROUP BY plan_id
"""
"""Of the jobs that have ended: the `outcome` of a plan that still runs may change. Its state stands in the HTTP API."""

VIEWS = {
    "executions_per_minute": EXECUTIONS_PER_MINUTE,
    "incidents": INCIDENTS,
    "attempts_per_minute": ATTEMPTS_PER_MINUTE,
    "errors_per_minute": ERRORS_PER_MINUTE,
    "waste_per_minute": WASTE_PER_MINUTE,
    "retries_per_day": RETRIES_PER_DAY,
    "breaker_openings": BREAKER_OPENINGS,
    "provider_health": PROVIDER_HEALTH,
    "estimate_accuracy": ESTIMATE_ACCURACY,
    "spend_per_hour": SPEND_PER_HOUR,
    "cost_and_usage": COST_AND_USAGE,
    "plans": PLANS,
}
"""The SELECT of each, by its name."""


def create_view(name: str, layout: Layout = PLAIN) -> str:
    """The statement that makes a view, or replaces it by this version."""
    return f"CREATE OR REPLACE VIEW {name}{layout.on_cluster} AS{VIEWS[name]}"
