"""What every page works with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Generic, TypeVar
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from starlette.requests import Request

from breakwater.analytics.client import Analytics
from breakwater.analytics.errors import AnalyticsUnavailable, QueryFailed
from services.console.door import Door, DoorError, SignedOut
from services.console.pages import Pages

T = TypeVar("T")

ANSWER_S = 8.0
"""How long a page waits for any part of it."""

WINDOWS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}


@dataclass(frozen=True, slots=True)
class Plane:
    """The parts of the plane that pages ask, and what writes the pages."""

    door: Door
    analytics: Analytics
    """Only read: where it matters, the URL is that of a user who can do no more."""
    pages: Pages
    now: Callable[[], datetime]
    stopping: asyncio.Event
    """Set when the process ends: who watches a job comes back by themselves."""
    placeholder: str
    """What stands where something was redacted."""
    zone: ZoneInfo
    """Where the days and months of budgets begin."""


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What was asked for, or why it can't be had: a page shows the rest of itself all the same."""

    value: T | None
    trouble: str | None = None


async def found(asked: Awaitable[T]) -> Found[T]:
    """Waits for an answer.

    Raises:
        SignedOut: the key is not known any more.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            return Found(await asked)
    except SignedOut:
        raise
    except TimeoutError:
        return Found(None, f"No answer came within {ANSWER_S:g} s. `breakwater doctor` tells what hangs.")
    except DoorError as error:
        return Found(None, error.message)
    except AnalyticsUnavailable as error:
        return Found(None, f"{error}. What happened is not lost: it is stored when ClickHouse is back.")
    except QueryFailed as error:
        return Found(None, f"ClickHouse refuses: {error.message}. `breakwater setup` brings its tables up to date.")


def window_of(request: Request, default: str = "24h") -> str:
    """Which of WINDOWS a page is asked for."""
    wanted = request.query_params.get("window", default)
    return wanted if wanted in WINDOWS else default


def window_links(request: Request, here: str) -> list[tuple[str, str, bool]]:
    """The same page for each of WINDOWS: its text, its address, whether it is this one."""
    others = {name: value for name, value in request.query_params.items() if name not in ("window", "after", "before")}
    return [(name, f"{request.url.path}?{urlencode(others | {'window': name})}", name == here) for name in WINDOWS]
