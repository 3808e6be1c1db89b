"""The console: web pages that show the records in ClickHouse, and act through the HTTP API."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from breakwater.alerts import pages as alerts
from breakwater.breakers import pages as breakers
from breakwater.client import ApiClient, ApiError, ApiKeyRefusedError
from breakwater.config import Config, cipher_of
from breakwater.health.pages import agents, overview
from breakwater.identity.contract import OPENID_CALLBACK
from breakwater.identity.pages.operator_actions import FormError
from breakwater.identity.pages.rendering import HEADERS, PageContext, PageRenderer
from breakwater.identity.pages.sessions import SessionCache
from breakwater.identity.pages.sign_in import LINK, OPENID, RequireSignIn, SignIn, to_sign_in
from breakwater.jobs.pages import dead_letters, now, plans
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.http.server import HttpServer, PortTakenError, listen
from breakwater.kernel.pages.charts import LIBRARY_FOLDER, LIBRARY_PACKAGE
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.telemetry.http_metrics import CountRequests, RequestCounter
from breakwater.kernel.telemetry.metrics import HttpMetrics
from breakwater.limits.pages import budgets, limits
from breakwater.records.pages import audit, costs, execution, executions
from breakwater.replay import pages as configs

PAGES = (
    overview,
    now,
    agents,
    executions,
    execution,
    plans,
    breakers,
    limits,
    budgets,
    costs,
    alerts,
    dead_letters,
    configs,
    audit,
)
"""All modules of pages, in the order of the navigation. Each has its routes, and its link in the navigation or None."""
ANSWER_TIMEOUT_S = 20.0
"""The longest time in seconds that a query may take."""
DRAIN_S = 0.5
"""Seconds to finish requests at the end. Only pages of running jobs take longer, and browsers reconnect them."""
STATIC_FILES: list[str | tuple[str, str]] = [("breakwater.kernel.pages", "static"), (LIBRARY_PACKAGE, LIBRARY_FOLDER)]
YEAR_S = 365 * 24 * 3600


def build(settings: Settings, config: Config) -> ConsoleService:
    """Wires the service. Opens no connection yet."""
    return ConsoleService(settings, config)


class ConsoleService:
    """The service that serves the pages."""

    def __init__(self, settings: Settings, config: Config) -> None:
        self._settings = settings
        self._pages = PageRenderer([page.LINK for page in PAGES if page.LINK is not None])
        self._api = ApiClient(settings.request_url)
        self._context = PageContext(
            connect(settings.clickhouse_url, answer_timeout_s=ANSWER_TIMEOUT_S),
            self._pages,
            lambda: datetime.now(UTC),
            asyncio.Event(),
            config.redaction.placeholder,
            config.tracing.url_template,
            config.budgets.zone,
            cipher_of(config),
        )
        self._console = config.console
        self._server = HttpServer(
            self._app(), drain_s=DRAIN_S, release=lambda: None, stopping=self._context.stopping.set
        )

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT.

        Raises:
            SystemExit: with code 1, if the port is not available; the reason is on stderr.
        """
        host = self._settings.console_host
        port = self._settings.console_port
        try:
            listening = listen(host, port, variables="BREAKWATER_CONSOLE_HOST and BREAKWATER_CONSOLE_PORT")
        except PortTakenError as error:
            sys.stderr.write(f"console: {error}\n")
            raise SystemExit(1) from None
        with listening:
            structlog.get_logger().info("listening", url=f"http://{host}:{port}")
            await self._server.serve(listening)

    async def is_alive(self) -> bool:
        """Returns True while the event loop runs; the console subscribes to nothing."""
        return True

    async def reload(self, config: Config) -> None:
        """Applies another config to all further pages."""
        self._context.placeholder = config.redaction.placeholder
        self._context.trace_template = config.tracing.url_template
        self._console = config.console

    def stop(self) -> None:
        """Ends serving, as SIGTERM does."""
        self._server.stop()

    def _app(self) -> Starlette:
        """Builds the application: the pages behind the sign-in."""
        sessions = SessionCache()
        sign_in = SignIn(
            sessions,
            self._api,
            self._pages,
            lambda: self._console.openid and self._console.openid.shown_as,
            # The console itself has no TLS, so an https:// URL means that there is a proxy.
            lambda: (self._console.url or "").startswith("https://"),
        )
        routes = [
            *(route for page in PAGES for route in page.routes(self._context)),
            Route("/sign-in", sign_in.show, methods=["GET"]),
            Route("/sign-in", sign_in.sign_in, methods=["POST"]),
            Route(LINK, sign_in.follow_link, methods=["GET"]),
            Route(OPENID, sign_in.begin_openid, methods=["GET"]),
            Route(OPENID_CALLBACK, sign_in.complete_openid, methods=["GET"]),
            Route("/sign-out", sign_in.sign_out, methods=["POST"]),
            Route("/healthz", _alive, methods=["GET"]),
            Mount("/static", GZipMiddleware(_Static(packages=STATIC_FILES))),
        ]
        app = Starlette(
            routes=routes,
            middleware=[
                Middleware(CountRequests, counter=RequestCounter(HttpMetrics(), routes)),
                Middleware(RequireSignIn, sessions=sessions, api=self._api, pages=self._pages),
            ],
            lifespan=self._lifespan,
        )
        for kind in (ApiError, FormError, HTTPException, ClientDisconnect, Exception):
            app.add_exception_handler(kind, self._error_response)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:  # noqa: ARG002  Starlette passes it
        structlog.get_logger().info("service_ready")
        try:
            yield
        finally:
            await self._api.close()
            await self._context.analytics.close()

    async def _error_response(self, request: Request, error: Exception) -> Response:
        """Answers a request that failed. The server logs unexpected errors."""
        match error:
            case ClientDisconnect():
                return Response(status_code=499)
            case ApiKeyRefusedError():
                return to_sign_in(request, "ended")
            case HTTPException(status_code=404):
                return self._error_page(request, 404, "Page not found", f"There is no page at {request.url.path}.")
            case HTTPException():
                return self._error_page(request, error.status_code, "The request failed", str(error.detail))
            case ApiError() | FormError():
                return self._error_page(request, error.status, "The request failed", str(error))
            case _:
                text = "This is a bug in Breakwater; see the console's log."
                return self._error_page(request, 500, "Something went wrong", text)

    def _error_page(self, request: Request, status: int, title: str, text: str) -> Response:
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse({"message": text}, status, HEADERS)
        return self._pages.plain(request, status, title, text)


class _Static(StaticFiles):
    """The style sheet, the scripts and the icon."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        # The query in the URL names the version, so that such a response never changes.
        response.headers["Cache-Control"] = f"public, max-age={YEAR_S}" if scope["query_string"] else "no-cache"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


async def _alive(_: Request) -> Response:
    return JSONResponse({"status": "alive"})
