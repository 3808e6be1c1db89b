"""The course of a streamed answer: which bytes are sent when, and what its faults make of them."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.embedded.provider.chat import ScriptedAnswer
from breakwater.embedded.provider.openai import OpenAI, StreamEvent
from breakwater.embedded.provider.script import Fault, Pace, StreamFault

STALL_S = 30.0
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


def course_of(answer: ScriptedAnswer, pace: Pace, rule: Fault | None, dialect: OpenAI) -> Course:
    """The stream of an answer, with a fault of the script if it is one of streams."""
    events = dialect.stream(answer, pace)
    chunks = sum(event.content for event in events)
    fault, after, stall_s, error = None, None, None, None
    if rule is not None:
        fault, after, stall_s, error = rule.stream, rule.after_chunks, rule.stall_s, rule.error
        if rule.kind in _AT_ONCE:
            fault, after = _AT_ONCE[rule.kind], 0
        elif rule.kind == "truncated":
            fault, after = "cut", chunks // 2
    at = 0 if rule is not None and rule.kind == "empty_body" else _place(events, fault, after)
    wait_s = 0.0 if pace.tokens_per_s is None else pace.tokens_per_chunk / pace.tokens_per_s
    steps = [(wait_s if event.content else 0.0, event) for event in events]
    match fault:
        case None:
            pass
        case "stall":
            steps[at] = (steps[at][0] + (stall_s or STALL_S), events[at])
        case "malformed":
            data = events[at].data
            steps[at] = (steps[at][0], StreamEvent(data[: len(data) // 2].rstrip() + b"\n\n"))
        case "error":
            steps[at:] = [(0.0, StreamEvent(dialect.event(dialect.error(500, error))))]
        case "cut" | "no_end":
            del steps[at:]
    return Course(steps, chunks, breaks=fault == "cut", whole=fault in (None, "stall"))


def _place(events: list[StreamEvent], fault: StreamFault | None, after: int | None) -> int:
    """The event that a fault hits, or comes before."""
    if after is None and fault == "no_end":
        return len(events) - 1
    contents = [number for number, event in enumerate(events) if event.content]
    if after is not None and after < len(contents):
        return contents[after]
    return next(number for number, event in enumerate(events) if event.ends)
