"""Says what is wrong with a message: the path of each field, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    path: str
    message: str


def problems(error: ValidationError, model: type[BaseModel] | None = None) -> list[Problem]:
    """Every problem of a validation, without the values that were given, which may be secret.

    Args:
        error: what pydantic found.
        model: the message's model, to suggest the field that was meant.
    """
    known = list(model.model_fields) if model is not None else []
    return [_problem(detail, known) for detail in error.errors(include_url=False, include_input=False)]


def explain(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All problems in one line."""
    found = problems(error, model)
    return "; ".join(f"{problem.path}: {problem.message}" if problem.path else problem.message for problem in found)


def _problem(detail: Any, known: Iterable[str]) -> Problem:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path, list(known), n=1) if len(detail["loc"]) == 1 else []
        return Problem(path, f"is not a field here; did you mean {close[0]!r}?" if close else "is not a field here")
    if detail["type"] == "missing":
        return Problem(path, "is missing")
    message = str(detail["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be"):
        message = "should be" + message.removeprefix("Input should be")
    return Problem(path, message)
