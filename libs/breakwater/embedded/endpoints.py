"""Where the parts of a running local stack can be reached."""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer

from breakwater.contracts.types import format_time

_CREDENTIALS = re.compile(r"(?<=//)([^/@:]*):[^/@]*(?=@)")


def mask_url(url: str) -> str:
    """Give a URL as it may be shown: `nats://user:***@host:port`."""
    return _CREDENTIALS.sub(r"\1:***", url)


class Endpoints(BaseModel):
    """The addresses of one stack; with its URL alone, any client of that protocol works.

    Attributes:
        request_url: The HTTP API.
        console_url: The console.
        nats_url: NATS, user and password included.
        redis_url: Redis, password included.
        clickhouse_url: ClickHouse's HTTP protocol, as `reader`, who only reads; password included.
        api_key_file: The file with a key for the HTTP API.
        config_file: The config, as it is edited; the services read a copy of it.
        data_dir: The stack's data directory.
        simulated_provider_url: The provider that takes the place of all others; None where real ones are called.
        metrics: What Prometheus scrapes, by process.
        pid: The process that runs it.
        started_at: When it was started; RFC 3339 UTC with milliseconds in JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_url: str
    console_url: str
    nats_url: str
    redis_url: str
    clickhouse_url: str
    api_key_file: Path
    config_file: Path
    data_dir: Path
    simulated_provider_url: str | None = None
    metrics: dict[str, str] = Field(default_factory=dict[str, str])
    pid: int
    started_at: Annotated[AwareDatetime, PlainSerializer(format_time, when_used="json")]

    def __repr_args__(self) -> Generator[tuple[str | None, Any]]:
        """Mask passwords: this is what repr() and str() show, so what ends up in logs and tracebacks."""
        for name, value in super().__repr_args__():
            yield name, mask_url(value) if isinstance(value, str) else value
