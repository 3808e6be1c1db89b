"""Errors of refused calls, worded the same in the API, the CLI, the console and alerts.

Each error has three texts. `message` is for programs: it names the rule that refused, without figures. `figures` is for
operators: what was needed, what remains of which limit, and what to do. `user_message` is for models and end users.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.kernel.formats import join_figures, sentence


def for_operators(error: ErrorInfo) -> str:
    """Returns the whole text of a refusal, with its figures and the next step."""
    return join_figures(error.message, error.figures)


def refusal(
    kind: ErrorKind,
    class_name: str,
    message: str,
    *,
    figures: str = "",
    to_do: str | None = None,
    retry_after_s: float | None = None,
    user_message: str | None = None,
) -> ErrorInfo:
    """Builds the error of a refusal."""
    for_people = [sentence(figures)] if figures else []
    if to_do is not None:
        for_people.append(f"To do: {to_do}.")
    return ErrorInfo(
        kind=kind,
        class_=class_name,
        message=message,
        figures=" ".join(for_people) or None,
        retry_after_s=retry_after_s,
        user_message=user_message,
    )


def command(group: str, action: str | None, *names: str, **options: str | None) -> str:
    """Returns a `breakwater` command for a text. `action` is None if the group itself is the command."""
    # Operators paste it into a shell, and programs choose names: names are quoted, and never read as options.
    flags = [f"--{option}={value}" for option, value in options.items() if value is not None]
    end = ["--"] if any(name.startswith("-") for name in names) else []
    return shlex.join(["breakwater", group, *([] if action is None else [action]), *flags, *end, *names])


def model_removed(model: str) -> ErrorInfo:
    """Returns the error of a job whose model was removed from the config while the job waited, or called it."""
    return refusal(
        "invalid",
        "ConfigChangedError",
        f"the model {model!r}, which this job waited for or called, was removed from its agent, and the config that it "
        "began with is not available any more",
        user_message="The model of this request was removed. Please send the request again.",
    )


def outside_region(model: str, residency: Iterable[str]) -> ErrorInfo:
    """Returns the error of a call that may not leave some regions, where its model has no deployment."""
    return refusal(
        "client",
        "ResidencyError",
        f"{model} has no deployment in {' and '.join(map(repr, residency))}, which calls of this job may not leave",
        to_do=f"set the `region` of a deployment under models.{model}.deployments, or name another model",
        user_message="This request may not leave its region, and the model is not there.",
    )
