-- Of the jobs that have ended: the `outcome` of a plan that still runs may change. The HTTP API has its state.
SELECT
    plan_key,
    any(executions.plan_id) AS plan_id,
    if(succeeded = jobs, 'succeeded', if(succeeded = 0, 'failed', 'partial')) AS outcome,
    count() AS jobs,
    countIf(status = 'succeeded') AS succeeded,
    countIf(status = 'dead_lettered') AS dead_lettered,
    countIf(status = 'cancelled') AS cancelled,
    sum(attempts_count) AS attempts,
    sum(total_tokens) AS tokens,
    sum(total_cost) AS cost,
    sum(executions.wasted_cost) AS wasted_cost,
    countIf(cost_basis = 'unknown') AS jobs_of_unknown_cost,
    countIf(cost_basis = 'estimated') AS jobs_of_estimated_cost,
    min(queued_at) AS first_queued_at,
    max(completed_at) AS last_completed_at
FROM executions FINAL
WHERE plan_key IS NOT NULL AND NOT dry_run
GROUP BY plan_key
