"""Python callables that the config names as `module:name`: agents and alert channels."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any

from breakwater.kernel.errors import ConfigError


def load_callable(name: str) -> Any:
    """Imports the object named by `module:name`; either part may have dots.

    Raises:
        ConfigError: the module can't be imported, has no such name, or the object can't be called.
    """
    module_name, _, path = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module is the operator's own, and may raise anything
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the callable {name!r}: the module {module_name} can't be imported: {problem}") from error
    try:
        loaded: Any = attrgetter(path)(module)
    except AttributeError as error:
        raise ConfigError(f"the callable {name!r}: the module {module_name} has no {path}") from error
    if not callable(loaded):
        raise ConfigError(f"{name!r} is {type(loaded).__name__}, which is not callable")
    return loaded
