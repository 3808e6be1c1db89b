"""Azure OpenAI: OpenAI's chat completions, with the deployment and the API's version in the URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from pydantic import Field

from breakwater.providers.base import URL, ApiVersion, HttpSettings, Provider
from breakwater.providers.openai import ChatCompletions


class AzureSettings(HttpSettings):
    """An Azure OpenAI resource. A model's name there is that of its deployment."""

    kind: Literal["azure"]
    base_url: str = Field(pattern=URL, description="The resource, as in `https://NAME.openai.azure.com`.")
    api_version: ApiVersion = "2024-10-21"

    def open(self) -> Provider:
        """Makes the provider. Raises ConfigError."""
        from breakwater.providers.http import HttpProvider

        return HttpProvider(AzureDeployments(self.base_url, self.api_version), self)


@dataclass(frozen=True, slots=True)
class AzureDeployments(ChatCompletions):
    """`<base_url>/openai/deployments/<model>/chat/completions`, with the key in a header of its own."""

    api_version: str

    def url(self, model: str) -> str:
        """The deployment's own."""
        path = f"openai/deployments/{quote(model, safe='')}/chat/completions"
        return f"{self.base_url.rstrip('/')}/{path}?api-version={self.api_version}"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """The key."""
        return {} if key is None else {"api-key": key}
