"""A publisher for tests of outages."""

from __future__ import annotations

from typing import Any

from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.publisher import Publisher


class FailingPublisher(Publisher):
    """A publisher whose bus is away at the first event of a shadow."""

    has_failed = False

    async def event(self, subject: str, *arguments: Any, **options: Any) -> Any:
        if subject.startswith("bw.shadow") and not self.has_failed:
            self.has_failed = True
            raise BusUnavailableError("the bus is away")
        return await super().event(subject, *arguments, **options)
