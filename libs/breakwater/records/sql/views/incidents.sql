-- What is known of each incident: its newest change. An incident that was reopened was acknowledged when it was for the
-- first time; it has no duration until it is resolved again.
--
-- Not `argMax` of each column: it passes over NULL, and would give a reopened incident the end that it had before.
SELECT
    incident_id,
    key,
    event,
    severity,
    first_event,
    highest_severity,
    status,
    change,
    agent,
    model,
    tenant,
    title,
    text,
    payload,
    count,
    version,
    reminders,
    opened_at,
    last_at,
    ends_at,
    acknowledged_by,
    acknowledged_at,
    resolved_by,
    resolved_at,
    reason,
    at AS changed_at,
    dateDiff('millisecond', opened_at, resolved_at) AS duration_ms,
    dateDiff(
        'millisecond', opened_at, min(acknowledged_at) OVER (PARTITION BY incident_id)
    ) AS time_to_acknowledge_ms
FROM alerts FINAL
ORDER BY incident_id, version DESC
LIMIT 1 BY incident_id
