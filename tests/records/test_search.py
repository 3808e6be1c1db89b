"""Pages of executions against a list in Python that is filtered, sorted and cut."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Execution, ExecutionSummary
from breakwater.jobs.rules.previews import preview, prompt_in
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records import rows, schema, search
from breakwater.records.search import Cursor, Filters
from tests.records.made import END, Made, known, made
from tests.records.samples import NOON, RATE_LIMITED, execution, new_database
from tests.server_sources import RunningServer
from tests.tables import each_row

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def history() -> Made:
    return made()


def key(record: Execution) -> tuple[datetime, str]:
    return record.completed_at, record.execution_id


def matching(history: Made, filters: Filters) -> list[Execution]:
    """The executions that the filters leave, the newest first; the text is an id's beginning or a word."""

    def has(record: Execution) -> bool:
        text = "" if filters.text is None else filters.text.lower()
        texts = [record.execution_id] if not text else [str(record.output), str(record.messages)]
        texts += [record.error.message] if record.error else []
        return (
            filters.agent in (None, record.agent)
            and filters.status in (None, record.status)
            and filters.reason in (None, record.reason)
            and filters.model in (None, record.chosen_model or record.requested_model)
            and filters.tenant in (None, record.tenant)
            and filters.user in (None, record.user)
            and filters.team in (None, record.team)
            and filters.task_id in (None, record.task_id)
            and filters.run_id in (None, record.run_id)
            and filters.error_kind in (None, record.error.kind if record.error else None)
            and (filters.min_cost is None or (record.total_cost or -1) >= filters.min_cost)
            and (filters.since is None or record.completed_at >= filters.since)
            and (filters.until is None or record.completed_at < filters.until)
            and (filters.dry_runs or not record.dry_run)
            and (record.execution_id.startswith(text) or any(text in one.lower() for one in texts))
        )

    return sorted((record for record in history.executions if has(record)), key=key, reverse=True)


async def walked(analytics: Analytics, filters: Filters, limit: int) -> list[tuple[datetime, str]]:
    """All pages, forwards; and checked to be the same ones backwards."""
    pages = [await search.search(analytics, filters, limit=limit)]
    assert pages[0].newer is None
    while (older := pages[-1].older) is not None:
        pages.append(await search.search(analytics, filters, after=older, limit=limit))
        assert pages[-1].lines
    back = pages[-1]
    for page in reversed(pages[:-1]):
        assert back.newer is not None
        back = await search.search(analytics, filters, before=back.newer, limit=limit)
        assert back.lines == page.lines
    assert back.newer is None
    return [(line.completed_at, line.execution_id) for page in pages for line in page.lines]


FILTERS = [
    Filters(),
    Filters(reason="error", dry_runs=False),
    Filters(model="claude-haiku-4.5"),
    Filters(user="user-7"),
    Filters(team="search", status="succeeded"),
    Filters(task_id="task-3"),
    Filters(run_id="acme/task-3"),
    Filters(error_kind="rate_limit"),
    Filters(min_cost=10_000_000),
    Filters(since=END - DAY, until=END - DAY / 2),
    Filters(agent="translator", tenant="globex", since=END - 2 * DAY),
    Filters(text="TEMPORARILY unknown words"),
    Filters(text="berlin"),
    Filters(text="Limit REACHED", agent="content-writer"),
]
FILTERS_OF_RUNS = [
    Filters(),
    Filters(agent="translator", tenant="globex", since=END - 2 * DAY),
    Filters(text="berlin"),
]
"""They become the same conditions there."""


@each_row("filters", FILTERS, ids=str)
async def test_pages_hold_all_that_the_filters_leave_and_nothing_else(
    filled: Analytics, history: Made, filters: Filters
) -> None:
    expected = [key(record) for record in matching(history, filters)]
    assert await walked(filled, filters, 250) == expected
    assert await search.count(filled, filters) == len(expected)


def runs_of(found: list[Execution]) -> dict[str, tuple[datetime, str]]:
    """Runs by where the last of their steps is, the newest first."""
    places: dict[str, tuple[datetime, str]] = {}
    for one in found:
        places.setdefault(one.run_id or "", key(one))
    return places


