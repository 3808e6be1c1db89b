"""Who spends what, and what of it was wasted?"""

from __future__ import annotations

from deploy.grafana.source.dashboard import Dashboard
from deploy.grafana.source.panels import BAD, GOOD, SO_SO, Chart, Figure, Listing, chart, figure
from deploy.grafana.source.shared import MODEL_CALLS, WASTE
from deploy.grafana.source.variables import AGENTS, MODELS, TENANTS

_TENANT_EXECUTIONS = (
    "FROM executions FINAL\nWHERE $__timeFilter_ms(completed_at) AND NOT dry_run AND <agent> AND <tenant>"
)
_SPEND_PER_HOUR = (
    "FROM spend_per_hour\n"
    "WHERE hour >= toStartOfHour($__fromTime) AND hour <= $__toTime AND <agent> AND <tenant> AND <model>"
)

_FIGURES = (
    figure(
        _SPEND_PER_HOUR,
        "sum(spend) AS spent",
        title="Spend",
        description="Cost of calls, as far as it is known, by the hour that budgets charge them to. The first hour "
        "counts in full.",
        unit="currencyUSD",
        width=4,
    ),
    figure(
        _SPEND_PER_HOUR,
        "sum(calls) AS made",
        title="Calls",
        description="Calls that this was spent on.",
        width=4,
    ),
    Figure(
        title="Calls of unknown cost",
        description="If there are any, the spend shown is a lower bound. Set a price in the config.",
        width=4,
        below=GOOD,
        steps=((1, SO_SO),),
        sql="""
        SELECT count() AS unknown
        FROM attempts FINAL
        WHERE $__timeFilter_ms(started_at) AND NOT short_circuited AND cost IS NULL
            AND <agent> AND <tenant> AND <model>
        """,
    ),
    figure(
        _TENANT_EXECUTIONS,
        "sum(wasted_cost) AS wasted",
        title="Wasted",
        description="Cost of calls that did not produce a result, for executions that ended. All models.",
        unit="currencyUSD",
        width=4,
    ),
    figure(
        _TENANT_EXECUTIONS,
        "if(sum(total_cost) > 0, toFloat64(sum(wasted_cost)) / toFloat64(sum(total_cost)), NULL) AS share",
        title="Share wasted",
        description="Share of the cost of executions that ended. All models.",
        unit="percentunit",
        width=4,
        below=GOOD,
        steps=((0.1, SO_SO), (0.3, BAD)),
    ),
    Figure(
        title="Cost per success",
        description="Cost of all executions divided by those that succeeded. All models.",
        unit="currencyUSD",
        width=4,
        sql="""
        SELECT if(countIf(status = 'succeeded') = 0, NULL, toFloat64(sum(total_cost)) / countIf(status = 'succeeded'))
            AS cost_of_one
        FROM executions FINAL
        WHERE $__timeFilter_ms(completed_at) AND NOT dry_run AND <agent> AND <tenant>
        """,
    ),
)


def _spend_by(column: str) -> Chart:
    return chart(
        _SPEND_PER_HOUR,
        "sum(spend) AS spent",
        at="hour",
        title=f"Spend by {column}",
        description="By the hour that budgets charge calls to; hours add up to what budgets count.",
        unit="currencyUSD",
        draw="bars",
        by=column,
        least_step="1h",
    )


DASHBOARD = Dashboard(
    name="spend",
    description="Who spends what, and how much is wasted on what?",
    variables=(AGENTS, TENANTS, MODELS),
    since="now-7d",
    refresh="5m",
    rows=(
        _FIGURES,
        (_spend_by("agent"), _spend_by("model")),
        (
            WASTE,
            chart(
                MODEL_CALLS,
                "sum(ifNull(input_tokens, 0)) - sum(ifNull(cached_tokens, 0)) AS input",
                'sum(ifNull(cached_tokens, 0)) AS "input, cached"',
                "sum(ifNull(output_tokens, 0)) AS output",
                title="Tokens",
                description="As reported by providers. Cached tokens are part of the input. All tenants.",
                draw="bars",
            ),
        ),
        (
            Listing(
                title="Spend by agent, tenant and model",
                description="The largest first. Spend is blank if nothing of it is known.",
                width=12,
                units={"spend": "currencyUSD"},
                agents_linked=True,
                sql="""
                SELECT
                    agent,
                    ifNull(tenant, 'no tenant') AS "tenant",
                    model,
                    sum(spend_per_hour.spend) AS "spend",
                    sum(spend_per_hour.calls) AS "calls"
                FROM spend_per_hour
                WHERE hour >= toStartOfHour($__fromTime) AND hour <= $__toTime AND <agent> AND <tenant> AND <model>
                GROUP BY agent, spend_per_hour.tenant, model
                ORDER BY "spend" DESC NULLS LAST, agent, "tenant", model
                LIMIT 200
                """,
            ),
            Listing(
                title="Waste by agent and cause",
                description="The largest first. All tenants and models.",
                width=12,
                units={"wasted": "currencyUSD"},
                agents_linked=True,
                sql="""
                SELECT
                    agent,
                    cause,
                    sum(cost) AS "wasted",
                    sum(waste_per_minute.executions) AS "executions"
                FROM waste_per_minute
                WHERE $__timeFilter(minute) AND <agent>
                GROUP BY agent, cause
                ORDER BY "wasted" DESC, agent, cause
                LIMIT 200
                """,
            ),
        ),
        (
            Listing(
                title="Reserved and actual cost",
                description="What budgets reserved for calls, and what the calls cost. If much more is reserved "
                "than spent, hard limits refuse calls early; below 100 % is safe. By whole days, all "
                "tenants.",
                width=12,
                units={"reserved": "currencyUSD", "cost": "currencyUSD", "cost of reserved": "percentunit"},
                agents_linked=True,
                below=GOOD,
                coloured={"cost of reserved": ((1, SO_SO), (1.5, BAD))},
                sql="""
                SELECT
                    agent,
                    model,
                    sum(estimate_accuracy.calls) AS "calls",
                    sum(estimate_accuracy.reserved) AS "reserved",
                    sum(estimate_accuracy.cost) AS "cost",
                    if("reserved" = 0, NULL, toFloat64("cost") / toFloat64("reserved")) AS "cost of reserved",
                    sum(exceeded) AS "above reserved"
                FROM estimate_accuracy
                WHERE $__dateFilter(day) AND <agent> AND <model>
                GROUP BY agent, model
                ORDER BY "reserved" DESC, agent, model
                LIMIT 200
                """,
            ),
            Listing(
                title="Budget events",
                description="Thresholds reached, limits raised and counters repaired, the latest first. The console "
                "shows the current state of each budget.",
                width=12,
                units={"total": "currencyUSD", "limit": "currencyUSD", "reached": "percent"},
                agents_linked=True,
                sql="""
                SELECT
                    at AS "when",
                    kind,
                    scope,
                    agent,
                    tenant,
                    window,
                    threshold_percent AS "reached",
                    total_cost AS "total",
                    limit_cost AS "limit",
                    enforcement
                FROM budget_events FINAL
                WHERE NOT shadow AND at >= $__fromTime_ms AND at <= $__toTime_ms
                    AND (agent IS NULL OR <agent>) AND (tenant IS NULL OR <tenant>)
                ORDER BY "when" DESC, event_id
                LIMIT 200
                """,
            ),
        ),
    ),
)
