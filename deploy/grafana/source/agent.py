"""How does one agent do? What the overview and the other dashboards show of all, for one, and its failed executions."""

from __future__ import annotations

from dataclasses import replace

from deploy.grafana.source.dashboard import Dashboard
from deploy.grafana.source.panels import Chart, Listing
from deploy.grafana.source.shared import (
    CALL_DURATIONS,
    CALLS,
    DURATIONS,
    ERRORS,
    FIGURES,
    FIRST_TOKENS,
    INCIDENTS_OVER_CHARTS,
    OPENINGS,
    OUTCOMES,
    TOKENS_PER_S,
    WASTE,
    spend_by,
)
from deploy.grafana.source.variables import ONE_AGENT


def _of_all_models(chart: Chart) -> Chart:
    return replace(chart, sql=chart.sql.replace(" AND <model>", ""))


DASHBOARD = Dashboard(
    name="agent",
    description="One agent in detail: executions, calls, errors, costs, breakers and incidents.",
    variables=(ONE_AGENT,),
    incidents=INCIDENTS_OVER_CHARTS,
    rows=(
        FIGURES,
        (OUTCOMES, DURATIONS),
        (
            replace(CALLS, width=8),
            replace(_of_all_models(ERRORS), width=8),
            replace(_of_all_models(CALL_DURATIONS), width=8),
        ),
        (_of_all_models(FIRST_TOKENS), _of_all_models(TOKENS_PER_S)),
        (
            spend_by("model", "Cost of its calls, as far as it is known."),
            WASTE,
        ),
        (
            Listing(
                title="Failed executions",
                description="The latest first. Search the console by id to see every attempt.",
                units={"took": "ms", "cost": "currencyUSD"},
                widths={"attempts": 90, "took": 100, "cost": 110, "ended": 170, "status": 120, "error": 130},
                sql="""
                SELECT
                    completed_at AS "ended",
                    job_id AS "execution",
                    tenant,
                    status,
                    ifNull(error_kind, reason) AS "error",
                    error_message AS "message",
                    attempts_count AS "attempts",
                    duration_ms AS "took",
                    total_cost AS "cost"
                FROM executions FINAL
                WHERE $__timeFilter_ms(completed_at) AND NOT dry_run AND status != 'succeeded' AND <agent>
                ORDER BY "ended" DESC, execution_id
                LIMIT 100
                """,
            ),
        ),
        (
            replace(OPENINGS, width=12),
            Listing(
                title="Incidents",
                description="Incidents that were open in the time range and belong to no other agent; the latest "
                "first.",
                width=12,
                sql="""
                SELECT
                    opened_at AS "opened",
                    highest_severity AS severity,
                    title,
                    status,
                    count AS "times",
                    resolved_at AS "resolved",
                    ifNull(resolved_by, acknowledged_by) AS "by"
                FROM incidents
                WHERE opened_at <= $__toTime_ms AND (resolved_at IS NULL OR resolved_at >= $__fromTime_ms)
                    AND (agent IS NULL OR <agent>)
                ORDER BY "opened" DESC, incident_id
                LIMIT 100
                """,
            ),
        ),
    ),
)
