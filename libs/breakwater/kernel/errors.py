"""The root of all exceptions, and those that more than one room raises.

BreakwaterError
├── ConfigError                     the config file, the environment or a secret is wrong
└── UnavailableError                a server does not answer
    ├── BusUnavailableError         NATS; in kernel/nats/errors.py
    ├── StateUnavailableError       Redis; in kernel/redis/connection.py
    └── AnalyticsUnavailableError   ClickHouse; in kernel/clickhouse/errors.py
"""

from __future__ import annotations

from typing import ClassVar


class BreakwaterError(Exception):
    """Root of every exception that Breakwater raises itself."""

    command_code: ClassVar[str | None] = None
    """The code with which the error ends a command, for programs; None if it is not for the user of a command."""


class ConfigError(BreakwaterError):
    """The config file, the environment or a secret has an error. The message says what, where and what to do."""

    command_code = "config"


class UnavailableError(BreakwaterError):
    """A server does not answer, or can't serve now: the same call may work later, and may have been carried out."""

    server: ClassVar[str]
    """The server's name in the log and in metrics."""
    remedy: str | None = None
    """The advice on what to do, if the server said why it can't serve."""
