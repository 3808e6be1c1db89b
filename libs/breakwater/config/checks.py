"""What can only be checked with the whole config at hand: a job's wishes, and secrets."""

from __future__ import annotations

from collections.abc import Iterator

from breakwater.callables import load_callable
from breakwater.config.errors import listing
from breakwater.config.models import Config
from breakwater.config.params import params_objection
from breakwater.contracts.job import Job
from breakwater.contracts.validation import FieldError
from breakwater.errors import ConfigError
from breakwater.secret_refs import SecretRef


def unreadable_secrets(config: Config) -> tuple[str, ...]:
    """The secrets that the config names and that can't be read here: where each is named, and what is wrong."""
    problems: list[str] = []
    for path, secret in named_secrets(config):
        try:
            secret.read()
        except ConfigError as error:
            problems.append(f"  {path}: {error}")
    return tuple(problems)


def unusable_programs(config: Config) -> tuple[str, ...]:
    """The programs and callables that the config names and that can't be used here, and why."""
    problems: list[str] = []
    for name, provider in config.providers.items():
        if provider.local:
            try:
                provider.open()
            except ConfigError as error:
                problems.append(f"  providers.{name}: {error}")
    for name, channel in config.alerts.channels.items():
        if channel.python is not None:
            try:
                load_callable(channel.python.callable)
            except ConfigError as error:
                problems.append(f"  alerts.channels.{name}.python.callable: {error}")
    return tuple(problems)


def named_secrets(config: Config) -> Iterator[tuple[str, SecretRef]]:
    """Every secret that the config names, with its place there."""
    for name, provider in config.providers.items():
        for place, secret in provider.secrets().items():
            yield f"providers.{name}.{place}", secret
    yield from config.alerts.secrets()


def objection(config: Config, job: Job) -> FieldError | None:
    """Why a job that is valid by itself can't be run by its (configured) agent; None where it can."""
    agent = config.agents[job.agent]
    if (problem := params_objection(job.params)) is not None:
        return FieldError(f"params.{problem.path}", problem.message)
    allowed = {*agent.chain, *agent.allowed_models}
    named = [("model", job.model), *((f"fallback_models.{i}", m) for i, m in enumerate(job.fallback_models or ()))]
    for path, model in named:
        if model is None:
            continue
        if "*" not in allowed and model not in allowed:
            known = listing(allowed)
            return FieldError(path, f"{model!r} is not allowed for agent {job.agent!r}; allowed are {known}")
        provider = config.provider_name(agent, model)
        if provider not in config.providers:
            return FieldError(path, f"no provider is known for {model!r}; known are {listing(config.providers)}")
        if model not in allowed and config.is_local(provider):
            return FieldError(path, f"{model!r} is a program, and has to be allowed by its name")
    if job.input is not None:
        chain = agent.chain_for(job)
        if any(not config.is_local(config.provider_name(agent, model)) for model in chain):
            return FieldError("input", f"agent {job.agent!r} is a chat agent and takes prompt or messages")
    return None
