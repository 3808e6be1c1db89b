"""`breakwater init`: writes a first config for a provider; also adds agents to a config."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
import typer

from breakwater.calls.providers.base import Call, CallError
from breakwater.calls.providers.failures import http_failure, transport_failure, unreachable_at
from breakwater.calls.rules.classify import TransportFailure, classify
from breakwater.config import Config
from breakwater.config.first_config import StartingAgent, write_config
from breakwater.config.mistakes import warnings_of_agent
from breakwater.config.starting_providers import (
    ANTHROPIC,
    AZURE,
    AZURE_KEY,
    BY_NAME,
    FOUND_HERE,
    OPENAI,
    StartingProvider,
)
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import CliError, ExitCode, usage_error
from breakwater.kernel.commands.formats import usd
from breakwater.local.plane import JsonOption

LOCAL_TIMEOUT_S = 1.0
LIST_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
_URL = re.compile(r"https?://[^/\s]+\S*")


def init(
    provider: Annotated[
        str | None,
        typer.Option("--provider", help=f"One of {', '.join(BY_NAME)}. Default: the first that is found here."),
    ] = None,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of --provider, such as region=eu-central-1."),
    ] = [],  # noqa: B006  typer copies it
    url: Annotated[
        str | None, typer.Option("--url", help="Any OpenAI-compatible endpoint; /v1 is added if it is missing.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option("--key-env", metavar="NAME", help="The variable that has the key for --url.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model to call.")] = None,
    agent: Annotated[str, typer.Option("--agent", help="The name of the agent.")] = "assistant",
    daily_usd: Annotated[str, typer.Option("--daily-usd", parser=usd, help="What it may spend in a day.")] = "1.00",
    call: Annotated[
        bool | None,
        typer.Option("--call/--no-call", help="Check it with one call of the model, which the provider may bill."),
    ] = None,
    file: Annotated[Path, typer.Option("--config", "-c", help="The file to write.")] = Path("breakwater.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file where there is one.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a first config, and check it.

    Looks for providers: OPENAI_API_KEY (with OPENAI_BASE_URL) and ANTHROPIC_API_KEY in the environment, Ollama and vLLM
    on this machine; and asks the provider for its models. On a terminal it asks which provider, which model, and
    whether it may call it once; otherwise it takes the first of each, and calls no model without --call. The file
    refers to keys and never contains them.

    For example:

        breakwater init

        breakwater init --provider anthropic --model claude-haiku-4-5 --no-call

        breakwater init --provider bedrock --set region=eu-central-1 --call

        breakwater init --url http://10.0.0.7:8000/v1 --key-env LLM_KEY --model qwen3 --call
    """
    interactive = _is_interactive() and not as_json
    if file.exists() and not force:
        raise usage_error(f"{file} already exists", "Name another one with --config FILE, or replace it with --force.")
    chosen_settings = _settings_of(settings, provider)
    chosen_provider = _choose_provider(provider, url, key_env, interactive=interactive)
    chosen_provider = _with_answers(chosen_provider, chosen_settings, interactive=interactive)
    if (
        model is None
        and chosen_provider.lists_models
        and not chosen_provider.models
        and not chosen_provider.trouble
        and (interactive or chosen_provider.suggested_model is None)
    ):
        chosen_provider = run(_list_models(chosen_provider))
    if chosen_provider.trouble and (interactive or model):
        output.note(chosen_provider.trouble, "yellow")
    chosen_model = model or _choose_model(chosen_provider, interactive=interactive)
    if call is None:
        call = interactive and typer.confirm(f"Call {chosen_model} once to check it? It may cost a fraction of a cent.")
    config = write_config(file, chosen_provider, StartingAgent(agent, chosen_model, daily_usd=daily_usd))
    for warning in warnings_of_agent(config, agent):
        output.note(warning, "yellow")
    answer = run(_call_model(config, agent, chosen_provider.base_url)) if call else None
    commands = [
        f"{formats.breakwater_command()} up" + ("" if str(file) == "breakwater.yaml" else f" --config {file}"),
        f'{formats.breakwater_command()} submit {agent} "Write a haiku about harbours."',
        f"{formats.breakwater_command()} executions --since 1h",
    ]
    if as_json:
        result = {"file": str(file), "provider": chosen_provider.name, "model": chosen_model, "agent": agent}
        output.json_document({**result, "answer": answer, "next": commands})
        return
    output.print_styled(
        (f"Wrote {file}", "bold green"), f": the agent {agent} with {chosen_model} of {chosen_provider}."
    )
    if answer is not None:
        output.print_styled(f"It answers: {answer}")
    output.print_styled("\nNext, the last two in another terminal here:")
    for command in commands:
        output.print_styled((f"  {command}", "bold"))


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _choose_provider(name: str | None, url: str | None, key_env: str | None, *, interactive: bool) -> StartingProvider:
    """Chooses the provider by the options; otherwise asks, or takes the first one. Raises CliError if there is none."""
    if url is not None:
        return run(_provider_at(url, key_env))
    if key_env is not None:
        raise usage_error("--key-env is for --url")
    providers = run(detect(os.environ))
    if name is not None:
        by_name = {**BY_NAME, **{candidate.name: candidate for candidate in providers}}
        if name not in by_name:
            raise usage_error(f"there is no provider {name}; known: {', '.join(by_name)}", _PROVIDER_HINT)
        return by_name[name]
    if not interactive:
        if not providers:
            raise CliError("no_provider", "no provider is found here", _PROVIDER_HINT)
        return providers[0]
    output.write("Providers:")
    for number, candidate in enumerate(providers, 1):
        output.write(f"  {number}  {candidate}")
    output.write(f"  {len(providers) + 1}  another OpenAI-compatible URL")
    number = typer.prompt("Which one?", default=1, type=int)
    if not 1 <= number <= len(providers) + 1:
        raise usage_error(f"there is no {number} in the list")
    if number <= len(providers):
        return providers[number - 1]
    address = typer.prompt("Its URL")
    key_env = typer.prompt("Environment variable with its key (empty: none)", default="", show_default=False)
    return run(_provider_at(address, key_env or None))


