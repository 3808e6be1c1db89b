"""The tree of executions: an agent that has others run names itself in their jobs, as `parent_execution_id`.

Read level by level, with an indexed look-up for each. One `WITH RECURSIVE` would do on new servers, but can't stop at
an execution it has met before, nor after a thousand of them, and reads all of the table for each level unless the
server happens to carry the ids over into the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

from breakwater.jobs.contract.tree import Cut, Subtree, Tree, TreeExecution, TreeNode
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records.search import SQL

MAX_NODES = 1_000
MAX_LEVELS = 50
"""The root is the first."""

_IDS_AT_ONCE = 200
"""In one statement: a server takes parameters of up to 128 KiB, and an id may have 512 bytes."""

_Below = dict[str, list[TreeExecution]]
"""The children of executions, by the parent's id."""

_COLUMNS = ", ".join(TreeExecution.model_fields)
ONE, OF_JOB, CHILDREN = (SQL[name] % _COLUMNS for name in ("tree_node", "tree_node_of_job", "tree_children"))


async def execution_tree(analytics: Analytics, execution_id: str) -> Tree | None:
    """Finds the tree that an execution belongs to, from its root down. Raises as `Analytics.query` does.

    Args:
        analytics: the database.
        execution_id: any of the tree, or the id of its job; also one that is not recorded yet but is named as a parent.

    Returns:
        At most `MAX_NODES` executions on `MAX_LEVELS` levels, those nearest to the root first; None where the id is
        neither recorded nor named as a parent.
    """
    up = await _path_up(analytics, execution_id)
    root, top = next(reversed(up.items()))
    below, cut = await _all_below(analytics, up)
    if top is None and not below:
        return None
    above = None if top is None else top.parent_execution_id
    circular = above in up
    if above is not None and not circular:
        cut = ("ancestors", *cut)
    return Tree(execution_id=next(iter(up)), root=_node(root, top, below), cut=cut, circular=circular)


async def _path_up(analytics: Analytics, execution_id: str) -> dict[str, TreeExecution | None]:
    """The execution, its parent and so on, up to the root, the limit of levels, or where the path closes a circle.

    Only the last one can be None: its children are unknown.
    """
    path: dict[str, TreeExecution | None] = {}
    current: str | None = execution_id
    while current is not None and current not in path and len(path) < MAX_LEVELS:
        execution = next(
            iter(await analytics.read(TreeExecution.model_construct, ONE, {"execution_id": current})), None
        )
        if execution is None and not path:
            execution = next(
                iter(await analytics.read(TreeExecution.model_construct, OF_JOB, {"execution_id": current})), None
            )
            current = current if execution is None else execution.execution_id
        path[current] = execution
        current = None if execution is None else execution.parent_execution_id
    return path


async def _all_below(analytics: Analytics, up: dict[str, TreeExecution | None]) -> tuple[_Below, tuple[Cut, ...]]:
    """All descendants of the last execution of a path up; the path itself is never cut."""
    path = list(up.items())[::-1]
    below: _Below = {parent: [child] for (parent, _), (_, child) in pairwise(path) if child is not None}
    met = set(up)
    level = [path[0][0]]
    depth = 1
    while level:
        children, more = await _children(analytics, level)
        new = [child for child in children if child.execution_id not in met]
        if depth == MAX_LEVELS:
            return below, ("levels",) if new else ()
        room = MAX_NODES - len(met)
        for child in new[:room]:
            below.setdefault(child.parent_execution_id or "", []).append(child)
        if more or len(new) > room:
            return below, ("nodes",)
        met.update(child.execution_id for child in new)
        level = [child.execution_id for child in new] + [execution_id for execution_id, _ in path[depth : depth + 1]]
        depth += 1
    return below, ()


async def _children(analytics: Analytics, parents: Sequence[str]) -> tuple[list[TreeExecution], bool]:
    """The children of executions, in the order in which they were queued; and True if there may be more.

    Of an id that was used again after the bus forgot it, the last record.
    """
    rows: list[TreeExecution] = []
    more = False
    for begin in range(0, len(parents), _IDS_AT_ONCE):
        parameters = {"parents": list(parents[begin : begin + _IDS_AT_ONCE]), "limit": MAX_NODES + 1}
        children = await analytics.read(TreeExecution.model_construct, CHILDREN, parameters)
        more = more or len(children) > MAX_NODES
        rows += children
    last = {child.execution_id: child for child in sorted(rows, key=_queue_order)}
    return sorted(last.values(), key=_queue_order), more


def _queue_order(execution: TreeExecution) -> tuple[datetime, str]:
    return execution.queued_at, execution.execution_id


def _node(execution_id: str, execution: TreeExecution | None, below: _Below) -> TreeNode:
    in_order = sorted(below.get(execution_id, ()), key=_queue_order)
    children = tuple(_node(child.execution_id, child, below) for child in in_order)
    sums = _sums(execution, [child.subtree for child in children])
    return TreeNode(execution_id=execution_id, execution=execution, subtree=sums, children=children)


def _sums(execution: TreeExecution | None, below: Sequence[Subtree]) -> Subtree:
    executions = [] if execution is None else [execution]
    return Subtree(
        executions=len(executions) + sum(subtree.executions for subtree in below),
        total_cost=_sum([part.total_cost for part in (*executions, *below)]),
        wasted_cost=_sum([part.wasted_cost for part in (*executions, *below)]),
        unknown_costs=sum(part.unknown_costs for part in below)
        + sum(item.cost_basis == "unknown" for item in executions),
    )


def _sum(costs: Sequence[int | None]) -> int | None:
    known_costs = [cost for cost in costs if cost is not None]
    return sum(known_costs) if known_costs else None
