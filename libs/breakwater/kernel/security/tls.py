"""TLS to NATS, Redis and ClickHouse, with the certificates that `BREAKWATER_TLS_*` names, read on demand."""

from __future__ import annotations

import ssl
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from breakwater.kernel.errors import ConfigError


class TlsSettings(BaseSettings):
    """The TLS settings. Every field is the variable `BREAKWATER_TLS_<NAME>`; all files are PEM."""

    model_config = SettingsConfigDict(env_prefix="BREAKWATER_TLS_", frozen=True, extra="ignore")

    ca: Path | None = Field(default=None, description="File of CA certificates to trust in addition to the system's.")
    cert: Path | None = Field(default=None, description="Client certificate, for servers that ask for one.")
    key: Path | None = Field(default=None, description="Private key of the certificate, if it is in a separate file.")


def tls_settings() -> TlsSettings:
    """Returns the settings, after checking that their files are usable. Raises ConfigError."""
    settings = TlsSettings()
    if settings.model_fields_set:
        client_context(settings)
    return settings


def client_context(settings: TlsSettings) -> ssl.SSLContext:
    """Returns a client context with the trusted authorities and our certificate. It takes 25 ms. Raises ConfigError."""
    context = ssl.create_default_context()
    if settings.key is not None and settings.cert is None:
        raise ConfigError("BREAKWATER_TLS_KEY is set without BREAKWATER_TLS_CERT: name the key's certificate there")
    if settings.ca is not None:
        try:
            context.load_verify_locations(settings.ca)
        except OSError as error:
            raise _unusable("BREAKWATER_TLS_CA", settings.ca, error) from error
    if settings.cert is not None:
        # Without a password, OpenSSL would ask for one on the terminal.
        try:
            context.load_cert_chain(settings.cert, settings.key, password=lambda: b"")
        except OSError as error:
            names = "BREAKWATER_TLS_CERT" if settings.key is None else "BREAKWATER_TLS_CERT and BREAKWATER_TLS_KEY"
            raise _unusable(names, settings.cert, error) from error
    return context


def _unusable(variables: str, file: Path, error: OSError) -> ConfigError:
    # SSLError is an OSError, too: its text names neither the file nor what it should be.
    why = "not a valid PEM file" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        why = "the key does not match the certificate"
    return ConfigError(f"{variables}: {file}: {why}")
