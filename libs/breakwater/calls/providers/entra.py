"""Tokens of Microsoft Entra ID, for Azure's resources."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from breakwater.calls.providers.credentials import Issued, renewal_time, sendable
from breakwater.calls.providers.extras import in_one_line, load_optional
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.security.secret_refs import SecretRef

TIMEOUT_S = 10.0
"""The time limit of each request for a token."""

_NOT_TRIED = {
    f"exclude_{name}_credential": True
    for name in ("shared_token_cache", "visual_studio_code", "powershell", "developer_cli", "broker")
}
"""Identities of people at their own machines, except that of the command `az`."""


@dataclass(frozen=True, slots=True)
class EntraSource:
    """A token of Microsoft Entra ID.

    Attributes:
        way: the place where the identity comes from, as in the config.
        scope: what the token is for.
        options: the options of azure-identity's credential.
        client_secret: the secret of the identity; None for ways without one.

    Raises:
        ConfigError: azure-identity is not installed.
    """

    way: str
    scope: str
    options: Mapping[str, str]
    client_secret: SecretRef | None = None
    _make: Callable[..., Any] = field(init=False, repr=False, compare=False)
    _failures: tuple[type[Exception], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        identity, errors = load_optional("azure", "azure.identity", "azure.core.exceptions")
        # Its warnings repeat the errors that it raises, in many lines.
        logging.getLogger("azure").setLevel(logging.CRITICAL)
        classes = {
            "default": identity.DefaultAzureCredential,
            "managed_identity": identity.ManagedIdentityCredential,
            "workload_identity": identity.WorkloadIdentityCredential,
            "client_secret": identity.ClientSecretCredential,
        }
        object.__setattr__(self, "_make", classes[self.way])
        object.__setattr__(self, "_failures", (errors.AzureError, ValueError, OSError))

    def __str__(self) -> str:
        return f"Microsoft Entra ID ({self.way})"

    def fetch(self) -> Issued[str]:
        """Fetches a new token: the credential of azure-identity, which would keep the one before, is made anew.

        Raises:
            ConfigError: there is none.
        """
        secret = None if self.client_secret is None else self.client_secret.read()
        try:
            further: dict[str, Any] = {} if secret is None else {"client_secret": secret}
            if self.way == "default":
                further |= _NOT_TRIED
            if "authority" in self.options:
                further["disable_instance_discovery"] = True  # such as that of a private cloud, which Microsoft's lacks
            limits = {"connection_timeout": TIMEOUT_S, "read_timeout": TIMEOUT_S, "retry_total": 1}
            with self._make(**self.options, **further, **limits) as credential:
                token = credential.get_token(self.scope)
        except self._failures as error:
            text = in_one_line(error)
            if secret is not None:
                text = text.replace(secret, "***")
            raise ConfigError(f"{self} gives no token: {text}") from None
        value = sendable(str(token.token), self)
        hidden = (value,) if secret is None else (value, secret)
        return Issued(value, hidden, renewal_time(token.expires_on, time.time()), float(token.expires_on))
