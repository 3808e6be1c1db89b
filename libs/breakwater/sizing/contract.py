"""The size of a plane."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.kernel.types import Count, Event

PlanePart = Literal["request", "worker", "breaker", "budget", "alerter", "sink", "nats", "redis", "clickhouse"]


class PartSize(Event):
    """A service or a server, all of its processes together."""

    part: PlanePart
    processes: Count
    cores: float = Field(description="Cores of CPU, with headroom.")
    memory_mb: Count
    disk_gb: float = Field(description="Disk, replicas included; 0 for what stores nothing.")
    why: str = Field(description="Figures that it follows from.")


class Bound(Event):
    """The load at which a part of the plane reaches what it can do."""

    jobs_per_s: float
    reached: bool = Field(description="True if the load is over it.")
    part: str
    remedy: str


class PlaneSize(Event):
    """The servers that a load needs."""

    nodes: Count = Field(description="Machines with `cores_per_node` and `memory_gb_per_node`.")
    cores_per_node: Count
    memory_gb_per_node: Count
    cores: float
    memory_gb: float
    disk_gb: float
    parts: tuple[PartSize, ...]
    bounds: tuple[Bound, ...] = Field(description="What ends first, the lowest load first.")
    assumptions: tuple[str, ...]
