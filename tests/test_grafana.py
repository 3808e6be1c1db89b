"""The Grafana dashboards: every query of every panel runs on ClickHouse, and the files are ones that Grafana takes."""

from __future__ import annotations

import asyncio
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import combinations, pairwise
from typing import Any, TypeVar

import pytest
import yaml

from breakwater.kernel.clickhouse.client import Analytics, ResultSet
from breakwater.kernel.time_window import TimeWindow
from breakwater.records import schema
from breakwater.records.figures import history
from breakwater.records.migrations import migrate
from deploy.grafana.source.__main__ import DIRECTORY, files
from tests.grafana_sql import ALL, Chosen, Shown
from tests.records.made import END, connected, filled_database, made
from tests.records.samples import new_database_url
from tests.server_sources import RunningServer
from tests.tables import each_row

T = TypeVar("T")

GRAFANA = DIRECTORY.parent
DASHBOARDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(DIRECTORY.glob("*.json"))
}
SHOWN = Shown(END - timedelta(days=3), END + timedelta(hours=1), 3_600)
UNITS = {"short", "percent", "percentunit", "ms", "currencyUSD"}
NUMBER = re.compile(r"(Nullable\()?(U?Int(8|16|32|64)|Float(32|64)|Decimal\([^)]*\))\)?")
TIME = re.compile(r"DateTime(64)?(\(.*\))?")
TEXT = re.compile(r"String|LowCardinality\(String\)")
SHOWABLE = re.compile(rf"{NUMBER.pattern}|(Nullable\()?{TIME.pattern}\)?|(LowCardinality\()?(Nullable\()?String\)*")


@dataclass(frozen=True)
class Query:
    """One query of a dashboard."""

    dashboard: str
    title: str
    sql: str
    panel: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.dashboard}: {self.title}"


