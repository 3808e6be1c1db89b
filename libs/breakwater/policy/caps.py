"""The arithmetic of every cap on money, in integer nano-dollars. The scripts on Redis apply the same rule.

The worst case of a call is held before it is made, and replaced by what it cost when it has ended. As it is asked for
against what was spent and what is held for others, calls at the same time can't pass a cap together.
"""

from __future__ import annotations

from collections.abc import Iterable

from breakwater.contracts.execution import Attempt

OWN_CAP = "execution"
"""The name of a job's own cap (`max_cost_usd`), as what refused a call."""


def fits(amount: int, *, limit: int | None, spent: int, reserved: int = 0) -> bool:
    """Whether an amount may be held under a cap. To reach it is to be within it.

    Args:
        amount: the most that a call can cost.
        limit: the cap; None where there is none.
        spent: what counts against it already.
        reserved: what is held for other calls.
    """
    return limit is None or spent + reserved + amount <= limit


def spent_by(attempts: Iterable[Attempt]) -> int:
    """What the attempts of a job have cost so far. One whose cost is unknown counts as what was held for it."""
    return sum((attempt.reserved or 0) if attempt.cost is None else attempt.cost for attempt in attempts)
