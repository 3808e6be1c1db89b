"""Values that never change, checked by types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Value = TypeVar("Value")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(*, slots: bool = True, kw_only: bool = False) -> Callable[[type[Value]], type[Value]]:
    """Makes a class a frozen dataclass for the type checker, and an ordinary one when it runs.

    For values that each job makes many of: `dataclass(frozen=True)` sets each field by a call, which takes five times
    as long.
    """
    return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=True)