@each_row("filters", FILTERS_OF_RUNS, ids=str)
async def test_runs_are_listed_once_at_the_last_step_that_matches(
    filled: Analytics, history: Made, filters: Filters
) -> None:
    expected = list(runs_of(matching(history, filters)))
    limit = len(expected) // 3 + 1  # three pages: the first, the last, and one between them
    pages = [await search.search_runs(filled, filters, limit=limit)]
    assert pages[0].newer is None
    while (older := pages[-1].older) is not None:
        pages.append(await search.search_runs(filled, filters, after=older, limit=limit))
    assert [run.run_id for page in pages for run in page.lines] == expected
    back = pages[-1]
    for page in reversed(pages[:-1]):
        assert back.newer is not None
        back = await search.search_runs(filled, filters, before=back.newer, limit=limit)
        assert [run.run_id for run in back.lines] == [run.run_id for run in page.lines]
    assert back.newer is None


def previews_of(record: Execution) -> dict[str, str | None]:
    return {
        "prompt_preview": preview(prompt_in({"messages": cast(Any, record.messages), "input": record.input})),
        "output_preview": preview(record.output),
    }


async def test_a_run_sums_up_all_its_steps(filled: Analytics, history: Made) -> None:
    page = await search.search_runs(filled, Filters(status="dead_lettered"), limit=200)
    assert max(run.steps for run in page.lines) > 1
    for run in page.lines:
        steps = sorted((one for one in history.executions if one.run_id == run.run_id), key=lambda one: one.queued_at)
        failed = [one for one in steps if one.status == "dead_lettered"]
        bases = {one.cost_basis for one in steps}
        assert (run.steps, run.failed, run.status) == (len(steps), len(failed), "dead_lettered")
        assert run.total_cost == known(one.total_cost for one in steps)
        assert run.wasted_cost == known(one.wasted_cost for one in steps)
        assert run.cost_basis == next(basis for basis in ("unknown", "estimated", "billed", "none") if basis in bases)
        assert run.agents == tuple(sorted({one.agent for one in steps}))
        assert run.started_at == steps[0].queued_at
        assert run.completed_at == max(one.completed_at for one in steps)
        assert run.duration_ms == (run.completed_at - run.started_at) // timedelta(milliseconds=1)
        ended_last = max(steps, key=lambda one: (one.completed_at, one.execution_id))
        assert (run.submitted_by, run.user) == ("app", steps[0].user)
        assert run.prompt_preview == previews_of(steps[0])["prompt_preview"]
        assert run.output_preview == previews_of(ended_last)["output_preview"]
        last = max(failed, key=lambda one: one.completed_at)
        assert (run.reason, run.error_message) == (last.reason, last.error and last.error.message)
        assert {one.execution_id for one in await search.steps(filled, run.run_id)} == {
            one.execution_id for one in steps
        }


async def test_the_dearest_runs_come_first(filled: Analytics, history: Made) -> None:
    costs = dict[str, int]()
    for one in history.executions:
        if one.total_cost is not None:
            costs[one.run_id or ""] = costs.get(one.run_id or "", 0) + one.total_cost
    found = await search.largest_runs(filled, Filters(), "total_cost", limit=10)
    assert [run.total_cost for run in found] == sorted(costs.values(), reverse=True)[:10]
    longest = await search.largest_runs(filled, Filters(), "duration_ms", limit=10)
    assert [run.duration_ms for run in longest] == sorted((run.duration_ms for run in longest), reverse=True)


@each_row("smallest", [False, True])
@each_row("filters", [Filters(), Filters(status="dead_lettered"), Filters(text="berlin")], ids=str)
async def test_the_largest_come_first_of_all_that_match_and_unknown_ones_last(
    filled: Analytics, history: Made, filters: Filters, *, smallest: bool
) -> None:
    found = matching(history, filters)
    known = [one for one in found if one.total_cost is not None]
    known.sort(key=lambda one: one.total_cost or 0, reverse=not smallest)
    lines = await search.largest(filled, filters, "total_cost", smallest=smallest, limit=1_000)
    costs = [one.total_cost for one in known] + [None] * (len(found) - len(known))
    assert [line.total_cost for line in lines] == costs
    assert {line.execution_id for line in lines} == {one.execution_id for one in found}
    fewer = await search.largest(filled, filters, "duration_ms", smallest=smallest, limit=3)
    took = sorted((one.duration_ms for one in found), reverse=not smallest)
    assert [line.duration_ms for line in fewer] == took[:3]


