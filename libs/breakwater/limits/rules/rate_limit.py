"""Limits on the rate of calls of an agent, a model or a task."""

from __future__ import annotations

from collections.abc import Mapping

from breakwater.limits.settings import LimitPeriod

WINDOW_MS = 60_000
"""The rolling window of limits per minute; those per hour and day are multiples of it (`MINUTES`)."""
MINUTES: Mapping[LimitPeriod, int] = {"minute": 1, "hour": 60, "day": 1440}

HELD = "ModelHeldError"
"""The error class of a call that is refused because its model is held."""
