"""The config of a running service: immutable, and replaced as a whole."""

from __future__ import annotations

from breakwater.config.models import Config
from breakwater.errors import ConfigError
from breakwater.policy.budget import Caps, CapTable


class LiveConfig:
    """The config that holds now."""

    def __init__(self, config: Config) -> None:
        self.now = config
        self._caps = config.caps

    def caps(self) -> CapTable:
        """The caps that hold now. An agent that is configured no more stays under its last one: its jobs may wait."""
        return self._caps

    def reload(self, config: Config) -> None:
        """Puts another config in force."""
        caps = config.caps
        self._caps = CapTable(caps.total, {**self._caps.agents, **caps.agents}, caps.tenants)
        self.now = config

    def keep(self, agent: str, caps: Caps) -> None:
        """Keeps an agent under a cap that is configured no more."""
        self._caps = CapTable(self._caps.total, {agent: caps, **self._caps.agents}, self._caps.tenants)


def require_reloadable(before: Config, after: Config) -> None:
    """Raises ConfigError where a running plane can't go over from one config to another."""
    if before.budgets.timezone != after.budgets.timezone:
        raise ConfigError(
            "budgets.timezone: the days and months of spend that is counted already would be others; stop all services "
            "before it is changed"
        )
    if before.encryption != after.encryption:
        raise ConfigError("encryption.keys: services read them when they start; restart them one by one instead")
