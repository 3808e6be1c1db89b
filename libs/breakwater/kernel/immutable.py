"""Values that never change, checked by types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast, dataclass_transform

Value = TypeVar("Value")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(*, slots: bool = True, kw_only: bool = False) -> Callable[[type[Value]], type[Value]]:
    """Makes a class a frozen dataclass for the type checker, and an ordinary one when it runs.

    For values that each job makes many of: `dataclass(frozen=True)` sets each field by a call, which takes five times
    as long.
    """
    return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=True)


class computed_once(Generic[Value]):  # noqa: N801  as a decorator
    """As `functools.cached_property`, whose lock takes four times as long: two threads may compute the same value."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: object, owner: type) -> Value:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def changed(value: Value, **changes: Any) -> Value:
    """As `dataclasses.replace`, which takes twenty times as long, and is used for classes with slots alone.

    Raises:
        TypeError: it has no such field.
    """
    try:
        fields = {**value.__dict__, **changes}
    except AttributeError:
        return replace(cast(Any, value), **changes)
    if len(fields) != len(cast(Any, value).__dataclass_fields__):
        # Of what was computed, or a name that is no field.
        return replace(cast(Any, value), **changes)
    changed_value = object.__new__(type(value))
    changed_value.__dict__ = fields
    return changed_value