def _settings_of(options: Sequence[str], provider: str | None) -> dict[str, str]:
    """Returns the settings of `--set` by their names. Raises CliError."""
    if options and provider is None:
        raise usage_error("--set is for --provider")
    named = {name: value for name, _, value in (option.partition("=") for option in options)}
    if not all(named.values()):
        raise usage_error("--set takes NAME=VALUE, such as region=eu-central-1")
    return named


def _with_answers(
    provider: StartingProvider, chosen_settings: Mapping[str, str], *, interactive: bool
) -> StartingProvider:
    """Returns the provider with the settings that it needs, and a way to its credential.

    Raises:
        CliError: nobody can be asked for one of them, or an option names another one.
    """
    names = [question.setting for question in provider.questions]
    if unknown_names := sorted(chosen_settings.keys() - set(names)):
        raise usage_error(
            f"{provider.name} has no setting {unknown_names[0]} to set here; known: {', '.join(names) or 'none'}"
        )
    answers: dict[str, object] = {}
    for question in provider.questions:
        answer = question.answer(chosen_settings, os.environ)
        if interactive and question.setting not in chosen_settings:
            answer = typer.prompt(question.prompt, default=answer or question.default)
        answer = answer or question.default
        if answer is None:
            raise usage_error(
                f"{provider.name} needs its {question.setting}",
                f"Give it with --set {question.setting}=…, or in {question.variables[0]}.",
            )
        answers[question.setting] = answer
    key_env = provider.key_env
    if provider.name == AZURE and not os.environ.get(AZURE_KEY):
        output.note(f"{AZURE_KEY} is not set: calls use a token of Entra ID.", "yellow")
        key_env = None
        answers["auth"] = {"entra": "default"}
    elif key_env is not None and not os.environ.get(key_env):
        output.note(f"The environment variable {key_env} is not set: it must have the key before a call.", "yellow")
    return replace(provider, key_env=key_env, settings={**provider.settings, **answers})


_PROVIDER_HINT = (
    "Set OPENAI_API_KEY or ANTHROPIC_API_KEY, start Ollama or vLLM, name another provider with --provider, or an "
    "OpenAI-compatible endpoint with --url. Without any, `breakwater up --simulate` writes a first config and "
    "simulates its provider."
)

MAX_LISTED_MODELS = 20


def _choose_model(provider: StartingProvider, *, interactive: bool) -> str:
    suggestion = provider.suggested_model or next(iter(provider.models), None)
    suffix = f", … ({len(provider.models)} models)" if len(provider.models) > MAX_LISTED_MODELS else ""
    model_list = f"{', '.join(provider.models[:MAX_LISTED_MODELS])}{suffix}"
    if interactive:
        if provider.models:
            output.write(f"It serves {model_list}.")
        return typer.prompt("Which model?", default=suggestion)
    if suggestion is None:
        raise usage_error(
            provider.trouble or f"{provider} lists no models",
            "Start the server, correct its URL, or name a model with --model.",
        )
    if provider.models:
        output.note(f"{provider} serves {model_list}; took {suggestion}. Name another one with --model.")
    return suggestion


