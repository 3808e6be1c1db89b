"""Versions of Redis and Valkey with publicly known holes that a program with a connection can use."""

import re
from typing import Literal

RedisServer = Literal["redis", "valkey"]
Version = tuple[int, ...]

_FIXED: dict[str, dict[RedisServer, tuple[Version, ...]]] = {
    # Lua scripts that run code in the server.
    "CVE-2024-46981": {
        "redis": ((6, 2, 17), (7, 2, 7), (7, 4, 2)),
        "valkey": ((7, 2, 8), (8, 0, 2)),
    },
    # Clients that have not authenticated fill its memory.
    "CVE-2025-21605": {
        "redis": ((6, 2, 18), (7, 2, 8), (7, 4, 3)),
        "valkey": ((7, 2, 9), (8, 0, 3), (8, 1, 1)),
    },
    # Lua scripts that run code in the server.
    "CVE-2025-49844": {
        "redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
        "valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
    },
}
"""The first fixed release of each branch (`major.minor`); branches after the last were begun with the fix."""


def read_version(text: str) -> Version:
    """Reads the numbers that a text such as `7.4.6` or `9.0.0-rc3` begins with; empty if there are none."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def known_vulnerabilities(server: RedisServer, version: Version) -> tuple[str, ...]:
    """Lists the CVE ids of the known holes in a release, oldest first.

    Distributions fix holes without changing the version, so the result may be wrong for their builds.

    Args:
        server: the server that the version belongs to.
        version: the numbers of the version. An unknown version is empty, and counts as older than any.
    """
    known_holes: list[str] = []
    for cve, releases in _FIXED.items():
        branches = {release[:2]: release for release in releases[server]}
        if version < branches.get(version[:2], version) or (
            version[:2] not in branches and version[:2] <= max(branches)
        ):
            known_holes.append(cve)
    return tuple(known_holes)
