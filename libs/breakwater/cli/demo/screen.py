"""What the demo looks like: the live panel, and the screen at the end. The same for terminals and pipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from breakwater.analytics.queries import AgentSummary
from breakwater.cli import output
from breakwater.cli.demo.books import Comparison, Line
from breakwater.cli.demo.display import Scene, dollars
from breakwater.cli.demo.report import BreakerLine, Report
from breakwater.cli.formats import duration
from breakwater.contracts.types import usd_from_nano

WIDE = 100
"""From here on, headings are written out."""

PIPE_WIDTH = 110
_NONE = "·"


def show(report: Report) -> None:
    """Prints the final screen: drawn on a terminal, plain text without trailing blanks elsewhere."""
    if output.terminal_width() is not None:
        console = output.console()
        console.print(final(report, console.width))
        return
    console = Console(width=PIPE_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(final(report, PIPE_WIDTH))
    output.write("")
    for text in captured.get().splitlines():
        output.write(text.rstrip())


def panel(scene: Scene) -> RenderableType:
    """The live panel."""
    if scene.phase == "starting":
        return Text.assemble(("starting  ", "bold"), ", ".join(scene.ready) or "local servers", ("  …", "dim"))
    tally = scene.tally
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        Text(scene.phase, "bold"),
        ProgressBar(total=scene.jobs, completed=tally.decided, width=40, complete_style="cyan", finished_style="green"),
        Text(f"{tally.decided}/{scene.jobs} jobs"),
        Text(f"{scene.elapsed_s:.0f} s", "dim"),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row("jobs", _states(("succeeded", tally.succeeded), ("dead_lettered", tally.decided - tally.succeeded)))
    facts.add_row(
        "attempts",
        f"{tally.attempts}: {tally.causes['retry']} retries, {tally.causes['fallback']} fallbacks, "
        f"{tally.short_circuits} short-circuited",
    )
    facts.add_row("spend", dollars(tally.spend))
    facts.add_row("breakers", _breaker_states(tally.breakers))
    facts.add_row("alerts", f"{len(scene.alerts)} delivered" + (f": {scene.alerts[-1].title}" if scene.alerts else ""))
    facts.add_row("provider", Text(", ".join(scene.trouble), "red") if scene.trouble else Text("well", "green"))
    return Group(bar, facts)


def final(report: Report, width: int) -> RenderableType:
    """The screen at the end."""
    parts: list[RenderableType] = [
        Text.assemble(("Agents", "bold cyan"), ("  read back from ClickHouse", "dim")),
        _agents(report.agents, wide=width >= WIDE),
        _heading("Breakers"),
        _breakers(report.breakers, wide=width >= WIDE),
        _heading("Alerts", "delivered to a local receiver, which checked every signature"),
        _alerts(report),
        _heading("What was provoked, and what became of it"),
        _checks(report),
        _heading("Three books", "the provider's own ledger, Redis' counters, ClickHouse's sums"),
        _books(report.books),
        Text(),
        _verdict(report),
    ]
    return Group(*parts)


def _heading(title: str, note: str = "") -> RenderableType:
    return Padding(Text.assemble((title, "bold cyan"), (f"  {note}" if note else "", "dim")), (1, 0, 0, 0))


def _agents(agents: Sequence[AgentSummary], *, wide: bool) -> Table:
    table = _table(1)
    titles = (
        ("agent", "agent"),
        ("executions", "jobs"),
        ("success", "ok"),
        ("attempts", "tries"),
        ("retries", "re-\ntries"),
        ("fallbacks", "fall-\nbacks"),
        ("short\ncircuits", "short\ncirc."),
        ("p50", "p50"),
        ("p95", "p95"),
        ("spend", "spend"),
        ("wasted", "wasted"),
    )
    for full, short in titles:
        table.add_column(full if wide else short, justify="left" if full == "agent" else "right", no_wrap=True)
    for agent in agents:
        rate = agent.success_rate
        table.add_row(
            agent.agent,
            str(agent.executions),
            Text("" if rate is None else f"{rate:.0%}", _rate_style(rate)),
            str(agent.attempts),
            _some(agent.retries),
            _some(agent.fallbacks),
            _some(agent.short_circuits),
            _duration(agent.p50_ms, wide=wide),
            _duration(agent.p95_ms, wide=wide),
            dollars(agent.spend),
            dollars(agent.wasted),
        )
    executions, succeeded = sum(a.executions for a in agents), sum(a.succeeded for a in agents)
    table.add_section()
    table.add_row(
        "all",
        str(executions),
        f"{succeeded / executions:.0%}" if executions else "",
        str(sum(a.attempts for a in agents)),
        _some(sum(a.retries for a in agents)),
        _some(sum(a.fallbacks for a in agents)),
        _some(sum(a.short_circuits for a in agents)),
        "",
        "",
        dollars(sum(a.spend or 0 for a in agents)),
        dollars(sum(a.wasted or 0 for a in agents)),
        style="bold",
    )
    return table


def _breakers(breakers: Sequence[BreakerLine], *, wide: bool) -> RenderableType:
    if not breakers:
        return Text("none opened", "dim")
    table = _table(2)
    for title, right in (("breaker", 0), ("opened", 1), ("half-open", 1), ("closed", 1), ("now", 0)):
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    if wide:
        table.add_column("opened first by", no_wrap=True)
    for line in breakers:
        counts = (str(line.opened), str(line.half_opened), str(line.closed))
        reason = [Text(line.reason.partition(" (")[0], "dim")] if wide else []
        table.add_row(f"{line.agent} on {line.model}", *counts, _state(line.now), *reason)
    return table


def _alerts(report: Report) -> RenderableType:
    # Incidents, however many changes of each were told; one of a breaker has two events: it opened, it closed.
    incidents = dict.fromkeys((alert.event, alert.severity, alert.incident_id) for alert in report.alerts)
    kinds = Counter((event, severity) for event, severity, _ in incidents)
    if not kinds:
        return Text("none", "dim")
    parts = [
        Text.assemble((f"{count} ", "bold"), (event.replace("_", " "), output.STYLES.get(severity, "")))
        for (event, severity), count in kinds.items()
    ]
    return Text("   ").join(parts)


def _checks(report: Report) -> Table:
    table = _table(2, header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for check in report.checks:
        table.add_row(Text("ok", "green") if check.ok else Text("FAILED", "bold red"), check.name, check.detail)
    return table


def _books(books: Comparison) -> RenderableType:
    table = _table(3)
    for title, right in (("", 0), ("provider", 1), ("Redis", 1), ("ClickHouse", 1), ("agree", 0)):
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for line in books.lines:
        table.add_row(
            line.name,
            *(_figure(line, value) for value in (line.provider, line.redis, line.clickhouse)),
            Text("yes", "green") if line.agree else Text("NO", "bold red"),
        )
    differences = [Text(f"differs: {words}", "red") for words in books.differences]
    estimated = next(line for line in books.lines if line.name == "estimated")
    note = Text("estimated: the worst case of calls whose answer never came", "dim")
    return Group(table, *([note] if estimated.clickhouse else []), *differences)


def _verdict(report: Report) -> Text:
    jobs, seconds = f"{report.jobs} jobs", f"{report.seconds:.0f} s"
    if report.ok:
        return Text(f"The three books agree to the nano-dollar and the call: {jobs} in {seconds}.", "bold green")
    failed = [check.name for check in report.checks if not check.ok]
    words = ["the books differ"] if not report.books.agree else []
    words += [f"not as expected: {', '.join(failed)}"] if failed else []
    return Text(f"FAILED after {seconds}: {'; '.join(words)}.", "bold red")


def _table(gap: int, *, header: bool = True) -> Table:
    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_header=header)


def _figure(line: Line, value: int | None) -> Text:
    if value is None:
        return Text(_NONE, "dim")
    return Text(f"${usd_from_nano(value)}" if line.is_money else str(value))


def _states(*counts: tuple[str, int]) -> Text:
    parts = [Text.assemble(f"{count} ", (name.replace("_", "-"), output.STYLES[name])) for name, count in counts]
    return Text(", ").join(parts)


def _breaker_states(breakers: dict[str, str]) -> Text:
    standing = [Text.assemble(f"{name} ", _state(state)) for name, state in breakers.items() if state != "closed"]
    return Text(", ").join(standing) if standing else Text("all closed", "green")


def _state(name: str) -> Text:
    return Text(name.replace("_", "-"), output.STYLES.get(name, ""))


def _some(count: int) -> str:
    return str(count) if count else _NONE


def _duration(ms: int | None, *, wide: bool) -> str:
    return duration(ms) if wide else duration(ms).replace(" ", "")


def _rate_style(rate: float | None) -> str:
    if rate is None:
        return ""
    return "green" if rate >= 0.99 else "yellow" if rate >= 0.5 else "red"
