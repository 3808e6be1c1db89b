-- Everything is read with FINAL. Conditions that leave much out are in PREWHERE, which is applied before rows are replaced:
-- that is right, as all versions of a row are the same message, stored twice. Quantiles are those of a random sample of
-- 8,192 where there are more: exact ones of a million take twice as long. In sums, `attempts.cost` is the column: a bare
-- `cost` could be the name of a sum.

-- name: executions
-- An execution's waste is the known part of it. With a call of unknown cost, that call was wasted where there is no
-- answer, or where the answer's cost is known: then the total is more than the waste.
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
    countIf(is_answered_by_model) AS answered,
    countIf(executions.fell_back) AS fell_back,
    ifNull(sum(executions.fallback_cost), 0) AS fallback_cost,
    ifNull(sumIf(executions.requested_model_cost, executions.fallback_cost IS NOT NULL), 0) AS requested_model_cost,
    accurateCastOrNull(round(times[1]), 'UInt64') AS p50_ms,
    accurateCastOrNull(round(times[2]), 'UInt64') AS p95_ms,
    countIf(unclear) AS unknown_waste,
    if(unknown_waste = 0, ifNull(sum(executions.wasted_cost), 0), nullIf(sum(executions.wasted_cost), 0)) AS wasted
FROM executions FINAL
PREWHERE completed_at >= {start:DateTime64(3, 'UTC')} AND completed_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT dry_run
GROUP BY GROUPING SETS ((name), (name, step))

-- name: attempts
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

-- name: errors
-- The latest message is looked up afterwards: reading the texts of all errors takes several times as long.
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

-- name: messages
SELECT agent, model, ifNull(error_hash, '') AS hash, started_at, error_message
FROM attempts FINAL
PREWHERE started_at IN (SELECT fromUnixTimestamp64Milli(arrayJoin({times_ms:Array(Int64)}), 'UTC'))
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT short_circuited AND error_kind IS NOT NULL
ORDER BY attempt_id

-- name: providers
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

-- name: refusals
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

-- name: streams
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

-- name: waste
SELECT agent, cause, sum(amount) AS cost, count() AS executions
FROM executions FINAL
ARRAY JOIN mapKeys(wasted_by_cause) AS cause, mapValues(wasted_by_cause) AS amount
PREWHERE completed_at >= {start:DateTime64(3, 'UTC')} AND completed_at < {end:DateTime64(3, 'UTC')}
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT dry_run
GROUP BY agent, cause
ORDER BY cost DESC, agent, cause

-- name: retries
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

-- name: spend_by
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

-- name: first_begun
-- Without FINAL: a row that is stored twice has one time.
SELECT minOrNull(subtractMilliseconds(completed_at, duration_ms))
FROM executions
WHERE completed_at >= {since:DateTime64(3, 'UTC')} AND NOT dry_run

-- name: agent_executions
SELECT
    agent,
    count() AS executions,
    countIf(status = 'succeeded') AS succeeded,
    countIf(is_answered_by_model) AS answered,
    countIf(executions.fell_back) AS fell_back,
    ifNull(sum(executions.fallback_cost), 0) AS fallback_cost,
    ifNull(sumIf(executions.requested_model_cost, executions.fallback_cost IS NOT NULL), 0) AS requested_model_cost,
    quantileExact(0.5)(duration_ms) AS p50_ms,
    quantileExact(0.95)(duration_ms) AS p95_ms
FROM executions FINAL
WHERE NOT dry_run AND completed_at >= {since:DateTime64(3, 'UTC')}
GROUP BY agent

-- name: agent_attempts
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