async def detect(environment: Mapping[str, str]) -> list[StartingProvider]:
    """Finds providers in the environment and on this machine. Connects only to this machine."""
    providers: list[StartingProvider] = []
    if environment.get("OPENAI_API_KEY"):
        base_url = environment.get("OPENAI_BASE_URL")
        another = StartingProvider(OPENAI.name, base_url, OPENAI.key_env) if base_url else OPENAI
        providers.append(another)
    if environment.get("ANTHROPIC_API_KEY"):
        providers.append(ANTHROPIC)
    providers += [
        provider
        for provider in BY_NAME.values()
        if provider not in (OPENAI, ANTHROPIC) and provider.key_env and environment.get(provider.key_env)
    ]
    return providers + [
        provider for provider in await asyncio.gather(*map(_list_models, FOUND_HERE)) if not provider.trouble
    ]


async def _provider_at(url: str, key_env: str | None) -> StartingProvider:
    if not _URL.fullmatch(url):
        raise usage_error(f"{url!r} is not a URL of the form http://host:port/v1")
    if key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", key_env):
        raise usage_error("--key-env is the name of a variable, and not a key")
    is_here = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    # Does not set `is_local`, because the server may be a gateway to a paid provider.
    provider = StartingProvider("local" if is_here else "provider", url.rstrip("/"), key_env)
    with_models = await _list_models(provider)
    if not with_models.models and not urlsplit(url).path.strip("/"):
        at_v1 = await _list_models(replace(provider, base_url=f"{provider.base_url}/v1"))
        if not at_v1.trouble:
            output.note(f"/v1 was missing in the URL: it is {at_v1.base_url}")
            return at_v1
    return with_models


async def _list_models(provider: StartingProvider) -> StartingProvider:
    """Asks the provider for its models. Returns it with them, or with the `trouble` why it lists none."""
    key = os.environ.get(provider.key_env or "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if provider.kind == "anthropic":
        headers = {"x-api-key": key or "", "anthropic-version": "2023-06-01"}
    url = f"{provider.base_url}/models"
    timeout = aiohttp.ClientTimeout(total=LOCAL_TIMEOUT_S if provider.is_local else LIST_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as http, http.get(url) as response:
            status = response.status
            payload = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        return replace(provider, trouble=unreachable_at(transport_failure(error), url))
    if status >= 300:
        failure = http_failure(status, payload, {})
        trouble = f"{url} answers {status}: {failure.message[:200]}"
        if status in (401, 403):
            if provider.key_env is None:
                trouble += "; name the variable that has its key with --key-env NAME"
            else:
                problem = "is refused" if key else "is not set"
                trouble += f"; the key in the environment variable {provider.key_env} {problem}"
        return replace(provider, trouble=trouble)
    try:
        return replace(provider, models=[str(model["id"]) for model in json.loads(payload)["data"]])
    except (ValueError, KeyError, TypeError):
        return replace(provider, trouble=f"{url} answers with something other than a list of models")


async def _call_model(config: Config, agent: str, url: str) -> str:
    """Calls the agent's model once. Returns the beginning of its answer. Raises CliError if the call fails."""
    settings = config.agents[agent]
    model = settings.chain[0]
    name = config.provider_name(settings, model) or ""
    provider = config.providers[name].open()
    message = {"role": "user", "content": "Reply with the word OK."}
    params = {"max_tokens": settings.max_tokens} if settings.max_tokens else {}
    try:
        response = await provider.perform(
            Call(
                "init:1", config.name_at_provider(name, model), [message], params, timeout_s=CALL_TIMEOUT_S, agent=agent
            )
        )
    except CallError as error:
        failure = error.failure
        no_answer = unreachable_at(failure, url) if isinstance(failure, TransportFailure) else None
        reason = no_answer or classify(failure, datetime.now(UTC)).error_info().message
        raise CliError(
            "call_failed",
            f"the config is written, but a call of {model} failed: {reason}",
            f"Correct the key, the model or providers.{name}.base_url, then try `breakwater up`.",
            ExitCode.FAILED,
        ) from error
    finally:
        await provider.close()
    return str(response.output).strip()[:200]
