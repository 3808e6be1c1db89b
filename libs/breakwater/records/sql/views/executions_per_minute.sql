-- Models answered `answered` jobs, and of these fallback models `fell_back`. `fallback_cost` is the cost of those of their
-- answers whose `requested_model_cost` is known: what they would have cost on the requested model.
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
    countIf(cache_hit) AS cache_hits,
    countIf(is_answered_by_model) AS answered,
    countIf(executions.fell_back) AS fell_back,
    sum(executions.fallback_cost) AS fallback_cost,
    sumIf(executions.requested_model_cost, executions.fallback_cost IS NOT NULL) AS requested_model_cost
FROM executions FINAL
WHERE NOT dry_run
GROUP BY agent, minute
