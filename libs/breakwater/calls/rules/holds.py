"""Holds of a model: the time for which its provider asks to be left alone."""

from __future__ import annotations

MAX_HELD_S = 10.0
"""The seconds that a job with another model waits at most for a held model."""


LONG_HOLD_S = 30.0
"""During a longer hold, one call of another caller is admitted in each such period: the limit may be the first
caller's alone."""


_SPREAD = 0.1


def waits_for_hold(wait_s: float) -> bool:
    """Returns True if a job that has another model waits for the held one; else it calls the other immediately."""
    return wait_s <= MAX_HELD_S


def after_hold_s(rest_s: float, jitter: float) -> float:
    """Returns the seconds after which a job tries a held model again, spread so that not all jobs try together.

    Args:
        rest_s: the seconds until the hold ends.
        jitter: a random number in [0, 1).
    """
    return rest_s * (1 + _SPREAD * jitter)
