"""Deployments: the places where a model is called, each a provider, the model's name there, and a key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from breakwater.calls.providers.registry import AnyProvider
from breakwater.calls.providers.settings import HttpSettings
from breakwater.kernel.formats import hint
from breakwater.kernel.security.secret_refs import Secret, SecretRef
from breakwater.kernel.types import Identifier, Message, Off, Region, is_identifier
from breakwater.limits.settings import RateLimit
from breakwater.prices.settings import Price

MAX_DEPLOYMENTS = 64
"""The most deployments of a model, each key of a list counted."""

MAX_ID = 256
"""The most characters of a deployment's id, which stands in place of a model in breakers."""


class _OneOrMore:
    """Reads a single item as a list of it, and adds it to the JSON schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: object) -> object:
            return value if isinstance(value, list | tuple) else [value]

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        listed = handler(schema)
        return {"anyOf": [listed["items"], listed]}


Choose = Literal["headroom", "weighted", "latency", "ordered"]
"""The choice among the deployments that may be called."""


class DeploymentSettings(Message):
    """A place where a model is called. Several keys are as many deployments.

    A key takes the place of the provider's `api_key`: for each key, the provider is opened once more, from its settings
    with that `api_key` (`connection_settings`). A kind of provider reads `self.api_key` in `open`, and needs to know
    nothing of deployments. One whose credentials are others, such as a role, is another provider in the config.
    """

    provider: Identifier
    name: str | None = Field(
        default=None, min_length=1, description="The model's name there; default: that of the model."
    )
    key: Annotated[tuple[Secret, ...], _OneOrMore()] | None = Field(
        default=None,
        description="In place of the provider's `api_key`; of a list, each key is a deployment of its own. Attempts "
        "name it by its environment variable or its file.",
    )
    weight: float = Field(default=1.0, gt=0, le=1000, description="Share of the calls, relative to the other ones.")
    role: Literal["overflow"] | None = Field(
        default=None, description="overflow: called only while no other deployment may be."
    )
    limits: Annotated[RateLimit | None, Off] = Field(
        default=None, description="Limits of this deployment over all agents; others are called beyond them."
    )
    price: Price | None = Field(default=None, description="By default the model's.")
    region: Region | None = Field(default=None, description="Where it is, for `residency`.")

    @field_validator("key")
    @classmethod
    def _some_key(cls, keys: tuple[SecretRef, ...] | None) -> tuple[SecretRef, ...] | None:
        if keys == ():
            raise ValueError("is empty; name a key, or leave it out to use the provider's `api_key`")
        return keys


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model at a provider, under one key."""

    model: str
    provider: str
    """The name of the provider; empty if it is unknown."""
    name: str
    """The provider's name for the model."""
    key: SecretRef | None = None
    """The key in place of the provider's own."""
    settings: DeploymentSettings | None = None
    """None for a model without `deployments`, which is one deployment of its provider."""

    @property
    def key_name(self) -> str | None:
        """The name of its key; None for the provider's own."""
        return None if self.key is None else key_name(self.key)

    @property
    def id(self) -> str:
        """Its id, `<provider>/<name>` or `<provider>/<name>#<key>`: the unit of holds and retry budgets."""
        return f"{self.provider}/{self.name}" + (f"#{key_name(self.key)}" if self.key is not None else "")

    @property
    def unit(self) -> str:
        """The unit of its breaker and its health: its id, or the model if that has no `deployments`."""
        return self.model if self.settings is None else self.id

    @property
    def connection(self) -> str:
        """The name of the open provider that calls it."""
        return self.provider if self.key is None else f"{self.provider}#{key_name(self.key)}"

    @property
    def region(self) -> str | None:
        """The region that it is in; None if that is not said."""
        return None if self.settings is None else self.settings.region


def key_name(key: SecretRef) -> str:
    """Returns the name of a key by its source, which shows nothing of the key: a variable, a file, or a hash."""
    if key.env is not None:
        return key.env
    if key.file is not None:
        return key.file.name
    return f"command-{hashlib.sha256(repr(key.command).encode()).hexdigest()[:8]}"


def expand(model: str, name: str, listed: Iterable[DeploymentSettings]) -> tuple[Deployment, ...]:
    """Returns the deployments that a model lists, one for each key, in their order.

    Args:
        model: the model's id.
        name: its name at providers for which no other is set; a prefix `<provider>/` does not go on the wire.
        listed: as the config lists them.
    """
    return tuple(
        Deployment(model, settings.provider, settings.name or name.removeprefix(f"{settings.provider}/"), key, settings)
        for settings in listed
        for key in settings.key or (None,)
    )


