"""The environment of programs that a service starts, which others can read."""

from __future__ import annotations

from collections.abc import Mapping

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_OF_PROGRAMS = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "LD_LIBRARY_PATH"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", *_PROXIES, *(name.lower() for name in _PROXIES)}
)


def for_program(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that any program may need; no secret is among them."""
    prefixes = ("LC_", "PYTHON")
    return {name: value for name, value in environment.items() if name in _OF_PROGRAMS or name.startswith(prefixes)}
