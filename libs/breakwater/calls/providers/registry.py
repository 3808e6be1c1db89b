"""The kinds of providers. A new kind takes a file next to this one, and the name of its settings here.

The settings of these kinds import what makes their calls only in `open`: most programs read the config, and call no
model.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, StringConstraints, Tag, model_validator

from breakwater.calls.providers.settings import (
    Auth,
    CommandAuth,
    HttpSettings,
    LocalSettings,
    ProviderSettings,
    embedding_maker,
    is_claude,
)
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.formats import words
from breakwater.kernel.security.secret_refs import EnvName, Secret, SecretRef, variable
from breakwater.kernel.types import HttpUrl, Message
from breakwater.redaction.settings import DEFAULT_REDACTION, RedactionRules

if TYPE_CHECKING:
    from breakwater.calls.providers.base import Provider
    from breakwater.calls.providers.credentials import Credential, CredentialSource
    from breakwater.jobs.contract.job import CallApi


def _as_written(value: object) -> object:
    # YAML reads a bare 2024-10-21 as a date.
    return value.isoformat() if isinstance(value, date) else value


ApiVersion = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$"), BeforeValidator(_as_written)]
"""A version such as 2024-10-21, with quotes or without."""


HeaderText = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]


class OpenAISettings(HttpSettings):
    """Any OpenAI-compatible endpoint: OpenAI, Gemini, vLLM, Ollama, OpenRouter and others."""

    kind: Literal["openai"] = "openai"
    base_url: HttpUrl = Field(description="Up to and including /v1.")
    organization: HeaderText | None = Field(default=None, description="Sent as `OpenAI-Organization`.")
    project: HeaderText | None = Field(default=None, description="Sent as `OpenAI-Project`.")
    api: Literal["chat", "responses"] = Field(
        default="chat",
        description="`responses`: requests of the Responses API go to `<base_url>/responses` as they are; others are "
        "chat completions. `chat`: Responses are translated to chat completions.",
    )

    def apis_of(self, model: str) -> Collection[CallApi]:  # noqa: ARG002  the same for all
        """Returns chats and embeddings, and Responses if the config says so."""
        return ("chat", "embeddings", "responses") if self.api == "responses" else ("chat", "embeddings")

    @property
    def all_headers(self) -> Mapping[str, str]:
        """The headers of every call, with organisation and project."""
        named = {"OpenAI-Organization": self.organization, "OpenAI-Project": self.project}
        return {**self.headers, **{name: value for name, value in named.items() if value is not None}}

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError."""
        from breakwater.calls.providers.http import HttpProvider
        from breakwater.calls.providers.openai import openai_wires

        wires = openai_wires(self.base_url)
        return HttpProvider(lambda _: wires, self, redaction)


AZURE_V1 = "v1"
"""The version of Azure's API whose requests are OpenAI's, and name the deployment as their model."""


