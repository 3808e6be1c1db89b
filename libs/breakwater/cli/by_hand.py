"""What people do by hand: asked of the HTTP interface, which tells what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from breakwater.cli.connect import run
from breakwater.cli.given import sendable
from breakwater.cli.plane import Door

Changed = TypeVar("Changed")
AsItIs = TypeVar("AsItIs")


def act(door: Door, path: str, body: Mapping[str, Any], *, see: str, unknown: str) -> Any:
    """Has the interface do something, and returns its answer as JSON.

    Args:
        door: the interface.
        path: below `api/v1`.
        body: its fields; those that are None are not sent.
        see: the command that tells whether it is done, where no answer came.
        unknown: what to do where the body names something that is not there.

    Raises:
        CliError: it is not done, or whether it is can't be told.
    """
    from breakwater.cli import api

    for name, value in body.items():
        sendable(name, value)
    unanswered = f"`{see}` tells whether it is done; to do it again does no harm."
    return run(api.post(door, path, body, unanswered=unanswered, unknown=unknown))


def is_unchanged(document: Any) -> bool:
    """Whether there was nothing to do."""
    from breakwater.cli import api

    return bool(api.read(dict[str, Any], document).get("unchanged"))


def told(document: Any, changed: type[Changed], as_it_is: type[AsItIs]) -> Changed | AsItIs:
    """What was changed; or where there was nothing to do, how it is."""
    from breakwater.cli import api

    return api.read(as_it_is, document) if is_unchanged(document) else api.read(changed, document)
