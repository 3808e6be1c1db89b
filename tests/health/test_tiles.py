"""The tiles on the first page and on that of an agent."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from breakwater.health.pages import tiles
from breakwater.kernel.pages.tables import TableUrl
from breakwater.kernel.pages.time_range import time_range_of
from breakwater.records.figures import WindowTotals
from tests.tables import each_row

TIME_RANGE = time_range_of(TableUrl("/", {"window": "1h"}), datetime(2026, 11, 22, 12, tzinfo=UTC), ZoneInfo("UTC"))
USD = 10**9
ENDED = WindowTotals(executions=2, succeeded=2, calls=2, spend=2 * USD, p50_ms=1_000, p95_ms=4_000)


def tile(label: str, totals: WindowTotals) -> tuple[str, str]:
    """What a tile says, and its colour."""
    [found] = [one for one in tiles.of_history(totals, TIME_RANGE) if one.label == label]
    return f"{re.sub('<[^>]*>', '', str(found.value))} {found.note}", found.colour


@each_row(
    ("label", "totals", "says", "colour"),
    [
        ("Success rate", WindowTotals(), "– 0 executions, 0 failed", ""),
        ("Success rate", ENDED, "100 % 2 executions, 0 failed", ""),
        (
            "Success rate",
            WindowTotals(executions=5, succeeded=3, dead_lettered=1),
            "75 % 5 executions, 1 failed, 1 cancelled",
            "bad",
        ),
        ("Spend", ENDED, "$2.00 2 calls", ""),
        ("Spend", replace(ENDED, unknown_costs=1), "$2.00 at least: 1 of 2 calls of unknown cost", ""),
        ("Spend", replace(ENDED, spend=None, unknown_costs=2), "unknown 2 of 2 calls of unknown cost", ""),
        ("Wasted", replace(ENDED, spend=0), "$0.00 nothing was spent", ""),
        ("Wasted", replace(ENDED, spend=None, unknown_costs=1), "$0.00 spend is unknown", ""),
        ("Wasted", ENDED, "$0.00 0 % of spend", ""),
        ("Wasted", replace(ENDED, wasted=USD // 2), "$0.50 25 % of spend", "warn"),
        ("Wasted", replace(ENDED, wasted=2 * USD, unknown_costs=1), "$2.00 at most 100 % of spend", "warn"),
        (
            "Wasted",
            replace(ENDED, wasted=USD, unknown_waste=1),
            "$1.00 at least: 1 of 2 executions wasted an unknown amount",
            "warn",
        ),
        (
            "Wasted",
            replace(ENDED, wasted=None, unknown_waste=1),
            "unknown 1 of 2 executions wasted an unknown amount",
            "",
        ),
        ("On fallbacks", WindowTotals(), "– no model answered", ""),
        ("On fallbacks", replace(ENDED, answered=40), "0 % 0 of 40 answers", ""),
        ("On fallbacks", replace(ENDED, answered=40, fell_back=12), "30 % 12 of 40 answers", ""),
        (
            "On fallbacks",
            replace(ENDED, answered=1, fell_back=1, fallback_cost=21, requested_model_cost=10),
            "100 % 1 of 1, 2.1 × the cost",
            "warn",
        ),
        ("p95 latency", ENDED, "4.0 s Median 1.0 s", ""),
        ("p95 latency", WindowTotals(), "– nothing ran", ""),
    ],
)
def test_a_tile_says_a_figure_and_what_it_is_of(label: str, totals: WindowTotals, says: str, colour: str) -> None:
    assert tile(label, totals) == (says, colour)


def test_tiles_are_pending_until_their_figures_are_read_and_none_without_them() -> None:
    assert [one.value for one in tiles.pending()] == ["…"] * 5
    assert tiles.of_history(None, TIME_RANGE) == []
