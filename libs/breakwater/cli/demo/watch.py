"""What happens, while it happens: counted from core NATS subscriptions, as any program may have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from breakwater.cli import connect
from breakwater.contracts.types import nano_from_usd


@dataclass(slots=True)
class Tally:
    """What has been heard so far. For looking at only: nothing that was missed here is missing in the records."""

    decided: int = 0
    succeeded: int = 0
    attempts: int = 0
    short_circuits: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])
    spend: int = 0
    """Nano-dollars."""
    breakers: dict[str, str] = field(default_factory=dict[str, str])
    """State by agent and model, of those that ever changed it."""

    def hear(self, kind: str, event: Mapping[str, Any]) -> None:
        """Counts an event; `kind` is its subject's second token."""
        match kind:
            case "executions":
                self.decided += 1
                self.succeeded += event["status"] == "succeeded"
            case "attempts":
                self.attempts += 1
                self.short_circuits += event["short_circuited"]
                self.causes[event["cause"]] += 1
                self.spend += nano_from_usd(event["cost"] or "0")
            case "breakers":
                self.breakers[f"{event['agent']} on {event['model']}"] = event["to_state"]
            case _:
                pass


@asynccontextmanager
async def watching(nats_url: str) -> AsyncGenerator[Tally]:
    """Counts for as long as the block lasts. Raises CliError where NATS does not answer."""
    tally = Tally()

    async def hear(message: Any) -> None:
        tally.hear(message.subject.split(".", 2)[1], orjson.loads(message.data))

    async with connect.bus(nats_url, patient=True) as client:
        for kind in ("executions", "attempts", "breakers"):
            await client.subscribe(f"bw.{kind}.>", cb=hear)
        await connect.subscribed(client)
        yield tally
