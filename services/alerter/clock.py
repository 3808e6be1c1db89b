"""The clock of the alerter: injected, so that a test of an hour need not last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of day, and a time that is never set back.

    Attributes:
        now: the time of day, with its zone.
        monotonic: seconds since an arbitrary moment, for delays.
    """

    now: Callable[[], datetime] = _utc_now
    monotonic: Callable[[], float] = time.monotonic


SYSTEM_CLOCK = Clock()