class EntraAuth(Auth):
    """A token of Microsoft Entra ID. Needs `pip install 'breakwater-plane[azure]'`."""

    entra: Literal["default", "managed_identity", "workload_identity", "client_secret"] = Field(
        description="Where the identity comes from. `default` tries the variables `AZURE_*`, workload identity, "
        "managed identity and `az login`, in this order."
    )
    tenant_id: HeaderText | None = Field(default=None, description="The directory, for `client_secret`.")
    client_id: HeaderText | None = Field(
        default=None, description="The application, or a user-assigned managed identity; default: the system-assigned."
    )
    client_secret: Secret | None = Field(default=None, description="The application's secret, for `client_secret`.")
    authority: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")] | None = Field(
        default=None, description="The host of Entra ID; default: AZURE_AUTHORITY_HOST, else login.microsoftonline.com."
    )
    scope: HeaderText = Field(
        default="https://cognitiveservices.azure.com/.default", description="What the token is asked for."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        of_secret = {"tenant_id": self.tenant_id, "client_secret": self.client_secret}
        for name, value in of_secret.items():
            if value is not None and self.entra != "client_secret":
                raise ValueError(f"{name} is for entra: client_secret")
        missing = [name for name, value in {**of_secret, "client_id": self.client_id}.items() if value is None]
        if self.entra == "client_secret" and missing:
            raise ValueError(f"entra: client_secret needs {', '.join(sorted(missing))}")
        if self.entra == "managed_identity" and self.authority is not None:
            raise ValueError("authority is not for entra: managed_identity, which asks the machine")
        if self.entra == "default" and self.client_id is not None:
            raise ValueError("client_id is not for entra: default, which reads AZURE_CLIENT_ID")
        return self

    def source(self) -> CredentialSource[str]:
        """Returns where the token comes from. Raises ConfigError: azure-identity is not installed."""
        from breakwater.calls.providers.entra import EntraSource

        named = {
            "tenant_id": self.tenant_id,
            "client_id": self.client_id,
            "authority": self.authority and f"https://{self.authority}",
        }
        options = {name: value for name, value in named.items() if value is not None}
        return EntraSource(self.entra, self.scope, options, self.client_secret)


def _way_of_azure(value: object) -> str:
    return (
        "auth:command"
        if isinstance(value, CommandAuth) or (isinstance(value, dict) and "command" in value)
        else "auth:entra"
    )


AzureAuth = Annotated[
    Annotated[CommandAuth, Tag("auth:command")] | Annotated[EntraAuth, Tag("auth:entra")], Discriminator(_way_of_azure)
]


_AZURE_VARIABLES = words(
    """
    AZURE_AUTHORITY_HOST AZURE_CLIENT_CERTIFICATE_PASSWORD AZURE_CLIENT_CERTIFICATE_PATH AZURE_CLIENT_ID
    AZURE_CLIENT_SECRET AZURE_CLIENT_SEND_CERTIFICATE_CHAIN AZURE_CONFIG_DIR AZURE_FEDERATED_TOKEN_FILE
    AZURE_POD_IDENTITY_AUTHORITY_HOST AZURE_TENANT_ID AZURE_TOKEN_CREDENTIALS IDENTITY_ENDPOINT IDENTITY_HEADER
    IDENTITY_SERVER_THUMBPRINT IMDS_ENDPOINT MSI_ENDPOINT MSI_SECRET REQUESTS_CA_BUNDLE
    """
)


class AzureSettings(HttpSettings):
    """An Azure OpenAI or Foundry resource. Its models are named by their deployments."""

    variables: ClassVar[Collection[str]] = _AZURE_VARIABLES

    kind: Literal["azure"]
    base_url: HttpUrl = Field(description="The resource, as in `https://NAME.openai.azure.com`.")
    api_version: ApiVersion = Field(
        default="2024-10-21", description="A date, or `v1`: OpenAI's own paths, at `<base_url>/openai/v1`."
    )
    api: Literal["chat", "responses"] = Field(
        default="chat", description="`responses`: requests of the Responses API go out as they are. Needs `v1`."
    )
    auth: AzureAuth | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  nobody assigns it
        default=None, description="A credential other than a key, in place of `api_key`."
    )

    @model_validator(mode="after")
    def _responses_at_v1(self) -> Self:
        if self.api == "responses" and self.api_version != AZURE_V1:
            raise ValueError("api: responses needs api_version: v1")
        return self

    def apis_of(self, model: str) -> Collection[CallApi]:  # noqa: ARG002  the same for all
        """Returns chats and embeddings, and Responses if the config says so."""
        return ("chat", "embeddings", "responses") if self.api == "responses" else ("chat", "embeddings")

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError."""
        from breakwater.calls.providers.http import HttpProvider
        from breakwater.calls.providers.openai import azure_wires

        wires = azure_wires(self.base_url, None if self.api_version == AZURE_V1 else self.api_version)
        return HttpProvider(lambda _: wires, self, redaction)


class AnthropicSettings(HttpSettings):
    """Anthropic, or a gateway with its Messages API. Enable betas under `headers`."""

    kind: Literal["anthropic"]
    base_url: HttpUrl = Field(default="https://api.anthropic.com/v1", description="Up to and including /v1.")
    version: ApiVersion = Field(default="2023-06-01", description="Sent as `anthropic-version`.")

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError."""
        from breakwater.calls.providers.anthropic import anthropic_wires
        from breakwater.calls.providers.http import HttpProvider

        wires = anthropic_wires(self.base_url, self.version)
        return HttpProvider(lambda _: wires, self, redaction)

    def apis_of(self, model: str) -> Collection[CallApi]:  # noqa: ARG002  the same for all
        """Returns chats and Messages."""
        return ("chat", "messages")

    def translates_chats(self, model: str) -> bool:  # noqa: ARG002  the same for all
        """Returns True."""
        return True

    def params_left_out(self, params: Mapping[str, JsonValue]) -> Sequence[str]:
        """Returns `dropped_params`."""
        from breakwater.calls.providers.anthropic import dropped_params

        return dropped_params(params)


