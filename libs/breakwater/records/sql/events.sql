-- name: transitions
SELECT * EXCEPT (event_sequence)
FROM breaker_transitions FINAL
WHERE agent = {agent:String} AND model = {model:String} AND NOT shadow
    AND at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
ORDER BY at DESC, version DESC, event_sequence DESC
LIMIT {limit:UInt32}

-- name: openings
SELECT agent, model, rule, reason, opened_at, closed_at
FROM breaker_openings
WHERE opened_at < {end:DateTime64(3, 'UTC')}
    AND (closed_at IS NULL OR closed_at > {start:DateTime64(3, 'UTC')})
    AND ({agent:String} = '' OR agent = {agent:String})
    AND ({model:String} = '' OR model = {model:String})
ORDER BY opened_at DESC, agent, model

-- name: operator_actions
SELECT at, by, action, agent, model, task_id, tenant, reason
FROM (
    SELECT at, ifNull(by, '') AS by, if(to_state = 'isolated', 'isolated', 'reset') AS action, agent,
        toNullable(toString(model)) AS model, CAST(NULL, 'Nullable(String)') AS task_id,
        CAST(NULL, 'Nullable(String)') AS tenant, reason, event_sequence
    FROM breaker_transitions FINAL
    WHERE breaker_transitions.by IS NOT NULL
    UNION ALL
    SELECT at, ifNull(by, '') AS by, 'reset' AS action, agent, CAST(NULL, 'Nullable(String)') AS model,
        toNullable(guard_events.task_id) AS task_id, CAST(tenant, 'Nullable(String)') AS tenant, reason, event_sequence
    FROM guard_events FINAL
    WHERE kind = 'reset'
)
WHERE at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
ORDER BY at DESC, event_sequence DESC
LIMIT {limit:UInt32}

-- name: incidents
-- By the incident's id where two were opened in the same millisecond, so that no page leaves one out.
SELECT %s, JSONExtract(payload, 'agents', 'Array(String)') AS agents
FROM incidents
WHERE opened_at >= {start:DateTime64(3, 'UTC')} AND opened_at < {end:DateTime64(3, 'UTC')}
    AND ({status:String} = '' OR status = {status:String})
    AND ({event:String} = '' OR event = {event:String} OR first_event = {event:String})
    AND ({agent:String} = '' OR agent = {agent:String} OR has(agents, {agent:String}))
    AND (toUnixTimestamp64Milli(opened_at), incident_id) < ({before_ms:Int64}, {before_id:String})
ORDER BY opened_at DESC, incident_id DESC
LIMIT {limit:UInt32}

-- name: config_changes
SELECT min(opened_at) AS at, any(JSONExtractString(payload, 'version')) AS version,
    any(JSONExtractString(payload, 'by')) AS by
FROM alerts
WHERE first_event = 'config_applied'
    AND opened_at >= {start:DateTime64(3, 'UTC')} AND opened_at < {end:DateTime64(3, 'UTC')}
GROUP BY incident_id
ORDER BY at DESC
LIMIT {limit:UInt32}

-- name: changes
SELECT * EXCEPT (event_sequence)
FROM alerts FINAL
WHERE incident_id = {incident_id:String}
ORDER BY version, event_sequence
LIMIT {limit:UInt32}

-- name: audit
SELECT * EXCEPT (event_sequence)
FROM audit FINAL
WHERE at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
    AND ({by:String} = '' OR by = {by:String}) AND ({action:String} = '' OR action = {action:String})
ORDER BY at DESC, audit_id DESC
LIMIT {limit:UInt32}

-- name: audit_of
SELECT * EXCEPT (event_sequence)
FROM audit FINAL
WHERE action IN {actions:Array(String)} AND JSONExtractString(details, {name:String}) = {value:String}
ORDER BY at DESC, audit_id DESC
LIMIT {limit:UInt32}

-- name: audit_names
SELECT groupUniqArray(by) AS people, groupUniqArray(action) AS actions
FROM audit
WHERE at >= {start:DateTime64(3, 'UTC')} AND at < {end:DateTime64(3, 'UTC')}
