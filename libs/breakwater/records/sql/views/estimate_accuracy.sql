-- What was held in the budgets for calls against what they cost. Only calls that were answered and billed count.
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
