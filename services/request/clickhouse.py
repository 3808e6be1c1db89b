"""Asking ClickHouse for what the HTTP API responds with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from breakwater.analytics.errors import AnalyticsUnavailable, QueryFailed

ANSWER_WITHIN_S = 20.0

T = TypeVar("T")


async def answered(asked: Awaitable[T]) -> T:
    """What ClickHouse answers. Raises AnalyticsUnavailable: it does not, or can't read its tables."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await asked
    except TimeoutError as error:
        message = f"ClickHouse did not answer within {ANSWER_WITHIN_S:g} s; ask for less, such as a shorter time"
        raise AnalyticsUnavailable(message) from error
    except QueryFailed as error:
        message = f"ClickHouse refused the query: {error.message}; `breakwater setup` brings its tables up to date"
        raise AnalyticsUnavailable(message) from error
