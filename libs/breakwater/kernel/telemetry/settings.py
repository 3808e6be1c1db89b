"""The section `tracing` of the config."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from breakwater.kernel.types import Message

TRACE_ID = "{trace_id}"
"""The placeholder of the trace's id in `url_template`."""


class Tracing(Message):
    """Links to traces, and their content. Sending them is set by the `OTEL_*` variables."""

    capture_content: bool = Field(
        default=False,
        description=(
            "Adds prompts and answers to spans, redacted as in records. Never if the agent does "
            "not keep them (`persist_prompts`, `persist_responses`), or if texts are encrypted."
        ),
    )
    max_content_bytes: int = Field(
        default=16 * 1024,
        ge=256,
        le=1024**2,
        description=(
            "Maximum size of a span's prompt, and of its answer. The longest texts are "
            "truncated, then the oldest messages omitted."
        ),
    )

    url_template: str | None = Field(
        default=None,
        description=(
            "URL of a trace in your tracing system, with the placeholder `{trace_id}`. The "
            "console links executions to it."
        ),
        examples=["https://jaeger.example.com/trace/{trace_id}"],
    )

    @field_validator("url_template")
    @classmethod
    def _a_url_with_the_id(cls, template: str | None) -> str | None:
        if template is None:
            return None
        if TRACE_ID not in template:
            raise ValueError(f"must contain the placeholder {TRACE_ID}")
        try:
            url = urlsplit(template)
            usable = url.scheme in {"http", "https"} and bool(url.hostname) and TRACE_ID not in url.netloc
        except ValueError:
            usable = False
        if not usable or not template.isprintable() or " " in template:
            raise ValueError(f"must be a URL: http:// or https://, a host, and {TRACE_ID} after it")
        return template
