"""`breakwater init`: a first config, for a provider that is found here or named, and what to type next."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from breakwater.cli import formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, ExitCode, written, wrong_usage
from breakwater.cli.formats import usd
from breakwater.cli.plane import JsonOption
from breakwater.cli.starter import StartingAgent, StartingProvider, config_text

if TYPE_CHECKING:
    from breakwater.config import Config

OPENAI_URL = "https://api.openai.com/v1"
ANTHROPIC_URL = "https://api.anthropic.com/v1"
LOCAL = {"ollama": "http://127.0.0.1:11434/v1", "vllm": "http://127.0.0.1:8000/v1"}
MODELS = {"openai": "gpt-5-mini", "anthropic": "claude-haiku-4-5"}
"""Which is suggested, where a provider is not asked for its models. The price list has them."""

LOOK_S = 1.0
CALL_S = 60.0
_URL = re.compile(r"https?://[^/\s]+\S*")


def init(
    provider: Annotated[
        str | None, typer.Option("--provider", help="One that is found here: openai, anthropic, ollama, vllm.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Any OpenAI-compatible endpoint, up to and including /v1.")
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
    on this machine. On a terminal it asks which one, which model, and whether it may call it once; else it takes the
    first that it finds, and calls nothing without --call. The file refers to keys and never has them in it.

    For example:

        breakwater init

        breakwater init --provider anthropic --model claude-haiku-4-5 --no-call

        breakwater init --url http://10.0.0.7:8000/v1 --key-env LLM_KEY --model qwen3 --call
    """
    asks = _somebody_is_there() and not as_json
    if file.exists() and not force:
        raise wrong_usage(f"{file} exists already", "Name another one with --config FILE, or replace it with --force.")
    found = _chosen(provider, url, key_env, asks=asks)
    chosen_model = model or _model(found, asks=asks)
    if call is None:
        call = asks and typer.confirm(f"Call {chosen_model} once to check it? It may cost a fraction of a cent.")
    starting = StartingAgent(agent, chosen_model, daily_usd=daily_usd)
    config = _written(file, found, starting)
    answer = run(_answer(config, agent)) if call else None
    commands = [
        f"{formats.program()} up" + ("" if str(file) == "breakwater.yaml" else f" --config {file}"),
        f'{formats.program()} submit {agent} "Write a haiku about harbours."',
        f"{formats.program()} executions --since 1h",
    ]
    if as_json:
        about = {"file": str(file), "provider": found.name, "model": chosen_model, "agent": agent}
        output.json_document({**about, "answer": answer, "next": commands})
        return
    output.styled((f"Wrote {file}", "bold green"), f": the agent {agent} with {chosen_model} of {found}.")
    if answer is not None:
        output.styled(f"It answers: {answer}")
    output.styled("\nNext; the second and third in another terminal here:")
    for command in commands:
        output.styled((f"  {command}", "bold"))


def _somebody_is_there() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _chosen(name: str | None, url: str | None, key_env: str | None, *, asks: bool) -> StartingProvider:
    """The provider to use. Raises CliError: there is none."""
    if url is not None:
        return run(_named(url, key_env))
    if key_env is not None:
        raise wrong_usage("--key-env is for --url")
    found = run(detect(os.environ))
    if name is not None:
        for one in found:
            if one.name == name:
                return one
        there = ", ".join(one.name for one in found) or "none"
        raise wrong_usage(f"the provider {name} is not found here; there is {there}", _WHAT_IS_LOOKED_FOR)
    if not asks:
        if not found:
            raise CliError("no_provider", "no provider is found here", _WHAT_IS_LOOKED_FOR)
        return found[0]
    output.write("Providers:")
    for number, one in enumerate(found, 1):
        output.write(f"  {number}  {one}")
    output.write(f"  {len(found) + 1}  another OpenAI-compatible URL")
    number = typer.prompt("Which one?", default=1, type=int)
    if not 1 <= number <= len(found) + 1:
        raise wrong_usage(f"there is no {number} in the list")
    if number <= len(found):
        return found[number - 1]
    return run(_named(typer.prompt("Its URL, up to and including /v1"), _asked_key()))


_WHAT_IS_LOOKED_FOR = (
    "Set OPENAI_API_KEY or ANTHROPIC_API_KEY, start Ollama or vLLM, or name an OpenAI-compatible endpoint with --url. "
    "Without any, `breakwater up --simulate` runs with a simulated one."
)


