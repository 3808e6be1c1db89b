"""The kinds of providers. A new kind takes a file next to this one, and the name of its settings here."""

from __future__ import annotations

from typing import Annotated, Any, cast, get_args

from pydantic import BeforeValidator, Discriminator

from breakwater.calls.providers.anthropic import AnthropicSettings
from breakwater.calls.providers.base import ProviderSettings
from breakwater.calls.providers.openai import AzureSettings, OpenAISettings
from breakwater.calls.providers.process import ProcessSettings
from breakwater.calls.providers.python import PythonSettings

AnyProvider = Annotated[
    OpenAISettings | AzureSettings | AnthropicSettings | ProcessSettings | PythonSettings, Discriminator("kind")
]
DEFAULT_KIND = "openai"


def _kind(settings: type[ProviderSettings]) -> str:
    return get_args(settings.model_fields["kind"].annotation)[0]


_ALL: tuple[type[ProviderSettings], ...] = get_args(get_args(AnyProvider)[0])
KINDS = {_kind(settings): settings for settings in _ALL}
"""The settings of each kind."""
LOCAL_KINDS = tuple(kind for kind, settings in KINDS.items() if settings.local)
"""Programs and callables, which have no models to choose from."""


def _with_kind(value: object) -> object:
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return fields if "kind" in fields else {"kind": DEFAULT_KIND, **fields}
    return value


ProviderEntry = Annotated[AnyProvider, BeforeValidator(_with_kind)]
"""A provider in the config, of the default kind if it names none."""
