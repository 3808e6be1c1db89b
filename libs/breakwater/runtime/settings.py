"""Settings of a process, read from `BREAKWATER_*` environment variables on demand."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The environment of one process. Every field is the variable `BREAKWATER_<NAME>`."""

    model_config = SettingsConfigDict(env_prefix="BREAKWATER_", frozen=True, extra="ignore", hide_input_in_errors=True)

    config: Path = Field(default=Path("breakwater.yaml"), description="The config file.")
    last_good_config: Path | None = Field(
        default=None,
        description="A copy of the effective config, to start with if the config file is wrong. "
        "One for each process, writable by it alone.",
    )
    nats_url: SecretStr = Field(default=SecretStr("nats://127.0.0.1:4222"), description="May hold user and password.")
    redis_url: SecretStr = Field(default=SecretStr("redis://127.0.0.1:6379/0"), description="May hold the password.")
    clickhouse_url: SecretStr = Field(
        default=SecretStr("http://127.0.0.1:8123/breakwater"), description="May hold user, password and the database."
    )
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8080, ge=1, le=65_535)
    console_host: str = "127.0.0.1"
    console_port: int = Field(default=8081, ge=1, le=65_535, description="Where the console's pages are served.")
    request_url: str = Field(
        default="http://127.0.0.1:8080",
        description="The HTTP interface, as the console reaches it.",
    )
    api_keys_file: Path = Field(default=Path("api_keys.json"), description="Hashes of the keys that may call the API.")
    nats_replicas: int = Field(default=1, ge=1, le=5, description="Copies of every stream; 3 on a cluster of three.")
    log_level: str = "info"
    log_json: bool | None = Field(default=None, description="JSON lines, or for people. None: JSON but on a terminal.")
    plane_key: SecretStr | None = Field(
        default=None,
        min_length=32,
        description="Of the worker and `request` alike: what the texts of agents that keep none are encrypted with in "
        "dead letters and results, where the config has no `encryption.keys`.",
    )
    alive_file: Path | None = Field(
        default=None, description="Touched about every 5 s while the service is connected and its event loop turns."
    )
    metrics_host: str = Field(default="127.0.0.1", description="The address that metrics are served on.")
    metrics_port: int | None = Field(
        default=None, ge=1, le=65_535, description="On which port; none are served by default."
    )
    metrics_token: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Token that scrapers send as `Authorization: Bearer`. None: scraping needs no token.",
    )
