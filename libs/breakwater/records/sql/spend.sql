-- name: spend
-- `%s` are expressions of ours, from `_Grouping`, here and below.
-- The figures have other names than the columns they are made of: ClickHouse would take a column for the sum.
WITH
    ifNull(reserved_at, started_at) AS charged_at,
    outcome = 'success' AND cost_basis = 'billed' AND cost IS NOT NULL AND reserved IS NOT NULL AS comparable,
    ifNull(input_tokens, 0) + ifNull(output_tokens, 0) AS known_tokens,
    -- As `tokens_used` of `limits.rules.ledger`.
    if(
        cost_basis = 'billed',
        input_tokens IS NULL AND output_tokens IS NULL AND ifNull(attempts.cost, 0) != 0,
        input_tokens IS NULL OR output_tokens IS NULL OR ifNull(attempts.cost != 0 AND attempts.cost = attempts.reserved, false)
    ) AS unmeasured
SELECT
    %s,
    sum(cost) AS spent,
    count() AS calls,
    countIf(cost IS NULL) AS unpriced,
    countIf(comparable) AS gauged,
    sumIf(reserved, comparable) AS foreseen,
    sumIf(cost, comparable) AS measured,
    countIf(comparable AND cost > reserved) AS exceeded,
    sum(if(unmeasured, greatest(known_tokens, ifNull(reserved_tokens, 0)), known_tokens)) AS tokens
FROM attempts FINAL
WHERE NOT short_circuited
    AND started_at >= {earliest:DateTime64(3, 'UTC')} AND started_at < {latest:DateTime64(3, 'UTC')}
    AND charged_at >= {start:DateTime64(3, 'UTC')} AND charged_at < {end:DateTime64(3, 'UTC')}
    -- What was erased is in no log any more.
    AND (stored_at < {log_created:DateTime64(3, 'UTC')} OR event_sequence <= {upto:UInt64} OR erased_at IS NOT NULL)
GROUP BY ALL

-- name: closed_spend
SELECT
    %s,
    sum(closed_spend.spent) AS spent,
    sum(closed_spend.calls) AS calls,
    sum(closed_spend.unpriced) AS unpriced,
    sum(closed_spend.gauged) AS gauged,
    sum(closed_spend.foreseen) AS foreseen,
    sum(closed_spend.measured) AS measured,
    sum(closed_spend.exceeded) AS exceeded,
    sum(closed_spend.tokens) AS tokens
FROM closed_spend FINAL
WHERE until <= {closed_until:DateTime64(3, 'UTC')}
    -- Two versions that close a month at once may name the same calls differently: the rows of one statement count.
    AND (until, event_sequence) IN (SELECT until, max(event_sequence) FROM closed_spend GROUP BY until)
GROUP BY ALL

-- name: closed_until
SELECT maxOrNull(until) FROM closed_spend

-- `%s` is the statement `spend`. Users of one hash have numbers: whoever has the hash of a user's name can guess the name.
-- name: close_spend
INSERT INTO closed_spend
    (until, names, agent, tenant, model, deployment, provider, submitted_by, user, team, cost_tags, event_sequence,
    spent, calls, unpriced, gauged, foreseen, measured, exceeded, tokens)
SELECT * REPLACE (concat(names, '-', toString(row_number() OVER (PARTITION BY names ORDER BY user))) AS names)
FROM (%s)

-- name: names_of_closed
{end:DateTime64(3, 'UTC')} AS until,
-- Of one text: the hash of several values is NULL if one of them is.
    hex(sipHash128(toString((agent, tenant, model, deployment, provider, submitted_by, team, cost_tags)))) AS names,
    agent, tenant, model, deployment, provider, submitted_by, user, team, cost_tags,
    toUnixTimestamp64Milli(now64(3)) AS event_sequence

-- name: stored_upto
-- Without FINAL: of two rows with one key the later message stays, so the highest sequence is among those that stay.
SELECT max(event_sequence) FROM attempts WHERE stored_at >= {log_created:DateTime64(3, 'UTC')}

-- name: stored_attempts
-- By the executions first: there is an index of those.
SELECT uniqExact(attempt_id)
FROM attempts
WHERE execution_id IN ({executions:Array(String)}) AND attempt_id IN ({attempts:Array(String)})

-- name: budget_notes
SELECT *
FROM budget_events FINAL
WHERE NOT shadow AND (window, period) IN (SELECT arrayJoin(arrayZip({windows:Array(String)}, {names:Array(String)})))
ORDER BY at, event_sequence

