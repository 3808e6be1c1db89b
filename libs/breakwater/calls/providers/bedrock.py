"""Amazon Bedrock: its APIs, and AWS' credentials and signatures. HTTP is ours; botocore makes no call to a model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

from breakwater.calls.providers.anthropic import Messages, NativeMessages, request_body
from breakwater.calls.providers.base import Call, StreamReader, Wire
from breakwater.calls.providers.bedrock_embeddings import InvokedEmbeddings
from breakwater.calls.providers.converse import ConverseEvents, converse_request, message_of
from breakwater.calls.providers.credentials import Issued, renewal_time
from breakwater.calls.providers.extras import load_optional
from breakwater.calls.providers.openai import openai_wires
from breakwater.calls.providers.settings import embedding_maker, is_claude
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.contract.job import CallApi
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.formats import hint
from breakwater.kernel.security.secret_refs import variable
from breakwater.prices.rules.usage import Usage

_auth, _awsrequest, _config, _credentials, _exceptions, _session = load_optional(
    "aws",
    "botocore.auth",
    "botocore.awsrequest",
    "botocore.config",
    "botocore.credentials",
    "botocore.exceptions",
    "botocore.session",
)
logging.getLogger("botocore").setLevel(logging.WARNING)  # below that, it logs session tokens and credentials

ANTHROPIC_VERSION = "bedrock-2023-05-31"
"""The version of Messages that Bedrock has."""


def _model_url(base_url: str, model: str, operation: str) -> str:
    return f"{base_url.rstrip('/')}/model/{quote(model, safe='')}/{operation}"


def _bearer(key: str | None) -> Mapping[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def betas_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Returns Anthropic's betas that headers enable."""
    values = [value for name, value in headers.items() if name.lower() == "anthropic-beta"]
    return tuple(beta for value in values for name in value.split(",") if (beta := name.strip()))


@dataclass(frozen=True, slots=True)
class Converse(Messages):
    """Converse, which all of Bedrock's models have. Chats are translated to it by way of Messages.

    Attributes:
        betas: the betas of Anthropic's that the config enables.
    """

    betas: tuple[str, ...] = ()

    def url(self, model: str, *, streamed: bool = False) -> str:
        """Returns the URL, which contains the model."""
        return _model_url(self.base_url, model, "converse-stream" if streamed else "converse")

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns Bedrock's own key, if there is one."""
        return _bearer(key)

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the translated call. Raises CallError."""
        return converse_request(request_body(call), call.model, self.betas if is_claude(call.model) else ())

    def stream_reader(self, answer: Assembly) -> StreamReader:  # noqa: ARG002  its own form has to be kept
        """Returns a reader of the events of a message."""
        return ConverseEvents()

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:  # noqa: ARG002  the same for all calls
        """Returns the answer as a message, as a stream of it is assembled."""
        return dict(_as_message(answer))

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Returns the tokens of an answer."""
        return Messages.usage(self, _as_message(answer))

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns one choice. What a guardrail says in place of the model is a text as any other."""
        return Messages.choices(self, _as_message(answer))


def _as_message(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    return message_of(answer) if "output" in answer and "content" not in answer else answer


@dataclass(frozen=True, slots=True)
class InvokedMessages(NativeMessages):
    """Messages as they are, by `invoke`. The URL has the model, and the body the API's version and betas."""

    betas: tuple[str, ...] = ()

    def url(self, model: str, *, streamed: bool = False) -> str:
        """Returns the URL, which contains the model."""
        return _model_url(self.base_url, model, "invoke-with-response-stream" if streamed else "invoke")

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns Bedrock's own key, if there is one."""
        return _bearer(key)

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the native request in Bedrock's envelope."""
        request = NativeMessages.body(self, call)
        betas = list(dict.fromkeys((*self.betas, *betas_in(call.headers))))
        return {
            "anthropic_version": self.version,
            **{name: value for name, value in request.items() if name not in ("model", "stream")},
            **({"anthropic_beta": betas} if betas and "anthropic_beta" not in request else {}),
        }


@dataclass(frozen=True, slots=True)
class _Invoked:
    """The URLs of models that are called by `invoke`."""

    base_url: str

    def address(self, operation: str, model: str) -> str:  # noqa: ARG002  `invoke` is the only one
        """Returns the URL of a model."""
        return _model_url(self.base_url, model, "invoke")

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns Bedrock's own key, if there is one."""
        return _bearer(key)


def bedrock_wires(base_url: str, headers: Mapping[str, str], model: str) -> Mapping[CallApi, Wire]:
    """Returns the APIs of a model.

    Args:
        base_url: the endpoint of `bedrock-runtime`.
        headers: the config's headers, which may enable betas.
        model: the id or ARN of the model or of an inference profile.
    """
    betas = betas_in(headers)
    chat = Converse(base_url, ANTHROPIC_VERSION, betas)
    if (maker := embedding_maker(model)) is not None:
        return {"chat": chat, "embeddings": InvokedEmbeddings(_Invoked(base_url), maker == "amazon")}
    if not is_claude(model):
        return {"chat": chat}
    return {"chat": chat, "messages": InvokedMessages(base_url, ANTHROPIC_VERSION, betas)}


def compatible_wires(base_url: str) -> Mapping[CallApi, Wire]:
    """Returns the APIs of the endpoint that is compatible with OpenAI's."""
    wires = openai_wires(base_url)
    return {api: wires[api] for api in ("chat", "responses")}


