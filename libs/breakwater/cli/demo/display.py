"""Live progress: a panel on a terminal, a line now and then in a pipe, nothing for programs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from breakwater.cli import output
from breakwater.cli.demo.receiver import Received
from breakwater.cli.demo.scenario import STORY, trouble_at
from breakwater.cli.demo.watch import Tally
from breakwater.contracts.types import usd_from_nano

if TYPE_CHECKING:
    from rich.live import Live

LINE_EVERY_S = 2.0


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


class Display(Protocol):
    """Shows scenes; a context manager."""

    interval_s: float

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, scene: Scene) -> None:
        """Called every `interval_s`."""
        ...

    def note(self, text: str) -> None:
        """Tells something out of the ordinary."""
        ...


class Silent:
    """Shows nothing."""

    interval_s = 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, scene: Scene) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """To stderr, as stdout is for the document."""
        output.note(text)


class Lines(Silent):
    """A line every two seconds, for pipes and logs."""

    interval_s = LINE_EVERY_S

    def __init__(self) -> None:
        self._last = ""

    def show(self, scene: Scene) -> None:
        """Writes a line, unless it would say the same as the last one."""
        words = line(scene)
        if words != self._last:
            output.write(f"{scene.elapsed_s:4.0f} s  {words}")
            self._last = words

    def note(self, text: str) -> None:
        """Between the lines."""
        output.write(text)


class Panel:
    """A panel that is drawn again and again, and is gone in the end."""

    interval_s = 0.125

    def __init__(self) -> None:
        from rich.live import Live

        self._live: Live = Live(console=output.console(), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, scene: Scene) -> None:
        """Draws."""
        from breakwater.cli.demo.screen import panel

        self._live.update(panel(scene), refresh=True)

    def note(self, text: str) -> None:
        """Above the panel."""
        self._live.console.print(text, style="yellow", highlight=False, markup=False)


def choose(*, as_json: bool) -> Display:
    """What fits whoever looks."""
    if as_json:
        return Silent()
    return Panel() if output.terminal_width() is not None else Lines()


def tell_story(jobs: int) -> None:
    """Says what is going to happen."""
    output.styled(("Breakwater demo", "bold"), f": {jobs} jobs, 6 agents, local servers, a simulated provider")
    for words in STORY:
        output.styled(("  - " + words, "dim"))
    output.write("")


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
    standing_open = sum(state != "closed" for state in tally.breakers.values())
    parts = [
        f"{scene.phase}: {tally.decided}/{scene.jobs} jobs decided, {tally.succeeded} succeeded",
        f"attempts {tally.attempts}",
        f"spend {dollars(tally.spend)}",
        f"breakers open {standing_open}",
        f"alerts {len(scene.alerts)}",
        *scene.trouble,
    ]
    return " | ".join(parts)
