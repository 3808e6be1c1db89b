"""Which params of a call can be sent to a provider as they are."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from breakwater.contracts.validation import FieldError
from breakwater.policy.price import MAX_OUTPUT_TOKENS, OUTPUT_LIMITS

RESERVED_PARAMS = {
    "model": "has a place of its own in a job",
    "messages": "have a place of their own in a job",
    "stream": "is not supported: an answer comes whole",
    "stream_options": "are not supported: an answer comes whole",
}


def params_objection(params: Mapping[str, JsonValue]) -> FieldError | None:
    """Why params can't go to a provider as they are; None where they can.

    What a call is admitted, priced and limited by must be what is sent.
    """
    for name in params:
        if name in RESERVED_PARAMS:
            return FieldError(name, RESERVED_PARAMS[name])
    for name, most in (*((limit, MAX_OUTPUT_TOKENS) for limit in OUTPUT_LIMITS), ("n", 128)):
        value = params.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            return FieldError(name, f"must be a whole number from 1 to {most}")
    return None
