"""The scenario as data: the plane's config, how the simulated provider behaves, which job is submitted when."""

from __future__ import annotations

import random
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from breakwater.jobs.contract.job import Job

LOAD_S = 20.0
"""Time over which the jobs are submitted."""

OUTAGE_S = (6.0, 11.0)
"""Seconds since the load began, between which gpt-4o answers 503."""

HANG_S = (3.0, 12.0)
"""Seconds between which o3 takes requests and does not answer them."""

BURST = 8
"""Number of requests in a row to gpt-4o-mini that are answered 429."""

RETRY_AFTER_S = 1
COOLDOWN_S = 3
ALERT_CHANNEL = "demo"

EXAMPLE = Path(__file__).with_name("example.yaml")
"""A link to examples/breakwater.yaml, whose agents run together with the demo's own; a package has the file itself."""

SHARES: Mapping[str, int] = {
    "content-writer": 30,
    "support-triage": 32,
    "nightly-digest": 10,
    "deep-research": 8,
    "small-budget": 12,
    "wrong-key": 8,
}
"""Each agent's jobs of a hundred."""

STORY: tuple[str, ...] = (
    f"gpt-4o is down from second {OUTAGE_S[0]:g} to {OUTAGE_S[1]:g}: every call is answered 503",
    f"gpt-4o-mini answers {BURST} calls in a row with 429 and Retry-After: {RETRY_AFTER_S}",
    f"o3 hangs from second {HANG_S[0]:g} to {HANG_S[1]:g}: it takes calls and does not answer",
    "wrong-key has a revoked API key",
    "small-budget may spend less than half of what its jobs would cost",
)
"""The scenario in words."""

_PRICES: Mapping[str, Mapping[str, str]] = {
    "o3": {"input_usd_per_mtok": "2.00", "output_usd_per_mtok": "8.00", "cached_input_usd_per_mtok": "0.50"},
    "gpt-4.1": {"input_usd_per_mtok": "2.00", "output_usd_per_mtok": "8.00"},
    "gpt-4.1-mini": {"input_usd_per_mtok": "0.40", "output_usd_per_mtok": "1.60"},
}
"""Of the models that only the demo's own agents use."""

_SMALL_BUDGET_CALL_USD = Decimal("0.00033")
"""About what a call of `small-budget` costs."""

_SUBJECTS = ("a folding bicycle", "the new tariff", "a lost parcel", "winter tyres", "a weekend in Ghent", "tea")
_TASKS = (
    "Describe {}.",
    "What should a customer know of {}?",
    "Sum up last week's news about {}.",
    "Compare {} to {}.",
)


def trouble_at(seconds: float) -> tuple[str, ...]:
    """The faults of the provider at a time, in words; seconds since the load began."""
    troubles = {"gpt-4o is down (503)": OUTAGE_S, "o3 hangs": HANG_S}
    return tuple(words for words, (begin, end) in troubles.items() if begin <= seconds < end)


def config(provider_url: str, receiver_url: str, secrets: Path, jobs: int) -> dict[str, Any]:
    """The plane's config, as the document of a config file: the example's, with agents and a provider of its own.

    The example's breakers cool down for seconds here, as a demo should not take minutes.

    Args:
        provider_url: of the simulated provider.
        receiver_url: of the receiver of alerts.
        secrets: the directory with the files `provider-key`, `wrong-key` and `webhook`.
        jobs: how many there are; the cap of `small-budget` grows with them.
    """
    document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["providers"] = {
        name: {"base_url": provider_url, "api_key": {"file": str(secrets / key)}}
        for name, key in (("openai", "provider-key"), ("house", "provider-key"), ("revoked", "wrong-key"))
    }
    document["models"] |= {model: {"price": dict(price)} for model, price in _PRICES.items()}
    for agent in document["agents"].values():
        agent["breaker"] = {**agent.get("breaker", {}), "cooldown_s": COOLDOWN_S}
    cap = _SMALL_BUDGET_CALL_USD * jobs * SHARES["small-budget"] / 100 * 4 / 10
    document["agents"] |= {
        "deep-research": {
            "model": "o3",
            "fallback_models": ["gpt-4.1-mini"],
            "max_tokens": 500,
            "timeout_s": 2,
            "retry": {"max_attempts": 1},
            "breaker": {"consecutive_failures": 2, "cooldown_s": COOLDOWN_S},
        },
        "small-budget": {
            "model": "gpt-4.1-mini",
            "max_tokens": 300,
            "concurrency": 2,
            "budget": {"daily_usd": f"{cap:f}", "enforcement": "hard", "soft_at_percent": [50, 80]},
        },
        "wrong-key": {"provider": "revoked", "model": "gpt-4.1", "max_tokens": 300},
    }
    document["alerts"] = {
        "quiet_s": 2,  # how long a recovery must last before it is announced
        # The receiver is on this machine, where an alerter sends nothing unless the config allows it.
        "allow_networks": ["127.0.0.0/8"],
        "channels": {
            ALERT_CHANNEL: {
                "webhook": {"url": receiver_url, "secret": {"file": str(secrets / "webhook")}},
                "rate_limit": "off",
            }
        },
    }
    return document


def provider_script(config: Mapping[str, Any], jobs: int, seed: int, api_key: str) -> dict[str, Any]:
    """The behaviour of the simulated provider: every model of the config at its price. Its clock starts with the load.

    Input tokens are left to the texts' length: a budget holds a high estimate of those, and no more.
    """
    # Early, while gpt-4o still works: its fallback is not down at the same time.
    first = max(2, jobs // 20)
    faults: dict[str, dict[str, Any]] = {
        "gpt-4o": {"status": 503, "from_s": OUTAGE_S[0], "to_s": OUTAGE_S[1], "latency_ms": 60},
        "gpt-4o-mini": {
            "status": 429,
            "requests": [first, first + BURST - 1],
            "retry_after_s": RETRY_AFTER_S,
            "latency_ms": 30,
        },
        "o3": {"hang_s": 600, "from_s": HANG_S[0], "to_s": HANG_S[1]},
    }
    output_tokens = {"gpt-4o": [250, 900], "gpt-4.1-mini": [130, 260], "o3": [150, 450]}
    models = {
        model: {
            "price": settings["price"],
            "latency_ms": {"p50": 180, "p95": 550},
            "usage": {"output_tokens": output_tokens.get(model, [40, 350]), "cached_tokens": [0, 12]},
            "faults": [faults[model]] if model in faults else [],
        }
        for model, settings in config["models"].items()
    }
    return {"seed": seed, "api_keys": [api_key], "models": models}


def plan_load(jobs: int, seed: int) -> list[tuple[float, Job]]:
    """Each job with its second of submission, since the load began; half of them over HTTP, half over NATS."""
    draw = random.Random(seed)  # noqa: S311  the same seed is to give the same load
    # The agents of a hundred jobs, those of each spread evenly.
    spread = sorted(
        ((place + draw.random()) / share, agent) for agent, share in SHARES.items() for place in range(share)
    )
    return [
        (
            number * LOAD_S / jobs,
            Job(
                job_id=f"demo-{number + 1:04d}",
                agent=spread[number % len(spread)][1],
                prompt=draw.choice(_TASKS).format(*draw.sample(_SUBJECTS, 2)),
                metadata={"way": "nats" if number % 2 else "http"},
            ),
        )
        for number in range(jobs)
    ]
