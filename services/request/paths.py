"""Paths of requests: which of them ask for a job's progress, although a job's id may hold slashes."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.routing import Match, Route
from starlette.types import Scope

PROGRESS = "/progress"


def as_routed(scope: Scope) -> str:
    """The path, decoded, but for a slash of the last name where it came encoded and the path seems to end in progress.

    `/api/v1/jobs/a/progress` asks for the progress of `a`, and `/api/v1/jobs/a%2Fprogress` for the job `a/progress`.
    What servers pass on as the path is the same for both.
    """
    path: str = scope["path"]
    if not path.endswith(PROGRESS) or (raw := scope.get("raw_path")) is None:
        return path
    name = unquote(raw.decode("latin-1").rpartition("/")[2])
    return path if "/" not in name else path.removesuffix(name) + name.replace("/", "%2F")


class ProgressRoute(Route):
    """A route that ends in `/progress`, and takes only what asks for progress."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether a request is for this route."""
        if scope["type"] == "http" and not as_routed(scope).endswith(PROGRESS):
            return Match.NONE, {}
        return super().matches(scope)
