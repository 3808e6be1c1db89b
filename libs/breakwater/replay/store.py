"""The shadows of limits in Redis."""

from __future__ import annotations

from pydantic import TypeAdapter

from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.redis.documents import Documents
from breakwater.replay.rules.shadow_limits import ShadowLimit

KEEP_MS = 100 * 24 * 3_600_000
"""Longer than a quarter."""


def shadow_limits_in(redis: Redis) -> Documents[ShadowLimit]:
    """The shadows of limits, by the names of their budgets."""
    return Documents(redis, "bw:shadow-limit:", TypeAdapter(ShadowLimit), ShadowLimit(), KEEP_MS)
