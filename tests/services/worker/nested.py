"""A callable and a program whose answers are nested as deep as they are asked for."""

from __future__ import annotations

import json
import sys
from typing import Any


def nested(shape: str, depth: int) -> Any:
    """Lists, objects, or both in turn."""
    found: Any = 1
    for level in range(depth):
        found = [found] if shape == "lists" or (shape == "both" and level % 2) else {"a": found}
    return found


async def answer(request: dict[str, Any]) -> Any:
    """A callable."""
    return nested(**request["input"])


if __name__ == "__main__":
    asked = nested(**json.load(sys.stdin)["input"])
    print(json.dumps({"status": "success", "code": 0, "result": asked, "cost_usd": "0.5"}))
