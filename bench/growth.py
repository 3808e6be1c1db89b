"""The growth of what `bench.hour` samples, beside what explains it, as a table and as a picture. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from bench.chart import Panel, small_multiples

POINTS = 120
"""The most points of a line of the picture."""
PER_JOB = "done"
"""The series that counts the jobs that have ended."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What series may grow by in the second half.

    Attributes:
        names: of the series, as a pattern.
        explained_by: the series that explains their growth; None if they must not grow.
        most: their growth for each unit of that series.
        slack: further growth that is no growth, as a share of their median: heaps breathe.
        least: the same, in their unit, where that is more.
    """

    names: str
    explained_by: str | None = None
    most: float = 0.0
    slack: float = 0.1
    least: float = 5.0


CLAIMS = (
    Claim("memory.nats", "messages.all", most=0.3e-3, slack=0.2, least=20),
    # The server of the wheel allocates by libc: what expires leaves holes between what stays.
    Claim("memory.redis", "redis.used", most=1.7, least=5),
    Claim("memory.clickhouse", slack=0.25, least=50),
    Claim("memory.*", slack=0.05, least=5),
    Claim("fds.clickhouse", slack=0.2, least=60),  # three for each thread that statements at one time have ever begun
    Claim("fds.*", slack=0.1, least=10),
    Claim("disk.nats", "bytes.all", most=1.3, slack=0.1, least=50),
    Claim("disk.redis", "redis.used", most=4, least=70),  # rewritten once it is twice as long as before, and 64 MB
    Claim("disk.clickhouse", "parts.mb", most=1.3, least=50),
    Claim("disk.logs", "failed", most=2e-3, least=5),
    Claim("redis.used", "redis.keys", most=0.4e-3, least=5),
    # Six of 103 jobs begin a task of four: its key stays for a week, and that of each step for an hour: 0.29 keys
    # a job. A quarter of all that Redis counts has expired, and is not yet freed.
    Claim("redis.keys", PER_JOB, most=0.4, least=500),
    Claim("redis.staying", slack=0.0, least=20),
    Claim("messages.EVENTS", "done.kept", most=3.5, slack=0.05, least=500),
    Claim("messages.RESULTS", "done.kept", most=1.0, slack=0.05, least=500),
    Claim("bytes.EVENTS", "messages.EVENTS", most=6e-3, slack=0.05),
    Claim("bytes.RESULTS", "messages.RESULTS", most=6e-3, slack=0.05),
    Claim("messages.DLQ", "failed", most=1.0, least=100),
    Claim("bytes.DLQ", "messages.DLQ", most=8e-3),
    Claim("messages.all", "done.kept", most=5.0, slack=0.1, least=1000),
    Claim("bytes.all", "done.kept", most=20e-3, slack=0.1),
    Claim("messages.*", "failed", most=0.1, least=200),
    Claim("bytes.*", "failed", most=0.1e-3, least=5),
    Claim("rows.attempts", PER_JOB, most=2.5, least=1000),
    Claim("rows.executions", PER_JOB, most=1.01, least=1000),
    Claim("rows.*", PER_JOB, most=4.0, least=1000),
    Claim("parts.mb", "rows.all", most=0.6e-3),
    Claim("parts", slack=0.3, least=40),
    Claim("lag.*", slack=0.3, least=500),
    Claim("p[59]?", slack=0.3, least=30),
    Claim("cpu_ms", slack=0.1, least=0.2),
)
"""The first that names a series holds for it; the others, such as the jobs themselves, may do as they like."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A series in the second half of a run.

    Attributes:
        name: of the series.
        begin: its first value there, by the line that fits best.
        growth: by the same line, until the end.
        claim: what it may grow by.
        explanation: the growth of the series that explains it; 0 without one.
    """

    name: str
    begin: float
    growth: float
    claim: Claim
    explanation: float

    @property
    def is_explained(self) -> bool:
        """Whether it grew by no more than it may."""
        slack = max(self.claim.least, self.claim.slack * abs(self.begin))
        return self.growth - self.claim.most * max(0.0, self.explanation) <= slack

    def row(self) -> str:
        """A line of the table."""
        each = "" if self.explanation <= 0 or self.growth <= 0 else f"{self.growth / self.explanation:.3g}"
        by = "" if self.claim.explained_by is None else f"{self.claim.explained_by} {self.explanation:+,.4g}"
        verdict = "" if self.is_explained else "**unexplained**"
        return f"| {self.name} | {self.begin:,.4g} | {self.growth:+,.4g} | {by} | {each} | {verdict} |"


def judged(lines: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Returns the table of all series, and those that grew without an explanation."""
    series = series_of(lines)
    half = max(at for at, _ in series[PER_JOB]) / 2
    growths = list(_growths({name: [point for point in of if point[0] >= half] for name, of in series.items()}))
    head = "| series | at half time | growth since | explained by | for each | |\n|---|---|---|---|---|---|"
    table = "\n".join((head, *(growth.row() for growth in growths)))
    return table, [f"{growth.name} {growth.growth:+,.4g}" for growth in growths if not growth.is_explained]


