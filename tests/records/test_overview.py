"""The figures of the console's pages, against the same figures computed from the records."""

from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.rules.record import totals
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.time_window import TimeWindow
from breakwater.records import figures, rows, schema, search
from breakwater.records.figures import History, WindowTotals
from tests.records.made import END, SOME, Made, known, made, quantile
from tests.records.samples import RATE_LIMITED, attempt, attempt_row, execution
from tests.records.view_figures import fallback_costs
from tests.tables import each_row

EMPTY = TimeWindow(END + timedelta(days=1), END + timedelta(days=2), 3_600)
AGENTS = [None, "support-triage"]
ITS_FAULT = ("server", "timeout", "network")
"""What a provider can be blamed for."""


@pytest.fixture(scope="module")
def history() -> Made:
    return made()


def totals_of(executions: list[Execution], attempts: list[Attempt]) -> WindowTotals:
    calls = [one for one in attempts if not one.short_circuited]
    durations = [one.duration_ms for one in executions]
    return WindowTotals(
        executions=len(executions),
        succeeded=sum(one.status == "succeeded" for one in executions),
        dead_lettered=sum(one.status == "dead_lettered" for one in executions),
        calls=len(calls),
        failed_calls=sum(one.outcome != "success" for one in calls),
        retries=sum(one.cause == "retry" for one in attempts),
        fallbacks=sum(one.cause == "fallback" for one in attempts),
        short_circuits=len(attempts) - len(calls),
        cache_hits=sum(one.cache_hit for one in executions),
        answered=sum(one.is_answered_by_model for one in executions),
        fell_back=sum(one.fell_back for one in executions),
        fallback_cost=sum(cost for cost, _ in fallback_costs(executions)),
        requested_model_cost=sum(cost for _, cost in fallback_costs(executions)),
        p50_ms=quantile(durations, 0.5),
        p95_ms=quantile(durations, 0.95),
        spend=known(one.cost for one in calls),
        wasted=known(one.wasted_cost for one in executions),
        unknown_costs=sum(one.cost is None for one in calls),
        unknown_waste=sum(None in wasted_costs(one) for one in executions),
    )


def wasted_costs(record: Execution) -> list[int | None]:
    called = [one for one in record.attempts if not one.short_circuited]
    return [one.cost for one in (called[:-1] if record.status == "succeeded" else called)]


async def test_every_row_is_there_twice(filled: Analytics, history: Made) -> None:
    assert (await filled.query("SELECT count() FROM attempts")).rows == ((2 * len(history.attempts),),)


@each_row("agent", AGENTS)
async def test_a_window_and_each_of_its_steps_have_the_figures_of_the_records(
    filled: Analytics, history: Made, agent: str | None
) -> None:
    found = await figures.history(filled, SOME, agent=agent)
    assert found.totals == totals_of(history.ended(SOME, agent), history.called(SOME, agent))
    assert found.totals.short_circuits
    assert found.totals.wasted
    assert found.totals.fallback_share
    assert found.totals.fallback_cost_factor
    steps = [TimeWindow(SOME.at(n), SOME.at(n) + timedelta(hours=1), 3_600) for n in range(SOME.buckets)]
    assert found.steps == tuple(totals_of(history.ended(one, agent), history.called(one, agent)) for one in steps)


