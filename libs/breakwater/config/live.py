"""The caps as the config file has them now: an edit holds a moment later, without a restart.

Caps are the one setting that people change in a hurry. Everything else in the file is read once, at the start.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from breakwater.config.load import load_config
from breakwater.config.models import Config
from breakwater.errors import ConfigError
from breakwater.policy.budget import CapTable

LOOK_EVERY_S = 1.0


class LiveCaps:
    """The caps that hold now. Called, it gives them."""

    def __init__(self, config: Config, path: Path | None = None) -> None:
        """Takes the config that was read, and where from."""
        self._config = config
        self._table = config.caps
        self._path = path
        self._seen: tuple[int, int, int] | None = None  # it may have been edited since it was read
        self._changed: tuple[int, int, int] | None = None

    def __call__(self) -> CapTable:
        """The caps that hold now."""
        return self._table

    async def run(self) -> None:
        """Looks at the file every second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Takes the caps over if the file has changed. One that can't be read or is wrong changes nothing."""
        stamp = self._stamp()
        if stamp == self._seen or stamp is None or self._path is None:
            return
        if stamp != self._changed:
            # Taken over when it is the same at the next look: half of a file may be a valid one.
            self._changed = stamp
            return
        log = structlog.get_logger()
        try:
            changed = load_config(self._path)
        except ConfigError as error:
            self._seen = stamp
            log.warning("config_not_taken_over", error=str(error), effect="the caps stay as they were")
            return
        if self._stamp() != stamp:
            return
        self._seen = stamp
        if changed.budgets.timezone != self._config.budgets.timezone:
            log.warning("config_not_taken_over", error="budgets.timezone has changed", remedy="restart the services")
            return
        # An agent that is gone from the file is served until the restart, and under its cap.
        caps = changed.caps
        caps = CapTable(caps.total, {**self._table.agents, **caps.agents}, caps.tenants)
        if caps != self._table:
            self._table = caps
            log.info("caps_changed", file=str(self._path))
        agents = {name: agent.model_copy(update={"budget": None}) for name, agent in changed.agents.items()}
        known = {name: agent.model_copy(update={"budget": None}) for name, agent in self._config.agents.items()}
        rest = {"agents": agents, "budgets": None}
        if changed.model_copy(update=rest) != self._config.model_copy(update={"agents": known, "budgets": None}):
            log.warning("config_changed", effect="only caps are taken over", remedy="restart the services for the rest")

    def _stamp(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None  # being replaced, or gone: what was read holds
        return found.st_mtime_ns, found.st_size, found.st_ino
