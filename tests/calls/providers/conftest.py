from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.calls.providers.kit import KEY


@pytest.fixture(autouse=True)
def _planted_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_KEY", KEY)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Modules that set ON_BOTH_LOOPS watch descriptors themselves, which uvloop (the worker's) does in its own way.

    Their tests that are marked `one_loop` are of what a program printed, whoever watched it.
    """
    both = isinstance(item, pytest.Function) and getattr(item.module, "ON_BOTH_LOOPS", False)
    both = both and item.get_closest_marker("one_loop") is None
    return {"asyncio": asyncio.new_event_loop} | ({"uvloop": uvloop.new_event_loop} if both else {})