def connection_settings(settings: AnyProvider, key: SecretRef | None) -> AnyProvider:
    """Returns a provider's settings with the key of a deployment."""
    return settings if key is None else settings.model_copy(update={"api_key": key, "auth": None})


def deployment_problems(
    place: str, deployments: Iterable[Deployment], providers: Mapping[str, AnyProvider]
) -> Iterable[str]:
    """Yields what is wrong with the deployments that a model lists; `place` is their path in the config."""
    first_places: dict[str, int] = {}
    connections: list[tuple[str, tuple[AnyProvider, str]]] = []
    count = 0
    for number, deployment in enumerate(deployments):
        count += 1
        path = f"{place}, the one of {deployment.provider!r}"
        settings = providers.get(deployment.provider)
        if settings is None:
            yield f"{place}: {deployment.provider!r} is not configured{hint(deployment.provider, providers)}"
            continue
        if not isinstance(settings, HttpSettings):
            yield f"{path}: its kind is {settings.kind!r}; only providers with a URL can be deployments"
        elif deployment.connection != deployment.provider and deployment.connection in providers:
            yield f"{path}: the provider {deployment.connection!r} has the name of this one with its key; rename one"
        if len(deployment.id) > MAX_ID or not is_identifier(deployment.id[:128]):
            yield f"{path}: {deployment.id[:60]!r}… is too long, or has characters that no id may have"
        if deployment.id in first_places:
            yield (
                f"{place}: {deployment.id!r} is listed twice, as number {first_places[deployment.id] + 1} and "
                f"{number + 1} (each key counts); give one another provider, name or key"
            )
        elif isinstance(settings, HttpSettings):
            connection = connection_settings(settings, deployment.key), deployment.name
            first_id = next((earlier_id for earlier_id, earlier in connections if earlier == connection), None)
            if first_id is not None:
                yield (
                    f"{place}: {deployment.id!r} and {first_id!r} are the same place under the same key, whose limits "
                    "and breaker would count twice; leave one out"
                )
            connections.append((deployment.id, connection))
        first_places.setdefault(deployment.id, number)
    if count > MAX_DEPLOYMENTS:
        yield f"{place}: has {count} deployments, each key counted; the most is {MAX_DEPLOYMENTS}"


def key_name_problems(deployments: Iterable[Deployment]) -> Iterable[str]:
    """Yields a problem for each key of a provider's that has the name of another: calls would go out with that one."""
    first_ones: dict[str, Deployment] = {}
    for deployment in deployments:
        if deployment.key is None:
            continue
        first = first_ones.setdefault(deployment.connection, deployment)
        if first.key is not None and first.key != deployment.key:
            first_source, source = (f"{key.file or key_name(key)}" for key in (first.key, deployment.key))
            yield (
                f"models.{deployment.model}.deployments, the one of {deployment.provider!r}: the key file {source} has "
                f"the name of {first_source} (models.{first.model}), and names tell keys apart; rename one"
            )


def shared_breaker_problems(listed: Iterable[Deployment], unlisted: Iterable[Deployment]) -> Iterable[str]:
    """Yields a problem for each model that has the id of another model's deployment: both would have one breaker.

    Args:
        listed: the deployments that models list.
        unlisted: those of the models that list none.
    """
    by_id = {deployment.id: deployment for deployment in listed}
    for deployment in unlisted:
        namesake = by_id.get(deployment.model)
        if namesake is not None and namesake.id != deployment.id:
            yield (
                f"models.{deployment.model}: is at {deployment.id!r}, and has the id of a deployment of "
                f"models.{namesake.model}, so that both would have one breaker; rename it"
            )


def shared_limit_problems(deployments: Iterable[Deployment]) -> Iterable[str]:
    """Yields a problem for each deployment of several models whose limits differ: it has one count for all of them."""
    first_ones: dict[str, Deployment] = {}
    for deployment in deployments:
        first = first_ones.setdefault(deployment.id, deployment)
        limits, first_limits = (place.settings and place.settings.limits for place in (deployment, first))
        if limits != first_limits and deployment.model != first.model:
            yield (
                f"models.{deployment.model}.deployments: {deployment.id!r} has other limits than under "
                f"models.{first.model}, but the calls of both count together; give both the same"
            )
