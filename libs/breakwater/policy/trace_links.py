"""Links to traces in whatever system they are looked at."""

from __future__ import annotations

TRACE_ID = "{trace_id}"
"""Where the id belongs in a template."""


def trace_url(template: str | None, trace_id: str | None) -> str | None:
    """The URL of a trace.

    Args:
        template: `tracing.url_template` of the config, with `{trace_id}` one or more times; None if it is not set.
        trace_id: 32 hex digits, as in a record; None if the trace was not sampled, and so is nowhere to be seen.

    Returns:
        None where there is no template or no trace.
    """
    return None if template is None or trace_id is None else template.replace(TRACE_ID, trace_id)