-- name: burn
WITH ifNull(reserved_at, started_at) AS charged_at
SELECT
    roundDown(toUnixTimestamp64Milli(charged_at), {steps:Array(Int64)}) AS step,
    sum(attempts.cost) AS spend,
    countIf(attempts.cost IS NULL) AS unknown_costs
FROM attempts FINAL
PREWHERE started_at >= {earliest:DateTime64(3, 'UTC')} AND started_at < {latest:DateTime64(3, 'UTC')}
WHERE NOT short_circuited
    AND charged_at >= {start:DateTime64(3, 'UTC')} AND charged_at < {end:DateTime64(3, 'UTC')}
    %s
GROUP BY step

-- name: spent_since
WITH ifNull(reserved_at, started_at) AS charged_at
SELECT %s, sum(attempts.cost) AS spend
FROM attempts FINAL
PREWHERE started_at >= {earliest:DateTime64(3, 'UTC')} AND started_at < {latest:DateTime64(3, 'UTC')}
WHERE NOT short_circuited AND charged_at >= {start:DateTime64(3, 'UTC')} AND charged_at < {end:DateTime64(3, 'UTC')}
GROUP BY ALL

-- name: first_charged
-- Without FINAL: a row that is stored twice has one time.
WITH ifNull(reserved_at, started_at) AS charged_at
SELECT minOrNull(charged_at)
FROM attempts
WHERE NOT short_circuited
    AND started_at >= {earliest:DateTime64(3, 'UTC')} AND started_at < {latest:DateTime64(3, 'UTC')}
    AND charged_at >= {start:DateTime64(3, 'UTC')} AND charged_at < {end:DateTime64(3, 'UTC')}

-- The names with the highest spend, and all others together: callers may invent a hundred thousand users.
-- `%s` is an expression of ours, from `_NAMES`.
-- name: spend_history
SELECT
    place > if(names <= {most:UInt32}, {most:UInt32}, {most:UInt32} - 1) AS is_other,
    if(is_other, NULL, ranked.of_name) AS name,
    step_and_spend.1 AS step,
    sum(step_and_spend.2) AS spend,
    max(names) AS all_names
FROM (
    SELECT
        of_name,
        steps,
        row_number() OVER (ORDER BY total DESC NULLS LAST, of_name) AS place,
        count() OVER () AS names
    FROM (
        SELECT of_name, groupArray((in_step, spent)) AS steps, sum(spent) AS total
        FROM (
            WITH ifNull(reserved_at, started_at) AS charged_at
            SELECT
                %s AS of_name,
                intDiv(toUnixTimestamp64Milli(charged_at) - {start_ms:Int64}, {step_ms:Int64}) AS in_step,
                sum(attempts.cost) AS spent
            FROM attempts FINAL
            PREWHERE started_at >= {earliest:DateTime64(3, 'UTC')} AND started_at < {latest:DateTime64(3, 'UTC')}
            WHERE NOT short_circuited
                AND charged_at >= {start:DateTime64(3, 'UTC')} AND charged_at < {end:DateTime64(3, 'UTC')}
            GROUP BY of_name, in_step
        )
        GROUP BY of_name
    )
) AS ranked
ARRAY JOIN steps AS step_and_spend
GROUP BY is_other, name, step

-- name: month
-- `%s` is an expression of ours, from `_NAMES`.
WITH
    ifNull(reserved_at, started_at) AS charged_at,
    charged_at >= {start:DateTime64(3, 'UTC')} AS current,
    outcome != 'success' AS failure,
    attempts.cost IS NULL AS unpriced
SELECT
    %s AS name,
    sumIf(attempts.cost, current) AS spend,
    sumIf(attempts.cost, current AND failure) AS wasted,
    sumIf(attempts.cost, current AND cost_basis = 'estimated') AS estimated,
    sumIf(attempts.cost, charged_at >= {recent:DateTime64(3, 'UTC')}) AS recent,
    sumIf(attempts.cost, NOT current) AS previous,
    countIf(current) AS calls,
    countIf(current AND failure) AS failed,
    countIf(current AND unpriced) AS unknown,
    countIf(current AND failure AND unpriced) AS unknown_wasted,
    countIf(NOT current AND unpriced) AS unknown_previous,
    sumIf(attempts.input_tokens, current) AS input_tokens,
    sumIf(attempts.output_tokens, current) AS output_tokens,
    sumIf(attempts.cached_tokens, current) AS cached_tokens
FROM attempts FINAL
PREWHERE started_at >= {earliest:DateTime64(3, 'UTC')} AND started_at < {latest:DateTime64(3, 'UTC')}
WHERE NOT short_circuited
    AND charged_at >= {previous:DateTime64(3, 'UTC')} AND charged_at < {end:DateTime64(3, 'UTC')}
GROUP BY name
