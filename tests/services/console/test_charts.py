"""Charts: the tables that are drawn, what leads where, and nothing that a page must escape."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.health.pages.history import history_charts
from breakwater.kernel.pages import charts
from breakwater.kernel.pages.charts import AxisSpan, Series
from breakwater.kernel.time_window import TimeWindow
from breakwater.records.events import ConfigChange
from breakwater.records.figures import WindowTotals

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)
HOUR = timedelta(hours=1)
EVIL = '<script>alert("1")</script>'


def moments(number: int) -> list[datetime]:
    return [NOON + HOUR * index for index in range(number)]


def drawing(markup: str) -> ElementTree.Element:
    """The SVG of a chart, which must be well-formed."""
    found = re.search(r"<svg.*?</svg>", markup, re.DOTALL)
    assert found
    return ElementTree.fromstring(found[0])


def rows(markup: str) -> "list[tuple[int, str, list[str | None], list[str | None]]]":
    """The table of a chart: where each row is drawn, what it leads to, its values and its texts."""
    found = re.search(r"<tbody>.*</tbody>", markup)
    assert found
    return [
        (
            int(row.attrib["data-at"]),
            link.attrib["href"] if (link := row.find("th/a")) is not None else "",
            [cell.attrib.get("data-value") for cell in row.findall("td")],
            [cell.text for cell in row.findall("td")],
        )
        for row in ElementTree.fromstring(found[0])
    ]


def rects(markup: str, colour: str) -> list[dict[str, float]]:
    return [
        {name: float(one.attrib[name]) for name in ("x", "y", "width", "height")}
        for one in drawing(markup).iter("rect")
        if one.attrib["class"] == colour
    ]


def test_a_chart_is_the_table_of_its_values():
    drawn = charts.over_time(
        "Spend",
        moments(3),
        [Series("spent", "plain", [3e9, 0, None]), Series("failed", "bad", [1, 1, 1], "bars", {"status": "x"})],
        charts.MONEY,
        step=HOUR,
        executions={"agent": "wri/ter"},
    )
    assert 'data-unit="money"' in drawn
    assert f'data-start="{NOON_MS}" data-end="{NOON_MS + 3 * 3_600_000}" data-zooms' in drawn
    assert 'data-style="bars" data-filters="status=x"' in drawn
    first, zero, gap = rows(drawn)
    assert first == (
        NOON_MS + 1_800_000,
        "/executions?agent=wri%2Fter&from=2026-11-21T12%3A00%3A00Z&to=2026-11-21T13%3A00%3A00Z",
        ["3000000000", "1"],
        ["$3.00", "$0.000000001"],
    )
    assert (zero[2][0], zero[3][0]) == ("0", "$0.00")
    assert (gap[2][0], gap[3][0]) == (None, None), "a gap is no zero"


def test_config_changes_are_marks_that_are_also_text_and_the_previous_period_is_a_thin_line():
    window = TimeWindow(NOON, NOON + 2 * HOUR, 3_600)
    assert window.preceding == TimeWindow(NOON - 2 * HOUR, NOON, 3_600)
    steps = [WindowTotals(executions=2, succeeded=2, spend=10**9, p95_ms=70), WindowTotals()]
    earlier = [WindowTotals(executions=3, succeeded=1, dead_lettered=2, spend=2 * 10**9, p95_ms=50), WindowTotals()]
    change = ConfigChange(NOON + HOUR / 2, EVIL, "zoë")
    drawn = history_charts(steps, window, previous_steps=earlier, changes=[change])
    assert [one[2] for one in rows(drawn.executions)] == [["2", "0", "3"], ["0", "0", "0"]]
    assert [one[2] for one in rows(drawn.money)] == [["1000000000", "0", "2000000000"], ["0", "0", "0"]]
    assert [one[2] for one in rows(drawn.latency)] == [[None, "70", "50"], [None, None, None]]
    for chart, name in ((drawn.executions, "both"), (drawn.money, "spent"), (drawn.latency, "p95")):
        assert f'data-colour="faint" data-style="thin" data-filters="">{name} before</th>' in chart
        assert "the previous period, from Nov 21 10:00 UTC" in chart
        assert f'data-mark="{NOON_MS + 1_800_000}"' in chart
        assert (
            "Nov 21 12:30: config version &lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt; was applied by zoë" in chart
        )
    alone = history_charts(steps, window, previous_steps=[WindowTotals()] * 2)
    assert "before" not in alone.executions, "nothing ran that one could compare with"
    assert "data-mark" not in alone.executions


def test_a_burn_down_shows_cap_and_forecast():
    drawn = charts.burn(
        "spend",
        [(NOON, 0), (NOON + HOUR, 4e9)],
        start=NOON,
        end=NOON + 4 * HOUR,
        cap=8e9,
        forecast=[(NOON + 2 * HOUR, 8e9), (NOON + 4 * HOUR, 16e9)],
    )
    assert "data-zooms" not in drawn, "a budget's period is no choice"
    assert [one[2] for one in rows(drawn)] == [
        ["0", "8000000000", None],
        ["4000000000", "8000000000", "4000000000"],
        [None, "8000000000", "8000000000"],
        [None, "8000000000", "16000000000"],
    ]
    assert "limit $8.00" in drawn
    assert "forecast $16.00" in drawn
    links = [one[1] for one in rows(drawn)]
    assert links[0] == "", "nothing was before the period"
    assert links[1] == "/executions?from=2026-11-21T12%3A00%3A00Z&to=2026-11-21T13%3A00%3A00Z"
    without = charts.burn("spend", [(NOON, 0)], start=NOON, end=NOON + HOUR, cap=8e9)
    assert [one[2][1] for one in rows(without)] == ["8000000000"] * 2, "the limit reaches the end"


def test_the_library_is_where_it_is_looked_for_and_its_loss_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert re.fullmatch("[0-9a-f]{12}", charts.library_version())
    monkeypatch.setattr(charts, "LIBRARY", "elsewhere.js")
    with pytest.raises(RuntimeError, match=r"install chartkick as .*elsewhere.js is not in it"):
        charts.library_version()
    monkeypatch.setattr(charts, "LIBRARY", "chartkick.js")
    with pytest.raises(RuntimeError, match=r"is not Chart.js v4"):
        charts.library_version()
    monkeypatch.setattr(charts, "LIBRARY_PACKAGE", "no_such_package")
    with pytest.raises(RuntimeError, match=r"requirements/runtime.txt"):
        charts.library_version()


def test_a_call_is_drawn_in_two_parts_with_a_mark_where_its_answer_began():
    drawn = charts.waterfall_bar(AxisSpan(200, 800), AxisSpan(500, 500), "good", quarters=True)
    assert [(one["x"], one["width"]) for one in rects(drawn, "good silent")] == [(200, 800)]
    assert [(one["x"], one["width"]) for one in rects(drawn, "good")] == [(500, 500)]
    assert [one["x"] for one in rects(drawn, "mark")] == [500]
    assert len(rects(drawn, "rest")) == 5
    silent = charts.waterfall_bar(AxisSpan(0, 3), None, "bad", quarters=False)
    assert rects(silent, "mark") == rects(silent, "rest") == []


def test_a_share_never_overflows():
    [part] = rects(charts.share([("bad", 30)], "spent", full_value=10), "bad")
    assert part["width"] == 100
    assert rects(charts.share([("bad", 0)], "spent", full_value=0), "bad") == []


def test_names_are_escaped_everywhere():
    series = [Series(EVIL, "good", [1], filters={"agent": EVIL})]
    for drawn in (
        charts.over_time(EVIL, [NOON], series, charts.COUNT, step=HOUR, executions={"agent": EVIL}),
        charts.sparkline([1], [0], EVIL),
        charts.share([("good", 1)], EVIL),
        charts.burn(EVIL, [(NOON, 1.0)], start=NOON, end=NOON + HOUR, cap=2.0),
    ):
        assert "<script" not in drawn


@given(st.lists(st.none() | st.floats(0, 1e12), max_size=130))
def test_whatever_the_values_it_is_a_table(values: "list[float | None]"):
    drawn = charts.over_time("x", moments(len(values)), [Series("a", "good", values)], charts.DURATION, step=HOUR)
    assert [one[2][0] is None for one in rows(drawn)] == [value is None for value in values]
