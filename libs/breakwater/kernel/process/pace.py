"""The pace of a plane: leases and heartbeats, whose times all processes must agree on.

A room has such times in a frozen dataclass of seconds with the values of production. A service takes them at the pace
of its settings, so that a test of what happens when they lapse need not wait for as long as production does.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Times = TypeVar("Times", bound="DataclassInstance")


def at_pace(times: Times, pace: float) -> Times:
    """Returns a dataclass of seconds with each of them divided by the pace: at a pace of 4, all are 4 times shorter."""
    return replace(times, **{field.name: getattr(times, field.name) / pace for field in fields(times)})