async def test_a_line_says_what_the_record_says(filled: Analytics, history: Made) -> None:
    for line in (await search.search(filled, Filters(status="dead_lettered"))).lines:
        (record,) = [one for one in history.executions if one.execution_id == line.execution_id]
        assert line == ExecutionSummary(
            execution_id=record.execution_id,
            job_id=record.job_id,
            agent=record.agent,
            tenant=record.tenant,
            task_id=record.task_id,
            task_key=record.task_key,
            parent_execution_id=record.parent_execution_id,
            parent_job_id=record.parent_job_id,
            plan_id=record.plan_id,
            plan_key=record.plan_key,
            run_id=record.run_id,
            status=record.status,
            reason=record.reason,
            chosen_model=record.chosen_model,
            requested_model=record.requested_model,
            attempts_count=record.attempts_count,
            total_tokens=record.total_tokens,
            total_cost=record.total_cost,
            wasted_cost=record.wasted_cost,
            cost_basis=record.cost_basis,
            duration_ms=record.duration_ms,
            completed_at=record.completed_at,
            error_kind=record.error.kind if record.error else None,
            error_message=record.error.message if record.error else None,
            error_status_code=record.error.status_code if record.error else None,
            cache_hit=record.cache_hit,
            dry_run=record.dry_run,
            submitted_by=record.submitted_by,
            user=record.user,
            team=record.team,
            **previews_of(record),
        )
        assert line.model == (record.chosen_model or record.requested_model)


async def test_a_whole_id_is_found_whenever_it_ended(filled: Analytics, history: Made) -> None:
    record = history.executions[7]
    later = Filters(text=record.execution_id, since=record.completed_at + DAY)
    page = await search.search(filled, later)
    assert [line.execution_id for line in page.lines] == [record.execution_id]
    assert (page.newer, page.older) == (None, None)
    assert await search.count(filled, later) == 1
    # What else was asked for is asked for still.
    assert (await search.search(filled, Filters(text=record.execution_id, agent="nobody"))).lines == ()


async def test_the_beginning_of_an_id_finds_all_that_have_it(filled: Analytics, history: Made) -> None:
    beginning = history.executions[100].execution_id[:7]
    expected = sorted((key(one) for one in history.executions if one.execution_id.startswith(beginning)), reverse=True)
    assert 0 < len(expected) < len(history.executions)
    assert await walked(filled, Filters(text=beginning), 7) == expected


async def test_words_are_looked_for_in_the_newest_only_and_ids_in_all(
    analytics: Analytics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "WORDS_WITHIN", 3)
    records = [
        execution(f"{'word' if n == 1 else 'e'}-{n}", completed_at=NOON + n * timedelta(hours=9), output="a Word of it")
        for n in range(6)
    ]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, 1) for one in records])
    assert [one for _, one in await walked(analytics, Filters(text="word"), 2)] == ["e-5", "e-4", "e-3", "word-1"]
    assert await search.count(analytics, Filters(text="word")) == 4
    # The newest of what the other filters leave.
    early = Filters(text="word", until=NOON + timedelta(hours=20))
    assert [one for _, one in await walked(analytics, early, 2)] == ["e-2", "word-1", "e-0"]


async def test_words_may_have_any_characters(analytics: Analytics) -> None:
    record = execution("e1", status="dead_lettered", reason="error", error=RATE_LIMITED, output=None)
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1)])
    for text in ("ZU VIELE", "“zu", "slow down:"):
        assert (await search.search(analytics, Filters(text=text))).lines, text
    for text in ("slow%down", "' OR 1 --", "\\", "{x:String}", "%s"):
        assert not (await search.search(analytics, Filters(text=text))).lines, text


