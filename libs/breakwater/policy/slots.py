"""How many of an agent's slots one caller may hold, so that the others find one free. Pure."""

from __future__ import annotations


def may_take(slots: int, own: int, others: int) -> bool:
    """Whether a caller may take one more slot.

    It leaves as many free as the others needed lately, and one more, up to half of all. Where nobody else calls, it may
    take all.

    Args:
        slots: how many there are.
        own: how many the caller holds.
        others: how many the other callers held at most, in the last minute.
    """
    half = slots // 2
    return not others or own < half or own + min(half, others + 1) < slots
