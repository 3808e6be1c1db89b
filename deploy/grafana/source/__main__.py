"""Writes the dashboards: `python -m deploy.grafana.source`."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.source import agent, overview, reliability, spend

DIRECTORY = Path(__file__).parent.parent / "dashboards"
DASHBOARDS = (overview.DASHBOARD, spend.DASHBOARD, reliability.DASHBOARD, agent.DASHBOARD)


def files() -> dict[str, str]:
    """What each file in `DIRECTORY` holds, by its name."""
    return {f"{one.name}.json": json.dumps(one.json(), indent=2, ensure_ascii=False) + "\n" for one in DASHBOARDS}


if __name__ == "__main__":
    for name, text in files().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
