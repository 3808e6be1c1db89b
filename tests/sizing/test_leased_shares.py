"""The sum of what nodes spend by leases is never over the limit, whatever crashes, is cut off or expires."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bench.leased_shares import CLOCKS_DIFFER_S, LEASE_S, Lessor, Node, run

NODES = st.integers(0, 4)


class LeasedShares(RuleBasedStateMachine):
    @initialize(
        cap=st.integers(1, 2_000), ahead=st.lists(st.floats(-CLOCKS_DIFFER_S, CLOCKS_DIFFER_S), min_size=5, max_size=5)
    )
    def begin(self, cap: int, ahead: list[float]) -> None:
        self.lessor = Lessor(cap, 5)
        self.nodes = [Node(number, seconds) for number, seconds in enumerate(ahead)]
        self.now = 0.0
        self.spent = 0

    @rule(node=NODES, cost=st.integers(1, 300))
    def call(self, node: int, cost: int) -> None:
        self.spent += cost * self.nodes[node].admit(cost, self.now, self.lessor)

    @rule(seconds=st.floats(0.0, LEASE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.lessor.end_expired(self.now)

    @rule(node=NODES)
    def crash(self, node: int) -> None:
        self.nodes[node].lease = None

    @rule(node=NODES, is_cut_off=st.booleans())
    def cut_off_or_heal(self, node: int, is_cut_off: bool) -> None:
        self.nodes[node].is_cut_off = is_cut_off

    @invariant()
    def never_over_the_limit(self) -> None:
        assert self.spent <= self.lessor.cap
        assert self.lessor.free >= 0

    @invariant()
    def nothing_is_lost(self) -> None:
        """Once all leases are over, exactly what was spent is missing from the limit."""
        leases = self.lessor.leases.values()
        assert self.lessor.settled + sum(lease.spent for lease in leases) == self.spent


TestLeasedShares = LeasedShares.TestCase


def test_a_limit_is_spent_to_its_last_call_where_nothing_fails() -> None:
    for nodes in (2, 10, 50):
        outcome = run(nodes, 100_000, 10)
        assert outcome.spent <= 100_000
        assert 100_000 - outcome.spent < 10 * (nodes + 1)
        assert outcome.calls / outcome.leases > 5
