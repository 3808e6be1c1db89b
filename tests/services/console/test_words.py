"""How figures read."""

from datetime import UTC, datetime, timedelta
from html import unescape

import pytest

from services.console import words

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (None, "unknown"),
        (0, "$0"),
        (1, "<$0.0001"),
        (-1, "<$0.0001"),
        (42_000_000, "$0.042"),
        (13_100_000, "$0.0131"),
        (1_234_567_890_000, "$1,234.57"),
        (-1_500_000_000, "-$1.50"),
    ],
)
def test_amounts_are_as_long_as_they_help(nano: "int | None", text: str):
    assert words.short_money(nano) == text


def test_the_exact_amount_stands_beside_the_short_one():
    assert words.money(1_234_567_891) == '<span class="money" title="$1.234567891">$1.23</span>'
    assert "unknown" in words.money(None)


@pytest.mark.parametrize(
    ("share", "text"), [(None, "–"), (0, "0 %"), (0.5, "50 %"), (0.98765, "98.8 %"), (0.9999, "99.9 %"), (1.0, "100 %")]
)
def test_a_share_that_is_not_all_does_not_look_like_it(share: "float | None", text: str):
    assert words.percent(share) == text


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (timedelta(milliseconds=300), "now"),
        (timedelta(seconds=45), "45 s ago"),
        (timedelta(minutes=12), "12 min ago"),
        (timedelta(hours=30), "30 h ago"),
        (timedelta(days=5), "5 d ago"),
        (timedelta(minutes=-3), "in 3 min"),
    ],
)
def test_how_long_ago(before: timedelta, text: str):
    reported = words.ago(NOW - before, NOW)
    assert f">{text}</time>" in reported
    assert f'datetime="{(NOW - before).isoformat(timespec="milliseconds").replace("+00:00", "Z")}"' in reported


def test_commands_in_a_message_are_set_apart_and_the_rest_is_escaped():
    assert words.code("run `x <y>` now") == "run <code>x &lt;y&gt;</code> now"
    assert words.code("a `half") == "a `half"
    assert words.code("<b>") == "&lt;b&gt;"


def test_a_name_is_one_segment_of_a_path():
    assert words.segment("a/b ?#%") == "a%2Fb%20%3F%23%25"


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        ([2_000_000_000, 0, 500_000_000], ["$2.00", "$0.00", "$0.50"]),
        ([2_000_000_000, 1_234_567, 1], ["$2.0000", "$0.0012", "<$0.0001"]),
        ([123_456_789_012, 1_234_567], ["$123.46", "<$0.01"]),
        ([None, 0], ["unknown", "$0.00"]),
        ([], []),
    ],
)
def test_amounts_of_a_column_have_the_same_places(column: "list[int | None]", texts: "list[str]"):
    places = words.places(column)
    assert [unescape(words.money(nano, places)).partition(">")[2].removesuffix("</span>") for nano in column] == texts
