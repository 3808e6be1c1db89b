"""The limits that are only tried, with what they have counted."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from breakwater.config import Config
from breakwater.kernel.redis.documents import Documents
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import ListedLimit, Window
from breakwater.limits.rules.budget import Period, period
from breakwater.limits.rules.limit import CALENDAR, Limit, amount_text
from breakwater.replay.rules.shadow_limits import ShadowLimit


class TriedLimitReader:
    """The limits that are only tried."""

    def __init__(
        self, config: Callable[[], Config], shadows: Documents[ShadowLimit], now: Callable[[], datetime]
    ) -> None:
        self._config = config
        self._shadows = shadows
        self._now = now

    async def listed(self, is_wanted: Callable[[Limit], bool]) -> tuple[ListedLimit, ...]:
        """Lists those that a condition holds for. Raises StateUnavailableError."""
        config = self._config()
        table = config.shadow_limits
        limits = [limit for limit in table.limits if is_wanted(limit)]
        windows: list[Window] = [CALENDAR[limit.window] for limit in limits if limit.window is not None]
        names = [table.counter(limit.key, window).name for limit, window in zip(limits, windows, strict=True)]
        shadows = await self._shadows.read(names)
        periods = [period(window, self._now(), config.budgets.zone) for window in windows]
        return tuple(_listed(*parts) for parts in zip(limits, shadows, periods, strict=True))


def _listed(limit: Limit, shadow: ShadowLimit, current: Period) -> ListedLimit:
    if shadow.start_ms != current.start_ms:
        shadow = ShadowLimit()  # it has counted nothing in this period
    use = {
        "used": amount_text(limit.unit, shadow.spent),
        "remaining": amount_text(limit.unit, max(0, limit.amount - shadow.spent)),
        "refused": shadow.refused,
    }
    return ListedLimit.model_validate(
        {
            "id": limit.id,
            "source": "config",
            "scope": limit.scope,
            "unit": limit.unit,
            "amount": amount_text(limit.unit, limit.amount),
            "usd": limit.amount,
            "per": limit.window,
            "action": limit.action,
            "thresholds": limit.thresholds,
            "until": None if limit.until_ms is None else time_from_ms(limit.until_ms),
            "resets_at": current.resets_at,
            **(use if limit.is_named else {}),
        }
    )
