-- `%s` is filled in with columns, or with conditions of `search.py`. Placeholders such as `{agent:String}` are ClickHouse's.

-- name: one_execution
SELECT * EXCEPT (event_sequence)
FROM executions FINAL
WHERE execution_id = {execution_id:String}
ORDER BY completed_at DESC
LIMIT 1

-- name: one_of_job
SELECT * EXCEPT (event_sequence)
FROM executions FINAL
WHERE job_id = {execution_id:String}
ORDER BY completed_at DESC
LIMIT 1

-- name: its_attempts
SELECT * EXCEPT (event_sequence)
FROM attempts FINAL
WHERE execution_id = {execution_id:String}
ORDER BY started_at, number

-- name: newest
SELECT max(completed_at), count()
FROM executions
PREWHERE completed_at >= {from:DateTime64(3, 'UTC')} AND completed_at < {to:DateTime64(3, 'UTC')} AND %s

-- Both ids have an index, which an OR of the two would not use.
-- name: keys_of_id
SELECT DISTINCT agent, completed_at, execution_id
FROM (
    SELECT agent, completed_at, execution_id FROM executions FINAL WHERE execution_id = {text:String} AND %s
    UNION ALL
    SELECT agent, completed_at, execution_id FROM executions FINAL WHERE job_id = {text:String} AND %s
)
ORDER BY completed_at DESC
LIMIT {limit:UInt32}

-- name: keys_upwards
SELECT agent, completed_at, execution_id
FROM executions FINAL
PREWHERE %s
WHERE (completed_at, execution_id) > ({at:DateTime64(3, 'UTC')}, {at_id:String}) AND (%s)
ORDER BY completed_at, execution_id
LIMIT {limit:UInt32}

-- name: keys_downwards
SELECT agent, completed_at, execution_id
FROM executions FINAL
PREWHERE %s
WHERE (completed_at, execution_id) < ({at:DateTime64(3, 'UTC')}, {at_id:String}) AND (%s)
ORDER BY completed_at DESC, execution_id DESC
LIMIT {limit:UInt32}

-- name: runs_of_id
SELECT run_id, (max((completed_at, execution_id)) AS last).1, last.2
FROM (
    SELECT run_id, completed_at, execution_id FROM executions FINAL WHERE execution_id = {text:String} AND %s
    UNION ALL
    SELECT run_id, completed_at, execution_id FROM executions FINAL WHERE job_id = {text:String} AND %s
    UNION ALL
    SELECT run_id, completed_at, execution_id FROM executions FINAL WHERE run_id = {text:String} AND %s
)
GROUP BY run_id
ORDER BY last DESC
LIMIT {limit:UInt32}

-- name: runs_upwards
SELECT run_id, (max((completed_at, execution_id)) AS last).1, last.2
FROM executions FINAL
PREWHERE %s
WHERE (completed_at, execution_id) > ({at:DateTime64(3, 'UTC')}, {at_id:String}) AND (%s)
GROUP BY run_id
ORDER BY last
LIMIT {limit:UInt32}

-- name: runs_downwards
SELECT run_id, (max((completed_at, execution_id)) AS last).1, last.2
FROM executions FINAL
PREWHERE %s
WHERE (completed_at, execution_id) < ({at:DateTime64(3, 'UTC')}, {at_id:String}) AND (%s)
GROUP BY run_id
ORDER BY last DESC
LIMIT {limit:UInt32}

-- Those whose place is a later one: of the steps that match, the last one counts.
-- name: runs_later
SELECT DISTINCT run_id
FROM executions FINAL
PREWHERE run_id IN {runs:Array(String)} AND completed_at >= {later:DateTime64(3, 'UTC')}
    AND completed_at < {end:DateTime64(3, 'UTC')} AND %s
WHERE (completed_at >= {to:DateTime64(3, 'UTC')}
    OR (completed_at, execution_id) >= ({at:DateTime64(3, 'UTC')}, {at_id:String})) AND (%s)

-- name: largest_runs
SELECT run_id, (max((completed_at, execution_id)) AS last).1, last.2
FROM executions FINAL
PREWHERE %s
WHERE %s
GROUP BY run_id
ORDER BY %s * {sign:Int8} NULLS LAST, last DESC
LIMIT {limit:UInt32}

