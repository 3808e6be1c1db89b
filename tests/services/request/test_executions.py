"""The record of executions over HTTP: pages, filters, one with its attempts, and who may see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import pytest_asyncio

from breakwater.client import ApiRefusedError, AsyncClient, Client, ExecutionQuery
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key
from breakwater.jobs.contract.execution import Execution, ExecutionList, ExecutionSummary
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.security.encryption import Cipher, new_key
from breakwater.local.ports import free_port
from breakwater.records import rows, schema
from tests.records import samples
from tests.records.made import END, Made, made
from tests.server_sources import RunningServer
from tests.services.request.conftest import CONFIG, Answer, HttpApi, running, settings_for
from tests.tables import each_row

PATH = "/api/v1/executions"
KEY = new_key()
ENCRYPTING = f'{CONFIG}encryption: {{keys: [{{command: [echo, "{KEY}"]}}]}}'
AGENT = "support-triage"
SECRET = "what nobody may read"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The API of a plane with a small history."""

    api: HttpApi
    analytics: Analytics
    history: Made
    without_clickhouse: HttpApi
    without_tables: HttpApi

    async def list(self, **query: object) -> ExecutionList:
        answer = await self.api.ask("GET", f"{PATH}?{urlencode(query)}")
        assert answer.status == 200, answer.body
        return ExecutionList.model_validate_json(answer.body)

    async def show(self, execution_id: str, **headers: str) -> Answer:
        return await self.api.ask("GET", f"{PATH}/{quote(execution_id, safe='')}", headers=headers)

    async def store(self, record: Execution, sequence: int = 1) -> None:
        await self.analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, sequence)])


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def recorded(
    module_nats_server: RunningServer,
    redis_server: RunningServer,
    clickhouse_server: RunningServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Recorded]:
    directory, history = tmp_path_factory.mktemp("executions"), made()
    config = parse_config(ENCRYPTING)
    await provision(module_nats_server.url, bus_plan(config))
    settings = settings_for(module_nats_server.url, redis_server.url, directory)
    key = create_key(settings.api_keys_file, "tests")

    def at(clickhouse_url: str) -> Any:
        fields = settings.model_dump() | {"clickhouse_url": clickhouse_url, "http_port": free_port()}
        return running(type(settings).model_validate(fields), config, key)

    async with samples.new_database(clickhouse_server.url) as analytics:
        for table in (schema.EXECUTIONS, schema.ATTEMPTS):
            await analytics.insert(table, history.rows[table.name])
        url = f"{clickhouse_server.url.rstrip('/')}/{analytics.database}"
        nowhere = f"http://127.0.0.1:{free_port()}/breakwater"
        async with at(url) as api, at(nowhere) as unreachable, at(f"{url}_of_nobody") as empty:
            yield Recorded(api, analytics, history, unreachable, empty)


def etag_of(answer: Answer) -> str:
    return next(value for name, value in answer.headers.items() if name.lower() == "etag")


def newest_first(records: Any) -> list[Execution]:
    return sorted(records, key=lambda one: (one.completed_at, one.execution_id), reverse=True)


async def test_a_page_leads_to_the_next_and_back(recorded: Recorded) -> None:
    matching = newest_first(one for one in recorded.history.executions if one.agent == AGENT and not one.dry_run)
    query: dict[str, object] = {"agent": AGENT, "dry_runs": "false", "limit": 30}
    pages = [first := await recorded.list(**query), await recorded.list(**query, after=first.older)]
    without_previews = {"prompt_preview": None, "output_preview": None}
    lines = [line for page in pages for line in page.executions]
    assert any(line.output_preview for line in lines)
    assert [line.model_copy(update=without_previews) for line in lines] == [
        ExecutionSummary.of(one) for one in matching[:60]
    ]
    assert first.newer is None
    back = await recorded.list(**query, before=pages[1].newer)
    assert back.executions == first.executions
    # A cursor is a place, and not a page of one search: another one goes on from the same moment.
    others = await recorded.list(agent="translator", after=pages[0].older, limit=5)
    assert all(one.completed_at <= pages[0].executions[-1].completed_at for one in others.executions)


FILTERS: list[tuple[dict[str, object], Callable[[Execution], bool]]] = [
    ({"status": "dead_lettered"}, lambda one: one.status == "dead_lettered"),
    ({"reason": "error", "error_kind": "server"}, lambda one: bool(one.error and one.error.kind == "server")),
    ({"tenant": "acme"}, lambda one: one.tenant == "acme"),
    ({"min_cost": "0.01"}, lambda one: (one.total_cost or 0) >= 10_000_000),
    (
        {"since": (END - timedelta(hours=9)).isoformat(), "until": "2026-11-21T08:00:00Z"},
        lambda one: timedelta(hours=4) < END - one.completed_at <= timedelta(hours=9),
    ),
]


@each_row(("query", "matches"), FILTERS)
async def test_filters_leave_those_that_match(
    recorded: Recorded, query: dict[str, object], matches: Callable[[Execution], bool]
) -> None:
    found = await recorded.list(**query, limit=1000)
    assert [one.execution_id for one in found.executions] == [
        one.execution_id
        for one in newest_first(one for one in recorded.history.executions if matches(one))
        if "reason" not in query or one.reason == query["reason"]
    ]
    assert found.executions