def series_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The series of the samples: minutes and values, by name."""
    samples = [line for line in lines if line["kind"] == "sample"]
    names = sorted({name for line in samples for name in line} - {"kind", "at_s"})
    return {name: [(line["at_s"] / 60, line[name]) for line in samples if name in line] for name in names}


def _growths(halves: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[Growth]:
    for name, points in halves.items():
        claim = next((claim for claim in CLAIMS if fnmatchcase(name, claim.names)), None)
        if claim is not None and len(points) > 1:
            begin, growth = fitted(points)
            explanation = 0.0 if claim.explained_by is None else fitted(halves[claim.explained_by])[1]
            yield Growth(name, begin, growth, claim, explanation)


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fits a line that outliers hardly move (Theil and Sen). Returns its first value, and its growth to the end."""
    slope = statistics.median(
        (later - earlier) / (end - begin) for (begin, earlier), (end, later) in combinations(points, 2) if end > begin
    )
    first, last = points[0][0], points[-1][0]
    level = statistics.median(value - slope * (at - first) for at, value in points)
    return level, slope * (last - first)


def drawn(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns the picture as SVG."""
    series = series_of(lines)
    pauses = [line["at_s"] / 60 for line in lines if line["kind"] == "ledgers"]
    run = next(line for line in lines if line["kind"] == "run")

    def panel(title: str, marks: Sequence[float] = (), /, **names: str) -> Panel:
        return Panel(title, {label: _thinned(series[name]) for label, name in names.items()}, "min", marks=marks)

    services = ("worker", "request", "sink", "budget", "breaker", "alerter")
    consumers = {"sink": "sink-events", "budget": "budget", "breaker": "breaker", "alerter": "alerter-executions"}
    panels = (
        panel("jobs a second", all="jobs_per_s", failed="failed_per_s"),
        panel("latency of a job, ms", p50="p50", p95="p95", p99="p99"),
        panel("CPU of a job, ms", CPU="cpu_ms"),
        panel("memory of services, MB", **{name: f"memory.{name}" for name in services}),
        panel("memory of servers, MB", NATS="memory.nats", Redis="memory.redis", ClickHouse="memory.clickhouse"),
        panel("disk, MB", NATS="disk.nats", Redis="disk.redis", ClickHouse="disk.clickhouse", logs="disk.logs"),
        panel("messages in NATS", EVENTS="messages.EVENTS", RESULTS="messages.RESULTS", DLQ="messages.DLQ"),
        panel("rows in ClickHouse", executions="rows.executions", attempts="rows.attempts"),
        panel("keys in Redis", keys="redis.keys"),
        panel("events that consumers lag behind", **{label: f"lag.{name}" for label, name in consumers.items()}),
        panel("open files", **{name: f"fds.{name}" for name in ("nats", "clickhouse", "worker", "request")}),
        panel("spend, USD; dashed: all ledgers compared", pauses, spend="cost_usd"),
    )
    return small_multiples(f"Everything on, {run['in_flight']} jobs in flight at any time", panels)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours, few enough to draw."""
    size = -(-len(points) // POINTS)
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(part[0][0], statistics.fmean(value for _, value in part)) for part in parts]
