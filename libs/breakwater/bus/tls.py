"""How connections to NATS are encrypted."""

from __future__ import annotations

import ssl
from typing import TypedDict

from breakwater.tls import client_context, tls_settings


class TlsOptions(TypedDict):
    """Keyword arguments of `nats.connect`."""

    tls: ssl.SSLContext | None
    tls_handshake_first: bool


def tls_options(url: str) -> TlsOptions:
    """For a server's URL.

    With `tls://`, TLS comes before the server's first word (its `handshake_first: true`). With `nats://`, a server that
    asks for TLS gets it; but whoever sits in between could say that it doesn't, and would be sent the password.

    Raises:
        ConfigError: a file of `BREAKWATER_TLS_*` can't be used.
    """
    settings, encrypted = tls_settings(), url.startswith("tls:")
    # With neither, nats-py makes such a context only if the server asks for TLS.
    context = client_context(settings) if encrypted or settings.model_fields_set else None
    return {"tls": context, "tls_handshake_first": encrypted}
