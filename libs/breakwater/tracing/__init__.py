"""Traces: spans that follow a job from its caller to the model, sent by OTLP. Off until an endpoint is named.

`start` once in a process, then `begin` wherever something takes time, and `end` on what it gave. There is no current
span in the background: whoever begins one says what its parent is, as a W3C traceparent that also crosses NATS.

What is put on a span leaves the plane: names, counts and classes, never a prompt, an answer or a key.
"""

from breakwater.tracing.attributes import (
    attempt_attributes,
    execution_attributes,
    genai_attributes,
    outcome_attributes,
    result_attributes,
)
from breakwater.tracing.spans import Attribute, Kind, Span, begin, is_traceparent, start, stop

__all__ = [
    "Attribute",
    "Kind",
    "Span",
    "attempt_attributes",
    "begin",
    "execution_attributes",
    "genai_attributes",
    "is_traceparent",
    "outcome_attributes",
    "result_attributes",
    "start",
    "stop",
]
