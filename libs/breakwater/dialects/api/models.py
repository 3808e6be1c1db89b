"""The meanings of `model` in OpenAI's requests: an agent, or an agent with one of its models."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from breakwater.config import Agent, Config
from breakwater.dialects.contract.openai import ModelName, ModelNames
from breakwater.identity.operations import ApiRequest, operation
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.types import Message
from breakwater.kernel.validation import FieldError


class ModelNameTable:
    """The agents and models that a config names."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._longest_first = sorted(config.agents, key=len, reverse=True)

    def resolve(self, name: str, caller: Caller) -> tuple[str, str | None]:
        """Returns the agent and the requested model that a name means; None for the agent's own model.

        If the key is bound to one agent, a model that the agent lists takes precedence over `agent/model`, and
        `agent/model` takes precedence over a model that the agent allows only by `*`.

        Args:
            name: `agent`, `agent/model`, or a model of the agent that the key is bound to. A model is named by its id,
                or by its name at the provider.
            caller: the sender.

        Raises:
            RequestError: 404, there is no such agent or model for this key.
        """
        if name in self._config.agents and (not caller.agents or name in caller.agents):
            return name, None
        usable = self._usable(caller)
        bound = caller.agents[0] if len(caller.agents) == 1 and usable else None
        if bound is not None and (model := self._listed_model(bound, name)) is not None:
            return bound, model
        for agent in (agent for agent in self._longest_first if agent in usable and name.startswith(f"{agent}/")):
            model_name = name.removeprefix(f"{agent}/")
            if (model := self._listed_model(agent, model_name) or self._by_wildcard(agent, model_name)) is not None:
                return agent, model
        if bound is not None and (model := self._by_wildcard(bound, name)) is not None:
            return bound, model
        raise self.not_found(name, caller)

    def names_for(self, caller: Caller) -> Iterator[str]:
        """Yields each name that a caller may use, except models that are only allowed by `*`."""
        for agent in self._usable(caller):
            if self.may_ask(caller, agent, None):
                yield agent
            for model in _listed_models(self._config.agents[agent]):
                if not self.may_ask(caller, agent, model):
                    continue
                yield f"{agent}/{model}"
                if len(caller.agents) == 1:
                    yield model

    def may_ask(self, caller: Caller, agent: str, model: str | None) -> bool:
        """Returns True if a caller may ask for a model of an agent; None for the agent's own, which is its first."""
        first = self._config.agents[agent].chain[:1]
        return not caller.models or (first[0] if model is None and first else model) in caller.models

    def _usable(self, caller: Caller) -> list[str]:
        return [agent for agent in self._config.agents if not caller.agents or agent in caller.agents]

    def _listed_model(self, agent_name: str, model_name: str) -> str | None:
        """Returns the agent's model with this id, else its first model that the provider calls so."""
        agent = self._config.agents[agent_name]
        models = _listed_models(agent)
        if model_name in models:
            return model_name
        return next((model for model in models if self._name_at_provider(agent, model) == model_name), None)

    def _by_wildcard(self, agent_name: str, model_name: str) -> str | None:
        agent = self._config.agents[agent_name]
        provider = self._config.provider_name(agent, model_name)
        is_known = provider in self._config.providers and not self._config.is_local(provider)
        return model_name if "*" in agent.allowed_models and is_known else None

    def _name_at_provider(self, agent: Agent, model: str) -> str | None:
        provider = self._config.provider_name(agent, model)
        return None if provider is None else self._config.name_at_provider(provider, model)

    def not_found(self, name: str, caller: Caller) -> RequestError:
        """Returns 404 for a name that means nothing to a caller, with a name that may be meant."""
        names = list(dict.fromkeys(self.names_for(caller)))
        message = (
            f"the model {name!r} does not exist, or this API key may not use it: `model` is an agent, `agent/model`, "
            f"or any model of the agent that the key is bound to{suggestion(name, names)}"
        )
        return RequestError(404, "model_not_found", message, [FieldError(path="model", message="is not known")])


def _listed_models(agent: Agent) -> list[str]:
    return [model for model in dict.fromkeys((*agent.chain, *agent.allowed_models)) if model != "*"]


class ModelRoutes:
    """The names of models."""

    def __init__(self, config: Config) -> None:
        self._names = ModelNameTable(config)
        self._created = datetime.now(UTC).replace(microsecond=0)

    @operation(
        "GET",
        "/v1/models",
        tag="openai",
        summary="Values of `model`",
        description="Agents, and each with the models that it lists; for a key that is bound to one agent, the models "
        "alone too. A model that is allowed by `*` only is not listed.",
        result="Those that the key may use.",
    )
    async def list_models(self, request: ApiRequest[Message]) -> ModelNames:
        """Lists the values of `model` for this key."""
        models = tuple(map(self._model, dict.fromkeys(self._names.names_for(request.caller))))
        return ModelNames(
            data=models, first_id=models[0].id if models else None, last_id=models[-1].id if models else None
        )

    @operation(
        "GET",
        "/v1/models/{model}",
        tag="openai",
        summary="One value of `model`",
        result="It may.",
        errors={404: "There is no such agent or model for this key (`model_not_found`)."},
    )
    async def show_model(self, request: ApiRequest[Message]) -> ModelName:
        """Shows one value of `model`. Raises RequestError: 404."""
        name = request.path["model"]
        agent, model = self._names.resolve(name, request.caller)
        if not self._names.may_ask(request.caller, agent, model):
            raise self._names.not_found(name, request.caller)
        return self._model(name)

    def _model(self, name: str) -> ModelName:
        created = int(self._created.timestamp())
        return ModelName(id=name, display_name=name, created=created, created_at=self._created)