class GoogleAuth(Auth):
    """A token of Google Cloud. Needs `pip install 'breakwater-plane[gcp]'`."""

    credentials: Secret | None = Field(
        default=None,
        description="A credential file's content: a service account's key, workload identity federation or a user's. "
        "Default: the application default credentials (GOOGLE_APPLICATION_CREDENTIALS, gcloud, the metadata server).",
    )

    def source(self) -> CredentialSource[str]:
        """Returns where the token comes from. Raises ConfigError: google-auth is not installed."""
        from breakwater.calls.providers.google import GoogleSource

        return GoogleSource(self.credentials)


def _way_of_google(value: object) -> str:
    return (
        "auth:command"
        if isinstance(value, CommandAuth) or (isinstance(value, dict) and "command" in value)
        else "auth:google"
    )


VertexAuth = Annotated[
    Annotated[CommandAuth, Tag("auth:command")] | Annotated[GoogleAuth, Tag("auth:google")],
    Discriminator(_way_of_google),
]


_GOOGLE_VARIABLES = words(
    """
    CLOUDSDK_CONFIG GCE_METADATA_HOST GCE_METADATA_IP GCE_METADATA_ROOT GCE_METADATA_TIMEOUT
    GOOGLE_APPLICATION_CREDENTIALS GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES NO_GCE_CHECK REQUESTS_CA_BUNDLE
    """
)


