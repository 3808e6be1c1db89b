"""`breakwater executions`: lists executions, and shows one with its attempts or its tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core

from breakwater.client.commands import Api, api_command
from breakwater.jobs.contract.execution import Execution
from breakwater.jobs.contract.tree import Tree, TreeExecution, TreeNode
from breakwater.kernel.columns import Column
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.errors import CliError, usage_error
from breakwater.records.commands.export import Status, export
from breakwater.records.commands.record_source import RecordSource, ask_record
from breakwater.records.search import Filters
from breakwater.records.tree import MAX_LEVELS, MAX_NODES
from breakwater.records.views.executions import ATTEMPTS, COLUMNS, FACTS, RUNS, STEPS, as_tree

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree as RichTree


T = TypeVar("T")


class ListOrShowGroup(typer.core.TyperGroup):
    """A group whose default command is `list`, with all arguments: `breakwater executions ID` is `… list ID`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the context's class is private to typer
        """Inserts `list` unless the first argument names a command."""
        if not args or args[0] not in self.commands:
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ListOrShowGroup,
    help="List executions, the latest first; show one; or export them to a file.",
)


@app.command("list")
@api_command
def executions(
    api: Api,
    execution_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this one, by its id or its job's, with its attempts.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Filter by agent.")] = None,
    status: Annotated[Status | None, typer.Option("--status", help="Filter by status.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Filter by user.")] = None,
    team: Annotated[str | None, typer.Option("--team", help="Filter by team.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="Filter by plan.")] = None,
    runs: Annotated[
        bool,
        typer.Option("--runs", help="List runs: all executions of one task, session, trace or tree in one row."),
    ] = False,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Show the steps of this run, each below its parent.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="AGO", help="Ended since: 10m, 2h, 7d, or a time.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Maximum number of rows.")] = 20,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the tree of executions that ID belongs to, with its costs.")
    ] = False,
) -> None:
    """List executions, latest first; or show one, with all its attempts, or with its tree.

    An execution is the record of a job, and has the job's id. It appears about a second after the job has ended. A job
    that names a `parent_execution_id` is below that execution in its tree.

    Reads ClickHouse; or the HTTP API with --url or --api-key, or if only BREAKWATER_URL is set.

    `breakwater executions export` writes the selected ones to a file: see its `--help`. An execution whose id is
    `export` or `list` is shown by `breakwater executions -- export`.

    For example:

        breakwater executions --status dead_lettered --since 1h

        breakwater executions order-4711

        breakwater executions order-4711 --tree

        breakwater executions --runs --status dead_lettered

        breakwater executions --run research-4711

        breakwater executions list --agent content-writer --json | jq '.[].total_cost'
    """
    if tree and execution_id is None:
        raise usage_error("--tree needs the id of an execution", "Try `breakwater executions ID --tree`.")
    if run is not None:
        run_steps = ask_record(api, lambda record: record.steps(run))
        if not run_steps:
            raise CliError("unknown_run", f"there is no run {run!r}", "`breakwater executions --runs` lists runs.")
        if api.as_json:
            output.json_document(run_steps)
        else:
            output.table(STEPS, as_tree(run_steps))
    elif execution_id is None:
        begin = formats.since(since, datetime.now(UTC)) if since is not None else None
        filters = Filters(agent=agent, status=status, user=user, team=team, plan_id=plan, since=begin)
        if runs:
            run_summaries = ask_record(api, lambda record: record.runs(filters, limit))
            _show_list(RUNS, run_summaries, "no runs", as_json=api.as_json)
        else:
            lines = ask_record(api, lambda record: record.executions(filters, limit))
            _show_list(COLUMNS, lines, "no executions", as_json=api.as_json)
    elif tree:
        execution_tree = _wait_for_record(api, lambda record: record.tree(execution_id), execution_id)
        show_tree(execution_tree, as_json=api.as_json)
    else:
        execution = _wait_for_record(api, lambda record: record.execution(execution_id), execution_id)
        _show_execution(execution, as_json=api.as_json)


app.command("export")(export)


def _show_list(columns: Sequence[Column[T]], rows: Sequence[T], empty: str, *, as_json: bool) -> None:
    if as_json:
        output.json_document(rows)
    else:
        output.table(columns, rows, empty=empty)


