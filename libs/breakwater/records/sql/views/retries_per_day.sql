-- Of what calls were made; a retry that the breaker refused is none. Costs are their known part.
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