@each_row(
    ("query", "path"),
    [
        ("status=failed", "status"),
        ("reason=because", "reason"),
        ("min_cost=-1", "min_cost"),
        ("since=2026-11-21T10:00:00", "since"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("after=yesterday", "after"),
        ("before=1.%00", "before"),
        ("after=1.a&before=1.a", ""),
        ("tenants=acme", "tenants"),
        ("text=%1b", "text"),
    ],
)
async def test_a_wrong_query_is_refused_with_the_parameter(recorded: Recorded, query: str, path: str) -> None:
    answer = await recorded.api.ask("GET", f"{PATH}?{query}")
    assert (answer.status, answer.code, answer.paths) == (422, "invalid_query", [path])


async def test_one_is_shown_with_its_attempts_and_known_again_by_its_etag(recorded: Recorded) -> None:
    record = max(recorded.history.executions, key=lambda one: len(one.attempts))
    answer = await recorded.show(record.execution_id)
    assert (answer.status, answer.headers["Cache-Control"]) == (200, "private, no-cache")
    assert Execution.model_validate_json(answer.body) == record
    assert answer.json["attempts"][0]["error"]["class"]
    etag = etag_of(answer)
    for sent in (etag, f'"other", W/{etag}', "*"):
        same = await recorded.show(record.execution_id, **{"If-None-Match": sent})
        assert (same.status, same.body, etag_of(same)) == (304, b"", etag)
    assert (await recorded.show(record.execution_id, **{"If-None-Match": '"other"'})).status == 200
    unknown = await recorded.show("nobody", **{"If-None-Match": "*"})
    assert (unknown.status, unknown.code) == (404, "unknown_execution")


async def test_an_id_with_slashes_is_found_and_a_changed_record_has_another_etag(recorded: Recorded) -> None:
    name = "a/b/progress"
    await recorded.store(samples.execution(name, output="one"))
    first = await recorded.api.ask("GET", f"{PATH}/{name}")
    assert first.json["execution_id"] == name
    await recorded.store(samples.execution(name, output="another"), 2)
    second = await recorded.show(name, **{"If-None-Match": etag_of(first)})
    assert (second.status, second.json["output"]) == (200, "another")


async def test_encrypted_texts_are_shown_with_their_key_and_the_rest_without_it(recorded: Recorded) -> None:
    for name, key in (("ours", KEY), ("others", new_key())):
        document = Cipher([key]).encrypt_document(samples.execution(name, output=SECRET).json_bytes())
        await recorded.store(Execution.model_validate_json(document))
    ours, others = (await recorded.show("ours")).json, (await recorded.show("others")).json
    assert (ours["output"], ours["encrypted"]) == (SECRET, None)
    assert (others["status"], others["output"]) == ("succeeded", None)
    assert others["encrypted"].startswith("bwe1.")


async def test_no_key_without_read_is_told_anything_of_an_execution(recorded: Recorded) -> None:
    record = newest_first(recorded.history.executions)[0]
    page = await recorded.list(limit=1)
    etag = etag_of(await recorded.show(record.execution_id))
    file = recorded.api.settings.api_keys_file
    keys = [
        create_key(file, "program", ("submit",)),
        # Its own executions are no exception: the answer to a job is under /api/v1/jobs, for who sent it.
        create_key(file, "bound", ("submit",), tenants=(record.tenant or "acme",), agents=(record.agent,)),
        create_key(file, "on-call", ("operate", "audit")),
    ]
    paths = (PATH, f"{PATH}?after={page.older}", f"{PATH}?agent={record.agent}", f"{PATH}/{record.execution_id}")
    for key in keys:
        for method in ("GET", "HEAD"):
            for path in paths:
                headers = {"Authorization": f"Bearer {key}", "If-None-Match": etag}
                answer = await recorded.api.ask(method, path, headers=headers)
                assert answer.status == 403, (method, path)
                assert "etag" not in map(str.lower, answer.headers)
                assert record.execution_id.encode() not in answer.body
    reader = {"Authorization": f"Bearer {create_key(file, 'dashboard', ('read',))}"}
    for path in paths:
        assert (await recorded.api.ask("GET", path, headers=reader)).status == 200


async def test_without_clickhouse_it_is_said_that_there_is_none(recorded: Recorded) -> None:
    for api, says in (
        (recorded.without_clickhouse, "ClickHouse does not answer"),
        (recorded.without_tables, "`breakwater setup`"),
    ):
        for path in (PATH, f"{PATH}/e1"):
            answer = await api.ask("GET", path)
            assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "unavailable", "1")
            assert says in answer.message


async def test_a_slow_clickhouse_is_not_waited_for_without_end(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.records.api.executions.ANSWER_WITHIN_S", 0.0)
    answer = await recorded.api.ask("GET", PATH)
    assert (answer.status, answer.code) == (503, "unavailable")
    assert "did not answer within" in answer.message


async def test_the_client_reads_all_pages_and_one_record(recorded: Recorded) -> None:
    key = create_key(recorded.api.settings.api_keys_file, "reader", ("read",))
    query = ExecutionQuery(agent=AGENT, since=END - timedelta(days=2), limit=30)
    expected = newest_first(
        one for one in recorded.history.executions if one.agent == AGENT and one.completed_at >= query.since
    )
    async with AsyncClient(recorded.api.url, key, retry_for_s=0) as client:
        found = [one async for one in client.executions(query)]
        assert [one.execution_id for one in found] == [one.execution_id for one in expected]
        assert len(found) > 30
        assert await client.execution(expected[0].execution_id) == expected[0]
        with pytest.raises(ApiRefusedError, match="no execution") as refused:
            await client.execution("nobody")
        assert refused.value.status == 404

    def humanize() -> list[str]:
        with Client(recorded.api.url, key, retry_for_s=0) as plain:
            assert plain.execution(expected[0].execution_id) == expected[0]
            return [one.execution_id for one in plain.executions(query)]

    assert await asyncio.to_thread(humanize) == [one.execution_id for one in expected]
