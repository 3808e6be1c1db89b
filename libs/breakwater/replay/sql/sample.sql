-- name: days
SELECT toDate(dispatched_at, {zone:String}) AS day, count() AS jobs
FROM executions FINAL
WHERE dispatched_at >= {since:DateTime64(3, 'UTC')} AND dispatched_at < {until:DateTime64(3, 'UTC')}
    AND completed_at >= {since:DateTime64(3, 'UTC')} AND NOT dry_run
GROUP BY day
ORDER BY day
