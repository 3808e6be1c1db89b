"""Settings of a process, read from `BREAKWATER_*` environment variables on demand."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from breakwater.kernel.process.environment import EnvironmentSettings


class Settings(EnvironmentSettings):
    """The environment of one process. Every field is the variable `BREAKWATER_<NAME>`."""

    PREFIX = "BREAKWATER_"

    config: Path = Field(default=Path("breakwater.yaml"), description="The config file.")
    follow_config: bool = Field(
        default=False, description="Reload the config file whenever it changes, as SIGHUP does."
    )
    last_good_config: Path | None = Field(
        default=None,
        description="Copy of the last good config, used at a start with a broken config file. One per "
        "process, writable only by it.",
    )
    nats_url: SecretStr = Field(
        default=SecretStr("nats://127.0.0.1:4222"), description="May contain user and password."
    )
    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"), description="May contain the password, or name Sentinels."
    )
    clickhouse_url: SecretStr = Field(
        default=SecretStr("http://127.0.0.1:8123/breakwater"), description="May contain user, password and database."
    )
    clickhouse_analyst_url: SecretStr | None = Field(
        default=None,
        description="The same as a user that only reads: for `POST /api/v1/query` of `request`.",
    )
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8080, ge=1, le=65_535)
    console_host: str = "127.0.0.1"
    console_port: int = Field(default=8081, ge=1, le=65_535, description="URL of the console.")
    request_url: str = Field(
        default="http://127.0.0.1:8080",
        description="URL of the HTTP API, as the console reaches it.",
    )
    api_keys_file: Path = Field(default=Path("api_keys.json"), description="File with the hashes of the API keys.")
    nats_replicas: int = Field(
        default=1, ge=1, le=5, description="Copies of each stream; 3 on a cluster of three servers."
    )
    pace: float = Field(default=1.0, gt=0, exclude=True)
    """For tests (see `kernel.process.pace`): at a quicker pace, a process that is merely busy may be taken for dead."""
    log_level: str = "info"
    log_json: bool | None = Field(
        default=None, description="JSON lines, or text for people; default: text on a terminal, JSON otherwise."
    )
    plane_key: SecretStr | None = Field(
        default=None,
        min_length=32,
        description="Shared by the worker and `request`: encrypts texts in dead letters and results of "
        "agents that keep no texts, if the config has no `encryption.keys`.",
    )
    backup_key: SecretStr | None = Field(
        default=None,
        description="Key of `breakwater encryption new-key`, with which `breakwater backup` encrypts. Keep it apart.",
    )
    alive_file: Path | None = Field(
        default=None,
        description="File that is touched about every 5 s while the service is connected and its event loop runs.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address that metrics are served on.")
    metrics_port: int | None = Field(
        default=None, ge=1, le=65_535, description="Port that metrics are served on; default: not served."
    )
    metrics_token: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Token that scrapers send as `Authorization: Bearer`; default: no token needed.",
    )
