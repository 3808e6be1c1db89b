-- One row for each time that a breaker opened or was isolated, with why. What it did until it closed, such as probes
-- that failed, is part of it; one that is open is so until now, and `closed_at` is NULL. `state` is what it is now, or
-- was at the end: `half_open` while it waits for a call to try it. Shadows are left out, as they refuse nothing.
--
-- A tuple of rule and reason, as `argMin` alone passes over NULL and would return the rule of a later change.
SELECT
    agent,
    model,
    scope,
    tupleElement(argMin((t.rule, t.reason), (at, version, event_sequence)) AS first, 1) AS rule,
    tupleElement(first, 2) AS reason,
    min(at) AS opened_at,
    maxOrNullIf(at, to_state = 'closed') AS closed_at,
    dateDiff('millisecond', opened_at, ifNull(closed_at, now64(3, 'UTC'))) AS open_ms,
    argMax(to_state, (at, version, event_sequence)) AS state
FROM
(
    SELECT *, countIf(to_state = 'closed') OVER earlier AS closings
    FROM breaker_transitions FINAL
    WHERE NOT shadow
    WINDOW earlier AS (
        PARTITION BY agent, model, scope
        ORDER BY at, version, event_sequence
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
) AS t
GROUP BY agent, model, scope, closings
HAVING countIf(to_state != 'closed') > 0
