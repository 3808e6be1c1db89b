-- name: latest
SELECT agent, measure, arraySlice(arrayReverseSort(groupArray((minute, value, calls))), 1, {count:UInt8}) AS minutes
FROM figures_per_minute
WHERE minute >= {since:DateTime('UTC')} AND minute < {until:DateTime('UTC')}
    AND (calls >= {minimum_calls:UInt32} OR measure = 'spend_rate')
GROUP BY agent, measure

-- name: baselines
-- Failing every night is no habit. The figures of fallbacks have limits instead.
SELECT
    agent,
    measure,
    if(measure = 'error_rate', avg(value), quantile(0.5)(value)) AS baseline,
    greatest(0, quantile(0.8)(value) - baseline) AS spread,
    quantileOrNullIf(0.99)(value, minute < {settled:DateTime('UTC')} AND measure != 'error_rate') AS peak
FROM figures_per_minute
WHERE minute >= {since:DateTime('UTC')} AND minute < {until:DateTime('UTC')}
    AND (calls >= {minimum_calls:UInt32} OR measure = 'spend_rate') AND NOT startsWith(measure, 'fallback_')
GROUP BY agent, measure
HAVING count() >= {minimum_minutes:UInt32}
