"""Decides whose turn it is, by weighted fair queueing: of callers that wait, each gets a share by its weight.

A caller is an API key with a priority and, within it, a tenant. Each item gets the moment of virtual time at which it
would be through if all callers were served at once, each at the speed of its weight; the earliest is first. So a flood
of one caller delays another one's single item by at most one item of the flood, and nobody starves: low priority is a
small weight, not a later turn, and what has waited for long with it counts as of normal priority.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, Self, TypeVar

from breakwater.identity.contract import PRIORITIES, Priority
from breakwater.kernel.nats.subjects import decode_token, encode_token

WEIGHT_OF: dict[Priority, int] = {"high": 16, "normal": 4, "low": 1}

AGED_S = 300.0
"""An item of low priority that has waited for so long counts as of normal priority."""

MAX_TENANTS = 100
"""The most tenants of a key that are told apart where callers that wait are named."""

ANY_TENANT = "*"
"""In place of a tenant: each one of the key."""

ItemT = TypeVar("ItemT")


def rank(priority: Priority) -> int:
    """Returns the place of a priority among all: 0 for the highest."""
    return PRIORITIES.index(priority)


def allowed_priority(*settings: Priority | None) -> Priority:
    """Returns the highest priority that a job may have by the settings of its agent and its key: the lower of the two.

    One that is not set does not count. Without any, it is normal.
    """
    ranks = [rank(setting) for setting in settings if setting is not None]
    return PRIORITIES[max(ranks)] if ranks else "normal"


def priority_problem(wanted: Priority | None, of_agent: Priority | None, of_key: Priority | None) -> str | None:
    """Returns why a job may not have the priority that it asks for; None if it may."""
    allowed = allowed_priority(of_agent, of_key)
    if wanted is None or rank(wanted) >= rank(allowed):
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
    def of_key(self) -> CallerTurn:
        """The turn of all tenants of the key."""
        return self._replace(tenant=ANY_TENANT)

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
class _TenantLine(Generic[ItemT]):
    """The items of one tenant of a key."""

    start: float
    """The virtual time at which the next item begins. It outlasts the items, until the virtual time is later."""
    items: list[tuple[float, int, ItemT]] = field(default_factory=list[tuple[float, int, ItemT]])
    """A heap with the oldest first."""


@dataclass(slots=True)
class _KeyLine(Generic[ItemT]):
    """The tenants of one key with a priority."""

    start: float
    """As of a tenant."""
    weight: int = 1
    virtual_time: float = 0.0
    """The virtual time among the tenants."""
    tenants: dict[str, _TenantLine[ItemT]] = field(default_factory=dict[str, "_TenantLine[ItemT]"])
    order: list[tuple[float, int, str]] = field(default_factory=list[tuple[float, int, str]])
    """A heap of the tenants with items, by their start: a key may name any number of tenants."""
    tidied_at: int = 16
    """The number of tenants at which those that begin anew anyway are forgotten."""

    def turn(self, key: str, priority: Priority, aged_before: float) -> CallerTurn:
        """Returns the turn of the key, without a tenant. It must have items."""
        is_aged = priority == "low" and self.tenants[self.order[0][2]].items[0][0] < aged_before
        return CallerTurn(key, "", "normal" if is_aged else priority, self.weight)

    def finish(self, share: int) -> float:
        """Returns when the next item would be through."""
        return finish_of(self.start, 0.0, 1, share)

    def line_up(self, tenant: str, number: int) -> None:
        """Puts a tenant with items into the order."""
        heappush(self.order, (self.tenants[tenant].start, number, tenant))

    def first(self, may: Callable[[str], bool]) -> str | None:
        """Removes the first tenant that may have a turn now from the order."""
        passed_over: list[tuple[float, int, str]] = []
        first = None
        while self.order and first is None:
            place = heappop(self.order)
            if may(place[2]):
                first = place[2]
            else:
                passed_over.append(place)
        for place in passed_over:
            heappush(self.order, place)
        return first

    def tidy(self) -> None:
        """Forgets the tenants that begin anew whenever they get an item."""
        if len(self.tenants) >= self.tidied_at:
            self.tenants = {
                name: line for name, line in self.tenants.items() if line.items or line.start > self.virtual_time
            }
            self.tidied_at = max(16, 2 * len(self.tenants))


class FairQueue(Generic[ItemT]):
    """Items that wait, in the order of weighted fair queueing by key, then by tenant, then by age."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, Priority], _KeyLine[ItemT]] = {}
        self._virtual_time = 0.0
        self._added = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has(self, turn: CallerTurn) -> bool:
        """Returns True if an item of the same caller waits."""
        of_key = self._keys.get((turn.key, turn.priority))
        of_tenant = None if of_key is None else of_key.tenants.get(turn.tenant)
        return of_tenant is not None and bool(of_tenant.items)

    def turns(self) -> set[CallerTurn]:
        """Returns the callers whose items wait. A key with many such tenants is there as a whole, for any tenant."""
        return {
            CallerTurn(key, tenant, priority, of_key.weight)
            for (key, priority), of_key in self._keys.items()
            for tenant in (
                (ANY_TENANT,) if len(of_key.order) > MAX_TENANTS else (tenant for _, _, tenant in of_key.order)
            )
        }

    def add(self, turn: CallerTurn, age: float, item: ItemT) -> None:
        """Adds an item. Of one caller, the one with the smallest `age` is first, such as the time of its arrival."""
        of_key = self._keys.setdefault((turn.key, turn.priority), _KeyLine(self._virtual_time))
        of_tenant = of_key.tenants.setdefault(turn.tenant, _TenantLine(of_key.virtual_time))
        of_key.weight = turn.weight
        self._added += 1
        if not of_key.order:
            of_key.start = max(of_key.start, self._virtual_time)
        if not of_tenant.items:
            of_tenant.start = max(of_tenant.start, of_key.virtual_time)
            of_key.line_up(turn.tenant, self._added)
        heappush(of_tenant.items, (age, self._added, item))
        self._count += 1

    def take(
        self,
        may_key: Callable[[CallerTurn], bool],
        may_tenant: Callable[[CallerTurn], bool] = lambda _: True,
        aged_before: float = -math.inf,
    ) -> ItemT | None:
        """Removes the next item of those whose callers may have a turn now. Returns None if there is none.

        Args:
            may_key: decides for a key and its priority, without a tenant.
            may_tenant: decides for a tenant of it.
            aged_before: an item of low priority whose `age` is smaller counts as of normal priority.
        """
        lines = [
            (of_key, of_key.turn(key, priority, aged_before))
            for (key, priority), of_key in self._keys.items()
            if of_key.order
        ]
        for of_key, turn in sorted(lines, key=lambda line: line[0].finish(line[1].share)):
            if may_key(turn):
                tenant = of_key.first(lambda tenant, turn=turn: may_tenant(turn._replace(tenant=tenant)))
                if tenant is not None:
                    return self._remove(of_key, tenant, turn.share)
        return None

    def prune(self, is_over: Callable[[ItemT], bool]) -> list[ItemT]:
        """Removes and returns the items that wait no more, without a turn for their callers."""
        removed: list[ItemT] = []
        for of_key in self._keys.values():
            for of_tenant in of_key.tenants.values():
                over = [entry for entry in of_tenant.items if is_over(entry[2])]
                if over:
                    of_tenant.items = [entry for entry in of_tenant.items if not is_over(entry[2])]
                    heapify(of_tenant.items)
                    removed += (item for _, _, item in over)
            of_key.order = [place for place in of_key.order if of_key.tenants[place[2]].items]
            heapify(of_key.order)
            of_key.tidy()
        self._count -= len(removed)
        self._forget_idle_keys()
        return removed

    def _remove(self, of_key: _KeyLine[ItemT], tenant: str, share: int) -> ItemT:
        of_tenant = of_key.tenants[tenant]
        self._virtual_time = max(self._virtual_time, of_key.start)
        of_key.virtual_time = max(of_key.virtual_time, of_tenant.start)
        of_key.start = of_key.finish(share)
        of_tenant.start = finish_of(of_tenant.start, 0.0, 1, 1)
        _, number, item = heappop(of_tenant.items)
        if of_tenant.items:
            of_key.line_up(tenant, number)
        self._count -= 1
        of_key.tidy()
        self._forget_idle_keys()
        return item

    def _forget_idle_keys(self) -> None:
        """Forgets the keys that begin anew whenever they get an item."""
        self._keys = {
            name: of_key for name, of_key in self._keys.items() if of_key.order or of_key.start > self._virtual_time
        }
