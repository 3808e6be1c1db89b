-- name: bounds
SELECT
    countIf(dispatched_at >= {since:DateTime64(3, 'UTC')} AND dispatched_at < {until:DateTime64(3, 'UTC')}),
    count(),
    toUnixTimestamp64Milli(min(dispatched_at)),
    toUnixTimestamp64Milli(max(dispatched_at))
FROM executions
WHERE NOT dry_run
