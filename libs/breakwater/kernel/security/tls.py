"""TLS to NATS, Redis and ClickHouse, with the certificates that `BREAKWATER_TLS_*` names, read on demand."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Protocol

from pydantic import Field

from breakwater.kernel.errors import ConfigError
from breakwater.kernel.process.environment import EnvironmentSettings


class CertificateFiles(Protocol):
    """PEM files of a connection: trusted authorities, our certificate, and its key if that is in another file."""

    @property
    def ca(self) -> Path | None: ...  # noqa: D102
    @property
    def cert(self) -> Path | None: ...  # noqa: D102
    @property
    def key(self) -> Path | None: ...  # noqa: D102


class TlsSettings(EnvironmentSettings):
    """The TLS settings. Every field is the variable `BREAKWATER_TLS_<NAME>`; all files are PEM."""

    PREFIX = "BREAKWATER_TLS_"

    ca: Path | None = Field(default=None, description="File of CA certificates to trust in addition to the system's.")
    cert: Path | None = Field(default=None, description="Client certificate, for servers that ask for one.")
    key: Path | None = Field(default=None, description="Private key of the certificate, if it is in a separate file.")


def tls_settings() -> TlsSettings:
    """Returns the settings, after checking that their files are usable. Raises ConfigError."""
    settings = TlsSettings()
    if settings.model_fields_set:
        client_context(settings)
    return settings


def client_context(files: CertificateFiles, prefix: str = "BREAKWATER_TLS_") -> ssl.SSLContext:
    """Returns a client context with the trusted authorities and our certificate. It takes 25 ms.

    Args:
        files: the files, each of which may be missing.
        prefix: the beginning of the settings' names, for errors.

    Raises:
        ConfigError: a file is not usable.
    """
    context = ssl.create_default_context()
    if files.key is not None and files.cert is None:
        key = _name(prefix, "key")
        raise ConfigError(f"{key} is set without {_name(prefix, 'cert')}: name the key's certificate there")
    if files.ca is not None:
        try:
            context.load_verify_locations(files.ca)
        except OSError as error:
            raise _unusable(_name(prefix, "ca"), files.ca, error) from error
    load_certificate(context, files, prefix)
    return context


def load_certificate(context: ssl.SSLContext, files: CertificateFiles, prefix: str = "BREAKWATER_TLS_") -> None:
    """Adds our certificate, if there is one, to a context; it replaces an earlier one. Raises ConfigError."""
    if files.cert is None:
        return
    # Without a password, OpenSSL would ask for one on the terminal.
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
    except OSError as error:
        names = ("cert",) if files.key is None else ("cert", "key")
        raise _unusable(" and ".join(_name(prefix, name) for name in names), files.cert, error) from error


def _name(prefix: str, field: str) -> str:
    return f"{prefix}{field.upper() if prefix.isupper() else field}"


def _unusable(variables: str, file: Path, error: OSError) -> ConfigError:
    # SSLError is an OSError, too: its text names neither the file nor what it should be.
    why = "not a valid PEM file" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        why = "the key does not match the certificate"
    return ConfigError(f"{variables}: {file}: {why}")
