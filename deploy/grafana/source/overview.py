"""Is it healthy? What is worth a look now, and how the last day went."""

from __future__ import annotations

from deploy.grafana.source.dashboard import Dashboard
from deploy.grafana.source.panels import BAD, Listing
from deploy.grafana.source.shared import (
    CALLS,
    DURATIONS,
    FIGURES,
    INCIDENTS_OVER_CHARTS,
    OUTCOMES,
    SUCCESS_STEPS,
    spend_by,
)
from deploy.grafana.source.variables import AGENTS

DASHBOARD = Dashboard(
    name="overview",
    description="Is everything healthy, and if not, where?",
    variables=(AGENTS,),
    incidents=INCIDENTS_OVER_CHARTS,
    rows=(
        FIGURES,
        (
            OUTCOMES,
            DURATIONS,
        ),
        (
            CALLS,
            spend_by("agent", "Cost of calls, as far as it is known."),
        ),
        (
            Listing(
                title="Agents",
                description="Agents whose executions ended in the time range. A cost is blank if nothing of it is "
                "known.",
                units={
                    "success rate": "percentunit",
                    "slowest 5 %": "ms",
                    "cost": "currencyUSD",
                    "wasted": "currencyUSD",
                },
                coloured={"success rate": SUCCESS_STEPS},
                below=BAD,
                agents_linked=True,
                sql="""
                SELECT
                    agent,
                    count() AS ended,
                    countIf(status = 'succeeded')
                        / nullIf(countIf(status IN ('succeeded', 'dead_lettered')), 0) AS "success rate",
                    countIf(status = 'dead_lettered') AS "dead-lettered",
                    quantile(0.95)(duration_ms) AS "slowest 5 %",
                    sum(total_cost) AS "cost",
                    sum(wasted_cost) AS "wasted"
                FROM executions FINAL
                WHERE $__timeFilter_ms(completed_at) AND NOT dry_run AND <agent>
                GROUP BY agent
                ORDER BY ended DESC, agent
                LIMIT 100
                """,
            ),
        ),
        (
            Listing(
                title="Unresolved incidents",
                description="Right now, whatever the time range. Acknowledge and resolve them in the console.",
                agents_linked=True,
                widths={"severity": 90, "status": 120, "times": 80},
                sql="""
                SELECT
                    severity,
                    title,
                    agent,
                    model,
                    status,
                    opened_at AS opened,
                    last_at AS latest,
                    count AS times,
                    acknowledged_by AS "acknowledged by"
                FROM incidents
                WHERE status != 'resolved' AND (agent IS NULL OR <agent>)
                ORDER BY
                    indexOf(['critical', 'warning', 'info'], toString(severity)),
                    opened_at DESC,
                    incident_id
                LIMIT 100
                """,
            ),
        ),
    ),
)