def panels() -> list[Query]:
    return [
        Query(name, panel["title"], target["rawSql"], panel)
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def variables() -> list[Query]:
    return [
        Query(name, one["name"], one["query"]["rawSql"], one)
        for name, dashboard in DASHBOARDS.items()
        for one in dashboard["templating"]["list"]
        if one["type"] == "query"
    ]


def drawn() -> list[Query]:
    return [
        Query(name, one["name"], one["target"]["rawSql"], one)
        for name, dashboard in DASHBOARDS.items()
        for one in dashboard["annotations"]["list"]
        if not one.get("builtIn")
    ]


def nothing_chosen(dashboard: str) -> Chosen:
    """As a dashboard opens: all of everything, and the first agent where there must be one."""
    first = min(one.agent for one in made().executions)
    return {one.title: ALL if one.panel["includeAll"] else [first] for one in variables() if one.dashboard == dashboard}


def check(queries: Sequence[Query], of_one: Callable[[Query], None]) -> None:
    """Checks each of them, and fails with all that are wrong, by name."""
    assert queries
    wrong: list[str] = []
    for query in queries:
        try:
            of_one(query)
        except Exception as error:  # noqa: BLE001  also what ClickHouse refuses
            wrong.append(f"{query.where}\n    {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


class Database:
    """A database that many tests read over one connection. Each query is sent once."""

    def __init__(self, runner: asyncio.Runner, analytics: Analytics) -> None:
        self._runner = runner
        self._analytics = analytics
        self._known: dict[str, ResultSet] = {}

    def run(self, use: Callable[[Analytics], Coroutine[Any, Any, T]]) -> T:
        return self._runner.run(use(self._analytics))

    def query(self, sql: str) -> ResultSet:
        if sql not in self._known:
            self._known[sql] = self.run(lambda analytics: analytics.query(sql))
        return self._known[sql]

    def asked(self, query: Query, chosen: Chosen | None = None) -> ResultSet:
        return self.query(SHOWN.query(query.sql, nothing_chosen(query.dashboard) if chosen is None else chosen))

    def types(self, query: Query, chosen: Chosen | None = None) -> dict[str, str]:
        sql = SHOWN.query(query.sql, nothing_chosen(query.dashboard) if chosen is None else chosen)
        return {row["name"]: row["type"] for row in self.query(f"DESCRIBE TABLE ({sql})").named_rows()}


@contextmanager
def opened(url: str) -> Generator[Database]:
    with asyncio.Runner() as runner:
        connection = connected(url)
        yield Database(runner, runner.run(connection.__aenter__()))
        runner.run(connection.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def twice(clickhouse_server: RunningServer) -> Generator[Database]:
    """A database with a small history, every row of it delivered twice."""
    with opened(filled_database(clickhouse_server.url)) as database:
        yield database


@pytest.fixture(scope="module")
def once(clickhouse_server: RunningServer) -> Generator[Database]:
    """The same history, delivered as it should be, without what the reader in `clickhouse-user.xml` may not see."""

    async def fill(analytics: Analytics) -> None:
        await migrate(analytics)
        for table in schema.TABLES:
            await analytics.insert(table, made().rows[table.name])
        for table, columns in hidden().items():
            for column in columns:
                await analytics.execute(f"ALTER TABLE {table} DROP COLUMN {column}")

    with opened(new_database_url(clickhouse_server.url)) as database:
        database.run(fill)
        yield database
        database.run(lambda analytics: analytics.execute(f"DROP DATABASE {analytics.database}"))


def test_the_files_are_those_of_the_source() -> None:
    held = {file.name: file.read_text(encoding="utf-8") for file in DIRECTORY.iterdir()}
    assert held == files(), "run `python -m deploy.grafana.source`"


def test_every_panel_shows_something(twice: Database) -> None:
    def shows_something(query: Query) -> None:
        found = twice.asked(query)
        assert found.rows
        if query.panel["type"] == "stat":
            assert [len(row) for row in found.rows] == [1]
            assert found.rows[0][0] is not None

    check(panels(), shows_something)


def test_every_panel_shows_the_same_after_a_second_delivery(once: Database, twice: Database) -> None:
    def shows_the_same(query: Query) -> None:
        assert comparable(twice.asked(query)) == comparable(once.asked(query))

    check(panels(), shows_the_same)


def comparable(found: ResultSet) -> list[tuple[object, ...]]:
    # A sum of floats differs in its last digits with the order of its parts.
    return [tuple(round(one, 9) if isinstance(one, float) else one for one in row) for row in found.rows]


def test_every_panel_has_columns_that_it_can_draw(twice: Database) -> None:
    def can_be_drawn(query: Query) -> None:
        found = twice.types(query)
        if query.panel["type"] != "timeseries":
            kinds = NUMBER if query.panel["type"] == "stat" else SHOWABLE
            assert all(kinds.fullmatch(kind) for kind in found.values()), found
            return
        (first, kind), *rest = found.items()
        assert first == "time"
        assert TIME.fullmatch(kind), kind
        name_of_series = query.panel["fieldConfig"]["defaults"].get("displayName", "")
        label = re.fullmatch(r"\$\{__field\.labels\.(\w+)\}", name_of_series)
        assert [name for name, kind in rest if TEXT.fullmatch(kind)] == ([label[1]] if label else [])
        values = [kind for name, kind in rest if label is None or name != label[1]]
        assert values
        assert all(NUMBER.fullmatch(kind) for kind in values), found
        moments = [row[0] for row in twice.asked(query).rows]
        assert all(earlier <= later for earlier, later in pairwise(moments)), "the plugin does not sort"
        assert label or len(set(moments)) == len(moments)

    check(panels(), can_be_drawn)


def test_what_is_set_for_a_column_or_a_series_is_set_for_one_that_is_there(twice: Database) -> None:
    def is_there(query: Query) -> None:
        set_ = {one["matcher"]["options"] for one in query.panel["fieldConfig"]["overrides"]}
        assert set_ <= twice.types(query).keys()

    check([one for one in panels() if one.panel["type"] in ("table", "timeseries")], is_there)


def test_a_table_counts_only_what_is_chosen(twice: Database) -> None:
    def only_of_what_is_chosen(query: Query) -> None:
        everything = twice.asked(query)
        for name, of_all in nothing_chosen(query.dashboard).items():
            if name not in everything.columns or f"${{{name}:" not in query.sql or of_all is not ALL:
                continue
            place = everything.columns.index(name)
            value = next((row[place] for row in everything.rows if row[place] not in (None, "*")), None)
            if value is None:
                continue
            found = twice.asked(query, {**nothing_chosen(query.dashboard), name: [value]})
            assert value in {row[place] for row in found.rows}
            assert {row[place] for row in found.rows} <= {value, None, "*"}

    check([one for one in panels() if one.panel["type"] == "table"], only_of_what_is_chosen)


def test_a_name_may_hold_a_quote(twice: Database) -> None:
    def takes_quotes(query: Query) -> None:
        names = ["o'neil, and sons", "x"][: 1 if query.dashboard == "agent" else 2]
        # Read by ClickHouse as any query is, but not run.
        twice.types(query, dict.fromkeys(nothing_chosen(query.dashboard), names))

    check(panels(), takes_quotes)


def test_a_variable_offers_every_name_once(twice: Database) -> None:
    def offers_every_name_once(query: Query) -> None:
        column = query.title
        known: set[str] = {getattr(one, column) or f"no {column}" for one in made().attempts}
        assert twice.asked(query).rows == tuple((name,) for name in sorted(known))

    check(variables(), offers_every_name_once)


def test_incidents_are_drawn_over_charts(twice: Database) -> None:
    def are_drawn(query: Query) -> None:
        found = twice.asked(query)
        assert found.columns == ("time", "timeEnd", "text", "tags")
        assert found.rows
        assert all(began <= ended for began, ended, *_ in found.rows)

    check(drawn(), are_drawn)


@pytest.mark.parametrize("name", ["overview", "agent"])
def test_figures_are_those_of_the_console(twice: Database, name: str) -> None:
    agent = nothing_chosen(name)["agent"]
    window = TimeWindow(SHOWN.since, SHOWN.until, 3_600)
    all_of_it = twice.run(lambda it: history(it, window, agent=agent[0] if agent else None)).totals
    figures = {one.title: twice.asked(one).rows[0][0] for one in panels() if one.dashboard == name}
    assert figures["Executions"] == all_of_it.executions > 0
    assert figures["Dead-lettered"] == all_of_it.dead_lettered
    assert figures["Success rate"] == pytest.approx(all_of_it.success_rate)
    assert round(figures["Duration, p95"]) == all_of_it.p95_ms
    assert figures["Spend"] == Decimal(all_of_it.spend or 0) / 10**9
    assert figures["Wasted"] == Decimal(all_of_it.wasted or 0) / 10**9


def test_ids_are_unique_and_of_no_server() -> None:
    assert len({one["uid"] for one in DASHBOARDS.values()}) == len(DASHBOARDS) == 4
    assert len({one["title"] for one in DASHBOARDS.values()}) == 4
    for name, dashboard in DASHBOARDS.items():
        assert dashboard["uid"] == f"breakwater-{name}"
        assert "id" not in dashboard
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        sources = {json.dumps(one, sort_keys=True) for one in _all(dashboard, "datasource")}
        chosen = '{"type": "grafana-clickhouse-datasource", "uid": "${datasource}"}'
        assert sources == {chosen, '{"type": "grafana", "uid": "-- Grafana --"}'}
        assert re.fullmatch(r"now-\d+[hd]", dashboard["time"]["from"])
        assert dashboard["time"]["to"] == "now"


def _all(node: Any, key: str) -> list[Any]:
    if isinstance(node, dict):
        return [*([node[key]] if key in node else []), *(one for part in node.values() for one in _all(part, key))]
    return [one for part in node for one in _all(part, key)] if isinstance(node, list) else []


@each_row("name", DASHBOARDS)
def test_panels_stand_side_by_side(name: str) -> None:
    places = [panel["gridPos"] for panel in DASHBOARDS[name]["panels"]]
    assert all(one["x"] + one["w"] <= 24 for one in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    widths = {y: sum(one["w"] for one in places if one["y"] == y) for y in {one["y"] for one in places}}
    assert set(widths.values()) == {24}


def test_every_panel_says_what_it_shows() -> None:
    def says_what_it_shows(query: Query) -> None:
        assert query.panel["title"]
        assert query.panel["description"].endswith(".")
        assert set(_all(query.panel, "unit")) <= UNITS
        overrides = query.panel["fieldConfig"]["overrides"]
        set_ = [one for part in overrides for one in part["properties"] if one["id"] == "unit"]
        assert {one["value"] for one in set_} <= UNITS
        steps = [step["value"] for one in _all(query.panel, "thresholds") for step in one["steps"]]
        assert steps[0] is None
        assert all(low < high for low, high in pairwise(steps[1:]))

    check(panels(), says_what_it_shows)


def test_a_check_names_all_that_are_wrong() -> None:
    def is_a_stat(query: Query) -> None:
        assert query.panel["type"] == "stat"

    with pytest.raises(
        AssertionError, match=r"(?s)overview: Executions by outcome.*spend: Spend by agent, tenant and model"
    ):
        check(panels(), is_a_stat)


def test_links_lead_to_dashboards_that_are_there() -> None:
    uids = {one["uid"] for one in DASHBOARDS.values()}
    for dashboard in DASHBOARDS.values():
        assert {one["url"].split("?")[0] for one in dashboard["links"]} == {
            f"/d/{uid}" for uid in uids - {dashboard["uid"]}
        }
        for url in re.findall(r"/d/([\w-]+)", json.dumps(dashboard["panels"])):
            assert url in uids


def test_what_is_not_known_is_not_put_in() -> None:
    for sql in ("$__timeFilters(at)", "$__timeFilter", "$agent", "${agent}", "${team:singlequote}", "[[agent]]"):
        with pytest.raises(ValueError, match=r"\w"):
            SHOWN.query(sql, {"agent": ["a"]})
    for sql in ("$__conditionalAll(1, $team)", "$__conditionalAll(1, ${agent:singlequote})", "$__conditionalAll(1)"):
        with pytest.raises(ValueError, match=r"\w"):
            SHOWN.query(sql, {"agent": ALL})


def test_macros_become_what_the_plugin_documents() -> None:
    at = datetime.fromisoformat("2022-10-21T11:45:26Z")
    shown = Shown(at, at + timedelta(days=2), 20)
    for sql, becomes in {
        "$__timeFilter(at)": "at >= toDateTime(1666352726) AND at <= toDateTime(1666525526)",
        "$__dateFilter(day)": "day >= toDate('2022-10-21') AND day <= toDate('2022-10-23')",
        "$__timeInterval(at)": "toStartOfInterval(toDateTime(at), INTERVAL 20 second)",
        "$__toTime_ms": "fromUnixTimestamp64Milli(1666525526000)",
        "$__conditionalAll(f(a, 'x') IN (${a:singlequote}), $a)": "f(a, 'x') IN ('it\\'s','b')",
        "$__conditionalAll(f(a, 'x') IN (${b:singlequote}), $b)": "1=1",
    }.items():
        assert shown.query(sql, {"a": ["it's", "b"], "b": ALL}) == becomes


def test_what_is_provisioned_holds_no_secret_and_finds_its_dashboards() -> None:
    read = {file.parent.name: yaml.safe_load(file.read_text()) for file in GRAFANA.glob("provisioning/*/*.yaml")}
    (source,) = read["datasources"]["datasources"]
    assert source["type"] == "grafana-clickhouse-datasource"
    assert source["jsonData"]["defaultDatabase"] == "breakwater"
    given = (source["jsonData"]["host"], source["jsonData"]["username"], source["secureJsonData"]["password"])
    assert all(re.fullmatch(r"\$BW_GRAFANA_\w+", one) for one in given)
    (provider,) = read["dashboards"]["providers"]
    assert provider["type"] == "file"
    reported = (GRAFANA / "README.md").read_text()
    for needed in (*(one.removeprefix("$") for one in given), provider["options"]["path"]):
        assert needed in reported


def reader() -> ElementTree.Element:
    return ElementTree.parse(GRAFANA / "clickhouse-user.xml").getroot()


def hidden() -> dict[str, list[str]]:
    """What the reader may not see, by table."""
    found = [re.fullmatch(r"REVOKE SELECT\((.+)\) ON breakwater\.(\w+)", one) for one in grants()]
    return {one[2]: one[1].split(", ") for one in found if one}


def grants() -> list[str]:
    return [one.text or "" for one in reader().iterfind("users/grafana/grants/query")]


def test_the_reader_reads_and_sees_no_prompt_nor_answer() -> None:
    assert reader().findtext("profiles/grafana/readonly") == "1"
    assert reader().find("profiles/grafana/constraints/max_execution_time/changeable_in_readonly") is not None
    assert reader().findtext("users/grafana/profile") == "grafana"
    password = reader().find("users/grafana/password")
    assert password is not None
    assert password.attrib == {"from_env": "BW_GRAFANA_PASSWORD"}
    assert not password.text
    assert grants()[0] == "GRANT SELECT ON breakwater.*"
    assert {"messages", "input", "output"} <= set(hidden()["executions"])
    columns = {table.name: table.columns for table in schema.TABLES}
    assert all(set(names) <= columns[table].keys() for table, names in hidden().items())


def test_the_readme_names_every_dashboard_and_no_other() -> None:
    reported = (GRAFANA / "README.md").read_text()
    assert set(re.findall(r"dashboards/(\w+)\.json", reported)) == set(DASHBOARDS)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (GRAFANA / "README.md").read_text(), re.DOTALL)


def test_the_readme_makes_the_same_user_by_sql(twice: Database) -> None:
    (sql,) = blocks("sql")
    statements = [one.strip() for one in sql.split(";") if one.strip()]
    for one in statements:
        twice.run(lambda it, one=one: it.query("SELECT formatQuery({sql:String})", {"sql": one}))
    assert [re.sub(" (TO|FROM) grafana$", "", one) for one in statements[1:]] == grants()


def test_the_readme_mounts_files_that_are_there() -> None:
    (compose,) = blocks("yaml")
    mounted = [one.split(":")[:2] for it in yaml.safe_load(compose)["services"].values() for one in it["volumes"]]
    assert all((GRAFANA.parent.parent / source).exists() for source, _ in mounted)
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/breakwater.yaml").read_text())["providers"]
    assert ["./deploy/grafana/dashboards", provider["options"]["path"]] in mounted
