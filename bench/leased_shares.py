"""A limit that many nodes share by leases, simulated: what no part of the plane does yet (docs/scaling.md).

    python -m bench.leased_shares [--nodes 10] [--cap 10000] [--call 1]

One place, such as Redis, leases shares of a limit to nodes, such as planes; each node admits calls against its share by
itself. A lease ends by its holder's clock before it ends by the lessor's. A node that does not come back has spent what
the record says, which is read when its lease is over: until then, its whole share counts as spent.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

LEASE_S = 10.0
CLOCKS_DIFFER_S = 1.0
"""The most by which the clocks of a node and of the lessor differ."""


@dataclass
class Lease:
    """A share of the limit, and what its holder has reserved of it."""

    amount: int
    ends_at: float
    """By the lessor's clock."""
    spent: int = 0
    """As the record will say: each call is reserved at its worst case when it begins."""


@dataclass
class Lessor:
    """Leases shares of a limit. What it has leased and what was spent is never more than the limit."""

    cap: int
    nodes: int
    settled: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """The part of the limit that is neither leased nor spent."""
        return self.cap - self.settled - sum(lease.amount for lease in self.leases.values())

    def lease(self, node: int, least: int, now: float) -> Lease | None:
        """Settles a node's last lease, and gives it another: half of an equal share of what is free, and `least`."""
        self.end(node)
        self.end_expired(now)
        share = max(self.free // (2 * self.nodes), least)
        if share > self.free:
            return None
        self.leases[node] = Lease(share, now + LEASE_S)
        return self.leases[node]

    def end(self, node: int) -> None:
        """Settles a lease with what its holder has spent."""
        if (lease := self.leases.pop(node, None)) is not None:
            self.settled += lease.spent

    def end_expired(self, now: float) -> None:
        """Settles what is over, as the record has it."""
        for node in [node for node, lease in self.leases.items() if lease.ends_at <= now]:
            self.end(node)


@dataclass
class Node:
    """Admits calls against its lease."""

    number: int
    clock_ahead_s: float = 0.0
    lease: Lease | None = None
    is_cut_off: bool = False

    def admit(self, cost: int, now: float, lessor: Lessor) -> bool:
        """Reserves a call's worst case, and asks for another lease if this one has no room for it."""
        if self._has_room(cost, now):
            return True
        if self.is_cut_off:
            return False
        self.lease = lessor.lease(self.number, cost, now)
        return self._has_room(cost, now)

    def _has_room(self, cost: int, now: float) -> bool:
        lease = self.lease
        # Its own clock, and the margin, in which the lessor's may already be past the end.
        if lease is None or now + self.clock_ahead_s >= lease.ends_at - CLOCKS_DIFFER_S:
            return False
        if lease.spent + cost > lease.amount:
            return False
        lease.spent += cost
        return True


@dataclass(frozen=True)
class Outcome:
    """The end of a limit."""

    spent: int
    calls: int
    leases: int
    left_at_first_refusal: int


def run(nodes: int, cap: int, call: int, seed: int = 1) -> Outcome:
    """Spends a limit by calls at random nodes until each refuses. Nothing crashes."""
    rng = random.Random(seed)
    lessor = Lessor(cap, nodes)
    all_nodes = [Node(number) for number in range(nodes)]
    spent = calls = refusals = leases = 0
    left_at_first_refusal: int | None = None
    now = 0.0
    while refusals < 20 * nodes:
        node = rng.choice(all_nodes)
        before = node.lease
        admitted = node.admit(call, now, lessor)
        leases += node.lease is not before
        now += 0.001
        if admitted:
            spent, calls, refusals = spent + call, calls + 1, 0
        else:
            refusals += 1
            if left_at_first_refusal is None:
                left_at_first_refusal = cap - spent
    return Outcome(spent, calls, leases, left_at_first_refusal or 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.leased_shares", description="Spends a limit by leases.")
    parser.add_argument("--cap", type=int, default=1_000_000)
    parser.add_argument("--call", type=int, default=10)
    given = parser.parse_args()
    for nodes in (2, 5, 10, 50):
        outcome = run(nodes, given.cap, given.call)
        left = 100 * outcome.left_at_first_refusal / given.cap
        print(
            f"{nodes:>3} nodes: {outcome.calls:,} calls, {outcome.calls / outcome.leases:,.0f} for each lease; at the"
            f" first refusal {left:.3f} % of the limit was left, in the end {given.cap - outcome.spent:,}"
        )


if __name__ == "__main__":
    main()
