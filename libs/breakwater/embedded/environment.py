"""Which environment variables the processes of a stack get: those they need, and no secrets of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_ALL = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "LD_LIBRARY_PATH"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", *_PROXIES, *(name.lower() for name in _PROXIES)}
)
_ALL_BEGIN = ("LC_", "PYTHON")
_SERVICES = frozenset({"BREAKWATER_LOG_LEVEL", "BREAKWATER_LOG_JSON", "BREAKWATER_METRICS_TOKEN"})
_SERVICES_BEGIN = ("BREAKWATER_TLS_", "OTEL_", "PROMETHEUS_")


def for_program(environment: Mapping[str, str]) -> dict[str, str]:
    """What any program may need: where programs and files are, language, time zone, proxies, Python's settings."""
    return {name: value for name, value in environment.items() if name in _ALL or name.startswith(_ALL_BEGIN)}


def for_service(environment: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """What a service gets: what its own part of the config names, and settings of logs, traces and metrics."""
    named = _SERVICES.union(named)
    return {
        name: value for name, value in environment.items() if name in named or name.startswith(_SERVICES_BEGIN)
    } | for_program(environment)
