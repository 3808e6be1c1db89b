"""What people do by hand: who asks, for what, and why. All of it goes on record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog
from starlette.requests import Request

from breakwater.bus.errors import BusError
from breakwater.contracts.api import OperatorRequest
from breakwater.contracts.types import Message
from breakwater.policy.redact import Redactor
from breakwater.state.connection import StateUnavailable
from services.request.auth import holder_of
from services.request.body import read_body
from services.request.parsing import read_command
from services.request.problems import Problem, unavailable

MAX_BYTES = 16_384

Form = TypeVar("Form", bound=Message)


@dataclass(frozen=True, slots=True)
class Asked(Generic[Form]):
    """What somebody wants to be done. `why` is without secrets, and empty where no reason was given."""

    form: Form
    by: str
    key_id: str
    why: str

    def reason(self, what: str) -> str:
        """`reset by ops: deployed a fix`."""
        return f"{what} by {self.by}: {self.why}" if self.why else f"{what} by {self.by}"

    def log(self, event: str, **told: object) -> None:
        """Puts on record what came of it."""
        structlog.get_logger().info(event, by=self.by, key_id=self.key_id, why=self.why or None, **told)


async def asked(request: Request, form: type[Form], redactor: Redactor) -> Asked[Form]:
    """Reads a request.

    Raises:
        Problem: its body is too large, or not of the form.
    """
    body = await read_body(request, MAX_BYTES, "a request like this may have at most {limit:,} bytes")
    read, holder = read_command(body, form), holder_of(request)
    reason = read.reason if isinstance(read, OperatorRequest) else None
    return Asked(read, holder.name, holder.id, redactor.text(reason or ""))


def not_read(error: BusError | StateUnavailable) -> Problem:
    """503: nothing is known, as Redis or NATS does not answer."""
    return unavailable("unavailable", f"how it stands can't be known now: {error}")


def not_done(error: BusError | StateUnavailable) -> Problem:
    """503: it was not done; or perhaps it was, and whoever asks again is told."""
    return unavailable("unavailable", f"this can't be done now: {error}; ask again")
