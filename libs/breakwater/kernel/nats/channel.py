"""A channel: subjects of one form, as AsyncAPI has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from breakwater.kernel.nats.subjects import Stream


@dataclass(frozen=True, slots=True)
class Channel:
    """Subjects of one form. A subject has its parameters encoded as tokens."""

    name: str
    address: str
    parameters: Mapping[str, str]
    message: type[BaseModel]
    stream: Stream | None
    """None for core NATS: received by current subscribers only, and not stored."""
    summary: str
    public: bool = True
    """False for what only Breakwater itself reads and writes."""
