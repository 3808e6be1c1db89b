"""What fails, why, and what helped against it?"""

from __future__ import annotations

from deploy.grafana.source.dashboard import Dashboard
from deploy.grafana.source.panels import BAD, GOOD, SO_SO, Chart, Listing, chart, figure
from deploy.grafana.source.shared import (
    BREAKERS_OPEN_NOW,
    CALL_DURATIONS,
    ERRORS,
    EXECUTIONS_ENDED,
    MODEL_CALLS,
    OPENINGS,
)
from deploy.grafana.source.variables import AGENTS, MODELS

AVAILABILITY = ((0.95, SO_SO), (0.99, GOOD))

_RETRIES_PER_DAY = "FROM retries_per_day\nWHERE $__dateFilter(day) AND <agent>"
_PROVIDER_HEALTH = "FROM provider_health\nWHERE $__timeFilter(minute) AND <model>"

_FIGURES = (
    figure(
        MODEL_CALLS,
        "if(sum(calls) = 0, NULL, sum(failed) / sum(calls)) AS share",
        title="Failed calls",
        description="As a share of calls made; refused ones are excluded.",
        unit="percentunit",
        width=4,
        below=GOOD,
        steps=((0.05, SO_SO), (0.2, BAD)),
    ),
    figure(
        MODEL_CALLS,
        "sum(short_circuits) AS refused",
        title="Refused calls",
        description="Calls not made because of a breaker, a budget, a guard or a limit.",
        width=4,
        below=GOOD,
        steps=((1, SO_SO),),
    ),
    figure(
        _RETRIES_PER_DAY,
        "if(sum(retried) = 0, NULL, sum(saved) / sum(retried)) AS share",
        title="Retries that helped",
        description="Executions that succeeded, as a share of those that retried. By whole days, all models.",
        unit="percentunit",
        width=4,
        below=BAD,
        steps=((0.3, SO_SO), (0.6, GOOD)),
    ),
    figure(
        _RETRIES_PER_DAY,
        "if(sum(fell_back) = 0, NULL, sum(saved_by_fallback) / sum(fell_back)) AS share",
        title="Fallbacks that helped",
        description="Executions that succeeded, as a share of those that fell back to another model. By whole days,"
        " all models.",
        unit="percentunit",
        width=4,
        below=BAD,
        steps=((0.3, SO_SO), (0.6, GOOD)),
    ),
    figure(
        _RETRIES_PER_DAY,
        "sum(cost_of_retries) AS spent",
        title="Cost of retries",
        description="Failed and successful retries. By whole days, all models.",
        unit="currencyUSD",
        width=4,
    ),
    figure(
        BREAKERS_OPEN_NOW,
        "count() AS open_now",
        title="Open breakers",
        description="Right now, whatever the time range; includes shared breakers, all models.",
        width=4,
        below=GOOD,
        steps=((1, BAD),),
    ),
)

DASHBOARD = Dashboard(
    name="reliability",
    description="What fails and why, whether retries and fallbacks helped, and the health of providers and breakers.",
    variables=(AGENTS, MODELS),
    rows=(
        _FIGURES,
        (
            ERRORS,
            chart(
                MODEL_CALLS,
                "sum(attempts_per_minute.retries) AS retries",
                "sum(attempts_per_minute.fallbacks) AS fallbacks",
                title="Retries and fallbacks",
                description="Retries on the same model, and fallbacks to another one.",
                draw="bars",
            ),
        ),
        (
            chart(
                _PROVIDER_HEALTH,
                "sum(availability * calls) / sum(calls) AS available",
                title="Provider availability",
                description="Calls without a failure on the provider's side (server errors, timeouts, lost "
                "connections); 0 without a success. All agents.",
                unit="percentunit",
                by="provider",
                most=1,
            ),
            CALL_DURATIONS,
        ),
        (
            chart(
                EXECUTIONS_ENDED,
                "sum(executions_per_minute.fell_back) / nullIf(sum(answered), 0) AS share",
                title="Traffic on fallbacks",
                description="Answers of another model than the requested one, as a share of all that models gave. "
                "All models.",
                unit="percentunit",
                by="agent",
                most=1,
            ),
            chart(
                EXECUTIONS_ENDED,
                "toFloat64(sum(executions_per_minute.fallback_cost)) "
                "/ nullIf(toFloat64(sum(executions_per_minute.requested_model_cost)), 0) AS times",
                title="Cost of fallbacks",
                description="Cost of the answers of fallbacks, as a multiple of what they would have cost on the "
                "requested model, where both are known. All models.",
                by="agent",
            ),
        ),
        (
            Chart(
                title="Success after retries and fallbacks",
                description="Executions that succeeded, as a share of those that retried or fell back. By whole "
                "days, all models.",
                unit="percentunit",
                most=1,
                least_step="1d",
                sql="""
                SELECT
                    toDateTime(day, 'UTC') AS time,
                    if(sum(retried) = 0, NULL, sum(saved) / sum(retried)) AS retries,
                    if(sum(fell_back) = 0, NULL, sum(saved_by_fallback) / sum(fell_back)) AS fallbacks
                FROM retries_per_day
                WHERE $__dateFilter(day) AND <agent>
                GROUP BY day
                ORDER BY time
                """,
            ),
            Listing(
                title="Providers",
                description="By model, over the whole time range. All agents.",
                width=12,
                height=8,
                units={"availability": "percentunit", "slowest 5 %": "ms"},
                below=BAD,
                coloured={"availability": AVAILABILITY},
                sql="""
                SELECT
                    provider,
                    model,
                    count() AS "calls",
                    if(countIf(outcome = 'success') = 0, 0,
                        1 - countIf(error_kind IN ('server', 'timeout', 'network')) / "calls") AS "availability",
                    countIf(error_kind = 'rate_limit') AS "rate limited",
                    countIf(error_kind = 'server') AS "server errors",
                    countIf(error_kind = 'timeout') AS "timeouts",
                    quantile(0.95)(duration_ms) AS "slowest 5 %"
                FROM attempts FINAL
                WHERE $__timeFilter_ms(started_at) AND NOT short_circuited AND <model>
                GROUP BY provider, model
                ORDER BY "availability", provider, model
                LIMIT 100
                """,
            ),
        ),
        (
            Listing(
                title="Errors",
                description="The most frequent first, each with its latest message.",
                units={"cost": "currencyUSD"},
                widths={"errors": 90, "kind": 150, "agent": 170, "model": 200},
                agents_linked=True,
                sql="""
                SELECT
                    sum(errors_per_minute.errors) AS "errors",
                    kind,
                    agent,
                    model,
                    argMax(latest_message, (minute, provider)) AS "the latest said",
                    max(minute) AS "latest",
                    sum(errors_per_minute.cost) AS "cost"
                FROM errors_per_minute
                WHERE $__timeFilter(minute) AND <agent> AND <model>
                GROUP BY kind, agent, model
                ORDER BY "errors" DESC, kind, agent, model
                LIMIT 200
                """,
            ),
        ),
        (OPENINGS,),
    ),
)