async def test_an_empty_table_has_one_empty_page(analytics: Analytics) -> None:
    nothing = search.Page((), None, None)
    assert await search.search(analytics, Filters()) == nothing
    assert await search.search(analytics, Filters(text="a")) == nothing
    assert await search.search(analytics, Filters(), after=Cursor(NOON, "e1")) == nothing
    assert await search.count(analytics, Filters(text="a")) == 0


async def test_a_page_is_on_one_side_of_a_place(analytics: Analytics) -> None:
    with pytest.raises(ValueError, match="not both"):
        await search.search(analytics, Filters(), after=Cursor(NOON, "a"), before=Cursor(NOON, "b"))


# Few times and few ids, so that many executions end in the same millisecond, far apart and close together.
PLACES = st.tuples(
    st.sampled_from([0, 1, 2, 3_600_000, 3_600_001, 9 * 3_600_000, 90 * 86_400_000]),
    st.sampled_from(["a", "b", "B", "c.d", "é", "e 1", "0"]),
)


@given(st.sets(PLACES, max_size=12), st.integers(2, 5))
@settings(max_examples=6)
async def test_paging_loses_and_repeats_nothing(
    clickhouse_server: RunningServer, places: set[tuple[int, str]], limit: int
) -> None:
    tenant = "acme"
    records = [
        execution(
            name, tenant=tenant, agent=f"agent {tenant} {len(name)}", completed_at=NOON + timedelta(milliseconds=ms)
        )
        for ms, name in places
    ]
    async with new_database(clickhouse_server.url) as analytics:
        for _ in range(2):
            await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, 1) for one in records])
        # ClickHouse compares texts by their bytes.
        expected = sorted((key(one) for one in records), key=lambda one: (one[0], one[1].encode()), reverse=True)
        assert await walked(analytics, Filters(tenant=tenant), limit) == expected


@given(
    st.datetimes(datetime(1970, 1, 1), datetime(2105, 12, 31), timezones=st.just(UTC)),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20),
)
def test_a_cursor_is_what_its_text_says(at: datetime, execution_id: str) -> None:
    cursor = Cursor(at.replace(microsecond=at.microsecond // 1000 * 1000), execution_id)
    assert Cursor.parse(cursor.text) == cursor


@each_row(
    ("text", "problem"),
    [
        ("", "no dot"),
        ("1795255200000", "no dot"),
        (".e1", "milliseconds"),
        ("soon.e1", "'soon'"),
        ("-5.e1", "'-5'"),
        ("²5.e1", "milliseconds"),
        ("99999999999999.e1", "milliseconds"),
        (f"{'9' * 5_000}.e1", "milliseconds"),
        (f"{'1'.zfill(20)}{'0' * 30}.e1", "milliseconds"),
        ("5.", "id"),
        ("5.a\x00b", "id"),
        (f"5.{'x' * 129}", "id"),
    ],
)
def test_a_text_that_is_no_cursor_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Cursor.parse(text)


async def test_an_execution_is_found_by_its_id_or_by_its_jobs(analytics: Analytics) -> None:
    shared = {"job_id": "order-1", "task_id": "t", "plan_id": "p"}
    stored = [
        execution("x-1", **shared, task_key="x-t", plan_key="x-p", completed_at=NOON),
        execution("x-2", **shared, completed_at=NOON + timedelta(seconds=1)),
        execution("order-12"),
    ]
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, number) for number, one in enumerate(stored)])
    found = await search.find_execution(analytics, "x-1")
    assert found is not None
    assert (found.execution_id, found.job_id, found.task_key) == ("x-1", "order-1", "x-t")
    latest = await search.find_execution(analytics, "order-1")
    assert latest is not None
    assert latest.execution_id == "x-2"

    async def matching(**filters: str) -> list[str]:
        return [line.execution_id for line in (await search.search(analytics, Filters(**filters))).lines]

    assert await matching(text="x-1") == ["x-1"]
    assert await matching(text="order-1") == ["x-2", "x-1"]
    assert sorted(await matching(text="order-")) == ["order-12", "x-1", "x-2"]
    assert await matching(task_id="x-t") == await matching(plan_id="x-p") == ["x-1"]
    assert await matching(task_id="t") == await matching(plan_id="p") == ["x-2", "x-1"]
    assert (await search.search_runs(analytics, Filters(text="order-1"))).lines[0].job_id == "order-1"
