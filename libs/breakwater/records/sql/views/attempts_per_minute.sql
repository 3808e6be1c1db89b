-- `short_circuits` made no call: a breaker, a budget or a limit refused it. Where there were no others, times are NULL.
--
-- `wasted` is the cost of calls that failed. What was wasted by executions as a whole, answers that were thrown away
-- included, is in `waste_per_minute`.
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