-- name: run_summaries
SELECT
    run_id,
    any(executions.tenant) AS tenant,
    argMin(executions.execution_id, (queued_at, executions.execution_id)) AS execution_id,
    argMin(executions.job_id, (queued_at, executions.execution_id)) AS job_id,
    arraySort(groupUniqArray(agent)) AS agents,
    arraySort(groupUniqArray(ifNull(chosen_model, requested_model))) AS models,
    count() AS steps,
    countIf(executions.status = 'dead_lettered') AS failed,
    multiIf(
        failed > 0, 'dead_lettered', countIf(executions.status = 'cancelled') > 0, 'cancelled', 'succeeded'
    ) AS status,
    argMax(executions.reason, (executions.status = 'dead_lettered', executions.completed_at)) AS reason,
    argMax(executions.error_message, (executions.status = 'dead_lettered', executions.completed_at)) AS error_message,
    sum(executions.attempts_count) AS attempts_count,
    sum(executions.total_tokens) AS total_tokens,
    sum(executions.total_cost) AS total_cost,
    sum(executions.wasted_cost) AS wasted_cost,
    multiIf(
        countIf(executions.cost_basis = 'unknown') > 0, 'unknown',
        countIf(executions.cost_basis = 'estimated') > 0, 'estimated',
        countIf(executions.cost_basis = 'billed') > 0, 'billed',
        any(executions.cost_basis)
    ) AS cost_basis,
    min(queued_at) AS started_at,
    max(executions.completed_at) AS completed_at,
    greatest(dateDiff('millisecond', started_at, completed_at), 0) AS duration_ms,
    min(executions.cache_hit) AS cache_hit,
    min(executions.dry_run) AS dry_run,
    -- A tuple: argMin would pass over a step without a value.
    (argMin(tuple(executions.submitted_by), (queued_at, executions.execution_id))).1 AS submitted_by,
    (argMin(tuple(executions.user), (queued_at, executions.execution_id))).1 AS user,
    (argMin(tuple(executions.prompt_preview), (queued_at, executions.execution_id))).1 AS prompt_preview,
    (argMax(tuple(executions.output_preview), (executions.completed_at, executions.execution_id))).1 AS output_preview
FROM executions FINAL
PREWHERE run_id IN {runs:Array(String)}
GROUP BY run_id

-- name: steps
SELECT %s
FROM executions FINAL
PREWHERE run_id = {run_id:String}
ORDER BY queued_at, execution_id
LIMIT {limit:UInt32}

-- name: largest
SELECT agent, completed_at, execution_id
FROM executions FINAL
PREWHERE %s
WHERE %s
ORDER BY {size:Identifier} * {sign:Int8} NULLS LAST, completed_at DESC, execution_id DESC
LIMIT {limit:UInt32}

-- name: count
SELECT count() FROM executions FINAL PREWHERE %s WHERE %s

-- name: floor
SELECT min(completed_at)
FROM (SELECT completed_at FROM executions PREWHERE %s ORDER BY completed_at DESC LIMIT {within:UInt32})

-- name: lines
SELECT %s
FROM executions FINAL
PREWHERE agent IN {agents:Array(String)}
    AND completed_at IN (SELECT fromUnixTimestamp64Milli(arrayJoin({times_ms:Array(Int64)}), 'UTC'))
    AND execution_id IN {ids:Array(String)}

-- name: facets
SELECT
    agent,
    ifNull(chosen_model, requested_model) AS model,
    tenant,
    reason,
    error_kind,
    count() AS executions,
    multiIf(
        grouping(agent) = 0, 'agents', grouping(model) = 0, 'models', grouping(tenant) = 0, 'tenants',
        grouping(reason) = 0, 'reasons', 'error_kinds'
    ) AS facet
FROM executions FINAL
PREWHERE completed_at >= {start:DateTime64(3, 'UTC')} AND completed_at < {end:DateTime64(3, 'UTC')}
GROUP BY GROUPING SETS ((agent), (model), (tenant), (reason), (error_kind))

-- name: tree_node
SELECT %s
FROM executions FINAL
WHERE execution_id = {execution_id:String}
ORDER BY completed_at DESC
LIMIT 1

-- name: tree_node_of_job
SELECT %s
FROM executions FINAL
WHERE job_id = {execution_id:String}
ORDER BY completed_at DESC
LIMIT 1

-- name: tree_children
SELECT %s
FROM executions FINAL
WHERE parent_execution_id IN {parents:Array(String)}
ORDER BY queued_at, execution_id, completed_at
LIMIT {limit:UInt32}

-- name: plan_jobs
SELECT
    plan_key, plan_id, execution_id, job_id, agent, status, reason, total_cost, wasted_cost, cost_basis, queued_at,
    completed_at
FROM executions FINAL
WHERE plan_key IN {plans:Array(String)} AND NOT dry_run
ORDER BY completed_at

-- name: plan_changes
SELECT
    change_id, plan_id, plan_key, from_state, to_state, reason, execution_id, job_id, tenant, owner, correlation_id,
    version, at
FROM plan_changes FINAL
WHERE plan_key IN {plans:Array(String)}
ORDER BY version

-- name: newest_plans
SELECT plan_key, max(at) AS ended
FROM (
    SELECT assumeNotNull(plan_key) AS plan_key, completed_at AS at
    FROM executions FINAL
    PREWHERE completed_at >= now() - INTERVAL 30 DAY
    WHERE plan_key IS NOT NULL AND NOT dry_run
    UNION ALL
    SELECT plan_key, at FROM plan_changes WHERE at >= now() - INTERVAL 30 DAY AND to_state IN ('draft', 'failed')
)
GROUP BY plan_key
ORDER BY ended DESC
LIMIT {limit:UInt32}
