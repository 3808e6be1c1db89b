"""The section `encryption` of the config."""

from __future__ import annotations

from pydantic import Field

from breakwater.kernel.security.secret_refs import Secret
from breakwater.kernel.types import Message


class Encryption(Message):
    """Encryption of stored prompts, answers and dead letters. Off without keys."""

    keys: tuple[Secret, ...] = Field(
        default=(),
        description=(
            "The first key encrypts, all decrypt. `breakwater encryption new-key` creates one. "
            "Services read the keys at their start."
        ),
    )
