"""The tree of executions, from whichever of them it is asked for, and whatever jobs claim of their parents."""

import re
from collections.abc import Iterable
from datetime import timedelta

import pytest

from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records import rows, schema, tree
from breakwater.records.tree import MAX_LEVELS, MAX_NODES, Subtree, Tree, TreeNode, execution_tree
from tests.records.samples import NOON, execution

FAMILY = [
    execution("root", total_cost=1, completed_at=NOON + timedelta(seconds=60), duration_ms=60_000),
    execution("late", agent="tagger", parent_execution_id="root", total_cost=20, wasted_cost=5),
    execution("early", parent_execution_id="root", total_cost=300, wasted_cost=None, duration_ms=9_000),
    execution(
        "leaf",
        parent_execution_id="early",
        total_cost=None,
        wasted_cost=None,
        cost_basis="unknown",
        status="dead_lettered",
        reason="timeout",
        chosen_model=None,
    ),
    execution("stranger"),
    execution("strange child", parent_execution_id="stranger"),
]


async def store(analytics: Analytics, records: Iterable[Execution]) -> None:
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(record, 1) for record in records])


async def found_tree(analytics: Analytics, execution_id: str) -> Tree:
    found = await execution_tree(analytics, execution_id)
    assert found is not None
    return found


def names(node: TreeNode) -> dict[str, object]:
    """A tree as nested dictionaries of ids."""
    return {node.execution_id: [names(child) for child in node.children]}


def ids(node: TreeNode) -> list[str]:
    return [node.execution_id, *(one for child in node.children for one in ids(child))]


async def test_every_member_shows_the_whole_tree_in_the_order_of_queueing(analytics: Analytics) -> None:
    for _ in range(2):
        await store(analytics, FAMILY)
    for asked in ("root", "late", "early", "leaf"):
        found = await found_tree(analytics, asked)
        assert names(found.root) == {"root": [{"early": [{"leaf": []}]}, {"late": []}]}
        assert (found.execution_id, found.cut, found.circular) == (asked, (), False)


async def test_a_node_reports_what_its_record_reports_and_the_sums_below(analytics: Analytics) -> None:
    await store(analytics, FAMILY)
    root = (await found_tree(analytics, "leaf")).root
    assert root.subtree == Subtree(executions=4, total_cost=321, wasted_cost=5, unknown_costs=1)
    early, late = root.children
    assert early.subtree == Subtree(executions=2, total_cost=300, wasted_cost=None, unknown_costs=1)
    assert late.subtree == Subtree(executions=1, total_cost=20, wasted_cost=5, unknown_costs=0)
    (leaf,) = early.children
    assert leaf.subtree == Subtree(executions=1, total_cost=None, wasted_cost=None, unknown_costs=1)
    reported = leaf.execution
    assert reported is not None
    assert (reported.status, reported.reason, reported.chosen_model, reported.total_cost) == (
        "dead_lettered",
        "timeout",
        None,
        None,
    )
    assert late.execution is not None
    assert (late.execution.agent, late.execution.duration_ms, late.execution.completed_at) == ("tagger", 1_000, NOON)


async def test_a_parent_that_is_not_recorded_yet_is_shown_as_such(analytics: Analytics) -> None:
    await store(analytics, [execution(one, parent_execution_id="running") for one in ("a", "b")])
    for asked in ("a", "b", "running"):
        found = await found_tree(analytics, asked)
        assert names(found.root) == {"running": [{"a": []}, {"b": []}]}, asked
        assert found.root.execution is None
        assert found.root.subtree.executions == 2


async def test_one_that_nobody_knows_has_no_tree(analytics: Analytics) -> None:
    await store(analytics, FAMILY)
    assert await execution_tree(analytics, "nobody") is None
    assert names((await found_tree(analytics, "stranger")).root) == {"stranger": [{"strange child": []}]}


async def test_one_without_relatives_is_a_tree_of_one(analytics: Analytics) -> None:
    await store(analytics, [execution("alone")])
    assert names((await found_tree(analytics, "alone")).root) == {"alone": []}


async def test_jobs_that_name_each_other_as_parents_end_somewhere(analytics: Analytics) -> None:
    circle = {"a": "c", "b": "a", "c": "b", "below": "b", "own": "own"}
    await store(analytics, [execution(one, parent_execution_id=parent) for one, parent in circle.items()])
    found = await found_tree(analytics, "below")
    assert found.circular
    assert found.cut == ()
    assert sorted(ids(found.root)) == ["a", "b", "below", "c"]
    own = await found_tree(analytics, "own")
    assert (names(own.root), own.circular) == ({"own": []}, True)


