-- One row for each figure of an agent that `agent_anomaly` judges: `error_rate` as a share of `calls`, `spend_rate` in USD,
-- `latency` and `first_token` in milliseconds, the median of the minute's calls or streams; `fallback_share`, of the
-- answers that models gave, and `fallback_cost`, how many times as much the answers of fallback models cost as they would
-- have cost on the requested model.
--
-- Refusals end immediately and cost nothing: they would look like fast, cheap calls. So only what was answered or failed
-- counts as a call, and other jobs only with what they have cost.
SELECT minute, agent, figure.1 AS measure, figure.2 AS value, figure.3 AS calls
FROM
(
    WITH
        status = 'dead_lettered' AND ifNull(reason, 'error') IN ('error', 'timeout', 'worker_lost') AS failed,
        failed OR status = 'succeeded' AS called,
        countIf(is_answered_by_model) AS answered
    SELECT
        toStartOfMinute(completed_at) AS minute,
        agent,
        countIf(called) AS count,
        [
            ('error_rate', if(count = 0, NULL, countIf(failed) / count), count),
            ('spend_rate', toFloat64(sumIf(total_cost, called OR total_cost > 0)), count),
            ('latency', toFloat64(quantileExactOrNullIf(0.5)(duration_ms, called)), count),
            ('fallback_share', if(answered = 0, NULL, countIf(fell_back) / answered), answered),
            (
                'fallback_cost',
                toFloat64(sum(fallback_cost)) / toFloat64(sumIf(requested_model_cost, fallback_cost IS NOT NULL)),
                count(fallback_cost)
            )
        ] AS figures
    FROM executions FINAL
    WHERE NOT dry_run AND NOT cache_hit
    GROUP BY minute, agent
    UNION ALL
    SELECT
        toStartOfMinute(started_at) AS minute,
        agent,
        count() AS count,
        [('first_token', toFloat64(quantileExactOrNull(0.5)(first_token_ms)), count)] AS figures
    FROM attempts FINAL
    WHERE first_token_ms IS NOT NULL
    GROUP BY minute, agent
)
ARRAY JOIN figures AS figure
WHERE value IS NOT NULL
