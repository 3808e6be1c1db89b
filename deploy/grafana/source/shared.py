"""What more than one dashboard shows."""

from __future__ import annotations

from deploy.grafana.source.panels import BAD, GOOD, SO_SO, Chart, Figure, Listing, chart, figure

# What figures and charts are made from. `<agent>` and `<model>` are what the dashboard's variables choose.
EXECUTIONS_ENDED = "FROM executions_per_minute\nWHERE $__timeFilter(minute) AND <agent>"
EXECUTION_RECORDS = "FROM executions FINAL\nWHERE $__timeFilter_ms(completed_at) AND NOT dry_run AND <agent>"
AGENT_CALLS = "FROM attempts_per_minute\nWHERE $__timeFilter(minute) AND <agent>"
MODEL_CALLS = "FROM attempts_per_minute\nWHERE $__timeFilter(minute) AND <agent> AND <model>"
CALL_RECORDS = "FROM attempts FINAL\nWHERE $__timeFilter_ms(started_at) AND NOT short_circuited AND <agent> AND <model>"
WASTE_PER_MINUTE = "FROM waste_per_minute\nWHERE $__timeFilter(minute) AND <agent>"
ERRORS_PER_MINUTE = "FROM errors_per_minute\nWHERE $__timeFilter(minute) AND <agent> AND <model>"
BREAKERS_OPEN_NOW = (
    "FROM breaker_openings\nWHERE closed_at IS NULL AND state != 'half_open' AND (agent = '*' OR <agent>)"
)

SUCCESS_STEPS = ((0.9, SO_SO), (0.98, GOOD))
OUTCOME_COLORS = {"succeeded": "green", "dead-lettered": "red", "cancelled": "text"}
CALL_COLORS = {"succeeded": "green", "failed": "red", "refused": "orange"}

FIGURES = (
    figure(
        EXECUTIONS_ENDED,
        "sum(succeeded) / nullIf(sum(succeeded) + sum(dead_lettered), 0) AS success_rate",
        title="Success rate",
        description="Executions that succeeded, as a share of those that succeeded or failed. Excludes cancelled "
        "ones and dry runs.",
        unit="percentunit",
        below=BAD,
        steps=SUCCESS_STEPS,
    ),
    figure(
        EXECUTIONS_ENDED,
        "sum(executions) AS ended",
        title="Executions",
        description="Executions that ended.",
    ),
    figure(
        EXECUTIONS_ENDED,
        "sum(dead_lettered) AS given_up",
        title="Dead-lettered",
        description="Executions that were given up. The console shows why, and can replay them.",
        below=GOOD,
        steps=((1, SO_SO),),
    ),
    figure(
        EXECUTION_RECORDS,
        "if(count() = 0, NULL, quantile(0.95)(duration_ms)) AS p95",
        title="Duration, p95",
        description="95 % of executions take less than this from queueing to their end.",
        unit="ms",
    ),
    figure(
        AGENT_CALLS,
        "sum(spend) AS spent",
        title="Spend",
        description="Cost of calls, as far as it is known.",
        unit="currencyUSD",
    ),
    figure(
        WASTE_PER_MINUTE,
        "sum(cost) AS wasted",
        title="Wasted",
        description="Cost of calls that did not produce a result.",
        unit="currencyUSD",
    ),
    figure(
        BREAKERS_OPEN_NOW,
        "count() AS open_now",
        title="Open breakers",
        description="Right now, whatever the time range; includes breakers that agents share.",
        below=GOOD,
        steps=((1, BAD),),
    ),
    Figure(
        title="Open incidents",
        description="Right now, whatever the time range: all that are not resolved, including acknowledged ones.",
        below=GOOD,
        steps=((1, SO_SO),),
        sql="""
        SELECT count() AS open_now
        FROM incidents
        WHERE status != 'resolved' AND (agent IS NULL OR <agent>)
        """,
    ),
)