RECORD_TIMEOUT_S = 3.0
"""Seconds to wait for a record, which appears about a second after its job has ended."""

RECORD_POLL_S = 0.25


def _wait_for_record(api: Api, find: Callable[[RecordSource], Awaitable[T | None]], execution_id: str) -> T:
    """Repeats a look-up until it finds the record. Raises CliError if it finds none within `RECORD_TIMEOUT_S`."""

    async def wait(source: RecordSource) -> T | None:
        deadline = time.monotonic() + RECORD_TIMEOUT_S
        while True:
            record = await find(source)
            if record is not None or time.monotonic() >= deadline:
                return record
            await asyncio.sleep(RECORD_POLL_S)

    record = ask_record(api, wait)
    if record is None:
        raise CliError(
            "unknown_execution",
            f"there is no execution {execution_id!r}",
            "A job appears here about a second after it has ended; `breakwater tail` shows live events.",
        )
    return record


def _show_execution(execution: Execution, *, as_json: bool) -> None:
    if as_json:
        output.json_document(execution)
        return
    output.facts([(execution.job_id, "bold")], FACTS, execution)
    if execution.attempts:
        output.write("")
        output.table(ATTEMPTS, execution.attempts)


def show_tree(tree: Tree, *, as_json: bool) -> None:
    """Prints a tree with one execution per line, and its sums. Notes on stderr say what is missing."""
    if as_json:
        output.json_document(tree_document(tree))
        return

    output.draw(_draw(tree.root, tree.execution_id))
    sums = tree.root.subtree
    wasted = f", of it {formats.money(sums.wasted_cost)} wasted" if sums.wasted_cost else ""
    output.print_styled(
        (f"total  {formats.quantity(sums.executions, 'execution')}, {_total(tree.root)}{wasted}", "bold")
    )
    for text in _missing(tree):
        output.note(text)


def tree_document(tree: Tree) -> dict[str, Any]:
    """Converts a tree to nested JSON, with money as decimal strings."""
    return {
        "execution_id": tree.execution_id,
        "cut": list(tree.cut),
        "circular": tree.circular,
        "root": _node_json(tree.root),
    }


def _draw(node: TreeNode, requested_id: str) -> RichTree:
    from rich.tree import Tree as RichTree

    rich_tree = RichTree(_line(node, requested_id))
    for child in node.children:
        rich_tree.children.append(_draw(child, requested_id))
    return rich_tree


def _line(node: TreeNode, requested_id: str) -> Text:
    from rich.text import Text

    execution = node.execution
    job_id = node.execution_id if execution is None else execution.job_id
    title = (job_id, "bold" if node.execution_id == requested_id else "")
    cells: list[output.Cell]
    if execution is None:
        cells = [title, ("not recorded (yet)", "dim")]
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
        cells.append((f"including children {_total(node)}", "dim"))
    filled_cells = [cell for cell in cells if cell not in ("", ("", ""))]
    return Text("  ").join(output.text(cell) for cell in filled_cells)


def _remark(execution: TreeExecution) -> str:
    return "dry run" if execution.dry_run else "from the cache" if execution.cache_hit else ""


def _total(node: TreeNode) -> str:
    return formats.at_least(node.subtree.total_cost, node.subtree.unknown_costs)


def _missing(tree: Tree) -> list[str]:
    texts = {
        "ancestors": f"only {MAX_LEVELS} levels are shown; the root is further up",
        "levels": f"only {MAX_LEVELS} levels are shown; the sums exclude those further down",
        "nodes": f"only {MAX_NODES:,} executions are shown; the sums exclude the others",
    }
    notes = [texts[cut] for cut in tree.cut]
    if tree.circular:
        notes.append("these jobs name each other as parents, so there is no root; the tree starts at one of them")
    return notes


def _node_json(node: TreeNode) -> dict[str, Any]:
    execution = node.execution
    return {
        "execution_id": node.execution_id,
        "recorded": execution is not None,
        **({} if execution is None else execution.model_dump(mode="json")),
        "subtree": node.subtree.model_dump(mode="json"),
        "children": [_node_json(child) for child in node.children],
    }