def _asked_key() -> str | None:
    return (
        typer.prompt("The environment variable that has its key (empty: none)", default="", show_default=False) or None
    )


def _model(found: StartingProvider, *, asks: bool) -> str:
    suggested = next(iter(found.models), MODELS.get(found.name))
    if asks:
        if len(found.models) > 1:
            output.write(f"It has {', '.join(found.models[:20])}{', …' if len(found.models) > 20 else ''}.")
        return typer.prompt("Which model?", default=suggested)
    if suggested is None:
        raise wrong_usage(f"{found} lists no models", "Name one with --model.")
    return suggested


async def detect(environment: Mapping[str, str]) -> list[StartingProvider]:
    """The providers that this environment and this machine have. Only this machine is asked anything."""
    import asyncio

    found: list[StartingProvider] = []
    if environment.get("OPENAI_API_KEY"):
        found.append(StartingProvider("openai", environment.get("OPENAI_BASE_URL") or OPENAI_URL, "OPENAI_API_KEY"))
    if environment.get("ANTHROPIC_API_KEY"):
        found.append(StartingProvider("anthropic", ANTHROPIC_URL, "ANTHROPIC_API_KEY", kind="anthropic"))
    local = [StartingProvider(name, url, is_local=True) for name, url in LOCAL.items()]
    listed = await asyncio.gather(*(_models_of(one, environment) for one in local))
    found += [replace(one, models=models) for one, models in zip(local, listed, strict=True) if models is not None]
    return found


async def _named(url: str, key_env: str | None) -> StartingProvider:
    if not _URL.fullmatch(url):
        raise wrong_usage(f"{url!r} is not a URL of the form http://host:port/v1")
    if key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", key_env):
        raise wrong_usage("--key-env is the name of a variable, and not a key")
    here = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    # Not `is_local`, which is free: it may be a gateway to somebody who is paid.
    provider = StartingProvider("local" if here else "provider", url.rstrip("/"), key_env)
    return replace(provider, models=await _models_of(provider, os.environ) or ())


async def _models_of(provider: StartingProvider, environment: Mapping[str, str]) -> Sequence[str] | None:
    """The models that an OpenAI-compatible server lists; None where none answers there."""
    import aiohttp

    key = environment.get(provider.key_env or "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=LOOK_S if provider.is_local else 10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
            http.get(f"{provider.base_url}/models") as response,
        ):
            document: Any = await response.json(content_type=None)
            return [str(one["id"]) for one in document["data"]]
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return None


def _written(file: Path, provider: StartingProvider, agent: StartingAgent) -> Config:
    """Writes the config, as far as it is valid. Raises ConfigError, CliError."""
    from breakwater.config import parse_config
    from breakwater.pricing import pricing_of

    text = config_text(provider, agent, priced=True)
    config = parse_config(text, source="the config that this would be")
    if pricing_of(config, provider.name, agent.model) is None:
        text = config_text(provider, agent, priced=False)
        config = parse_config(text)
    with written(file) as out:
        out.write(text.encode())
    return config


async def _answer(config: Config, agent: str) -> str:
    """What the model answers to one call. Raises CliError: the call failed; the file is written all the same."""
    from datetime import UTC, datetime

    from breakwater.policy.classify import classify
    from breakwater.providers.base import Call, CallFailed

    settings = config.agents[agent]
    model = settings.chain[0]
    name = config.provider_name(settings, model) or ""
    provider = config.providers[name].open()
    message = {"role": "user", "content": "Reply with the word OK."}
    params = {"max_tokens": settings.max_tokens} if settings.max_tokens else {}
    try:
        answer = await provider.perform(
            Call("init:1", config.name_at_provider(name, model), [message], params, timeout_s=CALL_S, agent=agent)
        )
    except CallFailed as failed:
        error = classify(failed.failure, datetime.now(UTC)).error_info()
        raise CliError(
            "call_failed",
            f"the config is written, but a call of {model} failed: {error.message}",
            f"Correct the key, the model or providers.{name}.base_url, then try `breakwater up`.",
            ExitCode.FAILED,
        ) from failed
    finally:
        await provider.close()
    return str(answer.output).strip()[:200]
