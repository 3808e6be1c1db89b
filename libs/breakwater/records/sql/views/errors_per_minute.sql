-- What was refused before it was called is among them, as `breaker_open`, `budget_exceeded` and so on.
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
