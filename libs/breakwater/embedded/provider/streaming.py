"""The course of a streamed answer: which bytes are sent when, and what its faults make of them."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.embedded.provider.dialects import Dialect
from breakwater.embedded.provider.script import Pace, StreamFault
from breakwater.embedded.provider.wire import Decision, StreamEvent

_AT_ONCE: dict[str | None, StreamFault] = {
    "malformed_json": "malformed",
    "empty_body": "no_end",
    "error_in_200": "error",
}
"""What the ways to break a whole answer come to at the beginning of a stream."""


@dataclass(frozen=True, slots=True)
class Course:
    """One stream.

    Attributes:
        steps: how long to wait, and what is sent then.
        chunks: how many chunks of content the whole answer has.
        breaks: the connection is closed in the middle of the body.
        whole: all of the answer is sent, and nothing else.
    """

    steps: list[tuple[float, StreamEvent]]
    chunks: int
    breaks: bool
    whole: bool


def course_of(decision: Decision, dialect: Dialect, model: str, pace: Pace) -> Course:
    """The course that a decision means."""
    events = dialect.write_stream(decision, model, pace)
    chunks = sum(event.content for event in events)
    fault, after = decision.stream_fault, decision.after_chunks
    if fault is None and decision.broken in _AT_ONCE:
        fault, after = _AT_ONCE[decision.broken], 0
    elif decision.broken == "truncated":
        fault, after = "cut", chunks // 2
    at = _place(events, fault, after)
    wait_s = 0.0 if pace.tokens_per_s is None else pace.tokens_per_chunk / pace.tokens_per_s
    steps = [(wait_s if event.content else 0.0, event) for event in events]
    match fault:
        case None:
            pass
        case "stall":
            steps[at] = (steps[at][0] + decision.stall_s, events[at])
        case "malformed":
            data = events[at].data
            steps[at] = (steps[at][0], StreamEvent(data[: len(data) // 2].rstrip() + b"\n\n"))
        case "error":
            error = dialect.write_error_event(dialect.write_error(500, decision.error))
            steps[at:] = [(0.0, StreamEvent(error))]
        case "cut" | "no_end":
            del steps[at if decision.broken != "empty_body" else 0 :]
    return Course(steps, chunks, breaks=fault == "cut", whole=fault in (None, "stall"))


def _place(events: list[StreamEvent], fault: StreamFault | None, after: int | None) -> int:
    """The event that a fault hits, or comes before."""
    if after is None and fault == "no_end":
        return len(events) - 1
    contents = [number for number, event in enumerate(events) if event.content]
    if after is not None and after < len(contents):
        return contents[after]
    return next(number for number, event in enumerate(events) if event.ends)