INCIDENTS_OVER_CHARTS = """
SELECT
    opened_at AS time,
    ifNull(resolved_at, $__toTime) AS timeEnd,
    title AS text,
    highest_severity AS tags
FROM incidents
WHERE opened_at <= $__toTime AND (resolved_at IS NULL OR resolved_at >= $__fromTime)
    AND (agent IS NULL OR <agent>)
ORDER BY time
"""

OUTCOMES = chart(
    EXECUTIONS_ENDED,
    "sum(executions_per_minute.succeeded) AS succeeded",
    'sum(dead_lettered) AS "dead-lettered"',
    'sum(executions) - succeeded - "dead-lettered" AS cancelled',
    title="Executions by outcome",
    description="By end time.",
    draw="bars",
    colors=OUTCOME_COLORS,
)

DURATIONS = chart(
    EXECUTION_RECORDS,
    'quantile(0.5)(duration_ms) AS "half"',
    'quantile(0.95)(duration_ms) AS "95 %"',
    at="completed_at",
    title="Execution duration",
    description="From queueing to the end: the median and the 95th percentile.",
    unit="ms",
)

CALLS = chart(
    AGENT_CALLS,
    "sum(attempts_per_minute.succeeded) AS succeeded",
    "sum(attempts_per_minute.failed) AS failed",
    "sum(short_circuits) AS refused",
    title="Calls",
    description="Attempts by outcome. Refused ones were not made, because of a breaker, a budget, a guard or a limit.",
    draw="bars",
    colors=CALL_COLORS,
)

WASTE = chart(
    WASTE_PER_MINUTE,
    "sum(cost) AS wasted",
    title="Waste by cause",
    description="Why calls did not produce a result: a retry or fallback followed, the response had to be "
    "corrected, the worker was lost, or the execution failed. All tenants and models.",
    unit="currencyUSD",
    draw="bars",
    by="cause",
)

ERRORS = chart(
    ERRORS_PER_MINUTE,
    "sum(errors) AS failures",
    title="Errors by kind",
    description="Failed and refused calls.",
    draw="bars",
    by="kind",
)

CALL_DURATIONS = chart(
    CALL_RECORDS,
    "quantile(0.95)(duration_ms) AS p95",
    at="started_at",
    title="Call duration, p95",
    description="95 % of a model's calls take less than this.",
    unit="ms",
    by="model",
)

FIRST_TOKENS = chart(
    f"{CALL_RECORDS} AND first_token_ms IS NOT NULL",
    "quantile(0.95)(first_token_ms) AS p95",
    at="started_at",
    title="Time to first token, p95",
    description="95 % of a model's streamed answers begin within this time.",
    unit="ms",
    by="model",
)

TOKENS_PER_S = chart(
    f"{CALL_RECORDS} AND tokens_per_s IS NOT NULL",
    "quantile(0.5)(tokens_per_s) AS half",
    at="started_at",
    title="Tokens per second",
    description="How fast a model's streamed answers come after their first token: the median.",
    by="model",
)

OPENINGS = Listing(
    title="Breaker openings",
    description="When and why breakers opened or were isolated. The time open counts within the time range. `*` "
    "stands for all agents. All models.",
    units={"open for": "ms"},
    agents_linked=True,
    sql="""
    SELECT
        opened_at AS "opened",
        closed_at AS "closed",
        dateDiff(
            'millisecond',
            greatest(opened_at, $__fromTime_ms),
            least(ifNull(closed_at, $__toTime_ms), $__toTime_ms)
        ) AS "open for",
        agent,
        model,
        scope,
        rule,
        reason
    FROM breaker_openings
    WHERE opened_at <= $__toTime_ms AND (closed_at IS NULL OR closed_at >= $__fromTime_ms)
        AND (agent = '*' OR <agent>)
    ORDER BY "opened" DESC, agent, model
    LIMIT 200
    """,
)


def spend_by(column: str, description: str) -> Chart:
    """What an agent's calls cost, by a column of theirs."""
    return chart(
        AGENT_CALLS,
        "sum(spend) AS spent",
        title=f"Spend by {column}",
        description=description,
        unit="currencyUSD",
        draw="bars",
        by=column,
    )