async def test_agents_are_listed_with_sparks(filled: Analytics, history: Made) -> None:
    found = await figures.agents(filled, SOME)
    assert list(found) == sorted({one.agent for one in [*history.ended(SOME), *history.called(SOME)]})
    part = (SOME.end - SOME.start) / 24
    for agent, its in found.items():
        ended, called = history.ended(SOME, agent), history.called(SOME, agent)
        assert its.totals == totals_of(ended, called)
        assert its.steps == tuple(
            totals_of(
                [one for one in ended if (one.completed_at - SOME.start) // part == n],
                [one for one in called if (one.started_at - SOME.start) // part == n],
            )
            for n in range(24)
        )


@each_row("agent", AGENTS)
async def test_errors_are_counted_by_what_they_are(filled: Analytics, history: Made, agent: str | None) -> None:
    by_hash: dict[str, list[Attempt]] = defaultdict(list)
    for one in history.called(SOME, agent):
        if one.error is not None and not one.short_circuited:
            by_hash[one.error.hash or ""].append(one)
    lines = await figures.errors(filled, SOME, agent=agent)
    assert len(lines) == min(20, len(by_hash))
    assert [line.calls for line in lines] == sorted((len(some) for some in by_hash.values()), reverse=True)[:20]
    for line in lines:
        some = by_hash[line.hash]
        latest = max(one.started_at for one in some)
        assert line.last_at == latest
        assert line.message in {one.error.message for one in some if one.error and one.started_at == latest}
        assert line.cost == known(one.cost for one in some)
        assert line.unknown_costs == sum(one.cost is None for one in some)
        assert {(line.kind, line.class_name)} == {(one.error.kind, one.error.class_) for one in some if one.error}
        assert line.agents == tuple(sorted({one.agent for one in some}))
        assert line.models == tuple(sorted({one.model for one in some}))
    assert await figures.errors(filled, SOME, agent=agent, limit=3) == lines[:3]


async def test_a_provider_is_as_available_as_its_view_reports(analytics: Analytics) -> None:
    kinds = ("server", "timeout", "network", "rate_limit", "logic", "context_overflow", "client")
    calls = [
        attempt("e1", number, outcome="error", error=RATE_LIMITED.model_copy(update={"kind": kind}))
        for number, kind in enumerate(kinds, 1)
    ]
    calls.append(attempt("e1", 8))
    await analytics.insert(schema.ATTEMPTS, [attempt_row(one, 1) for one in calls])
    (line,) = await figures.providers(analytics, TimeWindow(END, END + timedelta(hours=1), 60))
    view = await analytics.query("SELECT sum(availability * calls) / sum(calls) FROM provider_health")
    assert line.available_share == pytest.approx(view.rows[0][0]) == pytest.approx(5 / 8)
    assert (line.rate_limited, line.others, line.succeeded, line.calls) == (1, 3, 1, 8)


async def test_waste_is_reported_by_agent_and_cause(filled: Analytics, history: Made) -> None:
    cost, executions = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for one in history.ended(SOME):
        for cause, nano in one.wasted_by_cause.items():
            cost[one.agent, cause] += nano
            executions[one.agent, cause] += 1
    lines = await figures.waste(filled, SOME)
    assert {(line.agent, line.cause): (line.cost, line.executions) for line in lines} == {
        key: (cost[key], executions[key]) for key in cost
    }
    assert [line.cost for line in lines] == sorted(cost.values(), reverse=True)
    assert sum(line.cost for line in lines) == (await figures.history(filled, SOME)).totals.wasted
    one_agent = await figures.waste(filled, SOME, agent=lines[0].agent)
    assert one_agent == tuple(line for line in lines if line.agent == lines[0].agent)


@each_row("agent", AGENTS)
async def test_providers_are_judged_by_the_calls_they_got(filled: Analytics, history: Made, agent: str | None) -> None:
    by_model: dict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for one in history.called(SOME, agent):
        if not one.short_circuited:
            by_model[one.provider, one.model].append(one)
    lines = await figures.providers(filled, SOME, agent=agent)
    assert [(line.provider, line.model) for line in lines] == sorted(by_model)
    for line in lines:
        some = by_model[line.provider, line.model]
        failed = [one for one in some if one.error is not None]
        kinds = Counter(one.error.kind for one in failed if one.error)
        times = [one.duration_ms for one in some if one.outcome == "success"]
        latest = max((one.started_at for one in failed), default=None)
        assert (line.calls, line.succeeded) == (len(some), len(times))
        assert (line.rate_limited, line.server_errors, line.timeouts, line.lost_connections) == (
            kinds["rate_limit"],
            kinds["server"],
            kinds["timeout"],
            kinds["network"],
        )
        assert line.others == len(some) - len(times) - line.rate_limited - sum(kinds[kind] for kind in ITS_FAULT)
        assert line.available_share == pytest.approx(1 - sum(kinds[kind] for kind in ITS_FAULT) / len(some))
        assert (line.p50_ms, line.p95_ms) == (quantile(times, 0.5), quantile(times, 0.95))
        assert line.spend == known(one.cost for one in some)
        assert line.unknown_costs == sum(one.cost is None for one in some)
        assert line.last_error_at == latest
        assert line.last_error in {one.error.message for one in failed if one.error and one.started_at == latest}


async def test_streamed_answers_are_those_of_the_records(filled: Analytics, history: Made) -> None:
    by_model: dict[str, list[Attempt]] = defaultdict(list)
    for one in history.called(SOME, "support-triage"):
        if one.first_token_ms is not None:
            by_model[one.model].append(one)
    lines = await figures.streams(filled, SOME, agent="support-triage")
    assert {line.model for line in lines} == by_model.keys()
    assert [line.streams for line in lines] == sorted((len(some) for some in by_model.values()), reverse=True)
    for line in lines:
        some = by_model[line.model]
        begun = [one.first_token_ms for one in some if one.first_token_ms is not None]
        rates = [one.tokens_per_s for one in some if one.tokens_per_s is not None]
        assert line.broken_off == sum(one.outcome != "success" for one in some)
        assert (line.first_token_p50_ms, line.first_token_p95_ms) == (quantile(begun, 0.5), quantile(begun, 0.95))
        assert line.tokens_per_s == pytest.approx(median(rates))


@each_row("agent", AGENTS)
async def test_retries_are_judged_by_how_executions_ended(filled: Analytics, history: Made, agent: str | None) -> None:
    def having(cause: str) -> list[Execution]:
        ended = history.ended(SOME, agent)
        return [one for one in ended if any(a.cause == cause and not a.short_circuited for a in one.attempts)]

    retried, fell_back = having("retry"), having("fallback")
    found = await figures.retries(filled, SOME, agent=agent)
    assert (found.retried, found.saved) == (len(retried), sum(one.status == "succeeded" for one in retried))
    assert (found.fell_back, found.saved_by_fallback) == (
        len(fell_back),
        sum(one.status == "succeeded" for one in fell_back),
    )
    assert found.cost == sum(a.cost or 0 for one in retried for a in one.attempts if a.cause == "retry")
    assert found.rate == pytest.approx(found.saved / len(retried))


@each_row("by", ["agent", "tenant", "model"])
async def test_who_spent_what_is_reported_the_dearest_first(
    filled: Analytics, history: Made, by: figures.Spender
) -> None:
    groups: dict[str | None, list[Attempt]] = defaultdict(list)
    for one in history.called(SOME):
        if not one.short_circuited:
            groups[getattr(one, by)].append(one)
    lines = await figures.spend_by(filled, SOME, by, limit=100)
    assert {line.key for line in lines} == set(groups)
    for line in lines:
        some = groups[line.key]
        assert line.spend == known(one.cost for one in some)
        assert line.wasted == known(one.cost for one in some if one.outcome != "success")
        assert (line.calls, line.unknown_costs) == (len(some), sum(one.cost is None for one in some))
        assert line.unknown_waste == sum(one.cost is None for one in some if one.outcome != "success")
    spends = [line.spend or 0 for line in lines]
    assert spends == sorted(spends, reverse=True)
    assert await figures.spend_by(filled, SOME, by, limit=2) == lines[:2]


async def test_facets_are_what_there_is_the_most_frequent_first(filled: Analytics, history: Made) -> None:
    found = await search.facets(filled, SOME)
    seen = [one for one in history.executions if SOME.start <= one.completed_at < SOME.end]

    def counted(values: list[str | None]) -> tuple[tuple[str, int], ...]:
        counts = Counter(value for value in values if value is not None)
        return tuple(sorted(counts.items(), key=lambda one: (-one[1], one[0])))[:50]

    assert found.agents == counted([one.agent for one in seen])
    assert found.models == counted([one.chosen_model or one.requested_model for one in seen])
    assert found.tenants == counted([one.tenant for one in seen])
    assert found.reasons == counted([one.reason for one in seen])
    assert found.error_kinds == counted([one.error.kind if one.error else None for one in seen])


async def test_nothing_happened_is_reported_as_zero(filled: Analytics) -> None:
    found = (await figures.history(filled, EMPTY)).totals
    assert (found.executions, found.calls, found.spend, found.wasted) == (0, 0, 0, 0)
    assert (found.p50_ms, found.p95_ms, found.success_rate) == (None, None, None)
    assert await figures.history(filled, EMPTY) == History(found, (found,) * 24)
    assert await figures.agents(filled, EMPTY) == {}
    for nothing in (figures.errors, figures.providers, figures.waste):
        assert await nothing(filled, EMPTY) == ()
    assert await figures.retries(filled, EMPTY) == figures.RetryFigures(0, 0, 0, 0, 0)
    assert await figures.spend_by(filled, EMPTY, "tenant") == ()
    assert await search.facets(filled, EMPTY) == search.Facets((), (), (), (), ())


async def test_who_cancels_has_neither_failed_nor_succeeded(analytics: Analytics) -> None:
    states = ("succeeded", "succeeded", "succeeded", "dead_lettered", "cancelled", "cancelled")
    records = [execution(f"e{number}", status=status) for number, status in enumerate(states)]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, 1) for one in records])
    found = (await figures.history(analytics, TimeWindow(END, END + timedelta(hours=1), 60))).totals
    assert (found.executions, found.decided, found.success_rate) == (6, 4, 0.75)


