-- By the moment that a call is charged at in its budgets, so that hours add up to what they count, in any time zone
-- whose offset is of whole hours.
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
