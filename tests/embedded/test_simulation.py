"""What a simulated provider is given when the config is looked at again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from breakwater.config import ConfigError
from breakwater.embedded.datadir import DataDir
from breakwater.embedded.provider.app import SimulatedProvider
from breakwater.embedded.simulation import simulated

CONFIG = {
    "providers": {"openai": {"base_url": "http://127.0.0.1:9/v1"}},
    "models": {"one": {"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}}},
    "agents": {"writer": {"model": "one"}},
}


async def test_a_config_that_has_not_changed_leaves_the_provider_its_script(tmp_path: Path) -> None:
    data, file = DataDir(tmp_path / "data"), tmp_path / "breakwater.yaml"
    data.create()
    file.write_text(yaml.safe_dump(CONFIG))
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "1"}
    async with SimulatedProvider({"models": {"of-the-person": {"price": price}}}) as sim:
        simulation = simulated(data, file, port=sim.port)
        assert (await simulation.follow(file)).name == "breakwater.simulated.yaml"
        assert sim.models == ["of-the-person"]
        file.write_text(yaml.safe_dump(CONFIG).replace("one", "two"))
        await simulation.follow(file)
        assert sim.models == ["two"]
    # What the provider could not be given, it is given at the next look.
    file.write_text(yaml.safe_dump(CONFIG))
    for _ in range(2):
        with pytest.raises(ConfigError, match="refuses the models"):
            await simulation.follow(file)
