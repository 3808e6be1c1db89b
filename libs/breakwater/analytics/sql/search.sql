-- `%s` is filled in with columns, or with conditions of `search.py`. Placeholders such as `{agent:String}` are ClickHouse's.

-- name: one_execution
SELECT * EXCEPT (event_sequence)
FROM executions FINAL
WHERE execution_id = {execution_id:String}
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

-- name: keys_of_id
SELECT agent, completed_at, execution_id
FROM executions FINAL
WHERE execution_id = {text:String} AND %s
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

-- name: tree_children
SELECT %s
FROM executions FINAL
WHERE parent_execution_id IN {parents:Array(String)}
ORDER BY queued_at, execution_id, completed_at
LIMIT {limit:UInt32}

-- name: plan_jobs
SELECT
    plan_id, execution_id AS job_id, agent, status, reason, total_cost, wasted_cost, cost_basis, queued_at, completed_at
FROM executions FINAL
WHERE plan_id IN {plans:Array(String)} AND NOT dry_run
ORDER BY completed_at

-- name: newest_plans
SELECT assumeNotNull(plan_id), max(executions.completed_at) AS ended
FROM executions FINAL
PREWHERE completed_at >= now() - INTERVAL 30 DAY
WHERE plan_id IS NOT NULL AND NOT dry_run
GROUP BY plan_id
ORDER BY ended DESC
LIMIT {limit:UInt32}
