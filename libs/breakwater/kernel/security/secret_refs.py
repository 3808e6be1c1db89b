"""References to secrets. The config itself never contains a secret."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from breakwater.kernel.errors import ConfigError
from breakwater.kernel.types import Message

ENV_FILE = "BREAKWATER_ENV_FILE"
"""The variable that names a file of `NAME=value` lines, which precede the environment. Changes count at once."""

_SETTLED_S = 2.0
"""The age from which a file is known by its time: of one that has just been written, a further change may not show."""

COMMAND_TIMEOUT_S = 10.0
_CREDENTIALS = re.compile(r"(?<=//)([^/@:]*:)[^/?#]*(?=@)|([?&]sentinel_password=)[^&]*")

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class SecretRef(Message):
    """The source of a secret: an environment variable, a file, or the output of a command."""

    env: str | None = Field(default=None, min_length=1, description="Name of an environment variable.")
    file: Path | None = Field(default=None, description="A file that contains only the secret.")
    command: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="A program with its arguments, run without a shell; its output."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.env, self.file, self.command)) != 1:
            raise ValueError("give exactly one of env, file and command")
        return self

    def read(self) -> str:
        """Reads the secret, again at each call. A command may take up to 10 s.

        Raises:
            ConfigError: the variable is not set, the file can't be read, the command fails, or the secret is empty.
        """
        if self.env is not None:
            value = variable(self.env)
            source = f"the environment variable {self.env}"
            if not value:
                raise ConfigError(f"{source} is not set; it must hold a secret")
            return value
        if self.file is not None:
            value = _read_file(self.file)
            source = f"the secret file {self.file}"
        else:
            assert self.command is not None
            value = _run(self.command)
            source = f"the output of the secret command {self.command[0]}"
        if not value:
            raise ConfigError(f"{source} is empty")
        return value


def variable(name: str) -> str:
    """Returns an environment variable, or its value in the file of `ENV_FILE`; empty if it is not set.

    Raises:
        ConfigError: the file can't be read.
    """
    file = os.environ.get(ENV_FILE)
    if not file:
        return os.environ.get(name, "")
    try:
        values = _ENV_FILE_READER.values(file)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the file {file}, which {ENV_FILE} names, can't be read: {why}") from error
    return values.get(name) or os.environ.get(name, "")


class _EnvFileReader:
    """Reads the file of `ENV_FILE`, and parses it again only after a change: programs read it at each start."""

    def __init__(self) -> None:
        self._parsed: tuple[object, Mapping[str, str | None]] | None = None
        """The version of the file and its values, in one field because threads share it."""

    def values(self, file: str) -> Mapping[str, str | None]:
        """Returns the values by name. Raises OSError, UnicodeDecodeError."""
        with Path(file).open(encoding="utf-8") as lines:
            status = os.fstat(lines.fileno())
            version = file, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
            parsed = self._parsed
            if parsed is not None and parsed[0] == version:
                return parsed[1]
            from dotenv import dotenv_values  # few planes have such a file

            values = dotenv_values(stream=lines, interpolate=False)
        is_settled = time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED_S
        self._parsed = (version, values) if is_settled and stat.S_ISREG(status.st_mode) else None
        return values


_ENV_FILE_READER = _EnvFileReader()


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the secret file {path} can't be read: {why}") from error


def _run(command: tuple[str, ...]) -> str:
    # Neither its output nor its complaints are shown: either may hold the secret.
    try:
        completed = subprocess.run(  # noqa: S603  the command is the operator's own, from the config
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the secret command {command[0]} took over {COMMAND_TIMEOUT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"the secret command {command[0]} ended with {error.returncode}") from error
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "its output is not UTF-8 text"
        raise ConfigError(f"the secret command {command[0]} can't be used: {problem}") from error
    return completed.stdout.strip()


def _secret_ref(value: object) -> object:
    if isinstance(value, str):
        raise ValueError(  # noqa: TRY004  pydantic reports ValueError
            "a secret does not belong in the config; write {env: NAME}, {file: PATH} or {command: [PROGRAM, …]}"
        )
    return value


Secret = Annotated[SecretRef, BeforeValidator(_secret_ref)]


def mask_url(url: str) -> str:
    """Returns a URL as it may be shown: `nats://user:***@host:port`."""
    return _CREDENTIALS.sub(r"\1\2***", url)
