"""The providers that `breakwater init` can write a first config for: their addresses, variables and questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OPENAI_URL = "https://api.openai.com/v1"
ANTHROPIC_URL = "https://api.anthropic.com/v1"


@dataclass(frozen=True, slots=True)
class Question:
    """A setting that a provider needs, and that somebody has to know.

    Attributes:
        setting: its name in the config.
        prompt: the question.
        variables: environment variables that may have the answer, the first in the order of precedence.
        default: the answer where there is no other.
    """

    setting: str
    prompt: str
    variables: Sequence[str] = ()
    default: str | None = None

    def answer(self, options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
        """Returns the answer of the options or the environment; None if neither has one."""
        of_environment = (environment[name] for name in self.variables if environment.get(name))
        return options.get(self.setting) or next(of_environment, None)


@dataclass(frozen=True, slots=True)
class StartingProvider:
    """A provider for a first config.

    Attributes:
        name: name in the config.
        base_url: URL up to and including /v1; empty for a kind that knows its own.
        key_env: environment variable with the API key; None if the provider needs no key.
        kind: kind of provider in the config.
        is_local: True for a model server on this machine, whose calls cost nothing.
        models: models that the provider lists.
        trouble: why the provider lists no models; empty if it lists some, or was not asked.
        suggested_model: a model to begin with; None to take one of the list.
        lists_models: True if `<base_url>/models` lists them.
        questions: the settings to ask for.
        settings: further settings in the config, as YAML.
    """

    name: str
    base_url: str = ""
    key_env: str | None = None
    kind: str = "openai"
    is_local: bool = False
    models: Sequence[str] = ()
    trouble: str = ""
    suggested_model: str | None = None
    lists_models: bool = True
    questions: Sequence[Question] = ()
    settings: Mapping[str, object] = field(default_factory=dict[str, object])

    def __str__(self) -> str:
        if self.is_local:
            return f"{self.name} at {self.base_url}"
        place = self.base_url or f"kind {self.kind}"
        return f"{place} ({self.key_env})" if self.key_env else place


def _sold(name: str, base_url: str, key_env: str, model: str, **more: object) -> StartingProvider:
    return StartingProvider(name, base_url, key_env, suggested_model=model, settings=more)


def _here(name: str, port: int) -> StartingProvider:
    return StartingProvider(name, f"http://127.0.0.1:{port}/v1", is_local=True)


OPENAI = StartingProvider("openai", OPENAI_URL, "OPENAI_API_KEY", suggested_model="gpt-5-mini")
ANTHROPIC = StartingProvider(
    "anthropic", ANTHROPIC_URL, "ANTHROPIC_API_KEY", kind="anthropic", suggested_model="claude-haiku-4-5"
)
FOUND_HERE = (_here("ollama", 11434), _here("vllm", 8000))
"""Servers that are looked for on this machine."""
AZURE = "azure"
AZURE_KEY = "AZURE_OPENAI_API_KEY"

_OTHERS = (
    StartingProvider(
        AZURE,
        key_env=AZURE_KEY,
        kind="azure",
        lists_models=False,
        questions=(
            Question("base_url", "The resource's URL (https://NAME.openai.azure.com)", ("AZURE_OPENAI_ENDPOINT",)),
            Question("api_version", "The API's version", ("OPENAI_API_VERSION",), "v1"),
        ),
    ),
    StartingProvider(
        "bedrock",
        kind="bedrock",
        lists_models=False,
        questions=(Question("region", "The AWS region", ("AWS_REGION", "AWS_DEFAULT_REGION"), "us-east-1"),),
        suggested_model="global.anthropic.claude-haiku-4-5-20251001-v1:0",  # of any region, unlike `us.` or `eu.`
    ),
    StartingProvider(
        "vertex",
        kind="vertex",
        lists_models=False,
        questions=(
            Question("project", "The id of the Google Cloud project", ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT")),
            Question("location", "The location", ("GOOGLE_CLOUD_LOCATION", "GOOGLE_CLOUD_REGION"), "global"),
        ),
        suggested_model="gemini-2.5-flash",
    ),
    StartingProvider(
        "gemini", key_env="GEMINI_API_KEY", kind="gemini", lists_models=False, suggested_model="gemini-2.5-flash"
    ),
    _sold("mistral", "https://api.mistral.ai/v1", "MISTRAL_API_KEY", "mistral-small-latest"),
    _sold("groq", "https://api.groq.com/openai/v1", "GROQ_API_KEY", "llama-3.3-70b-versatile"),
    _sold("deepseek", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", "deepseek-chat"),
    _sold("xai", "https://api.x.ai/v1", "XAI_API_KEY", "grok-4-fast", api="responses"),
    _sold("openrouter", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", "openai/gpt-4o-mini"),
    _sold("together", "https://api.together.xyz/v1", "TOGETHER_API_KEY", "meta-llama/Llama-3.3-70B-Instruct-Turbo"),
    _sold(
        "fireworks",
        "https://api.fireworks.ai/inference/v1",
        "FIREWORKS_API_KEY",
        "accounts/fireworks/models/gpt-oss-120b",
    ),
    _sold("cohere", "https://api.cohere.ai/compatibility/v1", "COHERE_API_KEY", "command-r-08-2024"),
    _here("llamacpp", 8080),
    _here("lmstudio", 1234),
    _here("tgi", 8080),
    _here("sglang", 30000),
)
BY_NAME = {provider.name: provider for provider in (OPENAI, ANTHROPIC, *FOUND_HERE, *_OTHERS)}
