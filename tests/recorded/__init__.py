"""Requests of unmodified programs, as recorded: long texts and lists of tools cut, ids and paths replaced."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request.

    Attributes:
        name: of the recording.
        program: the npm package that sent it.
        version: of the program.
        path: below the root, with the query.
        headers: without credentials.
        body: of the request.
    """

    name: str
    program: str
    version: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def recorded(prefix: str = "/v1/") -> list[Recorded]:
    """The requests to the paths that begin with the prefix."""
    found = [Recorded(file.stem, **json.loads(file.read_text())) for file in sorted(HERE.glob("*.json"))]
    return [one for one in found if one.path.startswith(prefix)]
