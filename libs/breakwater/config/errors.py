"""How a wrong name in the config is told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(wrong: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where something is close, else all that is known."""
    names = list(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are {listing(names)}" if names else ""


def listing(names: Iterable[str]) -> str:
    """Names in order, with commas."""
    return ", ".join(sorted(names))
