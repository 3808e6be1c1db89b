"""Callables that are notified of alerts in tests."""

import threading

RELEASED = threading.Event()


def hangs(_event: str, _payload: dict[str, object]) -> None:
    """Does not return before a test lets it."""
    RELEASED.wait(200)
