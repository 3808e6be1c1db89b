"""Packages that only some providers need, and that come with an extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from breakwater.kernel.errors import ConfigError


def load_optional(extra: str, *modules: str) -> list[Any]:
    """Imports modules of an extra.

    Args:
        extra: the extra that installs them.
        modules: their names.

    Raises:
        ConfigError: one is not installed; the message has the command that installs it.
    """
    try:
        return [import_module(module) for module in modules]
    except ModuleNotFoundError as error:
        command = f"pip install 'breakwater-plane[{extra}]'"
        raise ConfigError(f"the package {error.name} is not installed; install it with: {command}") from error


def in_one_line(error: BaseException, longest: int = 1_000) -> str:
    """Returns what a library says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else f"{text[:longest]}…"
