"""The addresses and passwords of the running plane.

The address of a part is the option of the command; else, unless `--data` was given, its `BREAKWATER_*` variable; else
what `breakwater up` has written into its data directory.
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

from breakwater.cli.errors import CliError, ExitCode, wrong_usage

if TYPE_CHECKING:
    from breakwater.client import ApiClient
    from breakwater.config import Config
    from breakwater.embedded.datadir import Endpoints
    from breakwater.security.encryption import Cipher

DEFAULT_DATA = Path(".breakwater")

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


OWN_CONFIG = "[default: $BREAKWATER_CONFIG, breakwater.yaml]"


def own_config(given: Path | None) -> Path:
    """The config file that is about to be checked or changed, which may be another than that of a running plane."""
    return given or Path(os.environ.get("BREAKWATER_CONFIG") or "breakwater.yaml")


class PlaneLocation:
    """The addresses of the parts of one plane, read when they are asked for. It connects to nothing by itself."""

    def __init__(self, data: Path | None) -> None:
        self.data = data or DEFAULT_DATA
        self._only_data = data is not None
        self._endpoints: Endpoints | None = None

    @property
    def endpoints(self) -> Endpoints:
        """The addresses of the local stack of the data directory. Raises CliError: none runs."""
        return self._running()

    @property
    def nats_url(self) -> str:
        """NATS, user and password included. Raises CliError, as all of these."""
        return self._variable("BREAKWATER_NATS_URL") or self._running("BREAKWATER_NATS_URL").nats_url

    @property
    def admin_nats_url(self) -> str:
        """NATS as the user that may see all streams and consumers, where its password is at hand."""
        url = self.nats_url
        return url if self._endpoints is None else self._as_user(url, "setup", "nats-setup")

    @property
    def redis_url(self) -> str:
        """Redis, password included."""
        return self._variable("BREAKWATER_REDIS_URL") or self._running("BREAKWATER_REDIS_URL").redis_url

    @property
    def clickhouse_url(self) -> str:
        """ClickHouse, user and password included; of a local stack, the user that only reads."""
        return self._variable("BREAKWATER_CLICKHOUSE_URL") or self._running("BREAKWATER_CLICKHOUSE_URL").clickhouse_url

    @property
    def admin_clickhouse_url(self) -> str:
        """ClickHouse as the user that may create tables and write, where its password is at hand."""
        if url := self._variable("BREAKWATER_CLICKHOUSE_URL"):
            return url
        url = self.clickhouse_url
        return url if urlsplit(url).username != "reader" else self._as_user(url, "breakwater", "clickhouse")

    def runs_with(self, config: Path) -> bool:
        """True if the plane of the data directory runs, with this config file."""
        running = self._if_running()
        try:
            return running is not None and (running.edited_config_file or running.config_file).samefile(config)
        except OSError:
            return False

    @property
    def console_url(self) -> str | None:
        """The console of the running plane; None where none is known."""
        return None if (running := self._if_running()) is None else running.console_url

    @property
    def simulated_provider_url(self) -> str:
        """The simulated provider of the running plane."""
        if (url := self._running().simulated_provider_url) is None:
            raise CliError(
                "not_simulated", "the plane calls real providers", "`breakwater up --simulate` simulates them."
            )
        return url

    async def metrics_urls(self) -> dict[str, str]:
        """The URL of each process's metrics: of a local stack, or of the containers of a network."""
        if (port := self._variable("BREAKWATER_METRICS_PORT")) is None:
            return {} if (running := self._if_running()) is None else running.metrics
        loop, urls = asyncio.get_running_loop(), dict[str, str]()
        for service in ("request", "worker", "breaker", "budget", "alerter", "sink", "console"):
            try:
                found = await loop.getaddrinfo(service, int(port), type=socket.SOCK_STREAM)
            except OSError:
                continue  # not in this network
            hosts = sorted({str(address[4][0]) for address in found})
            urls |= {f"{service} at {host}": f"http://{host}:{port}/metrics" for host in hosts}
        return urls

    @property
    def metrics_headers(self) -> dict[str, str]:
        """The headers that their scrapers send."""
        token = os.environ.get("BREAKWATER_METRICS_TOKEN")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def effective_config(self) -> Config | None:
        """The config that the services of a local stack run under; None where none runs. Raises ConfigError."""
        from breakwater.config import load_config
        from breakwater.embedded.stack import IN_FORCE

        return None if (running := self._if_running()) is None else load_config(running.data_dir / IN_FORCE)

    def api_client(self, url: str | None = None, api_key: str | None = None) -> ApiClient:
        """A client of the HTTP API, to be closed: where and with the key that the options say, else as found."""
        from breakwater.client import ApiClient

        where = url or self._variable("BREAKWATER_URL")
        key = api_key or self._variable("BREAKWATER_API_KEY")
        if where is None:
            running = self._running("BREAKWATER_URL")
            return ApiClient(running.request_url, key or _key_in(running.api_key_file))
        if not re.match(r"https?://[^/\s]+", where):
            raise wrong_usage(f"{where!r} is not a URL of the form http://host:port")
        return ApiClient(where, key)

    def config_file(self, option: Path | None) -> Path:
        """The config file: as the option says, else as the environment does, else the running plane's, else here."""
        if option is not None:
            return option
        if named := self._variable("BREAKWATER_CONFIG"):
            return Path(named)
        return Path("breakwater.yaml") if (running := self._if_running()) is None else running.config_file

    def config(self, option: Path | None) -> Config:
        """The config. Raises ConfigError."""
        from breakwater.config import load_config

        return load_config(self.config_file(option))

    def cipher(self, option: Path | None = None) -> Cipher:
        """The cipher of the config's keys, and of the plane's own, where it is at hand.

        Raises ConfigError: keys that the config names can't be read here.
        """
        from pydantic import SecretStr

        from breakwater.config import cipher_of
        from breakwater.embedded.stack import PLANE_KEY

        own, secret = self._variable("BREAKWATER_PLANE_KEY"), self.data / "secrets" / PLANE_KEY
        if own is None and secret.is_file():
            own = secret.read_text(encoding="utf-8").strip()
        return cipher_of(self.config(option), None if own is None else SecretStr(own))

    def _as_user(self, url: str, user: str, secret: str) -> str:
        """The URL with another user, where its password is in the data directory."""
        parts, file = urlsplit(url), self.data / "secrets" / secret
        if not file.is_file():
            return url
        return parts._replace(netloc=f"{user}:{file.read_text().strip()}@{parts.hostname}:{parts.port}").geturl()

    def _variable(self, name: str) -> str | None:
        return None if self._only_data else os.environ.get(name) or None

    def _if_running(self) -> Endpoints | None:
        try:
            return self._running()
        except CliError:
            return None

    def _running(self, variable: str = "") -> Endpoints:
        from breakwater.embedded.datadir import DataDir, NotRunningError, read_endpoints

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

    def _not_running(self, what: str, variable: str) -> CliError:
        looked = what if self._only_data or not variable else f"{what}, and {variable} is not set"
        other = f" or {variable}" if variable else ""
        where = "" if self.data == DEFAULT_DATA else f" --data {self.data}"
        return CliError(
            "not_running",
            looked,
            f"Start one with `breakwater up{where}`, or select a running one with --data DIR{other}.",
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