class VertexSettings(HttpSettings):
    """Google's Vertex AI: Claude by its own API, Gemini and others by the OpenAI-compatible endpoint."""

    variables: ClassVar[Collection[str]] = _GOOGLE_VARIABLES

    kind: Literal["vertex"]
    project: Annotated[str, Field(pattern=r"^[a-z0-9.:-]{1,100}$", description="The id of the project.")]
    location: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] = Field(
        default="global", description="`global`, a region such as `europe-west4`, or `us` or `eu`."
    )
    base_url: HttpUrl = Field(default="", description="Default: the endpoint of the location.")
    auth: VertexAuth | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  nobody assigns it
        default=GoogleAuth(), description="Default: the application default credentials."
    )

    @model_validator(mode="before")
    @classmethod
    def _at_location(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        named = cast(dict[str, Any], values)
        location = named.get("location", "global")
        if "base_url" in named or not isinstance(location, str):
            return named
        host = {
            "global": "aiplatform.googleapis.com",
            "us": "aiplatform.us.rep.googleapis.com",
            "eu": "aiplatform.eu.rep.googleapis.com",
        }.get(location, f"{location}-aiplatform.googleapis.com")
        return {**named, "base_url": f"https://{host}"}

    @model_validator(mode="after")
    def _no_key(self) -> Self:
        if self.api_key is not None:
            raise ValueError("Vertex takes no api_key: it needs a token (auth); with a key, use kind: gemini")
        return self

    def credential(self) -> Credential[Any]:
        """Returns the credential; the key of a deployment is a credential file's content. Raises ConfigError."""
        from breakwater.calls.providers.credentials import Credential

        return Credential((self.auth or GoogleAuth(credentials=self.api_key)).source())

    def apis_of(self, model: str) -> Collection[CallApi]:
        """Returns chats, and Messages for Claude."""
        return ("chat", "messages") if is_claude(model) else ("chat",)

    def translates_chats(self, model: str) -> bool:
        """Returns True for Claude."""
        return is_claude(model)

    def api_kind(self, model: str) -> str:
        """Returns Anthropic's kind for Claude."""
        return "anthropic" if is_claude(model) else DEFAULT_KIND

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError."""
        from breakwater.calls.providers.http import HttpProvider
        from breakwater.calls.providers.vertex import VertexWires

        place = f"v1/projects/{self.project}/locations/{self.location}"
        return HttpProvider(VertexWires(f"{self.base_url.rstrip('/')}/{place}"), self, redaction)


class GeminiSettings(HttpSettings):
    """Gemini's own API, by key. Embeddings go to its endpoint that is compatible with OpenAI's."""

    takes_thinking: ClassVar[bool] = True

    kind: Literal["gemini"]
    base_url: HttpUrl = Field(
        default="https://generativelanguage.googleapis.com/v1beta", description="Up to and including the version."
    )

    def apis_of(self, model: str) -> Collection[CallApi]:  # noqa: ARG002  the same for all
        """Returns chats and embeddings."""
        return ("chat", "embeddings")

    def translates_chats(self, model: str) -> bool:  # noqa: ARG002  the same for all
        """Returns True."""
        return True

    def params_left_out(self, params: Mapping[str, JsonValue]) -> Sequence[str]:
        """Returns `dropped_params`."""
        from breakwater.calls.providers.gemini import dropped_params

        return dropped_params(params)

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError."""
        from breakwater.calls.providers.gemini import gemini_wires
        from breakwater.calls.providers.http import HttpProvider

        wires = gemini_wires(self.base_url)
        return HttpProvider(lambda _: wires, self, redaction)


DEFAULT_KIND = "openai"
_AWS_VARIABLES = words(
    """
    AWS_ACCESS_KEY_ID AWS_BEARER_TOKEN_BEDROCK AWS_CA_BUNDLE AWS_CONFIG_FILE AWS_CONTAINER_AUTHORIZATION_TOKEN
    AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE AWS_CONTAINER_CREDENTIALS_FULL_URI AWS_CONTAINER_CREDENTIALS_RELATIVE_URI
    AWS_DEFAULT_PROFILE AWS_EC2_METADATA_DISABLED AWS_EC2_METADATA_SERVICE_ENDPOINT AWS_ENDPOINT_URL_STS AWS_PROFILE
    AWS_ROLE_ARN AWS_ROLE_SESSION_NAME AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_SHARED_CREDENTIALS_FILE
    AWS_STS_REGIONAL_ENDPOINTS AWS_USE_DUALSTACK_ENDPOINT AWS_USE_FIPS_ENDPOINT AWS_WEB_IDENTITY_TOKEN_FILE
    """
)
_BEDROCK_KEY = "AWS_BEARER_TOKEN_BEDROCK"
"""The variable in which AWS' tools look for one of Bedrock's own keys."""
_AWS_DOMAINS = {"cn-": "amazonaws.com.cn", "eusc-": "amazonaws.eu"}


class BedrockSettings(HttpSettings):
    """Amazon Bedrock in a region. A model is the id or ARN of a model or of an inference profile.

    Without `api_key` or `auth`, calls are signed with AWS' credentials: those of the environment, a profile, web
    identity, or the container's or instance's role. Enable betas of Anthropic's under `headers`.
    """

    variables: ClassVar[Collection[str]] = _AWS_VARIABLES
    seller: ClassVar[str | None] = "aws"

    kind: Literal["bedrock"]
    region: str = Field(pattern=r"^[a-z]{2,4}(-[a-z]+)+-\d{1,2}$", description="As in `eu-central-1`.")
    base_url: HttpUrl = Field(
        default="",
        description="By default `https://bedrock-runtime.REGION.amazonaws.com`, with `/openai/v1` for an `api` of "
        "OpenAI's. Another one for a VPC endpoint, or `https://bedrock-mantle.REGION.api.aws/openai/v1`.",
    )
    api_key: Secret | None = Field(
        default=None, description=f"One of Bedrock's own keys; by default that in {_BEDROCK_KEY}, if there is one."
    )
    profile: str | None = Field(default=None, min_length=1, description="A profile in AWS' config files.")
    role_arn: str | None = Field(
        default=None, pattern=r"^arn:aws[\w-]*:iam::\d{12}:role/.+$", description="A role to assume by STS."
    )
    external_id: str | None = Field(default=None, min_length=2, description="The external id that the role asks for.")
    api: Literal["converse", "chat", "responses"] = Field(
        default="converse",
        description="`converse`: all models by Converse, and Claude's native Messages as they are. `chat` and "
        "`responses`: chat completions, or Responses too, at the endpoint that is compatible with OpenAI's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_url(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        named = cast(dict[str, Any], value)
        region = named.get("region")
        if named.get("base_url") or not isinstance(region, str):
            return named
        domain = next((domain for start, domain in _AWS_DOMAINS.items() if region.startswith(start)), "amazonaws.com")
        path = "" if named.get("api", "converse") == "converse" else "/openai/v1"
        return {**named, "base_url": f"https://bedrock-runtime.{region}.{domain}{path}"}

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.profile or self.role_arn) and (self.api_key or self.auth):
            raise ValueError("give either api_key or auth, or profile and role_arn")
        if self.external_id and not self.role_arn:
            raise ValueError("external_id is set without role_arn")
        return self

    def apis_of(self, model: str) -> Collection[CallApi]:
        """Returns chats, and for Claude also Messages, unless the API is OpenAI's; embeddings for models of these."""
        if self.api != "converse":
            return ("chat",) if self.api == "chat" else ("chat", "responses")
        if embedding_maker(model) is not None:
            return ("chat", "embeddings")
        return ("chat", "messages") if is_claude(model) else ("chat",)

    def max_inputs(self, model: str) -> int | None:
        """Returns 1 for Titan, and 96 for Cohere's models."""
        return {"amazon": 1, "cohere": 96, None: None}[embedding_maker(model)]

    def translates_chats(self, model: str) -> bool:  # noqa: ARG002  the same for all
        """Returns True unless the API is OpenAI's."""
        return self.api == "converse"

    def api_kind(self, model: str) -> str:
        """Returns `anthropic` for Claude, as its params and tokens are the same there."""
        if self.api != "converse":
            return "openai"
        return "anthropic" if is_claude(model) else self.kind

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError: also if botocore is not installed, or there is no such region."""
        from breakwater.calls.providers.bedrock import bedrock_wires, compatible_wires
        from breakwater.calls.providers.http import HttpProvider

        self.check()
        if self.api != "converse":
            wires = compatible_wires(self.base_url)
            return HttpProvider(lambda _: wires, self, redaction)
        return HttpProvider(partial(bedrock_wires, self.base_url, self.headers), self, redaction)

    def check(self) -> None:
        """Checks that botocore is installed, and that there is such a region. Raises ConfigError."""
        from breakwater.calls.providers.bedrock import check_region

        if urlsplit(self.base_url).hostname == f"bedrock-runtime.{self.region}.amazonaws.com":
            check_region(self.region)

    def credential(self) -> Credential[Any]:
        """Returns a key, or AWS' credentials, which are fetched with the first call. Raises ConfigError."""
        from breakwater.calls.providers.bedrock import AwsSource
        from breakwater.calls.providers.credentials import Credential, read_now

        if self.api_key is not None or self.auth is not None:
            return HttpSettings.credential(self)
        if variable(_BEDROCK_KEY) and self.profile is None and self.role_arn is None:
            return read_now(SecretRef(env=_BEDROCK_KEY))
        return Credential(AwsSource(self.region, self.profile, self.role_arn, self.external_id))

    def key_headers(self, credential: Any, url: str, body: bytes) -> Mapping[str, str] | None:
        """Returns the signature of a request with AWS' credentials; a key is sent as it is."""
        if isinstance(credential, str):
            return HttpSettings.key_headers(self, credential, url, body)
        from breakwater.calls.providers.bedrock import signature

        return signature(credential, self.region, url, body)

    def params_left_out(self, params: Mapping[str, JsonValue]) -> Sequence[str]:
        """Returns those that Messages or Converse lack and that do not change the answer."""
        from breakwater.calls.providers.anthropic import dropped_params

        if self.api != "converse":
            return ()
        unsent = {name for name in ("metadata", "user") if params.get(name) is not None}
        return sorted(unsent.union(dropped_params(params)))


INHERITED = ("PATH", "HOME", "LANG", "TMPDIR")
MIB = 1024 * 1024

NoNul = StringConstraints(pattern=r"^[^\x00]*$")


def _text_or_secret(value: object) -> object:
    # The type decides, as trying both would report a mistake in a secret as one in a text, too.
    if isinstance(value, dict):
        return SecretRef.model_validate(value)
    if not isinstance(value, str | SecretRef):
        raise ValueError("must be a text, in quotes, or {env: NAME}, {file: PATH} or {command: [PROGRAM, …]}")  # noqa: TRY004  pydantic reports ValueError
    return value


EnvValue = Annotated[SecretRef | Annotated[str, NoNul], BeforeValidator(_text_or_secret)]


class ProcessLimits(Message):
    """Limits of the kernel for a program, and for each process that it starts. Linux only.

    A wrapper that starts the program elsewhere, as `docker run` does, has its own options for limits.
    """

    memory_mb: int | None = Field(default=None, ge=1, le=1 << 24, description="Address space, in MiB (RLIMIT_AS).")
    cpu_s: int | None = Field(default=None, ge=1, le=86_400, description="CPU time, in seconds; then it is killed.")
    processes: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description=(
            "Processes and threads of its user, including the worker's if it is the same user. "
            "The kernel does not apply it to root."
        ),
    )
    open_files: int | None = Field(default=None, ge=4, le=1 << 20, description="Open files, sockets and pipes.")

    def by_number(self) -> dict[int, int]:
        """Returns the limits that are set, by the kernel's numbers."""
        named = {
            resource.RLIMIT_AS: None if self.memory_mb is None else self.memory_mb * MIB,
            resource.RLIMIT_CPU: self.cpu_s,
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_NOFILE: self.open_files,
        }
        return {number: value for number, value in named.items() if value is not None}


