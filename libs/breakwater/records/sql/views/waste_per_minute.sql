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