async def test_a_long_line_is_cut_above_and_below(analytics: Analytics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_LEVELS", 5)
    line = range(12)
    await store(
        analytics, [execution(f"n{n}", parent_execution_id=f"n{n - 1}" if n else None, total_cost=1) for n in line]
    )
    top = await found_tree(analytics, "n0")
    assert (ids(top.root), top.cut) == (["n0", "n1", "n2", "n3", "n4"], ("levels",))
    assert top.root.subtree.total_cost == 5
    assert await found_tree(analytics, "n4") == top.model_copy(update={"execution_id": "n4"})
    middle = await found_tree(analytics, "n8")
    assert (ids(middle.root), middle.cut) == (["n4", "n5", "n6", "n7", "n8"], ("ancestors", "levels"))
    bottom = await found_tree(analytics, "n11")
    assert (ids(bottom.root), bottom.cut) == (["n7", "n8", "n9", "n10", "n11"], ("ancestors",))


async def test_exactly_as_many_levels_as_are_allowed_are_whole(analytics: Analytics) -> None:
    line = range(MAX_LEVELS)
    await store(analytics, [execution(f"n{n}", parent_execution_id=f"n{n - 1}" if n else None) for n in line])
    assert (await found_tree(analytics, "n20")).cut == ()


async def test_a_wide_tree_is_cut_but_keeps_the_one_that_was_asked_for(analytics: Analytics) -> None:
    def sibling(number: int) -> Execution:
        return execution(f"s{number:04}", parent_execution_id="root", completed_at=NOON + timedelta(seconds=number))

    await store(analytics, [execution("root"), *(sibling(number) for number in range(MAX_NODES - 1))])
    whole = await found_tree(analytics, "root")
    assert (whole.root.subtree.executions, whole.cut) == (MAX_NODES, ())
    last = f"s{MAX_NODES + 500:04}"
    await store(analytics, [sibling(number) for number in range(MAX_NODES - 1, MAX_NODES + 501)])
    await store(analytics, [execution("below", parent_execution_id=last)])
    found = await found_tree(analytics, "below")
    assert found.cut == ("nodes",)
    children = ids(found.root)
    assert len(children) == MAX_NODES
    assert children[1:4] == ["s0000", "s0001", "s0002"]
    assert children[-2:] == [last, "below"]


async def test_a_level_of_long_foreign_ids_is_asked_for_in_parts(analytics: Analytics) -> None:
    children = [f"{number:03}'\\{'🙂' * 120}" for number in range(450)]
    await store(analytics, [execution("root"), *(execution(one, parent_execution_id="root") for one in children)])
    await store(analytics, [execution(f"under {one[:3]}", parent_execution_id=one) for one in children])
    found = await found_tree(analytics, "root")
    assert (found.root.subtree.executions, found.cut) == (1 + 2 * len(children), ())
    assert all([f"under {child.execution_id[:3]}"] == ids(child)[1:] for child in found.root.children)


async def test_an_id_that_was_used_again_is_shown_once_with_its_last_record(analytics: Analytics) -> None:
    again = execution("child", parent_execution_id="root", total_cost=7, completed_at=NOON + timedelta(days=40))
    await store(analytics, [execution("root"), execution("child", parent_execution_id="root", total_cost=3), again])
    for asked in ("root", "child"):
        (child,) = (await found_tree(analytics, asked)).root.children
        assert child.execution is not None
        assert (child.execution.total_cost, child.execution.completed_at) == (7, again.completed_at)


async def test_neither_way_through_the_tree_reads_the_whole_table(analytics: Analytics) -> None:
    await analytics.execute(
        "INSERT INTO executions (execution_id, parent_execution_id, agent, completed_at)"
        " SELECT 'e' || number, if(number % 10 = 0, NULL, 'e' || intDiv(number, 10) * 10), 'writer',"
        " toDateTime64('2026-11-21 12:00:00', 3, 'UTC') + number FROM numbers(50000)"
    )
    parameters = {"execution_id": "e30000", "parents": ["e30000", "nobody"], "limit": 10}
    for sql, index in ((tree.ONE, "by_execution_id"), (tree.CHILDREN, "by_parent_execution_id")):
        plan = "\n".join(row[0] for row in (await analytics.query(f"EXPLAIN indexes = 1 {sql}", parameters)).rows)
        after = plan.partition(f"Name: {index}")[2]
        granules = re.search(r"Granules: (\d+)/(\d+)", after)
        assert granules is not None, plan
        kept, of_all = map(int, granules.groups())
        assert kept < of_all / 2
