"""Decides whose turn it is, by weighted fair queueing: of callers that wait, each gets a share by its weight.

A caller is an API key with a priority and, within it, a tenant. Each item gets the moment of virtual time at which it
would be through if all callers were served at once, each at the speed of its weight; the earliest is first. So a flood
of one caller delays another one's single item by at most one item of the flood, and nobody starves: low priority is a
small weight, not a later turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, NamedTuple, Self, TypeVar

from breakwater.identity.contract import PRIORITIES, Priority
from breakwater.kernel.nats.subjects import decode_token, encode_token

WEIGHT_OF: dict[Priority, int] = {"high": 16, "normal": 4, "low": 1}

ItemT = TypeVar("ItemT")
NameT = TypeVar("NameT")


def rank(priority: Priority) -> int:
    """Returns the place of a priority among all: 0 for the highest."""
    return PRIORITIES.index(priority)


def allowed_priority(*settings: Priority | None) -> Priority:
    """Returns the highest priority that a job may have by the settings of its agent and its key: the lower of the two.

    One that is not set does not count. Without any, it is normal.
    """
    ranks = [rank(setting) for setting in settings if setting is not None]
    return PRIORITIES[max(ranks)] if ranks else "normal"


def priority_problem(asked: Priority | None, of_agent: Priority | None, of_key: Priority | None) -> str | None:
    """Returns why a job may not have the priority that it asks for; None if it may."""
    allowed = allowed_priority(of_agent, of_key)
    if asked is None or rank(asked) >= rank(allowed):
        return None
    return f"at most {allowed!r} is allowed, by `priority` of the agent and of the key; ask for less, or for none"


class CallerTurn(NamedTuple):
    """The turn that a job waits for: whose it is, and its share."""

    key: str = ""
    """The name of the API key or the program; empty if it is unknown."""
    tenant: str = ""
    priority: Priority = "normal"
    weight: int = 1
    """The weight of the key."""

    @property
    def share(self) -> int:
        """The weight among all that wait."""
        return self.weight * WEIGHT_OF[self.priority]

    @property
    def text(self) -> str:
        """The turn as the value of a header."""
        names = (name and encode_token(name) for name in (self.key, self.tenant))
        return " ".join((self.priority, str(self.weight), *names))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `text`. What another version has written counts as nobody's."""
        priority, weight, key, tenant, *_ = (*text.split(" "), "", "", "", "")
        if priority not in PRIORITIES or not (weight.isascii() and weight.isdigit()):
            return cls()
        return cls(decode_token(key), decode_token(tenant), priority, max(1, int(weight)))


NOBODYS = CallerTurn()


def finish_of(virtual_time: float, last_finish: float, amount: float, share: float) -> float:
    """Returns when an item would be through, in virtual time.

    Args:
        virtual_time: the virtual time now.
        last_finish: when the same caller's item before it would be through.
        amount: what the item takes.
        share: the weight of the caller.
    """
    return max(virtual_time, last_finish) + amount / share


@dataclass(slots=True)
class _Line(Generic[ItemT]):
    """The items of one key, or of one of its tenants."""

    start: float
    """The virtual time at which the next item begins. It outlasts the items, until the virtual time is later."""
    share: int = 1
    count: int = 0
    items: list[tuple[float, int, ItemT]] = field(default_factory=list[tuple[float, int, ItemT]])
    """A heap with the oldest first; of a tenant."""
    tenants: dict[str, _Line[ItemT]] = field(default_factory=dict[str, "_Line[ItemT]"])
    virtual_time: float = 0.0
    """The virtual time among the tenants."""

    def finish(self) -> float:
        """Returns when the next item would be through."""
        return finish_of(self.start, 0.0, 1, self.share)


class FairQueue(Generic[ItemT]):
    """Items that wait, in the order of weighted fair queueing by key, then by tenant, then by age."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, Priority], _Line[ItemT]] = {}
        self._virtual_time = 0.0
        self._added = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has(self, turn: CallerTurn) -> bool:
        """Returns True if an item of the same caller waits."""
        of_key = self._keys.get((turn.key, turn.priority))
        of_tenant = None if of_key is None else of_key.tenants.get(turn.tenant)
        return of_tenant is not None and of_tenant.count > 0

    def turns(self) -> set[CallerTurn]:
        """Returns the callers whose items wait."""
        return {
            CallerTurn(key, tenant, priority, of_key.share // WEIGHT_OF[priority])
            for (key, priority), of_key in self._keys.items()
            for tenant, of_tenant in of_key.tenants.items()
            if of_tenant.count
        }

    def add(self, turn: CallerTurn, age: float, item: ItemT) -> None:
        """Adds an item. Of one caller, the one with the smallest `age` is first, such as the time of its arrival."""
        of_key = self._keys.setdefault((turn.key, turn.priority), _Line(self._virtual_time))
        of_tenant = of_key.tenants.setdefault(turn.tenant, _Line(of_key.virtual_time))
        of_key.share = turn.share
        if not of_key.count:
            of_key.start = max(of_key.start, self._virtual_time)
        if not of_tenant.count:
            of_tenant.start = max(of_tenant.start, of_key.virtual_time)
        self._added += 1
        heappush(of_tenant.items, (age, self._added, item))
        of_tenant.count += 1
        of_key.count += 1
        self._count += 1

    def take(self, may: Callable[[CallerTurn], bool]) -> ItemT | None:
        """Removes the next item of those whose callers may have a turn now. Returns None if there is none."""
        for (key, priority), of_key in sorted(self._keys.items(), key=lambda entry: entry[1].finish()):
            weight = of_key.share // WEIGHT_OF[priority]
            for tenant, of_tenant in sorted(of_key.tenants.items(), key=lambda entry: entry[1].start):
                if of_tenant.count and may(CallerTurn(key, tenant, priority, weight)):
                    return self._remove(of_key, of_tenant)
        return None

    def _remove(self, of_key: _Line[ItemT], of_tenant: _Line[ItemT]) -> ItemT:
        self._virtual_time = max(self._virtual_time, of_key.start)
        of_key.virtual_time = max(of_key.virtual_time, of_tenant.start)
        of_key.start = of_key.finish()
        of_tenant.start = of_tenant.finish()
        of_tenant.count -= 1
        of_key.count -= 1
        self._count -= 1
        of_key.tenants = _without_idle(of_key.tenants, of_key.virtual_time)
        self._keys = _without_idle(self._keys, self._virtual_time)
        return heappop(of_tenant.items)[2]


def _without_idle(lines: dict[NameT, _Line[ItemT]], virtual_time: float) -> dict[NameT, _Line[ItemT]]:
    """Returns the lines without those that begin anew whenever they get an item."""
    return {name: line for name, line in lines.items() if line.count or line.start > virtual_time}
