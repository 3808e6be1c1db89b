"""`breakwater executions`: how jobs ended, from ClickHouse: as a list, one with its attempts, one with its tree."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core

from breakwater.cli import connect, formats, output
from breakwater.cli.errors import CliError, wrong_usage
from breakwater.cli.export import Status, export
from breakwater.cli.output import Column
from breakwater.cli.plane import DataOption, JsonOption, PlaneLocation
from breakwater.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree as RichTree

    from breakwater.analytics.tree import Subtree, Tree, TreeExecution, TreeNode
    from breakwater.contracts.execution import Attempt, Execution, ExecutionSummary

T = TypeVar("T")

_ERROR_WIDTH = 60


class ListsOrShows(typer.core.TyperGroup):
    """Does `list` where no command is named, and gives it what is: `breakwater executions ID` shows that one."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the context's class is private to typer
        """Takes the arguments of the group."""
        if not args or args[0] not in self.commands:
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ListsOrShows,
    help="List executions, the latest first; show one; or export them to a file.",
)


@app.command("list")
def executions(
    execution_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this one, with its attempts.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Of this agent only.")] = None,
    status: Annotated[Status | None, typer.Option("--status", help="That ended so.")] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="Of this plan only.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="AGO", help="That ended since: 10m, 2h, 7d, a time.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")] = 20,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the tree of executions that ID belongs to, with its costs.")
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List executions, the latest first; or show one, with every attempt it took, or with its tree.

    An execution is the record of a job, and has the job's id. It appears about a second after the job was decided.
    A job that names a `parent_execution_id` stands below that execution in its tree.

    `breakwater executions export` writes all that you choose to a file: see its `--help`. An execution whose id is
    `export` or `list` is shown by `breakwater executions -- export`.

    For example:

        breakwater executions --status dead_lettered --since 1h

        breakwater executions order-4711

        breakwater executions order-4711 --tree

        breakwater executions list --agent content-writer --json | jq '.[].total_cost'
    """
    if tree and execution_id is None:
        raise wrong_usage("--tree needs the id of an execution", "Try `breakwater executions ID --tree`.")
    from breakwater.analytics.search import Filters, find_execution, search
    from breakwater.analytics.tree import execution_tree

    url = PlaneLocation(data).clickhouse_url
    if execution_id is None:
        begin = formats.since(since, datetime.now(UTC)) if since is not None else None
        filters = Filters(agent=agent, status=None if status is None else status.value, plan_id=plan, since=begin)
        lines = connect.asked(url, lambda analytics: search(analytics, filters, limit=limit)).lines
        if as_json:
            output.json_document(lines)
        else:
            output.table(_COLUMNS, lines, empty="no executions")
    elif tree:
        whole = _known(connect.asked(url, lambda analytics: execution_tree(analytics, execution_id)), execution_id)
        show_tree(whole, as_json=as_json)
    else:
        found = _known(connect.asked(url, lambda analytics: find_execution(analytics, execution_id)), execution_id)
        _show_execution(_decrypted(found, PlaneLocation(data)), as_json=as_json)


app.command("export")(export)


def _known(found: T | None, execution_id: str) -> T:
    if found is None:
        raise CliError(
            "unknown_execution",
            f"there is no execution {execution_id!r}",
            "A job appears here about a second after it was decided; `breakwater tail` shows what is going on.",
        )
    return found


def _decrypted(found: Execution, plane: PlaneLocation) -> Execution:
    """With its texts, where the keys of the config can be read here; else a note says why not."""
    if found.encrypted is None:
        return found
    from breakwater.encryption import Undecryptable

    try:
        return plane.cipher().decrypt_record(found)
    except (ConfigError, Undecryptable) as error:
        output.note(f"its texts are not shown: {error}", "yellow")
        return found


def _remarks(line: ExecutionSummary) -> str:
    said = ("dry run" if line.dry_run else None, line.reason, line.error_message)
    return _shortened(": ".join(part for part in said if part))


_COLUMNS: list[Column[ExecutionSummary]] = [
    Column("ended", lambda line: (formats.clock(line.completed_at), "dim"), drop=3),
    Column("id", lambda line: line.execution_id),
    Column("agent", lambda line: line.agent),
    Column("status", lambda line: output.state(line.status)),
    Column("model", lambda line: line.chosen_model, drop=2),
    Column("attempts", lambda line: line.attempts_count, right=True, drop=5),
    Column("cost", lambda line: formats.money(line.total_cost), right=True, drop=1),
    Column("took", lambda line: formats.duration(line.duration_ms), right=True, drop=4),
    Column("reason", _remarks, drop=6),
]


def _show_execution(execution: Execution, *, as_json: bool) -> None:
    if as_json:
        output.json_document(execution)
        return
    error = execution.error
    facts: list[tuple[str, output.Value]] = [
        ("agent", execution.agent),
        ("status", output.state(execution.status)),
        ("reason", execution.reason),
        ("error", "" if error is None else f"{error.class_}: {error.message}"),
        ("stopped", execution.statistics and formats.failures_in_words(execution.statistics)),
        ("model", execution.chosen_model),
        ("models to try", " > ".join(execution.fallback_chain)),
        ("tokens", f"{execution.input_tokens:,} in, {execution.output_tokens:,} out" if execution.total_tokens else ""),
        ("cost", _cost(execution)),
        ("wasted", _wasted(execution)),
        ("cache", _cache(execution)),
        ("left out", _left_out(execution)),
        ("finish reason", execution.finish_reason),
        ("usage", _usage_problems(execution)),
        ("queued", execution.queued_at),
        ("took", formats.duration(execution.duration_ms)),
        ("tenant", execution.tenant),
        ("task", execution.task_id),
        ("parent", execution.parent_execution_id),
        ("plan", execution.plan_id),
        ("dry run", "yes" if execution.dry_run else ""),
        ("config", execution.config_version),
        ("answer", execution.output if isinstance(execution.output, str) else None),
    ]
    output.facts([(execution.execution_id, "bold")], facts)
    if execution.attempts:
        output.write("")
        output.table(_ATTEMPTS, execution.attempts)


def _rate(attempt: Attempt) -> str | None:
    return None if attempt.tokens_per_s is None else f"{attempt.tokens_per_s:,.0f}"


def _attempt_error(attempt: Attempt) -> str | None:
    error = attempt.error
    if error is None:
        return None
    status = f" {error.status_code}" if error.status_code else ""
    return _shortened(f"{error.kind}{status}: {error.message}")


_ATTEMPTS: list[Column[Attempt]] = [
    Column("#", lambda one: one.number, right=True),
    Column("model", lambda one: one.model),
    Column("why", lambda one: one.cause, drop=4),
    Column("outcome", lambda one: output.state(one.outcome)),
    Column("finish", lambda one: one.finish_reason, drop=6),
    Column("took", lambda one: formats.duration(one.duration_ms), right=True, drop=2),
    Column("first token", lambda one: formats.duration(one.first_token_ms), right=True, drop=7),
    Column("tokens/s", _rate, right=True, drop=8),
    Column("waited", lambda one: formats.duration(one.backoff_ms or None), right=True, drop=5),
    Column("cost", lambda one: None if one.short_circuited else formats.money(one.cost), right=True, drop=1),
    Column("error", _attempt_error, drop=3),
]


def _cost(execution: Execution) -> str:
    if execution.total_cost is None:
        return "unknown"
    basis = "" if execution.cost_basis == "billed" else f" ({execution.cost_basis})"
    return f"{formats.money(execution.total_cost)}{basis}"


def _wasted(execution: Execution) -> str:
    if not execution.wasted_cost:
        return ""
    dearest_first = sorted(execution.wasted_by_cause.items(), key=lambda part: -part[1])
    causes = ", ".join(f"{cause.replace('_', ' ')} {formats.money(cost)}" for cause, cost in dearest_first if cost)
    return f"{formats.money(execution.wasted_cost)}{f' ({causes})' if causes else ''}"


def _cache(execution: Execution) -> str:
    if not execution.cache_hit:
        return ""
    source = f" of {execution.cached_from}" if execution.cached_from else ""
    return f"answered from the cache{source}, nothing was called"


def _left_out(execution: Execution) -> str:
    """What calls did without: orphaned tool calls, or turns that did not fit."""
    return ", ".join(
        f"{attempt.dropped_messages} message{'s' if attempt.dropped_messages > 1 else ''} in attempt {attempt.number}"
        for attempt in execution.attempts
        if attempt.dropped_messages
    )


def _usage_problems(execution: Execution) -> str:
    """What was reported and is not credible; the costs are estimated then."""
    return "; ".join(
        f"{attempt.usage_problem} in attempt {attempt.number}"
        for attempt in execution.attempts
        if attempt.usage_problem is not None
    )


def _shortened(text: str) -> str:
    """The beginning of a text, in one line that fits into a table."""
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_WIDTH else line[: _ERROR_WIDTH - 1] + "…"


def show_tree(tree: Tree, *, as_json: bool) -> None:
    """Prints the tree with box characters, an execution a line, and its sums; to stderr what is missing of it."""
    if as_json:
        output.json_document(tree_document(tree))
        return

    output.draw(_draw(tree.root, tree.execution_id))
    sums = tree.root.subtree
    wasted = f", of it {formats.money(sums.wasted_cost)} wasted" if sums.wasted_cost else ""
    output.styled((f"total  {formats.counted(sums.executions, 'execution')}, {_total(tree.root)}{wasted}", "bold"))
    for text in _missing(tree):
        output.note(text)


def tree_document(tree: Tree) -> dict[str, Any]:
    """The tree as nested JSON, money as decimal strings."""
    return {
        "execution_id": tree.execution_id,
        "cut": list(tree.cut),
        "circular": tree.circular,
        "root": _node_json(tree.root),
    }


def _draw(node: TreeNode, asked: str) -> RichTree:
    from rich.tree import Tree as RichTree

    drawn = RichTree(_line(node, asked))
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
    return Text("  ").join(output.text(cell) for cell in shown)


def _remark(execution: TreeExecution) -> str:
    return "dry run" if execution.dry_run else "from the cache" if execution.cache_hit else ""


def _total(node: TreeNode) -> str:
    return formats.at_least(node.subtree.total_cost, node.subtree.unknown_costs)


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
    execution = node.execution
    known = {} if execution is None else asdict(execution) | _costs(execution)
    return {
        "execution_id": node.execution_id,
        "recorded": execution is not None,
        **known,
        "subtree": asdict(node.subtree) | _costs(node.subtree),
        "children": [_node_json(child) for child in node.children],
    }


def _costs(of: ExecutionSummary | TreeExecution | Subtree) -> dict[str, str | None]:
    return {"total_cost": formats.exact(of.total_cost), "wasted_cost": formats.exact(of.wasted_cost)}
