-- name: minutes
SELECT
    toStartOfMinute(dispatched_at) AS minute,
    count() AS jobs,
    max(dateDiff('millisecond', dispatched_at, completed_at)) AS longest_ms
FROM executions FINAL
WHERE dispatched_at >= {since:DateTime64(3, 'UTC')} AND dispatched_at < {until:DateTime64(3, 'UTC')}
    AND completed_at >= {since:DateTime64(3, 'UTC')} AND NOT dry_run
GROUP BY minute
ORDER BY minute

-- name: executions
SELECT
    execution_id, job_id, agent, tenant, task_id, task_key, status, reason, requested_model, chosen_model, attempts_count,
    total_tokens, toInt64(total_cost * 1000000000) AS total_cost, toInt64(wasted_cost * 1000000000) AS wasted_cost, queued_at, dispatched_at, completed_at, duration_ms,
    task_counted_at, cache_hit, fallback_chain, own_rules, finish_reason, cost_basis,
    toInt64(requested_model_cost * 1000000000) AS requested_model_cost,
    error_kind, error_class, error_message, error_status_code, error_retryable, error_hash
FROM executions FINAL
WHERE dispatched_at >= {since:DateTime64(3, 'UTC')} AND dispatched_at < {until:DateTime64(3, 'UTC')}
    AND completed_at >= {since:DateTime64(3, 'UTC')} AND completed_at <= {over:DateTime64(3, 'UTC')} AND NOT dry_run

-- name: attempts
SELECT
    attempt_id, execution_id, job_id, agent, tenant, task_id, task_key, submitted_by, caller, user, team,
    cost_tags, number, model, provider, deployment, provider_key, started_at, completed_at, duration_ms, input_tokens, output_tokens,
    cached_tokens, first_token_ms, finish_reason, usage_problem, toInt64(cost * 1000000000) AS cost, cost_basis,
    toInt64(reserved * 1000000000) AS reserved, reserved_tokens, reserved_at, task_asked_at, outcome, short_circuited, refused_by,
    counts_for_breaker, breaker_version, cause, backoff_ms,
    error_kind, error_class, error_message, error_status_code, error_retryable, error_hash,
    event_sequence, toUnixTimestamp64Milli(stored_at),
    toUnixTimestamp64Milli(coalesce(task_asked_at, if(short_circuited, completed_at, ifNull(reserved_at, started_at))))
FROM attempts FINAL
WHERE started_at >= {since:DateTime64(3, 'UTC')} AND started_at <= {over:DateTime64(3, 'UTC')}
    AND execution_id IN (
        SELECT execution_id FROM executions
        WHERE dispatched_at >= {since:DateTime64(3, 'UTC')} AND dispatched_at < {until:DateTime64(3, 'UTC')}
            AND completed_at >= {since:DateTime64(3, 'UTC')} AND completed_at <= {over:DateTime64(3, 'UTC')}
            AND NOT dry_run
    )
ORDER BY execution_id, number

-- name: transitions
SELECT * EXCEPT (event_sequence) FROM breaker_transitions FINAL
WHERE NOT shadow AND at >= {since:DateTime64(3, 'UTC')} AND at < {until:DateTime64(3, 'UTC')}
ORDER BY event_sequence

-- name: earlier_transitions
SELECT * EXCEPT (event_sequence) FROM breaker_transitions FINAL
WHERE NOT shadow AND at < {since:DateTime64(3, 'UTC')}
ORDER BY at DESC, event_sequence DESC
LIMIT 1 BY agent, model

-- name: budgets
SELECT * EXCEPT (event_sequence) FROM budget_events FINAL
WHERE NOT shadow AND at >= {since:DateTime64(3, 'UTC')} AND at < {until:DateTime64(3, 'UTC')}
ORDER BY event_sequence

-- name: guards
SELECT * EXCEPT (event_sequence) FROM guard_events FINAL
WHERE at >= {since:DateTime64(3, 'UTC')} AND at < {until:DateTime64(3, 'UTC')}
ORDER BY event_sequence

-- name: alerts
SELECT * EXCEPT (event_sequence) FROM alerts FINAL
WHERE at >= {since:DateTime64(3, 'UTC')} AND at < {until:DateTime64(3, 'UTC')}
ORDER BY event_sequence

-- name: limits
SELECT * EXCEPT (event_sequence) FROM limit_events FINAL
WHERE at < {until:DateTime64(3, 'UTC')}
ORDER BY event_sequence

-- name: used
SELECT
    agent, tenant, model, provider, submitted_by, user, team, cost_tags, deployment,
    toInt64(sum(ifNull(cost, 0)) * 1000000000) AS spent,
    sum(if(
        input_tokens IS NULL AND output_tokens IS NULL,
        ifNull(reserved_tokens, 0),
        ifNull(input_tokens, 0) + ifNull(output_tokens, 0)
    )) AS tokens,
    count() AS calls
FROM attempts FINAL
WHERE NOT short_circuited AND ifNull(reserved_at, started_at) >= {begin:DateTime64(3, 'UTC')}
    AND ifNull(reserved_at, started_at) < {since:DateTime64(3, 'UTC')} AND started_at >= {begin_of_calls:DateTime64(3, 'UTC')}
GROUP BY ALL
