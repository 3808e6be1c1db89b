"""Callables that are notified of alerts in tests."""

import time


def hangs(_event: str, _payload: dict[str, object]) -> None:
    """Takes longer than anybody waits."""
    time.sleep(200)
