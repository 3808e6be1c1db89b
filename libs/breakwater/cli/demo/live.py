"""What happens during a run: counted from core NATS subscriptions, as any program may have them, and shown live."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

import orjson

from breakwater.cli import connect, output
from breakwater.cli.demo.receiver import Received
from breakwater.cli.demo.scenario import trouble_at
from breakwater.contracts.types import nano_from_usd, usd_from_nano

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

LINE_EVERY_S = 2.0
REDRAWN_EVERY_S = 0.125


@dataclass(slots=True)
class Tally:
    """Events so far. For looking at only: the report is made of what was stored."""

    decided: int = 0
    succeeded: int = 0
    attempts: int = 0
    short_circuits: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    spend: int = 0
    """Nano-dollars."""
    breakers: dict[str, str] = field(default_factory=dict[str, str])
    """State by agent and model, of those that ever changed it."""

    def count(self, kind: str, event: Mapping[str, Any]) -> None:
        """Counts an event; `kind` is its subject's second token."""
        match kind:
            case "executions":
                self.decided += 1
                self.succeeded += event["status"] == "succeeded"
            case "attempts":
                self.attempts += 1
                self.short_circuits += event["short_circuited"]
                self.causes[event["cause"]] += 1
                self.spend += nano_from_usd(event["cost"] or "0")
            case "breakers":
                self.breakers[f"{event['agent']} on {event['model']}"] = event["to_state"]
            case _:
                pass


@asynccontextmanager
async def tallying(nats_url: str) -> AsyncGenerator[Tally]:
    """Counts for as long as the block lasts. Raises CliError where NATS does not answer."""
    tally = Tally()

    async def count(message: Any) -> None:
        tally.count(message.subject.split(".", 2)[1], orjson.loads(message.data))

    async with connect.bus(nats_url, reconnects=True) as client:
        for kind in ("executions", "attempts", "breakers"):
            await client.subscribe(f"bw.{kind}.>", cb=count)
        await connect.subscribed(client)
        yield tally


@dataclass(slots=True)
class Scene:
    """What there is to see now."""

    jobs: int
    phase: Literal["starting", "running", "settling"] = "starting"
    begun: float = field(default_factory=time.monotonic)
    load_begun: float | None = None
    """On the same clock; None while there is no load."""
    ready: list[str] = field(default_factory=list[str])
    """Processes that are up."""
    tally: Tally = field(default_factory=Tally)
    alerts: tuple[Received, ...] = ()

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self.begun

    @property
    def trouble(self) -> tuple[str, ...]:
        """What is wrong at the provider now."""
        return () if self.load_begun is None else trouble_at(time.monotonic() - self.load_begun)


class Display:
    """Shows scenes: a panel on a terminal, a line now and then in a pipe, nothing for programs. A context manager."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._live: Live | None = None
        self._last = ""
        self.interval_s = LINE_EVERY_S
        if not as_json and output.terminal_width() is not None:
            from rich.live import Live

            self._live = Live(console=output.console(), auto_refresh=False, transient=True)
            self.interval_s = REDRAWN_EVERY_S

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, scene: Scene) -> None:
        """Shows a scene; called every `interval_s`."""
        if self._live is not None:
            self._live.update(_panel(scene), refresh=True)
        elif not self._as_json and (words := line(scene)) != self._last:
            output.write(f"{scene.elapsed_s:4.0f} s  {words}")
            self._last = words

    def note(self, text: str) -> None:
        """Says something out of the ordinary, where the document of `--json` is not disturbed."""
        if self._live is not None:
            self._live.console.print(text, style="yellow", highlight=False, markup=False)
        else:
            (output.note if self._as_json else output.write)(text)


def dollars(nano: int | None) -> str:
    """Nano-dollars for a table: to a hundredth of a cent."""
    if nano is None:
        return "unknown"
    return f"${usd_from_nano(nano)[:-5]}" if nano >= 100_000 or not nano else "<$0.0001"


def line(scene: Scene) -> str:
    """A scene in one line."""
    tally = scene.tally
    if scene.phase == "starting":
        return f"starting: {', '.join(scene.ready) or 'servers'}"
    not_closed = sum(state != "closed" for state in tally.breakers.values())
    parts = [
        f"{scene.phase}: {tally.decided}/{scene.jobs} jobs decided, {tally.succeeded} succeeded",
        f"attempts {tally.attempts}",
        f"spend {dollars(tally.spend)}",
        f"breakers open {not_closed}",
        f"alerts {len(scene.alerts)}",
        *scene.trouble,
    ]
    return " | ".join(parts)


def _panel(scene: Scene) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

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
    failed = Text.assemble(f"{tally.decided - tally.succeeded} ", _state("dead_lettered"))
    facts.add_row("jobs", Text.assemble(f"{tally.succeeded} ", _state("succeeded"), ", ", failed))
    facts.add_row(
        "attempts",
        f"{tally.attempts}: {tally.causes['retry']} retries, {tally.causes['fallback']} fallbacks, "
        f"{tally.short_circuits} short-circuited",
    )
    facts.add_row("spend", dollars(tally.spend))
    states = [Text.assemble(f"{name} ", _state(state)) for name, state in tally.breakers.items() if state != "closed"]
    facts.add_row("breakers", Text(", ").join(states) if states else Text("all closed", "green"))
    facts.add_row("alerts", f"{len(scene.alerts)} delivered" + (f": {scene.alerts[-1].title}" if scene.alerts else ""))
    facts.add_row("provider", Text(", ".join(scene.trouble), "red") if scene.trouble else Text("healthy", "green"))
    return Group(bar, facts)


def _state(name: str) -> Text:
    return output.text(output.state(name, name.replace("_", "-")))
