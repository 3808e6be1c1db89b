"""Charts: what is drawn, what can be read without seeing it, and nothing that a page must escape."""

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console import charts
from services.console.charts import HEIGHT, WIDTH, Bar, Series

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
EVIL = '<script>alert("1")</script>'


def moments(number: int) -> list[datetime]:
    return [NOON + HOUR * index for index in range(number)]


def drawing(markup: str) -> ElementTree.Element:
    """The SVG of a chart, which must be well-formed."""
    found = re.search(r"<svg.*?</svg>", markup, re.DOTALL)
    assert found
    return ElementTree.fromstring(found[0])


def rects(markup: str, colour: str) -> list[dict[str, float]]:
    return [
        {name: float(one.attrib[name]) for name in ("x", "y", "width", "height")}
        for one in drawing(markup).iter("rect")
        if one.attrib["class"] == colour
    ]


def test_columns_stand_on_one_another_and_reach_the_top_of_the_axis():
    drawn = charts.columns(
        "executions",
        moments(2),
        [Series("succeeded", "good", [3, 10]), Series("failed", "bad", [1, 0])],
        lambda value: f"{value:.0f}",
        step=HOUR,
    )
    good, bad = rects(drawn, "good"), rects(drawn, "bad")
    assert [one["height"] for one in good] == [HEIGHT * 0.3, HEIGHT]
    assert len(bad) == 1
    assert bad[0]["y"] + bad[0]["height"] == good[0]["y"], "the failed ones stand on the others"
    assert "Nov 21 12:00: succeeded 3, failed 1" in drawn
    assert "<th scope=row>Nov 21 13:00</th><td>10</td><td>0</td>" in drawn


def test_lines_have_gaps_where_nothing_was_and_a_lone_point_is_seen():
    drawn = charts.lines(
        "latency", moments(5), [Series("p95", "plain", [1, 2, None, 3, None])], lambda value: f"{value} ms", step=HOUR
    )
    [path] = [one.attrib["d"] for one in drawing(drawn).iter("path") if one.attrib["class"] == "line plain"]
    assert path.count("M") == 2
    assert path.endswith("h0.1")
    assert "Nov 21 14:00: nothing" in drawn


def test_a_burn_down_shows_cap_and_forecast():
    drawn = charts.burn(
        "spend",
        [(NOON, 0.0), (NOON + HOUR, 4.0)],
        start=NOON,
        end=NOON + 4 * HOUR,
        unit=lambda value: f"${value:g}",
        cap=8.0,
        forecast=[(NOON + 2 * HOUR, 8.0), (NOON + 4 * HOUR, 16.0)],
    )
    lines = {one.attrib["class"]: one.attrib["d"] for one in drawing(drawn).iter("path")}
    assert lines["line cap"] == f"M0 {HEIGHT - 8 / 20 * HEIGHT:g}L{WIDTH} {HEIGHT - 8 / 20 * HEIGHT:g}"
    assert lines["line forecast"].count("L") == 2
    assert lines["line forecast"].endswith(f"L{WIDTH} {HEIGHT - 16 / 20 * HEIGHT:g}")
    assert "cap $8" in drawn
    assert "forecast $16" in drawn


def test_a_timeline_shows_what_took_no_time():
    drawn = charts.timeline(
        [[Bar(0, 10, "wait", "waited"), Bar(10, 100, "bad", "failed")], [Bar(100, 100, "warn", "refused")]],
        "attempts",
        lambda ms: f"{ms:.0f} ms",
    )
    [refused] = rects(drawn, "warn")
    assert refused["width"] > 0
    assert refused["x"] + refused["width"] <= WIDTH
    assert "<span>100 ms</span>" in drawn


def test_a_share_never_overflows():
    [part] = rects(charts.share([("bad", 30)], "spent", of=10), "bad")
    assert part["width"] == 100
    assert rects(charts.share([("bad", 0)], "spent", of=0), "bad") == []


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (-3, 1), (0.0003, 0.0005), (1, 1), (1.01, 2), (3, 5), (7, 10), (10, 10), (11, 20)]
)
def test_axes_end_at_round_numbers(value: float, top: float):
    assert charts.nice(value) == pytest.approx(top)


@pytest.mark.parametrize(
    ("seconds", "top"),
    [
        (0, 1),
        (0.3, 0.5),
        (3, 5),
        (11, 15),
        (45, 60),
        (100, 120),
        (301, 600),
        (601, 900),
        (1_801, 3_600),
        (9_000, 21_600),
        (86_400, 86_400),
        (90_000, 172_800),
        (10 * 86_400, 10 * 86_400),
    ],
)
def test_axes_of_durations_end_at_round_times(seconds: float, top: float):
    assert charts.nice_seconds(seconds) == pytest.approx(top)
    drawn = charts.columns(
        "x", [NOON], [Series("a", "bad", [seconds])], "{:g}".format, step=HOUR, nice=charts.nice_seconds
    )
    assert f"<span>{top:g}</span><span>{top / 2:g}</span>" in drawn
    drawn = charts.lines(
        "x", [NOON], [Series("a", "bad", [seconds])], "{:g}".format, step=HOUR, nice=charts.nice_seconds
    )
    assert f"<span>{top:g}</span><span>{top / 2:g}</span>" in drawn


@given(st.floats(1e-9, 1e15))
def test_every_value_fits_below_the_top(value: float):
    assert value * (1 - 1e-6) <= charts.nice(value) <= value * 10


def test_names_are_escaped_everywhere():
    series = [Series(EVIL, "good", [1])]
    for drawn in (
        charts.columns(EVIL, [NOON], series, str, step=HOUR),
        charts.lines(EVIL, [NOON], series, str, step=HOUR),
        charts.timeline([[Bar(0, 1, "good", EVIL)]], EVIL, str),
        charts.sparkline([1], [0], EVIL),
        charts.share([("good", 1)], EVIL),
        charts.burn(EVIL, [(NOON, 1.0)], start=NOON, end=NOON + HOUR, unit=lambda _: EVIL, cap=2.0),
    ):
        assert "<script" not in drawn
        drawing(drawn)


@given(st.lists(st.none() | st.floats(0, 1e12), max_size=130))
def test_whatever_the_values_it_is_drawn(values: "list[float | None]"):
    times = moments(len(values))
    for draw in (charts.columns, charts.lines):
        drawing(draw("x", times, [Series("a", "good", values)], str, step=HOUR))
