"""What is usual of a measure: an exponentially weighted mean, and the mean distance from it.

Both are learned from clipped values, so that an outlier moves them little (an M-estimator, after Huber). With `w` the
weight of a value `x`, and `d` the deviation, which is `spread` with its floors:

    usual  += w * clip(x - usual, -CENTRE_CLIP * d, CENTRE_CLIP * d)
    spread += w * (min(|x - usual|, SPREAD_CLIP * d) - spread)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, Literal

from pydantic import Field

Measure = Literal["error_rate", "spend_rate", "latency"]
"""A share of calls; nano-dollars per minute; milliseconds."""
MEASURES: tuple[Measure, ...] = ("error_rate", "spend_rate", "latency")

HALF_LIFE = 4_320
"""Minutes after which one counts half: three days of an agent that never rests. With one day of it a quiet weekend
would outweigh the week, and each Monday be news."""
WEIGHT = 1 - 2 ** (-1 / HALF_LIFE)
"""Of one minute, once there are many; the first ones weigh as in a plain mean."""
START = 5
"""Minutes whose median is where learning begins, so that an odd first one is not what is usual. As few as
`minimum_minutes` may be."""
CENTRE_CLIP = 3.0
"""Beyond it a minute moves the usual figure no further; of normal noise that is 2 %."""
SPREAD_CLIP = 20.0
"""Beyond it a minute widens the deviation no further. Wide, as what has few but high peaks must not be taken for
steady: with a clip of `c` that happens where fewer than 1 of 2c minutes is a peak."""
RELATIVE_FLOOR = 0.1
"""Of the usual figure: the least deviation, however steady an agent is."""
ABSOLUTE_FLOOR: Mapping[Measure, float] = {"error_rate": 0.02, "spend_rate": 10_000_000, "latency": 50}
"""The least deviation: 2 % of calls, one cent per minute, 50 ms. Less is not worth a person's time."""

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, le=4_000_000_000)]
"""A count, or a minute since the epoch, as far as times can be written."""


@dataclass(frozen=True, slots=True)
class Level:
    """What is usual of a measure."""

    usual: Figure = 0.0
    spread: Figure = 0.0
    """Mean distance from the usual figure, without floors. Of normal noise it is 0.8 of the standard deviation."""
    learned: Number = 0
    """Of how many minutes."""
    first: Annotated[tuple[Figure, ...], Field(max_length=START)] = ()
    """Those minutes, while there are fewer than START."""


UNKNOWN = Level()


def learned(level: Level, measure: Measure, value: float, calls: int) -> Level:
    """The level after a minute with this value, of so many calls."""
    count = level.learned + 1
    if count <= START:
        first = (*level.first, value)
        usual = median(first)
        return Level(usual, fmean(abs(one - usual) for one in first), count, first if count < START else ())
    weight = max(WEIGHT, 1 / count)
    deviation = deviation_of(level, measure, calls)
    off, most = value - level.usual, CENTRE_CLIP * deviation
    usual = level.usual + weight * max(-most, min(off, most))
    spread = level.spread + weight * (min(abs(off), SPREAD_CLIP * deviation) - level.spread)
    return Level(usual, spread, count)


def deviation_of(level: Level, measure: Measure, calls: int) -> float:
    """The usual deviation of a minute with so many calls: never less than its floors, so never zero.

    Of an error rate it is also never less than chance alone makes it: of the ten calls of a minute at night one that
    fails is 10 %, while the thousands by day, from which most is learned, are steady.
    """
    chance = 0.0
    if measure == "error_rate" and calls:
        chance = math.sqrt(max(0.0, level.usual * (1 - level.usual)) / calls)
    return max(level.spread, RELATIVE_FLOOR * level.usual, ABSOLUTE_FLOOR[measure], chance)
