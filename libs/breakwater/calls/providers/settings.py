"""The settings that kinds of providers have in common."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, Field, JsonValue, model_validator

from breakwater.kernel.security.secret_refs import Secret, SecretRef
from breakwater.kernel.types import HttpUrl, Message, UsdAmount
from breakwater.redaction.settings import DEFAULT_REDACTION, RedactionRules

if TYPE_CHECKING:
    from breakwater.calls.providers.base import Provider
    from breakwater.calls.providers.credentials import Credential, CredentialSource
    from breakwater.jobs.contract.job import CallApi


class ProviderSettings(Message):
    """Settings of a provider. Each subclass has its own `kind`, and opens its provider."""

    local: ClassVar[bool] = False
    """True for a program or a callable, which needs no model and takes any JSON as input."""
    variables: ClassVar[Collection[str]] = ()
    """Environment variables that a library of its maker's reads, in addition to those of its secrets."""
    takes_thinking: ClassVar[bool] = False
    """True if chats may say in Anthropic's words, `thinking`, how much a model thinks."""
    seller: ClassVar[str | None] = None
    """The provider in the price list, where that follows from the kind, and not from the names of models."""

    def apis_of(self, model: str) -> Collection[CallApi]:  # noqa: ARG002  most have the same for all models
        """Returns the APIs whose requests the provider takes for a model, by its name there."""
        return ("chat",)

    def max_inputs(self, model: str) -> int | None:  # noqa: ARG002  most have no such limit
        """Returns the most inputs that a model, by its name at the provider, embeds in one call; None if unknown."""
        return None

    def translates_chats(self, model: str) -> bool:  # noqa: ARG002  most have the same for all models
        """Returns True if chats with a model, by its name at the provider, are translated to another API."""
        return False

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. It connects to nothing yet.

        Args:
            redaction: the rules that hide texts in its errors, in addition to its own secrets.

        Raises:
            ConfigError: a secret, or something else that the settings name, is missing.
        """
        raise NotImplementedError

    def api_kind(self, model: str) -> str:  # noqa: ARG002  most have one API
        """Returns the kind of provider whose params and tokens a model has, by its name there."""
        return getattr(self, "kind", "")

    def check(self) -> None:
        """Checks that programs, packages and places that the settings name are there. It reads no key.

        Raises:
            ConfigError: one is missing.
        """

    def params_left_out(self, params: Mapping[str, JsonValue]) -> Sequence[str]:  # noqa: ARG002  most drop nothing
        """Returns the params that are left out of a call, as the provider has no counterpart of them."""
        return ()


def is_claude(model: str) -> bool:
    """Returns True for the name of a model of Anthropic's, alone or after its publisher, in Bedrock's ids and ARNs."""
    return re.search(r"(?:^|[/.])claude", model) is not None


def embedding_maker(model: str) -> Literal["amazon", "cohere"] | None:
    """Returns the maker of an embedding model of Bedrock's, by its id or ARN there; None for another model."""
    named = re.search(r"(?:^|[/.])(amazon)\.titan-embed-(?:g1-)?text|(?:^|[/.])(cohere)\.embed", model)
    return None if named is None else cast(Literal["amazon", "cohere"], named[1] or named[2])


_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or re.search(r"[\r\n\0]", value):
            raise ValueError(f"{name!r} is not a valid HTTP header")
    return headers


class Auth(Message):
    """A way to a credential other than a key."""

    def source(self) -> CredentialSource[str]:
        """Returns where the credential comes from. Raises ConfigError: what it needs is not installed or missing."""
        raise NotImplementedError

    def headers(self, credential: str) -> Mapping[str, str]:
        """Returns the headers with the credential."""
        return {"Authorization": f"Bearer {credential}"}


class CommandAuth(Auth):
    """A credential that a program prints, such as a token that ends."""

    command: tuple[str, ...] = Field(
        min_length=1, description="A program with its arguments, run without a shell; its output."
    )
    refresh_s: float = Field(
        default=600.0, ge=1, le=86_400, description="It runs again after this time, and when a call is refused (401)."
    )
    header: str = Field(default="Authorization", pattern=r"^[A-Za-z0-9-]+$", description="The header that has it.")
    scheme: str = Field(
        default="Bearer",
        pattern=r"^[A-Za-z0-9-]*$",
        description="Written before it in `Authorization`; other headers have it alone.",
    )

    def source(self) -> CredentialSource[str]:
        """Returns the program's output."""
        from breakwater.calls.providers.credentials import SecretSource

        return SecretSource(SecretRef(command=self.command), self.refresh_s)

    def headers(self, credential: str) -> Mapping[str, str]:
        """Returns the header with the credential."""
        has_scheme = self.scheme and self.header.lower() == "authorization"
        return {self.header: f"{self.scheme} {credential}" if has_scheme else credential}


class TlsFiles(Message):
    """Certificates of the connection; all files are PEM. New connections use changed ones."""

    ca: Path | None = Field(default=None, description="CA certificates to trust in addition to the system's.")
    cert: Path | None = Field(default=None, description="Client certificate (mTLS).")
    key: Path | None = Field(default=None, description="Its private key, if it is in a separate file.")


class HttpSettings(ProviderSettings):
    """An endpoint of a model provider."""

    base_url: HttpUrl
    api_key: Secret | None = None
    auth: CommandAuth | None = Field(default=None, description="A credential other than a key, in place of `api_key`.")
    headers: Annotated[dict[str, str], AfterValidator(_sendable)] = Field(
        default_factory=dict, description="Sent with every call; no secrets."
    )
    tls: TlsFiles | None = None
    proxy: HttpUrl | None = Field(
        default=None, description="The HTTP proxy that connections go through; the environment's are ignored."
    )
    proxy_auth: Secret | None = Field(default=None, description="`user:password` at the proxy.")

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        if self.api_key is not None and "auth" in self.model_fields_set and self.auth is not None:
            raise ValueError("give either api_key or auth")
        if self.proxy_auth is not None and self.proxy is None:
            raise ValueError("proxy_auth is set without proxy")
        return self

    @property
    def all_headers(self) -> Mapping[str, str]:
        """The headers of every call, without those of the credential."""
        return self.headers

    def key_headers(self, credential: Any, url: str, body: bytes) -> Mapping[str, str] | None:  # noqa: ARG002
        """Returns the headers with a credential that is not the API's own kind of key; None for that one.

        Args:
            credential: the credential.
            url: the URL of a POST request, for one that signs it.
            body: the request's body.
        """
        return None if self.auth is None else self.auth.headers(credential)

    def check(self) -> None:
        """Checks that the packages for the credential are installed. Raises ConfigError."""
        if self.auth is not None:
            self.auth.source()

    def credential(self) -> Credential[Any]:
        """Returns the credential; a key is read now, anything else with the first call.

        Raises:
            ConfigError: the key can't be read, or what the credential needs is not there.
        """
        from breakwater.calls.providers.credentials import Credential, read_now

        return read_now(self.api_key) if self.auth is None else Credential(self.auth.source())


class LocalSettings(ProviderSettings):
    """A program or a callable that runs on the worker's own machine."""

    local: ClassVar[bool] = True

    cost_per_call_usd: UsdAmount | None = Field(
        default=None,
        description=(
            "Cost of a call that does not report its own, and its worst case for limits. "
            "Without it the cost is unknown, and calls are refused under a hard limit."
        ),
    )

    def check(self) -> None:
        """Opens the provider. Raises ConfigError."""
        self.open()
