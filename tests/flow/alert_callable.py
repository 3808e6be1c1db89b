"""Callables that alerts are told to in tests."""

import time


def hangs(_event: str, _payload: dict[str, object]) -> None:
    """Takes longer than anybody waits."""
    time.sleep(200)
