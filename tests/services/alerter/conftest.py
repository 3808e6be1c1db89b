"""Receivers and secrets for the alerter's tests."""

from collections.abc import AsyncGenerator

import pytest

from tests.services.alerter.kit import SECRET, Receiver


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def receiver() -> AsyncGenerator[Receiver]:
    """Not started yet, so that a test may begin with a receiver that is down."""
    one = Receiver()
    yield one
    await one.stop()


@pytest.fixture
async def slack(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Receiver]:
    one = await Receiver().start()
    monkeypatch.setenv("SLACK_HOOK", one.url)
    yield one
    await one.stop()
