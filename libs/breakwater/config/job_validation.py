"""Checks jobs against the config of their agents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from breakwater.calls.rules.parameters import is_droppable
from breakwater.config.agents import Agent
from breakwater.config.document import Config
from breakwater.dialects.rules.embeddings import PARAMS, fallback_objection, native_body, too_many, too_many_batches
from breakwater.dialects.rules.forms import InvalidBodyError
from breakwater.dialects.rules.native_requests import chat_form
from breakwater.dialects.rules.params import connection_objection, params_objection, unknown_objection, unknown_part
from breakwater.jobs.contract.job import ChatMessage, Job, NativeRequest
from breakwater.jobs.rules.attribution import name_claims
from breakwater.kernel.formats import listing
from breakwater.kernel.types import is_identifier
from breakwater.kernel.validation import FieldError
from breakwater.limits.rules.budget import LimitTable
from breakwater.prices.rules.price import term_of
from breakwater.redaction.rules.redact import id_objection

_IDS = ("job_id", "tenant", "task_id", "parent_execution_id", "plan_id")


def validate_job(config: Config, limits: LimitTable, job: Job, *, with_figures: bool = False) -> FieldError | None:
    """Returns the reason why its configured agent can't run a well-formed job; None if it can.

    Args:
        config: the config.
        limits: the current limits.
        job: the job.
        with_figures: True if the reason may name the config's bounds, which only operators may see.
    """
    agent = config.agents[job.agent]
    strictness = config.strict_params(agent, job, limits)
    ids = [(path, name) for path in _IDS if (name := getattr(job, path)) is not None]
    models = [(f"fallback_models.{number}", model) for number, model in enumerate(job.fallback_models or ())]
    if job.model is not None:
        models.insert(0, ("model", job.model))
    for path, name in (*ids, *models, *(("depends_on", name) for name in job.depends_on)):
        if (objection := id_objection(config.redaction, name)) is not None:
            return FieldError(path, objection)
    for claim in name_claims(job):
        if not is_identifier(claim.name):
            return FieldError(claim.path, "must name a user or a team with 1 to 128 characters, none of them a control")
        if (objection := id_objection(config.redaction, claim.name)) is not None:
            return FieldError(claim.path, objection)
    if job.api == "embeddings" and (problem := _embeddings_objection(config, agent, job)) is not None:
        return problem
    if (
        job.api_request is not None
        and (problem := _request_objection(config, agent, job, job.api_request, strictness)) is not None
    ):
        return FieldError(f"api_request.body.{problem.path}", problem.message)
    if job.params and (problem := _params_objection(config, agent, job, job.params, strictness)) is not None:
        return FieldError(f"params.{problem.path}", problem.message)
    if job.messages is not None and (problem := _parts_objection(agent, job, job.messages, strictness)) is not None:
        return FieldError(f"messages.{problem.path}", problem.message)
    allowed = {*agent.chain, *agent.allowed_models} if models else set[str]()
    for path, model in models:
        if "*" not in allowed and model not in allowed:
            choices = listing(allowed)
            return FieldError(path, f"{model!r} is not allowed for agent {job.agent!r}; allowed: {choices}")
        provider = config.provider_name(agent, model)
        if provider not in config.providers:
            return FieldError(path, f"no provider is known for {model!r}; known: {listing(config.providers)}")
        if model not in allowed and config.is_local(provider):
            return FieldError(path, f"{model!r} is a process or callable, and must be allowed by name")
    if job.total_timeout_s is not None and job.total_timeout_s > agent.total_timeout_s:
        bound = f": at most {agent.total_timeout_s:g}" if with_figures else "; leave it out, or set a shorter one"
        return FieldError("total_timeout_s", f"is longer than agent {job.agent!r} allows{bound}")
    if isinstance(rules := agent.rules_for(job, with_figures=with_figures), FieldError):
        return rules
    if job.input is not None:
        chain = agent.chain_for(job)
        if any(not config.is_local(config.provider_name(agent, model)) for model in chain):
            return FieldError("input", f"agent {job.agent!r} is a chat agent and needs prompt or messages")
    return None


def _embeddings_objection(config: Config, agent: Agent, job: Job) -> FieldError | None:
    """Returns the reason why the models of a job can't embed, or can't replace one another; None if they can."""
    if job.stream:
        return FieldError("stream", "is not possible: embeddings come whole")
    chain = agent.chain_for(job)
    for model in chain:
        for place in config.deployments(agent, model):
            provider = place.provider
            if config.speaks(provider, "embeddings", model, place.name):
                continue
            kind = "" if provider not in config.providers else f" of kind {config.providers[provider].kind!r}"
            message = (
                f"{model!r} has no embeddings, as its provider {provider!r} is{kind}; name an agent for embeddings"
            )
            return FieldError("model", message)
    problem = fallback_objection({model: config.dimensions(model) for model in chain})
    return None if problem is None else FieldError("model", f"agent {job.agent!r} can't embed: {problem}")


def _request_objection(
    config: Config, agent: Agent, job: Job, request: NativeRequest, strictness: str | None
) -> FieldError | None:
    """Returns the reason why a job's native request can't be sent to the providers of its models; None if it can."""
    try:
        form = chat_form(request)
    except InvalidBodyError as error:
        return error.problem
    places = [place for model in agent.chain_for(job) for place in config.deployments(agent, model)]
    drops = agent.on_unsupported_param == "drop"
    losses = [loss for loss in form.losses if not (drops and is_droppable(loss.path))]
    if losses and not any(config.speaks(place.provider, request.api, place.model, place.name) for place in places):
        return losses[0]
    if strictness is not None:
        for unpriced in form.unpriced:
            name = re.split(r"[.\[]", unpriced.path)[0]
            if name not in agent.allowed_params:
                remedy = f"list {name!r} in agents.{job.agent}.allowed_params to allow it"
                message = f"{unpriced.message}: {strictness}, only such fields are allowed; {remedy}"
                return FieldError(unpriced.path, message)
    if request.api == "embeddings":
        body = native_body(request.body, params=agent.params)
        declared = config.dimensions(agent.chain_for(job)[0])
        if (problem := too_many(body, declared)) is not None:
            return problem
        if (problem := too_many_batches(body, config.max_inputs(agent, agent.chain_for(job)))) is not None:
            return problem
        unpriced_params = {name: value for name, value in form.params.items() if name not in PARAMS}
        return _params_objection(config, agent, job, unpriced_params, strictness)
    problem = _params_objection(config, agent, job, form.params, strictness)
    return None if problem is None else FieldError(form.in_body(problem.path), problem.message)


def _tier_objection(config: Config, chain: Iterable[str], params: Mapping[str, JsonValue]) -> FieldError | None:
    """Returns the reason why a job can't ask for its terms of service, which have no price; None if it can."""
    if (term := term_of(params)) is None:
        return None
    for model in chain:
        settings = config.models.get(model)
        tiers = () if settings is None or settings.price is None else settings.price.service_tiers
        if term not in {name.strip().lower() for name in tiers}:
            message = f"{term!r} has no price: set models.{model}.price.service_tiers.{term} to allow it"
            return FieldError("service_tier", message)
    return None


