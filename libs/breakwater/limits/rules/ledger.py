"""Sums over attempts, the same in Redis, in ClickHouse and in the log, and the tags that costs are grouped by."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from zoneinfo import ZoneInfo

from pydantic import JsonValue

from breakwater.jobs.contract.execution import Attempt
from breakwater.limits.rules.budget import periods_at, scope_keys


@dataclass(frozen=True, slots=True)
class AttemptSums:
    """Sums over attempts, all integers; money in nano-dollars.

    Attributes:
        spent: what they cost, as far as that is known.
        calls: how many called.
        unpriced: of those, whose cost is not known.
        gauged: calls that succeeded and whose worst case was held, which show how good the estimates are.
        foreseen: what was held for those.
        measured: what those cost.
        exceeded: how many of those cost more than was held.
    """

    spent: int = 0
    calls: int = 0
    unpriced: int = 0
    gauged: int = 0
    foreseen: int = 0
    measured: int = 0
    exceeded: int = 0

    def __add__(self, other: AttemptSums) -> AttemptSums:
        return AttemptSums(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: AttemptSums) -> AttemptSums:
        return AttemptSums(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def largest(self, other: AttemptSums) -> AttemptSums:
        """The larger of each."""
        return AttemptSums(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))

    def items(self) -> Iterable[tuple[str, int]]:
        """Names and values."""
        return ((name, getattr(self, name)) for name in FIGURES)


FIGURES = tuple(one.name for one in fields(AttemptSums))

BudgetPlace = tuple[str, str]
"""A period's name and a scope's key: `("2026-11", "agent:writer")`."""

Ledger = Mapping[BudgetPlace, AttemptSums]


def is_reached(limit: int, figures: AttemptSums, reserved: int, *, refused: bool) -> bool:
    """True if a cap is reached. A hard one hardly ever is to the cent: it refuses the call that could exceed it.

    Args:
        limit: the cap, in nano-dollars.
        figures: what is spent under it.
        reserved: what calls in flight hold of it.
        refused: it has refused a call. That alone says little: others may have held the rest, and have ended since.
    """
    no_call_fits = not figures.gauged or (limit - figures.spent) * figures.gauged < figures.foreseen
    return figures.spent + reserved >= limit or (refused and no_call_fits)


def figures_of(attempt: Attempt) -> AttemptSums:
    """Sums of one attempt. Nothing where no call was made."""
    if attempt.short_circuited:
        return AttemptSums()
    cost = attempt.cost
    held = attempt.reserved
    gauged = attempt.outcome == "success" and attempt.cost_basis == "billed" and cost is not None and held is not None
    return AttemptSums(
        spent=cost or 0,
        calls=1,
        unpriced=int(cost is None),
        gauged=int(gauged),
        foreseen=(held or 0) if gauged else 0,
        measured=(cost or 0) if gauged else 0,
        exceeded=int(gauged and (cost or 0) > (held or 0)),
    )


def charged_at(attempt: Attempt) -> datetime:
    """The moment whose day and month an attempt's cost counts in."""
    return attempt.reserved_at or attempt.started_at


def places_of(attempt: Attempt, zone: ZoneInfo) -> tuple[BudgetPlace, ...]:
    """The budgets that an attempt counts in, in their periods: the day's first."""
    periods = periods_at(charged_at(attempt), zone)
    keys = scope_keys(attempt.agent, attempt.tenant)
    return tuple((period.name, key) for period in (periods.day, periods.month) for key in keys)


def ledger(attempts: Iterable[Attempt], zone: ZoneInfo) -> dict[BudgetPlace, AttemptSums]:
    """The sums over attempts, by period and scope."""
    sums: dict[BudgetPlace, AttemptSums] = defaultdict(AttemptSums)
    for attempt in attempts:
        if not attempt.short_circuited:
            for place in places_of(attempt, zone):
                sums[place] += figures_of(attempt)
    return dict(sums)


MAX_TAGS = 10
"""Keys in the config. Each attempt carries its tags, on the bus and in ClickHouse."""
MAX_LENGTH = 128
"""Characters of a value; the rest of a longer one is cut off."""


def cost_tags(keys: Iterable[str], metadata: Mapping[str, JsonValue]) -> dict[str, str]:
    """The tags of a job: its metadata under the keys of the config, as text, in the order of the config.

    Args:
        keys: that are kept, `cost_tags` of the config.
        metadata: of the job, redacted: a part of a secret is not known for one.

    Returns:
        A text as it is, a number as JSON has it, `true` or `false`. Lists, objects, null and the empty text are no
        values to group by, and left out.
    """
    found = ((key, _text(metadata.get(key))) for key in keys)
    return {key: text[:MAX_LENGTH] for key, text in found if text}


def _text(value: JsonValue) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value.strip()
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return str(value)
        case _:
            return ""
