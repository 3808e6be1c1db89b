-- `availability`, from 0 to 1: the calls that did not fail by the provider's own fault, which errors of the server,
-- timeouts and lost connections are; 0 without a success. A call that came too often was answered, and is counted
-- separately.
SELECT
    toStartOfMinute(started_at) AS minute,
    provider,
    model,
    deployment,
    count() AS calls,
    if(countIf(outcome = 'success') = 0, 0, 1 - countIf(error_kind IN ('server', 'timeout', 'network')) / calls) AS
        availability,
    countIf(error_kind = 'rate_limit') AS rate_limited,
    countIf(error_kind = 'server') AS server_errors,
    countIf(error_kind = 'timeout') AS timeouts,
    quantileExact(0.95)(duration_ms) AS p95_ms
FROM attempts FINAL
WHERE NOT short_circuited
GROUP BY minute, provider, model, deployment
