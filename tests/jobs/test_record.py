from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.rules.record import totals
from tests.calls.test_unanswered import answered, failed, lost, refused
from tests.tables import each_row


@each_row(
    ("attempts", "ended_well", "wasted"),
    [
        ([answered()], True, {}),
        ([failed(), answered()], True, {"retry": 10}),
        ([failed("m"), answered("n")], True, {"fallback": 10}),
        ([failed("m"), refused("m"), answered("n")], True, {"fallback": 10}),
        ([failed("m"), refused("n"), answered("m")], True, {"retry": 10}),
        ([failed(), failed(), failed("n"), answered("o")], True, {"retry": 10, "fallback": 20}),
        ([lost(), answered()], True, {"worker_lost": 10}),
        ([lost("m"), answered("n")], True, {"worker_lost": 10}),
        ([answered(cost=30), answered()], True, {"worker_lost": 30}),
        ([answered(cost=30)], False, {"worker_lost": 30}),
        ([failed(kind="logic"), answered()], True, {"self_correction": 10}),
        ([failed(kind="logic"), failed(kind="logic")], False, {"self_correction": 20}),
        ([failed(), failed()], False, {"retry": 10, "failed": 10}),
        ([failed(), refused()], False, {"failed": 10}),
        ([failed(cost=None), failed(cost=0), answered()], True, {}),
        ([refused()], False, {}),
        ([], False, {}),
    ],
)
def test_waste_is_reported_by_what_came_of_it(
    attempts: list[Attempt], ended_well: bool, wasted: dict[str, int]
) -> None:
    assert totals(attempts, answered=ended_well).wasted_by_cause == wasted


ATTEMPTS = st.builds(
    lambda model, kind, cost: {
        "success": lambda: answered(model, cost),
        "worker_lost": lambda: failed(model, "worker_lost", cost, outcome="worker_lost"),
        "refused": lambda: refused(model),
    }.get(kind, lambda: failed(model, kind, cost))(),
    st.sampled_from(["m", "n"]),
    st.sampled_from(["success", "worker_lost", "refused", "server", "logic", "client"]),
    st.none() | st.integers(0, 10**12),
)


@settings(deadline=None)
@given(st.lists(ATTEMPTS, max_size=8), st.booleans())
def test_the_causes_add_up_to_what_is_known_of_the_waste(attempts: list[Attempt], ended_well: bool) -> None:
    sums = totals(attempts, answered=ended_well)
    assert sum(sums.wasted_by_cause.values()) == (sums.wasted_cost or 0)
    assert all(cost > 0 for cost in sums.wasted_by_cause.values())
    if sums.wasted_cost is None:
        assert sums.wasted_by_cause == {}
