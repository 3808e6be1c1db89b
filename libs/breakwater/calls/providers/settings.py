"""The settings that kinds of providers have in common."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field, JsonValue

from breakwater.kernel.security.secret_refs import Secret
from breakwater.kernel.types import HttpUrl, Message, UsdAmount
from breakwater.redaction.settings import DEFAULT_REDACTION, RedactionRules

if TYPE_CHECKING:
    from breakwater.calls.providers.base import Provider
    from breakwater.jobs.contract.job import CallApi


class ProviderSettings(Message):
    """Settings of a provider. Each subclass has its own `kind`, and opens its provider."""

    local: ClassVar[bool] = False
    """True for a program or a callable, which needs no model and takes any JSON as input."""
    translates_chats: ClassVar[bool] = False
    """True if chats are translated to another API."""

    @property
    def apis(self) -> Collection[CallApi]:
        """The APIs whose requests the provider takes as they are."""
        return ("chat",)

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. It connects to nothing yet.

        Args:
            redaction: the rules that hide texts in its errors, in addition to its own secrets.

        Raises:
            ConfigError: a secret, or something else that the settings name, is missing.
        """
        raise NotImplementedError

    def params_left_out(self, params: Mapping[str, JsonValue]) -> Sequence[str]:  # noqa: ARG002  most drop nothing
        """Returns the params that are left out of a call, as the provider has no counterpart of them."""
        return ()


_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or re.search(r"[\r\n\0]", value):
            raise ValueError(f"{name!r} is not a valid HTTP header")
    return headers


class HttpSettings(ProviderSettings):
    """An endpoint of a model provider."""

    base_url: HttpUrl
    api_key: Secret | None = None
    headers: Annotated[dict[str, str], AfterValidator(_sendable)] = Field(
        default_factory=dict, description="Sent with every call; no secrets."
    )


class LocalSettings(ProviderSettings):
    """A program or a callable that runs on the worker's own machine."""

    local: ClassVar[bool] = True

    cost_per_call_usd: UsdAmount | None = Field(
        default=None,
        description=(
            "Cost of a call that does not report its own, and its worst case for budgets. "
            "Without it the cost is unknown, and calls are refused under a hard budget."
        ),
    )