async def test_what_is_not_known_is_not_zero(analytics: Analytics) -> None:
    calls = [attempt("e1", 1, cost=0), attempt("e2", 1, cost=None, cost_basis="unknown", outcome="error")]
    await analytics.insert(schema.ATTEMPTS, [attempt_row(one, 1) for one in calls])
    window = TimeWindow(END, END + timedelta(hours=1), 60)
    found = (await figures.history(analytics, window)).totals
    assert (found.spend, found.unknown_costs) == (None, 1)
    (line,) = await figures.spend_by(analytics, window, "agent")
    assert (line.spend, line.wasted, line.calls, line.unknown_costs, line.unknown_waste) == (None, None, 2, 1, 1)


FAILED = {"status": "dead_lettered", "reason": "error"}


WASTE: list[tuple[list[int | None], dict[str, Any], int | None, int]] = [
    ([None], FAILED, None, 1),
    ([None, 5], FAILED, 5, 1),
    ([None, 5], {}, None, 1),
    ([3, None, 5], {}, 3, 1),
    # What is not known is what the answer cost: no waste.
    ([None], {}, 0, 0),
    ([3, None], {}, 3, 0),
    ([], FAILED, 0, 0),
]
"""The costs of an execution's calls, its end, what is known of its waste, and the calls of which it is not known."""


