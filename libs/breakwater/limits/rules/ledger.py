"""Sums over attempts, equal in Redis, in ClickHouse and in the event log, and the tags that group costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from operator import attrgetter
from zoneinfo import ZoneInfo

from pydantic import JsonValue

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.immutable import immutable
from breakwater.limits.contract import LimitUnit
from breakwater.limits.rules.budget import periods_at
from breakwater.limits.rules.scopes import ONLY_BASE, CallNames, Dimensions


@immutable()
class AttemptSums:
    """Sums over attempts; money is in nano-dollars.

    Attributes:
        spent: the known costs.
        calls: how many attempts made a call.
        unpriced: how many calls have an unknown cost.
        gauged: how many calls succeeded with a reservation and a billed cost. They show how good the estimates are.
        foreseen: the amounts reserved for the gauged calls.
        measured: the costs of the gauged calls.
        exceeded: how many gauged calls cost more than their reservation.
        tokens: input and output; of a call that nothing is reported of, those that were reserved for it.
    """

    spent: int = 0
    calls: int = 0
    unpriced: int = 0
    gauged: int = 0
    foreseen: int = 0
    measured: int = 0
    exceeded: int = 0
    tokens: int = 0

    def __add__(self, sums: AttemptSums) -> AttemptSums:
        return AttemptSums(*(a + b for a, b in zip(_figures_of(self), _figures_of(sums), strict=True)))

    def __sub__(self, sums: AttemptSums) -> AttemptSums:
        return AttemptSums(*(a - b for a, b in zip(_figures_of(self), _figures_of(sums), strict=True)))

    def largest(self, sums: AttemptSums) -> AttemptSums:
        """Returns the larger one of each pair of figures."""
        return AttemptSums(*(max(pair) for pair in zip(_figures_of(self), _figures_of(sums), strict=True)))

    def used(self, unit: LimitUnit) -> int:
        """Returns what counts towards a limit on a unit."""
        return self.spent if unit == "usd" else self.tokens if unit == "tokens" else self.calls

    def items(self) -> Iterable[tuple[str, int]]:
        """Returns the names and values of all figures."""
        return zip(FIGURES, _figures_of(self), strict=True)


FIGURES = tuple(figure.name for figure in fields(AttemptSums))
_figures_of = attrgetter(*FIGURES)

BudgetPlace = tuple[str, str]
"""A period's name and a scope's key: `("2026-11", "agent:writer")`."""

Ledger = Mapping[BudgetPlace, AttemptSums]


def is_reached(limit: int, figures: AttemptSums, reserved: int, *, refused: bool) -> bool:
    """Returns True if a limit is reached: spent, reserved, or too little left of it for another call.

    A hard limit is hardly ever spent to the cent, because it refuses the first call that could exceed it.

    Args:
        limit: the limit, in nano-dollars.
        figures: the sums over the attempts that count towards it.
        reserved: the nano-dollars that calls in flight reserve.
        refused: True if the limit has refused a call. That alone proves nothing: other calls may have reserved the
            remainder then, and have ended since.
    """
    no_call_fits = not figures.gauged or (limit - figures.spent) * figures.gauged < figures.foreseen
    return figures.spent + reserved >= limit or (refused and no_call_fits)


def figures_of(attempt: Attempt) -> AttemptSums:
    """Returns the sums over a single attempt; all are zero if it made no call."""
    if attempt.short_circuited:
        return AttemptSums()
    cost = attempt.cost
    reserved = attempt.reserved
    is_billed = attempt.outcome == "success" and attempt.cost_basis == "billed" and cost is not None
    gauged = is_billed and reserved is not None
    return AttemptSums(
        spent=cost or 0,
        calls=1,
        unpriced=int(cost is None),
        gauged=int(gauged),
        foreseen=(reserved or 0) if gauged else 0,
        measured=(cost or 0) if gauged else 0,
        exceeded=int(gauged and (cost or 0) > (reserved or 0)),
        tokens=_most_tokens(attempt) if (tokens := tokens_used(attempt)) is None else tokens,
    )


def tokens_used(attempt: Attempt) -> int | None:
    """Returns the tokens of a call, input and output; None if they are unknown, so that its worst case counts.

    They are if the call is charged its worst case of money, too: the figures are then those of the answer's text, and
    the model may have thought more than it wrote.
    """
    counts = attempt.input_tokens, attempt.output_tokens
    if attempt.cost_basis == "billed":
        is_known = counts != (None, None) or not attempt.cost
    else:
        is_known = None not in counts and not (attempt.cost and attempt.cost == attempt.reserved)
    return _known_tokens(attempt) if is_known else None


def _known_tokens(attempt: Attempt) -> int:
    return (attempt.input_tokens or 0) + (attempt.output_tokens or 0)


def _most_tokens(attempt: Attempt) -> int:
    return max(_known_tokens(attempt), attempt.reserved_tokens or 0)


def charged_at(attempt: Attempt) -> datetime:
    """Returns the moment whose day and month an attempt's cost counts in."""
    return attempt.reserved_at or attempt.started_at


def places_of(attempt: Attempt, zone: ZoneInfo, dimensions: Dimensions = ONLY_BASE) -> tuple[BudgetPlace, ...]:
    """Returns the budgets that an attempt counts in, in the dimensions that are counted."""
    periods = periods_at(charged_at(attempt), zone)
    return tuple((periods.of(window).name, key) for window, key in dimensions.keys(CallNames.of(attempt)))


def ledger(
    attempts: Iterable[Attempt], zone: ZoneInfo, dimensions: Dimensions = ONLY_BASE
) -> dict[BudgetPlace, AttemptSums]:
    """Returns the sums over attempts by period and scope."""
    sums: dict[BudgetPlace, AttemptSums] = defaultdict(AttemptSums)
    for attempt in attempts:
        if not attempt.short_circuited:
            for place in places_of(attempt, zone, dimensions):
                sums[place] += figures_of(attempt)
    return dict(sums)


MAX_LENGTH = 128
"""The most characters of a value; longer ones are cut off."""


def cost_tags(keys: Iterable[str], metadata: Mapping[str, JsonValue]) -> dict[str, str]:
    """Returns the cost tags of a job, as text and in the config's order.

    Args:
        keys: the config's `cost_tags`: the keys of the metadata that become tags.
        metadata: the job's metadata, already redacted: once a secret is cut off, redaction no longer recognises it.

    Returns:
        Strings unchanged, numbers as JSON writes them, and booleans as `true` or `false`. Lists, objects, null and
        empty strings are left out: costs cannot be grouped by them.
    """
    texts = ((key, _text(metadata.get(key))) for key in keys)
    return {key: text[:MAX_LENGTH] for key, text in texts if text}


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
