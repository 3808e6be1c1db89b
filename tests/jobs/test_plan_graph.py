"""Where the jobs of a plan are drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.submission import PlanJob
from breakwater.jobs.rules.plan_graph import plan_graph
from tests.tables import each_row

AT = "2026-11-28T10:00:00.000Z"


def job(name: str, *depends_on: str, status: str = "succeeded", agent: str = "writer") -> PlanJob:
    ids = {"execution_id": name, "job_id": f"own-{name}"}
    return PlanJob.model_validate({**ids, "agent": agent, "status": status, "depends_on": depends_on, "queued_at": AT})


def drawn(jobs: list[PlanJob], **limit: int) -> list[tuple[list[str], int, int, tuple[int, ...]]]:
    nodes = plan_graph(jobs, **limit)
    return [([one.execution_id for one in node.jobs], node.column, node.row, node.dependencies) for node in nodes]


@each_row(
    ("jobs", "expected"),
    [
        ([], []),
        ([job("a")], [(["a"], 0, 0, ())]),
        # The last of its dependencies decides where a job is.
        (
            [job("d", "a", "c"), job("c", "b"), job("b"), job("a")],
            [(["a"], 0, 0, ()), (["b"], 0, 1, ()), (["c"], 1, 1, (1,)), (["d"], 2, 0, (0, 2))],
        ),
        # Each is beside what it waits for.
        (
            [job("a"), job("b"), job("y", "b"), job("z", "a")],
            [(["a"], 0, 0, ()), (["b"], 0, 1, ()), (["z"], 1, 0, (0,)), (["y"], 1, 1, (1,))],
        ),
        # A job that is not of the plan, or that this key does not see.
        ([job("a", "elsewhere")], [(["a"], 0, 0, ())]),
    ],
)
def test_a_job_is_drawn_behind_those_that_it_depends_on(jobs: list[PlanJob], expected: Any) -> None:
    assert drawn(jobs) == expected


def test_a_plan_of_hundreds_of_jobs_is_drawn_with_one_node_for_all_that_are_alike() -> None:
    jobs = [job("root")]
    for number in range(300):
        failed = "dead_lettered" if number in (7, 9) else "succeeded"
        jobs += [job(f"f{number:03}", "root", status=failed), job(f"g{number:03}", f"f{number:03}", agent="editor")]
    jobs.append(job("sum", *(f"g{number:03}" for number in range(300)), status="pending"))
    nodes = plan_graph(jobs)
    assert [(len(node.jobs), node.agent, node.status, node.column, node.dependencies) for node in nodes] == [
        (1, "writer", "succeeded", 0, ()),
        (298, "writer", "succeeded", 1, (0,)),
        (2, "writer", "dead_lettered", 1, (0,)),
        (298, "editor", "succeeded", 2, (1,)),
        (2, "editor", "succeeded", 2, (2,)),
        (1, "writer", "pending", 3, (3, 4)),
    ]


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 29), max_size=3), st.sampled_from(["succeeded", "pending"]), st.sampled_from("ab")
        ),
        max_size=30,
    ),
    st.sampled_from([0, 100]),
)
def test_every_job_is_in_one_node_and_every_node_behind_its_dependencies(
    drafts: list[tuple[set[int], Any, str]], max_single_jobs: int
) -> None:
    jobs = [
        job(f"j{number}", *(f"j{needed}" for needed in before if needed < number), status=status, agent=agent)
        for number, (before, status, agent) in enumerate(drafts)
    ]
    nodes = plan_graph(jobs, max_single_jobs)
    assert sorted(one.execution_id for node in nodes for one in node.jobs) == sorted(one.execution_id for one in jobs)
    places = [(node.column, node.row) for node in nodes]
    places += [place for node in nodes for place in enumerate(node.passed_rows, node.column + 1)]
    assert len(set(places)) == len(places), "no edge crosses a node"
    node_of = {one.execution_id: index for index, node in enumerate(nodes) for one in node.jobs}
    edges = {(node_of[needed], node_of[one.execution_id]) for one in jobs for needed in one.depends_on}
    assert edges == {(needed, index) for index, node in enumerate(nodes) for needed in node.dependencies}
    for needed, index in edges:
        assert 0 <= nodes[index].column - nodes[needed].column - 1 <= len(nodes[needed].passed_rows)
    if max_single_jobs:
        assert len(nodes) == len(jobs)