async def test_waste_is_a_lower_bound_where_a_part_of_it_is_not_known(analytics: Analytics) -> None:
    def ended(hour: int, costs_of_calls: list[int | None], fields: dict[str, Any]) -> Execution:
        calls = [
            attempt("e1", number, cost=cost, cost_basis="unknown" if cost is None else "billed")
            for number, cost in enumerate(costs_of_calls, 1)
        ]
        sums = totals(calls, answered=not fields)
        money = {name: getattr(sums, name) for name in ("total_cost", "wasted_cost", "wasted_by_cause", "cost_basis")}
        at = END + timedelta(hours=hour)
        return execution("e1", completed_at=at, attempts=calls, attempts_count=len(calls), **money, **fields)

    records = [ended(hour, costs, fields) for hour, (costs, fields, _, _) in enumerate(WASTE)]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in records])
    for record, (costs, fields, wasted, unknown) in zip(records, WASTE, strict=True):
        window = TimeWindow(record.completed_at, record.completed_at + timedelta(hours=1), 60)
        found = (await figures.history(analytics, window)).totals
        assert (found.wasted, found.unknown_waste) == (wasted, unknown), (costs, fields)


@given(
    st.timedeltas(timedelta(minutes=40), timedelta(days=119)),
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),
)
def test_a_window_holds_its_span_in_40_to_120_whole_steps(span: timedelta, now: datetime) -> None:
    window = TimeWindow.last(span, now)
    assert 40 <= window.buckets <= 120
    assert window.start <= now - span
    assert now < window.end
    assert window.end - now <= timedelta(seconds=window.step_s)
    assert (now - span) - window.start < timedelta(seconds=window.step_s) + timedelta(milliseconds=1)
    assert window.start_ms % (window.step_s * 1000) == 0
    assert window.at(window.buckets) == window.end


@each_row(
    ("start", "end", "step_s"),
    [
        (END, END, 60),
        (END + timedelta(hours=1), END, 60),
        (END, END + timedelta(seconds=90), 60),
        (END, END + timedelta(hours=1), 0),
        (END.replace(tzinfo=None), END + timedelta(hours=1), 60),
    ],
)
def test_a_window_that_is_none_is_refused(start: datetime, end: datetime, step_s: int) -> None:
    with pytest.raises(ValueError, match=r"time range"):
        TimeWindow(start, end, step_s)
