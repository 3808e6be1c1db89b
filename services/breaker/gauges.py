"""What Prometheus is shown of breakers: by agent and model, as far as the config names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from breakwater.config import Config, breakers_of
from breakwater.contracts.events import BreakerState
from breakwater.metrics import BREAKER_STATE, OTHER, Readings, one_of
from breakwater.policy.breaker import ALL, BreakerKey
from breakwater.state.breakers import Breakers

_WORST: tuple[BreakerState, ...] = ("isolated", "open", "half_open", "closed")


class BreakerGauges:
    """Reads them.

    Args:
        config: the one that holds.
        breakers: those of the fleet.
    """

    def __init__(self, config: Callable[[], Config], breakers: Breakers) -> None:
        self._config, self._breakers = config, breakers

    async def read(self) -> Readings:
        """The state of each. Raises StateUnavailable."""
        known: dict[BreakerKey, BreakerState] = {
            key: loaded.breaker.state for key, loaded in await self._breakers.all()
        }
        states: dict[tuple[str, ...], float] = {}
        for labels, state in shown(self._config(), known).items():
            states |= one_of(state, get_args(BreakerState), *labels)
        return {BREAKER_STATE: states}


def shown(config: Config, known: Mapping[BreakerKey, BreakerState]) -> dict[tuple[str, str], BreakerState]:
    """The state of each breaker by its labels: of those that share them, the worst; one that was never used is closed.

    Args:
        config: whose breakers; those of agents that it does not have are left out.
        known: what Redis has.
    """
    found: dict[tuple[str, str], BreakerState] = {labels_of(config, key): "closed" for key in breakers_of(config)}
    for key, state in known.items():
        if key.agent in config.agents or key.agent == ALL:
            labels = labels_of(config, key)
            if labels not in found or _WORST.index(state) < _WORST.index(found[labels]):
                found[labels] = state
    return found


def labels_of(config: Config, key: BreakerKey) -> tuple[str, str]:
    """A breaker's agent and model; a model that the config does not name is `other`, as jobs may ask for any."""
    provider = key.model.removesuffix(f"/{ALL}")
    named = key.model in config.known_models or (key.agent == ALL and provider in config.providers)
    return key.agent, key.model if named else OTHER