def _params_objection(
    config: Config, agent: Agent, job: Job, params: Mapping[str, JsonValue], strictness: str | None
) -> FieldError | None:
    """Returns the reason why a job's params can't be sent to the providers of its models; None if they can."""
    if (problem := params_objection(params)) is not None:
        return problem
    if (problem := _tier_objection(config, agent.chain_for(job), params)) is not None:
        return problem
    of_connection = connection_objection(params)
    if strictness is None and of_connection is None:
        return None
    kinds = {
        config.providers[place.provider].api_kind(place.name)
        for model in agent.chain_for(job)
        for place in config.deployments(agent, model)
        if place.provider in config.providers and not config.is_local(place.provider)
    }
    if kinds and of_connection is not None:
        return of_connection
    if strictness is None:
        return None
    for kind in sorted(kinds):
        if (problem := unknown_objection(params, kind, agent.allowed_params)) is not None:
            top_level_param = problem.path.partition(".")[0]
            remedy = f"list {top_level_param!r} in agents.{job.agent}.allowed_params to allow it"
            return FieldError(problem.path, f"{problem.message}: {strictness}, only such params are allowed; {remedy}")
    return None


def _parts_objection(
    agent: Agent, job: Job, messages: Iterable[ChatMessage], strictness: str | None
) -> FieldError | None:
    """Returns the reason why parts of a job's messages, which may cost more than tokens, are not allowed."""
    if strictness is None:
        return None
    if (problem := unknown_part(messages, agent.allowed_params)) is None:
        return None
    remedy = f"list 'messages' in agents.{job.agent}.allowed_params to allow it"
    return FieldError(problem.path, f"{problem.message}: {strictness}, only such parts are allowed; {remedy}")
