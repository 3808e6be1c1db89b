"""Links to traces."""

from __future__ import annotations

from breakwater.alerts.rules.links import trace_url
from tests.tables import each_row

TRACE = "0af7651916cd43dd8448eb211c80319c"


@each_row(
    ("template", "trace_id", "url"),
    [
        ("https://jaeger.example.com/trace/{trace_id}", TRACE, f"https://jaeger.example.com/trace/{TRACE}"),
        ("https://x.example.com/?q={{a}}&t={trace_id}", TRACE, f"https://x.example.com/?q={{{{a}}}}&t={TRACE}"),
        ("https://x.example.com/{trace_id}#{trace_id}", TRACE, f"https://x.example.com/{TRACE}#{TRACE}"),
        ("https://jaeger.example.com/trace/{trace_id}", None, None),
        (None, TRACE, None),
        (None, None, None),
    ],
)
def test_a_trace_has_a_url_where_a_template_and_an_id_are(
    template: str | None, trace_id: str | None, url: str | None
) -> None:
    assert trace_url(template, trace_id) == url