# Credentials

_PARTITIONS = ("aws", "aws-cn", "aws-us-gov", "aws-eusc", "aws-iso", "aws-iso-b", "aws-iso-e", "aws-iso-f")
_KEY_ID = "AWS_ACCESS_KEY_ID"
_METADATA_OFF = "AWS_EC2_METADATA_DISABLED"
_NETWORK = _config.Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 2})


def check_region(region: str) -> None:
    """Raises ConfigError if AWS has no such region, as far as the installed botocore knows."""
    session = _session.Session()
    regions: set[str] = {name for partition in _PARTITIONS for name in session.get_available_regions("ec2", partition)}
    if region not in regions:
        raise ConfigError(f"AWS has no region {region!r}{hint(region, regions)} (for a newer one, set base_url)")


@dataclass(frozen=True, slots=True)
class AwsSource:
    """AWS' credentials, by a role or by botocore's chain: environment, profile, web identity, container, instance.

    Attributes:
        region: the region, in which STS is asked for the credentials of a role.
        profile: the profile in AWS' config files; None for the environment's or the default one.
        role_arn: a role to assume with these credentials; None for none.
        external_id: the external id that the role asks for; None for none.
    """

    region: str
    profile: str | None = None
    role_arn: str | None = None
    external_id: str | None = None

    def __str__(self) -> str:
        place = "AWS' default chain" if self.profile is None else f"the AWS profile {self.profile}"
        return place if self.role_arn is None else f"the role {self.role_arn} by {place}"

    def fetch(self) -> Issued[Any]:
        """Asks for the credentials, and looks at AWS' files again. Raises ConfigError."""
        with _in_our_words(self):
            session = _session.Session(profile=self.profile)
            if self.profile is None and not os.environ.get(_KEY_ID) and (key_id := variable(_KEY_ID)):
                # The file with our environment's variables may have those that botocore reads in its own.
                secret_key = variable("AWS_SECRET_ACCESS_KEY")
                session.set_credentials(key_id, secret_key, variable("AWS_SESSION_TOKEN") or None)
            credentials = session.get_credentials()
            if credentials is None:
                raise ConfigError(_where_it_looked(session, self.profile))
            if self.role_arn is not None:
                return self._assume(session, self.role_arn)
            frozen = credentials.get_frozen_credentials()
            # The only way to know the end: `refresh_needed` says for a given moment whether it is near.
            return _issued(frozen, getattr(credentials, "_expiry_time", None))

    def _assume(self, session: Any, role_arn: str) -> Issued[Any]:
        sts = session.create_client("sts", region_name=self.region, config=_NETWORK)
        external = {} if self.external_id is None else {"ExternalId": self.external_id}
        assumed = sts.assume_role(RoleArn=role_arn, RoleSessionName="breakwater", **external)["Credentials"]
        keys = (assumed[name] for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
        return _issued(_credentials.ReadOnlyCredentials(*keys), assumed["Expiration"])


def _issued(credentials: Any, ends_at: datetime | None) -> Issued[Any]:
    secrets = [text for text in (credentials.secret_key, credentials.token) if text]
    if ends_at is None:
        return Issued(credentials, secrets)
    ends_at_s = ends_at.timestamp()
    return Issued(credentials, secrets, renewal_time(ends_at_s, time.time()), ends_at_s)


@contextmanager
def _in_our_words(source: AwsSource) -> Generator[None]:
    try:
        yield
    except _exceptions.ProfileNotFound as error:
        raise ConfigError(f"there is no AWS profile {source.profile} in AWS' config files") from error
    except _exceptions.CredentialRetrievalError as error:
        # A program's message may contain what it was to keep secret.
        is_program = error.kwargs.get("provider") == "custom-process"
        text = "the profile's credential_process failed" if is_program else str(error)
        raise ConfigError(f"no credentials from {source}: {text}") from error
    except (_exceptions.BotoCoreError, _exceptions.ClientError) as error:
        raise ConfigError(f"no credentials from {source}: {error}") from error
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"no credentials from {source}: {type(error).__name__}") from error


def _where_it_looked(session: Any, profile: str | None) -> str:
    instance = f"instance metadata (off: {_METADATA_OFF})" if _metadata_is_off() else "instance metadata"
    files = [str(session.get_config_variable(name)) for name in ("credentials_file", "config_file")]
    named = "" if profile is None else f" for the profile {profile}"
    places = [
        f"the environment ({_KEY_ID})",
        "web identity (AWS_WEB_IDENTITY_TOKEN_FILE)",
        *files,
        "the container (AWS_CONTAINER_CREDENTIALS_*)",
        instance,
    ]
    return f"no AWS credentials{named}: looked at {', '.join(places)}; or set api_key to one of Bedrock's own keys"


def _metadata_is_off() -> bool:
    return os.environ.get(_METADATA_OFF, "").lower() == "true"


def signature(credentials: Any, region: str, url: str, body: bytes) -> Mapping[str, str]:
    """Returns the headers that sign a POST request with SigV4, now."""
    host = urlsplit(url).hostname or ""
    service = "bedrock-mantle" if host.startswith("bedrock-mantle.") else "bedrock"
    request = _awsrequest.AWSRequest("POST", url, data=body)
    _auth.SigV4Auth(credentials, service, region).add_auth(request)
    return {name: str(value) for name, value in request.headers.items()}
