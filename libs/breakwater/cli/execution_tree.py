"""`breakwater executions ID --tree`: an execution among those that had it run, and those that it had run."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from breakwater.cli import connect, formats, output

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree as Drawn

    from breakwater.analytics.tree import Tree, TreeExecution, TreeNode

_NEVER_WRAP = 100_000


async def find(url: str, execution_id: str) -> Tree | None:
    """The tree of an execution, or None where nothing is known of it."""
    from breakwater.analytics.tree import execution_tree

    async with connect.analytics(url) as analytics:
        return await execution_tree(analytics, execution_id)


def show(tree: Tree) -> None:
    """Prints the tree with box characters, an execution a line, and its sums; to stderr what is missing of it."""
    from rich.console import Console

    drawn = _draw(tree.root, tree.execution_id)
    if output.is_terminal(sys.stdout):
        output.console().print(drawn, highlight=False)
    else:
        page = Console(file=io.StringIO(), width=_NEVER_WRAP, color_system=None)
        with page.capture() as captured:
            page.print(drawn, highlight=False)
        for line in captured.get().splitlines():
            output.write(line.rstrip())
    sums = tree.root.subtree
    wasted = f", of it {formats.money(sums.wasted_cost)} wasted" if sums.wasted_cost else ""
    executions = "1 execution" if sums.executions == 1 else f"{sums.executions:,} executions"
    output.styled((f"total  {executions}, {_total(tree.root)}{wasted}", "bold"))
    for text in _missing(tree):
        output.note(text)


def document(tree: Tree) -> dict[str, Any]:
    """The tree as nested JSON, money as decimal strings."""
    return {
        "execution_id": tree.execution_id,
        "cut": list(tree.cut),
        "circular": tree.circular,
        "root": _node_json(tree.root),
    }


def _draw(node: TreeNode, asked: str) -> Drawn:
    from rich.tree import Tree as Drawn

    drawn = Drawn(_line(node, asked))
    for child in node.children:
        drawn.children.append(_draw(child, asked))
    return drawn


def _line(node: TreeNode, asked: str) -> Text:
    from rich.text import Text

    title = (node.execution_id, "bold" if node.execution_id == asked else "")
    execution = node.execution
    cells: list[output.Cell]
    if execution is None:
        cells = [title, ("not recorded, or not yet", "dim")]
    else:
        reason = f": {execution.reason}" if execution.reason else ""
        cells = [
            title,
            execution.agent,
            output.state(execution.status, execution.status + reason),
            execution.chosen_model or "",
            _remark(execution),
            formats.money(execution.total_cost),
            (formats.duration(execution.duration_ms), "dim"),
        ]
    if node.children:
        cells.append((f"with those below {_total(node)}", "dim"))
    shown = [cell for cell in cells if cell not in ("", ("", ""))]
    return Text("  ").join(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in shown)


def _remark(execution: TreeExecution) -> str:
    return "dry run" if execution.dry_run else "from the cache" if execution.cache_hit else ""


def _total(node: TreeNode) -> str:
    sums = node.subtree
    more = "+" if sums.unknown_costs and sums.total_cost is not None else ""
    return f"{formats.money(sums.total_cost)}{more}"


def _missing(tree: Tree) -> list[str]:
    from breakwater.analytics.tree import MAX_LEVELS, MAX_NODES

    texts = {
        "ancestors": f"only {MAX_LEVELS} levels are shown: the root lies further up",
        "levels": f"only {MAX_LEVELS} levels are shown: there are more below, which the sums lack",
        "nodes": f"only {MAX_NODES:,} executions are shown: there are more, which the sums lack",
    }
    said = [texts[cut] for cut in tree.cut]
    if tree.circular:
        said.append("these jobs name each other as parents: there is no root, and the first one here is any of them")
    return said


def _node_json(node: TreeNode) -> dict[str, Any]:
    from dataclasses import asdict

    execution = node.execution
    told = {} if execution is None else asdict(execution) | _usd(execution.total_cost, execution.wasted_cost)
    return {
        "execution_id": node.execution_id,
        "recorded": execution is not None,
        **told,
        "subtree": asdict(node.subtree) | _usd(node.subtree.total_cost, node.subtree.wasted_cost),
        "children": [_node_json(child) for child in node.children],
    }


def _usd(total: int | None, wasted: int | None) -> dict[str, str | None]:
    from breakwater.contracts.types import usd_from_nano

    return {
        "total_cost": None if total is None else usd_from_nano(total),
        "wasted_cost": None if wasted is None else usd_from_nano(wasted),
    }
