"""A publisher for tests of outages."""

from __future__ import annotations

from typing import Any

from breakwater.kernel.nats.errors import BusUnavailableError, EventStreamFullError
from breakwater.kernel.nats.publisher import Publisher


class FailingPublisher(Publisher):
    """A publisher whose bus is away at the first event of a shadow, and full at the second try."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.failures = [BusUnavailableError("the bus is away"), EventStreamFullError("there is no room")]

    async def event(self, subject: str, *arguments: Any, **options: Any) -> Any:
        if subject.startswith("bw.shadow") and self.failures:
            raise self.failures.pop(0)
        return await super().event(subject, *arguments, **options)
