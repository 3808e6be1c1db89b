"""A receiver of alerts, as a user would write one: it checks every signature with the Standard Webhooks package."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

from breakwater.contracts.alerts import Alert


@dataclass(slots=True)
class Delivered:
    """What a receiver got."""

    alerts: list[Alert] = field(default_factory=list[Alert])
    """In the order of their arrival."""
    repeated: int = 0
    """Deliveries of an alert that had arrived before."""
    refused: int = 0
    """Requests whose signature was not right."""


@asynccontextmanager
async def receiving(secret: str, delivered: Delivered) -> AsyncGenerator[str]:
    """Listens on a free port of loopback while the block runs; gives the URL to post to.

    Args:
        secret: the signing secret, `whsec_…`.
        delivered: takes what arrives.
    """
    webhook = Webhook(secret)

    async def receive(request: web.Request) -> web.Response:
        try:
            event = webhook.verify(await request.read(), dict(request.headers))
        except WebhookVerificationError as error:
            delivered.refused += 1
            return web.Response(status=401, text=str(error))
        alert = Alert.model_validate(event["data"])
        if any(alert.alert_id == known.alert_id for known in delivered.alerts):
            delivered.repeated += 1
        else:
            delivered.alerts.append(alert)
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/alerts", receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/alerts"
    finally:
        await runner.cleanup()
