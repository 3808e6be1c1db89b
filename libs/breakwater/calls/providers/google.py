"""Tokens of Google Cloud."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC
from functools import partial
from typing import Any

import orjson

from breakwater.calls.providers.credentials import Issued, renewal_time, sendable
from breakwater.calls.providers.extras import in_one_line, load_optional
from breakwater.jobs.rules.chat_messages import fields
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import SecretRef

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TIMEOUT_S = 10.0
"""The time limit of each request for a token."""
_LOOKED = (
    "looked at the file that GOOGLE_APPLICATION_CREDENTIALS names, at gcloud's application_default_credentials.json "
    "and for a metadata server"
)
_HIDDEN = ("private_key", "client_secret", "refresh_token")
"""Fields of a credential file that no error may contain."""


@dataclass(frozen=True, slots=True)
class GoogleSource:
    """A token of Google Cloud.

    Attributes:
        key: a credential file's content: a service account's key, a workload identity federation, or a user's;
            None for the application default credentials.

    Raises:
        ConfigError: google-auth is not installed.
    """

    key: SecretRef | None = None
    _auth: Any = field(init=False, repr=False, compare=False)
    _request: Callable[[], Any] = field(init=False, repr=False, compare=False)
    _failures: tuple[type[Exception], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        auth, exceptions, transport = load_optional(
            "gcp", "google.auth", "google.auth.exceptions", "google.auth.transport.requests"
        )
        object.__setattr__(self, "_auth", auth)
        object.__setattr__(self, "_request", lambda: partial(transport.Request(), timeout=TIMEOUT_S))
        object.__setattr__(self, "_failures", (exceptions.GoogleAuthError, ValueError, OSError))

    def __str__(self) -> str:
        return f"Google Cloud ({'application default credentials' if self.key is None else 'a credential file'})"

    def fetch(self) -> Issued[str]:
        """Fetches a new token: google-auth's credentials, which would keep the one before, are loaded anew.

        Raises:
            ConfigError: there is none.
        """
        content = None if self.key is None else self.key.read()
        hidden: list[str] = []
        request = self._request()
        try:
            if content is None:
                credentials, _ = self._auth.default(scopes=[SCOPE])
            else:
                info = fields(orjson.loads(content))
                hidden = [info[name] for name in _HIDDEN if isinstance(info.get(name), str) and info[name]]
                credentials, _ = self._auth.load_credentials_from_dict(info, scopes=[SCOPE])
            credentials.refresh(request)
        except self._failures as error:
            text = "the credential is not JSON" if isinstance(error, orjson.JSONDecodeError) else in_one_line(error)
            for secret in hidden:
                text = text.replace(secret, "***")
            looked = f"; {_LOOKED}" if content is None else ""
            raise ConfigError(f"{self} gives no token: {text}{looked}") from None
        value = sendable(str(credentials.token), self)
        if credentials.expiry is None:
            return Issued(value, (value, *hidden))
        ends_at = credentials.expiry.replace(tzinfo=UTC).timestamp()
        return Issued(value, (value, *hidden), renewal_time(ends_at, time.time()), ends_at)
