"""A receiver of alerts, as a user would write one: it checks every signature with the Standard Webhooks package."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

PATH = "/alerts"


@dataclass(frozen=True, slots=True)
class Received:
    """A change of an incident that arrived, by itself or in a digest."""

    alert_id: str
    incident_id: str
    event: str
    status: str
    severity: str
    title: str


_FIELDS = tuple(field.name for field in fields(Received))


class Receiver:
    """Listens on a free port of loopback; an async context manager.

    Args:
        secret: the signing secret, `whsec_…`.
    """

    def __init__(self, secret: str) -> None:
        self._webhook = Webhook(secret)
        self._alerts: list[Received] = []
        self._messages: set[str] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.repeated = 0
        """Deliveries of a message that had arrived before."""
        self.refused = 0
        """Requests whose signature was not right."""

    @property
    def url(self) -> str:
        """Where alerts are to be posted."""
        return f"http://127.0.0.1:{self.port}{PATH}"

    @property
    def alerts(self) -> tuple[Received, ...]:
        """What arrived, in the order of arrival, without the messages that came again."""
        return tuple(self._alerts)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post(PATH, self._receive)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            event: Any = self._webhook.verify(body, dict(request.headers))
        except WebhookVerificationError as error:
            self.refused += 1
            return web.Response(status=401, text=str(error))
        message_id, data = request.headers["webhook-id"], event["data"]
        if message_id in self._messages:
            self.repeated += 1
            return web.Response(status=204)
        self._messages.add(message_id)
        alerts = data["alerts"] if event["type"] == "digest" else [data]
        self._alerts += (Received(**{name: alert[name] for name in _FIELDS}) for alert in alerts)
        return web.Response(status=204)
