"""What is done to a plane, and which scenarios `make chaos` runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "stutter", "slow", "silent", "reset", "memory", "jump", "full", "flush", "limit"]

SERVICES = ("worker", "worker-2", "breaker", "budget", "alerter", "sink", "request")
SERVERS = ("nats", "redis", "clickhouse")
PARTS = SERVICES + SERVERS
ALONE = tuple(part for part in PARTS if part != "worker-2")
"""Parts to which something happens alone, each once: the second worker is as the first."""
LEADER = "nats-leader"
"""The node that leads the stream of jobs. A scenario that names it, or a node, runs on a cluster of three."""
NODES = ("nats-1", "nats-2", "nats-3")

SHORT_STOP_S = 12.0
"""A worker that stands still for no longer keeps its jobs: NATS delivers them to nobody else before 20 s."""

ANYWHERE: tuple[Kind, ...] = ("kill", "stop", "slow", "silent", "reset", "memory")
KINDS: tuple[Kind, ...] = (*ANYWHERE, "stutter", "jump", "full", "flush", "limit")

_OF: dict[Kind, tuple[str, ...]] = {
    **dict.fromkeys(ANYWHERE, PARTS),
    "jump": (*SERVICES, "redis"),  # a program in Go asks the kernel itself
    "full": SERVERS,
    "flush": ("redis",),
    "limit": ("nats",),
    "stutter": SERVERS,
}
_OF_NODE: tuple[Kind, ...] = ("kill", "stop", "stutter", "silent", "reset")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a part.

    Attributes:
        kind: `kill` is SIGKILL, and a start; `stop` is SIGSTOP, and SIGCONT; `stutter` is both, again and again, as of
            a server that waits for a slow disk. The others concern all connections of the part, and of a node those to
            the other nodes: they become slow or silent, or are reset and refused.
            `memory` leaves a part no more memory than it has, and starts it again where it dies of that. `jump`
            sets its clock an hour ahead, and back. `full` fills the disk of a server, and starts NATS again when
            there is space. `flush` empties Redis. `limit` leaves the streams EVENTS and RESPONSES no more space.
        part: one of `PARTS` or `NODES`, or `LEADER`.
        for_s: how long it lasts.
        at_s: when, after the first job.
    """

    kind: Kind
    part: str
    for_s: float
    at_s: float = 2.0

    @property
    def may_lose_jobs(self) -> bool:
        """Whether a worker may have seemed dead, so that others made its calls again."""
        return self.part.startswith("worker") and not (self.kind == "stop" and self.for_s <= SHORT_STOP_S)

    def __str__(self) -> str:
        return f"{self.part} {self.kind} {self.for_s:g} s"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads `nats:stop:28` or `nats:stop:28@5`. Raises ValueError."""
        what, _, at = text.partition("@")
        part, kind, for_s = what.split(":")
        if kind not in KINDS or not (kind in _OF_NODE if part in {LEADER, *NODES} else part in _OF[kind]):
            raise ValueError(kind)
        return cls(kind, part, float(for_s), float(at or 2))


Scenario = tuple[Fault, ...]


def at_random(seed: int, faults: int = 4, over_s: float = 12.0) -> Scenario:
    """A scenario of faults that any part may have. One part has one fault at a time."""
    chosen = random.Random(seed)
    free_at: dict[str, float] = {}
    found: list[Fault] = []
    for _ in range(faults):
        part = chosen.choice(PARTS)
        at_s = max(round(chosen.uniform(0.5, over_s), 1), free_at.get(part, 0.0))
        fault = Fault(chosen.choice(ANYWHERE), part, chosen.choice((0.5, 1.0, 3.0, 8.0, 15.0, 25.0)), at_s)
        free_at[part] = fault.at_s + fault.for_s + 1.0
        found.append(fault)
    return tuple(sorted(found, key=lambda fault: fault.at_s))


SCENARIOS: tuple[Scenario, ...] = (
    *((Fault("kill", part, 1),) for part in ALONE),
    (Fault("stop", "nats", 12),),
    (Fault("stop", "nats", 28),),
    (Fault("stop", "nats", 60),),
    (Fault("stop", "worker", SHORT_STOP_S),),
    *((Fault("stop", part, 28),) for part in ALONE if part != "nats"),
    *((Fault("silent", part, 15),) for part in ALONE),
    *((Fault("reset", part, 10),) for part in ALONE),
    *((Fault("slow", part, 15),) for part in ALONE),
    *((Fault("full", part, 10),) for part in SERVERS),
    (Fault("kill", LEADER, 10),),
    (Fault("stop", LEADER, 28),),
    (Fault("silent", LEADER, 28),),
    (Fault("stutter", LEADER, 15),),
    tuple(Fault("kill", node, 1, 1 + 2.0 * number) for number, node in enumerate(NODES)),
    *((Fault("memory", part, 15),) for part in ("worker", "sink", "nats", "redis", "clickhouse")),
    *((Fault("jump", part, 15),) for part in ALONE if part in _OF["jump"]),
    (Fault("stop", "nats", 28), Fault("stop", "redis", 28)),
    (Fault("stop", "redis", 28), Fault("stop", "worker", 28)),
    (Fault("kill", "worker", 1), Fault("kill", "redis", 1)),
    (Fault("kill", "nats", 2), Fault("kill", "sink", 1), Fault("kill", "budget", 1)),
    (Fault("silent", "redis", 15), Fault("kill", "worker", 1)),
    tuple(Fault("kill", ("worker", "worker-2")[number % 2], 0.5, 1 + 2.0 * number) for number in range(5)),
    at_random(1),
    at_random(2),
)
