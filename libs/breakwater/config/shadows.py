"""The section `shadow`: limits that are tried on all calls."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from breakwater.kernel.types import Message
from breakwater.limits.contract import LimitSettings
from breakwater.limits.rules.limit import SLIDING
from breakwater.limits.settings import MAX_LIMITS


class TriedLimits(Message):
    """Limits to try, which refuse nothing: what they would have done is recorded."""

    limits: tuple[LimitSettings, ...] = Field(
        default=(), max_length=MAX_LIMITS, description="Limits on spend in calendar periods, or in total."
    )

    def problems(self) -> Iterator[str]:
        """Yields what can't be tried: what a rate would have refused depends on calls that would have waited."""
        for number, limit in enumerate(self.limits):
            if limit.usd is None or limit.per in SLIDING:
                yield (
                    f"shadow.limits.{number}: only limits of usd per day, week, month, quarter or total can be tried; "
                    "`breakwater plan` tries others on recorded jobs"
                )
