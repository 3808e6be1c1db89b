"""What the console counts."""

from prometheus_client import REGISTRY

from tests.helpers import until
from tests.services.console.conftest import Console

REQUESTS = "breakwater_http_requests_total"


def counted() -> dict[tuple[str, str], float]:
    """Requests by route and status."""
    return {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == REQUESTS
    }


async def test_pages_are_counted_by_route_and_never_by_what_they_show(console: Console) -> None:
    before = counted()
    paths = ("/executions/an-id-of-somebody", "/static/console.css", "/nothing/here")
    statuses = [(await console.get(path)).status for path in paths]
    routes = ("/executions/{execution_id}", "/static/{path}", "other")
    asked = {(route, str(status)) for route, status in zip(routes, statuses, strict=True)}

    def grown() -> set[tuple[str, str]]:
        return {labels for labels, value in counted().items() if value != before.get(labels, 0.0)}

    # A request is counted once its response is out.
    await until(lambda: asked <= grown())
    assert not any("somebody" in route for route, _ in counted())
