"""Events of the bus in the envelope of CloudEvents' JSON format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from pydantic_core import to_json

from breakwater.kernel.nats.subjects import Header


@dataclass(frozen=True, slots=True)
class EventAttributes:
    """The attributes of an event; without headers, as live progress is, those that follow from its subject."""

    specversion: str
    id: str
    type: str
    source: str
    time: str | None
    subject: str

    @classmethod
    def of(cls, subject: str, headers: Mapping[str, str], event: Mapping[str, Any] | None = None) -> Self:
        """Reads the attributes of an event from its headers, and what they lack from its content."""
        content = event or {}
        return cls(
            specversion="1.0",
            id=headers.get(Header.CE_ID) or f"{subject}/{content.get('state', '')}/{content.get('at', '')}",
            type=headers.get(Header.CE_TYPE) or f"breakwater.{_message_name(subject)}",
            source=headers.get(Header.CE_SOURCE) or "breakwater",
            time=headers.get(Header.CE_TIME) or content.get("at"),
            subject=subject,
        )

    def document(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the envelope with the event in it."""
        return {**asdict(self), "data": event}

    def envelope(self, event: bytes) -> bytes:
        """Returns the envelope with an event in it that is JSON already."""
        return to_json(self)[:-1] + b',"data":' + event + b"}"


def _message_name(subject: str) -> str:
    kind = subject.split(".", 2)[1]
    return (kind if kind == "progress" else kind.removesuffix("s")).capitalize()