class ProcessSettings(LocalSettings):
    """A child program, started for each attempt: JSON request on stdin, JSON response on stdout.

    Before the response it may print its answer in pieces, a line of `{"delta": "text"}` for each; the response needs no
    `result` then.

    It runs as the worker's own user. Its clean environment and `limits` are no sandbox; a `wrapper` can be one.
    """

    kind: Literal["process"] = "process"
    command: tuple[Annotated[str, NoNul], ...] = Field(
        min_length=1, description="The program with its arguments, run without a shell."
    )
    wrapper: tuple[Annotated[str, NoNul], ...] = Field(
        default=(),
        description=(
            "A program with its arguments that runs the command, which is appended: bwrap, "
            "nsjail, docker run. It must pass on stdin, stdout and the environment."
        ),
    )
    limits: ProcessLimits = ProcessLimits()
    cwd: Path | None = Field(
        default=None, description="Working directory; default: a new empty one, removed afterwards."
    )
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict,
        description=(
            "Environment, as texts or as {env: NAME}, {file: PATH} or {command: [PROGRAM, …]}, "
            f"with {', '.join(INHERITED)}. It inherits nothing else from the worker."
        ),
    )
    max_output_bytes: int = Field(
        default=4 * MIB, ge=1, le=64 * MIB, description="A program that prints more is killed."
    )

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError: the program, its directory or a secret is missing."""
        from breakwater.calls.providers.local import ErrorTexts
        from breakwater.calls.providers.process import ProcessProvider, Program, find_program

        cwd = None if self.cwd is None else self.cwd.absolute()
        if cwd is not None and not cwd.is_dir():
            raise ConfigError(f"cwd of the program {self.command[0]}: there is no directory {cwd}")
        if (limits := self.limits.by_number()) and sys.platform != "linux":
            raise ConfigError(f"limits of the program {self.command[0]}: only Linux supports them")
        secrets = {name: value.read() for name, value in self.env.items() if isinstance(value, SecretRef)}
        texts = {name: value for name, value in self.env.items() if isinstance(value, str)}
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env = {**inherited, **texts, **secrets}
        return ProcessProvider(
            Program(
                command=(*self.wrapper, *self.command),
                file=find_program((*self.wrapper, *self.command)[0], cwd or Path.cwd(), env.get("PATH")),
                env=env,
                error_texts=ErrorTexts(redaction, secrets.values()),
                cwd=cwd,
                max_output_bytes=self.max_output_bytes,
                limits=limits,
                cost_per_call=self.cost_per_call_usd,
            )
        )


class PythonSettings(LocalSettings):
    """An async callable of a module that the worker can import, or an async generator that yields its answer in pieces.

    It is given a dict (`execution_id`, `job_id`, `attempt_id`, `agent`, `model`, `tenant`, `task_id`, `timeout_s`,
    `traceparent`, `stream`, `params`, and `input` or `messages`) and returns any JSON, or a `Reply`; a generator yields
    texts, and may end with a `Reply` whose `result`, unless None, is the whole answer. Any exception is a failure that
    is tried again, except `NonRetryableError`. It shares the worker's event loop: one that blocks it stops all calls of
    the worker, and no timeout can end it. Such code belongs in a program of its own (`kind: process`).
    """

    kind: Literal["python"] = "python"
    callable: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$", description="package.module:function")

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Returns the provider. Raises ConfigError: the callable can't be imported, or is not async."""
        from breakwater.calls.providers.python import PythonProvider, load_agent

        function = load_agent(self.callable)
        return PythonProvider(self.callable, function, redaction, cost_per_call=self.cost_per_call_usd)


AnyProvider = Annotated[
    OpenAISettings
    | AzureSettings
    | AnthropicSettings
    | BedrockSettings
    | VertexSettings
    | GeminiSettings
    | ProcessSettings
    | PythonSettings,
    Discriminator("kind"),
]


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
