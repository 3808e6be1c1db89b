"""Addresses and passwords of the running plane.

An address comes from the command's option; otherwise from its `BREAKWATER_*` variable, unless `--data` is set;
otherwise from the data directory of `breakwater up`. Commands that can use a server or the HTTP API ask
`PlaneLocation.uses_http`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from breakwater.kernel.commands.errors import CliError, ExitCode, usage_error

if TYPE_CHECKING:
    from breakwater.client import ApiClient
    from breakwater.config import Config
    from breakwater.kernel.security.encryption import Cipher
    from breakwater.local.datadir import Endpoints

DEFAULT_DATA = Path(".breakwater")
CLICKHOUSE_VARIABLE = "BREAKWATER_CLICKHOUSE_URL"

DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data directory of a running `breakwater up`. [default: .breakwater]"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON for programs, including errors (on stderr).")]
UrlOption = Annotated[str | None, typer.Option("--url", help="The HTTP API. [env: BREAKWATER_URL]")]
ApiKeyOption = Annotated[str | None, typer.Option("--api-key", help="[env: BREAKWATER_API_KEY]")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The config file. [default: $BREAKWATER_CONFIG, the running plane's, breakwater.yaml]",
    ),
]


EDITED_CONFIG_HELP = "[default: $BREAKWATER_CONFIG, breakwater.yaml]"


def config_to_edit(option: Path | None) -> Path:
    """The config file to check or change, which need not be that of a running plane."""
    return option or Path(os.environ.get("BREAKWATER_CONFIG") or "breakwater.yaml")


class PlaneLocation:
    """The addresses of a plane's servers and services, which are read on first use. It opens no connection."""

    def __init__(self, data: Path | None) -> None:
        self.data = data or DEFAULT_DATA
        self._only_data = data is not None
        self._endpoints: Endpoints | None = None

    def uses_http(self, server_variable: str, url: str | None, api_key: str | None) -> bool:
        """Returns whether a command that could use a server uses the HTTP API instead.

        It does if an option names the API; otherwise if only the API's variable is set, and not the server's.

        Args:
            server_variable: the variable with the server's address, such as `BREAKWATER_CLICKHOUSE_URL`.
            url: option for the API's URL.
            api_key: option for the API key.
        """
        if url is not None or api_key is not None:
            return True
        return self._variable(server_variable) is None and self._variable("BREAKWATER_URL") is not None

    def lacks(self, server_variable: str) -> bool:
        """Returns whether a server can't be reached from here, and the HTTP API can: as with BREAKWATER_URL alone."""
        return self.uses_http(server_variable, None, None) and self._if_running() is None

    def require_server(self, server_variable: str, what: str, url: str | None, api_key: str | None) -> None:
        """Raises CliError, which names the server's variable, if a command can reach only the HTTP API."""
        if self.uses_http(server_variable, url, api_key):
            raise usage_error(
                f"the HTTP API can't {what}",
                f"Set {server_variable}, or use --data DIR on the machine of the plane.",
            )

    @property
    def endpoints(self) -> Endpoints:
        """The addresses of the data directory's local stack. Raises CliError if none is running."""
        return self._running()

    @property
    def nats_url(self) -> str:
        """The URL of NATS, with user and password. Raises CliError, as all properties do, if no plane is running."""
        return self._variable("BREAKWATER_NATS_URL") or self._running("BREAKWATER_NATS_URL").nats_url

    @property
    def admin_nats_url(self) -> str:
        """The URL of NATS for the user that may see all streams and consumers, if its password is available."""
        url = self.nats_url
        return url if self._endpoints is None else self._as_user(url, "setup", "nats-setup")

    @property
    def redis_url(self) -> str:
        """The URL of Redis, with its password."""
        return self._variable("BREAKWATER_REDIS_URL") or self._running("BREAKWATER_REDIS_URL").redis_url

    @property
    def clickhouse_url(self) -> str:
        """The URL of ClickHouse, with user and password; for a local stack, those of the read-only user."""
        return self._variable(CLICKHOUSE_VARIABLE) or self._running(CLICKHOUSE_VARIABLE).clickhouse_url

    @property
    def admin_clickhouse_url(self) -> str:
        """The URL of ClickHouse for the user that may create tables and write, if its password is available."""
        if url := self._variable(CLICKHOUSE_VARIABLE):
            return url
        url = self.clickhouse_url
        return url if urlsplit(url).username != "reader" else self._as_user(url, "breakwater", "clickhouse")

    def runs_with(self, config: Path) -> bool:
        """Returns whether the plane of the data directory is running with this config file."""
        try:
            return (running_config := self.running_config) is not None and running_config.samefile(config)
        except OSError:
            return False

    @property
    def running_config(self) -> Path | None:
        """The config file that the data directory's plane is running with; None if no local stack is running."""
        running = self._if_running()
        return None if running is None else running.edited_config_file or running.config_file

    @property
    def console_url(self) -> str | None:
        """The URL of the running plane's console; None if no local stack is running."""
        running = self._if_running()
        return None if running is None else running.console_url

    @property
    def simulated_provider_url(self) -> str:
        """The URL of the running plane's simulated provider."""
        url = self._running().simulated_provider_url
        if url is None:
            raise CliError(
                "not_simulated", "the plane calls real providers", "`breakwater up --simulate` simulates them."
            )
        return url

    async def metrics_urls(self) -> dict[str, str]:
        """The metrics URLs of all processes by name: those of a local stack, or of the containers in a network."""
        port = self._variable("BREAKWATER_METRICS_PORT")
        if port is None:
            running = self._if_running()
            return {} if running is None else running.metrics
        loop = asyncio.get_running_loop()
        urls: dict[str, str] = {}
        for service in ("request", "worker", "breaker", "budget", "alerter", "sink", "console"):
            try:
                addresses = await loop.getaddrinfo(service, int(port), type=socket.SOCK_STREAM)
            except OSError:
                continue  # not in this network
            hosts = sorted({str(address[4][0]) for address in addresses})
            urls |= {f"{service} at {host}": f"http://{host}:{port}/metrics" for host in hosts}
        return urls

    @property
    def metrics_headers(self) -> dict[str, str]:
        """The headers to send to the metrics URLs."""
        token = os.environ.get("BREAKWATER_METRICS_TOKEN")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def effective_config(self) -> Config | None:
        """Loads the config that a local stack's services run under; None if none is running. Raises ConfigError."""
        from breakwater.config import load_config
        from breakwater.local.stack import IN_FORCE

        running = self._if_running()
        return None if running is None else load_config(running.data_dir / IN_FORCE)

    def api_client(self, url: str | None = None, api_key: str | None = None) -> ApiClient:
        """Returns a client of the HTTP API, which the caller closes.

        Args:
            url: option for the API's URL; by default that of the environment or of the local stack.
            api_key: option for the API key; by default that of the environment or of the local stack.
        """
        from breakwater.client import ApiClient

        chosen_url = url or self._variable("BREAKWATER_URL")
        key = api_key or self._variable("BREAKWATER_API_KEY")
        if chosen_url is None:
            running = self._running("BREAKWATER_URL")
            return ApiClient(running.request_url, key or _key_in(running.api_key_file))
        if not re.match(r"https?://[^/\s]+", chosen_url):
            raise usage_error(f"{chosen_url!r} is not a URL of the form http://host:port")
        return ApiClient(chosen_url, key)

    def config_file(self, option: Path | None) -> Path:
        """The config file: that of the option, of the environment, of the running plane, or `breakwater.yaml` here."""
        if option is not None:
            return option
        if path := self._variable("BREAKWATER_CONFIG"):
            return Path(path)
        running = self._if_running()
        return Path("breakwater.yaml") if running is None else running.config_file

    def config(self, option: Path | None) -> Config:
        """Loads the config. Raises ConfigError."""
        from breakwater.config import load_config

        return load_config(self.config_file(option))

    def cipher(self, option: Path | None = None) -> Cipher:
        """Builds the cipher of the config's keys, and of the plane's own key if it is available.

        Raises:
            ConfigError: if keys that the config names can't be read here.
        """
        from pydantic import SecretStr

        from breakwater.config import cipher_of
        from breakwater.local.stack import PLANE_KEY

        plane_key = self._variable("BREAKWATER_PLANE_KEY")
        key_file = self.data / "secrets" / PLANE_KEY
        if plane_key is None and key_file.is_file():
            plane_key = key_file.read_text(encoding="utf-8").strip()
        return cipher_of(self.config(option), None if plane_key is None else SecretStr(plane_key))

    def _as_user(self, url: str, user: str, secret: str) -> str:
        """The URL with another user, if the data directory has the user's password; otherwise the URL as it is."""
        parts = urlsplit(url)
        password_file = self.data / "secrets" / secret
        if not password_file.is_file():
            return url
        password = password_file.read_text().strip()
        return parts._replace(netloc=f"{user}:{password}@{parts.hostname}:{parts.port}").geturl()

    def _variable(self, name: str) -> str | None:
        return None if self._only_data else os.environ.get(name) or None

    def _if_running(self) -> Endpoints | None:
        try:
            return self._running()
        except CliError:
            return None

    def _running(self, variable: str = "") -> Endpoints:
        from breakwater.local.datadir import DataDir, NotRunningError, read_endpoints

        if self._endpoints is None:
            try:
                endpoints = read_endpoints(self.data)
            except NotRunningError:
                if DataDir(self.data).holder() is not None:
                    raise _starting(self.data) from None
                raise self._not_running(f"no plane is running in {self.data}", variable) from None
            if DataDir(self.data).holder() is None:
                raise self._not_running(
                    f"the plane of {self.data} has ended (it was process {endpoints.pid})", variable
                )
            self._endpoints = endpoints
        return self._endpoints

    def _not_running(self, problem: str, variable: str) -> CliError:
        message = problem
        if variable and not self._only_data:
            message += f", and {variable} is not set"
        elif self._variable("BREAKWATER_URL"):
            message += ", and BREAKWATER_URL does not lead to what this command needs"
        or_variable = f" or {variable}" if variable else ""
        data_option = "" if self.data == DEFAULT_DATA else f" --data {self.data}"
        return CliError(
            "not_running",
            message,
            f"Start one with `breakwater up{data_option}`, or select a running one with --data DIR{or_variable}.",
            ExitCode.UNREACHABLE,
        )


def _starting(data: Path) -> CliError:
    hint = "Repeat this once `breakwater up` says that Breakwater is up."
    return CliError("not_running", f"the plane of {data} is starting or stopping", hint, ExitCode.UNREACHABLE)


def _key_in(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CliError("api_key", f"the API key in {file} can't be read: {error.strerror}") from error
