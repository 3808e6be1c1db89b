"""Settings from environment variables."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class EnvironmentSettings(BaseModel):
    """Settings whose fields are the variables of a prefix and their names, read when they are made.

    `pydantic-settings` would take 2 ms for it, as each service and command does at its start.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    PREFIX: ClassVar[str]

    def __init__(self, **values: Any) -> None:
        """Takes values that are not read. Raises ValidationError, whose locations are the fields."""
        variables = {field: os.environ.get(f"{self.PREFIX}{field.upper()}") for field in type(self).model_fields}
        super().__init__(**{field: text for field, text in variables.items() if text is not None} | values)
