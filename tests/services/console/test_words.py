"""How figures read."""

from datetime import UTC, datetime, timedelta

from breakwater.kernel.pages import words
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def test_the_exact_amount_stands_beside_the_short_one():
    assert words.money(1_234_567_891) == '<span class="money" title="$1.234567891">$1.23</span>'
    assert "unknown" in words.money(None)


@each_row(
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
