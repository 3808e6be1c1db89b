"""Errors that more than one room raises.

ConfigError     a person has set something up wrongly
Unavailable     a server does not answer
├── BusUnavailable          NATS; in bus/errors.py
├── StateUnavailable        Redis; in state/connection.py
└── AnalyticsUnavailable    ClickHouse; in analytics/errors.py
"""

from __future__ import annotations

from typing import ClassVar


class ConfigError(Exception):
    """Something in the config file, the environment or a secret can't be used. Says what, where and what to do."""


class Unavailable(Exception):  # noqa: N818  a state of the world, named as people say it
    """A server does not answer, or can't serve now: the same call may work later, and may have been carried out."""

    server: ClassVar[str]
    """The server's name in the log and in metrics."""
