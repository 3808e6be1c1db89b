"""How sums come out of ClickHouse, for the pages that people look at."""

from __future__ import annotations

from decimal import Decimal

from breakwater.analytics.window import Window
from breakwater.contracts.types import NANO_PER_USD

ENDED = """
PREWHERE completed_at >= fromUnixTimestamp64Milli({start_ms:Int64})
    AND completed_at < fromUnixTimestamp64Milli({end_ms:Int64})
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT dry_run
"""
"""Which executions count in a window."""
CALLED = """
FROM attempts FINAL
PREWHERE started_at >= fromUnixTimestamp64Milli({start_ms:Int64})
    AND started_at < fromUnixTimestamp64Milli({end_ms:Int64})
    AND ({agent:String} = '' OR agent = {agent:String})
"""
"""Which attempts count in a window."""
SETTINGS = " SETTINGS do_not_merge_across_partitions_select_final = 1"
"""Rows are replaced within their partition only: `schema` says why. Reading with FINAL takes half as long so."""


def known_sum(total: Decimal | None, unknown: int) -> int | None:
    """A sum of amounts in nano-dollars; None where it may hide something.

    Args:
        total: of the amounts that are known.
        unknown: how many are not.

    Returns:
        The sum, a lower bound where some are not known; None where nothing but zero is known, and something is not.
    """
    nano = whole_sum(total)
    return nano if nano or not unknown else None


def whole_sum(total: Decimal | None) -> int:
    """The known part of a sum, in nano-dollars."""
    # A sum is a Decimal(38, 9), and may be more than `nano_from_usd` allows a single amount to be.
    return 0 if total is None else int(total * NANO_PER_USD)


def within(window: Window, agent: str | None) -> dict[str, object]:
    """The parameters that all queries over a window have."""
    return {
        "start_ms": window.start_ms,
        "end_ms": window.end_ms,
        "step_ms": window.step_s * 1000,
        "agent": agent or "",
    }
