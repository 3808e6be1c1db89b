"""The demo's scenario as data: the plane's config, the behaviour of the simulated provider, and the load."""

from __future__ import annotations

import random
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from breakwater.jobs.contract.job import Job

LOAD_S = 20.0
"""Seconds over which the jobs are submitted."""

OUTAGE_S = (6.0, 11.0)
"""Begin and end of the outage in which gpt-4o answers 503, in seconds since the load began."""

HANG_S = (3.0, 12.0)
"""Begin and end of the time in which o3 accepts requests without answering, in seconds since the load began."""

BURST = 8
"""Number of consecutive requests that gpt-4o-mini answers with 429."""

RETRY_AFTER_S = 1
COOLDOWN_S = 3
ALERT_CHANNEL = "demo"

EXAMPLE = Path(__file__).with_name("example.yaml")
"""A link to examples/breakwater.yaml, whose agents run in the demo, too; a package contains the file itself."""

SHARES: Mapping[str, int] = {
    "content-writer": 30,
    "support-triage": 32,
    "nightly-digest": 10,
    "deep-research": 8,
    "small-budget": 12,
    "wrong-key": 8,
}
"""The number of each agent's jobs in a hundred."""

STORY: tuple[str, ...] = (
    f"gpt-4o is down from second {OUTAGE_S[0]:g} to {OUTAGE_S[1]:g}: every call is answered 503",
    f"gpt-4o-mini answers {BURST} calls in a row with 429 and Retry-After: {RETRY_AFTER_S}",
    f"o3 hangs from second {HANG_S[0]:g} to {HANG_S[1]:g}: it takes calls and does not answer",
    "wrong-key has a revoked API key",
    "small-budget may spend less than half of what its jobs would cost",
)
"""Sentences that describe the scenario."""

_PRICES: Mapping[str, Mapping[str, str]] = {
    "o3": {"input_usd_per_mtok": "2.00", "output_usd_per_mtok": "8.00", "cached_input_usd_per_mtok": "0.50"},
    "gpt-4.1": {"input_usd_per_mtok": "2.00", "output_usd_per_mtok": "8.00"},
    "gpt-4.1-mini": {"input_usd_per_mtok": "0.40", "output_usd_per_mtok": "1.60"},
}
"""Prices of the models that only the demo's own agents use."""

_SMALL_BUDGET_CALL_USD = Decimal("0.00033")
"""The approximate cost of a call of `small-budget`."""

_SUBJECTS = ("a folding bicycle", "the new tariff", "a lost parcel", "winter tyres", "a weekend in Ghent", "tea")
_TASKS = (
    "Describe {}.",
    "What should a customer know of {}?",
    "Sum up last week's news about {}.",
    "Compare {} to {}.",
)


def faults_at(seconds: float) -> tuple[str, ...]:
    """Describes the faults of the provider at a time, in seconds since the load began."""
    faults = {"gpt-4o is down (503)": OUTAGE_S, "o3 hangs": HANG_S}
    return tuple(description for description, (begin, end) in faults.items() if begin <= seconds < end)


def config(provider_url: str, receiver_url: str, secrets: Path, jobs: int) -> dict[str, Any]:
    """Builds the plane's config: the example's, with further agents and the simulated provider.

    Breakers cool down within seconds, because a demo should not take minutes.

    Args:
        provider_url: URL of the simulated provider.
        receiver_url: URL of the receiver of alerts.
        secrets: directory with the files `provider-key`, `wrong-key` and `webhook`.
        jobs: number of jobs; the limit of `small-budget` grows with it.
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
        "quiet_s": 2,  # a recovery must last this long before it is announced
        # The receiver is on this machine; an alerter sends nothing to internal addresses unless the config allows it.
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
    """Builds the script of the simulated provider, with all models of the config and their prices.

    Its clock starts with the load. Input tokens follow from the length of the texts, because a budget reserves an
    estimate of exactly those.
    """
    # Early, while gpt-4o still works, so that gpt-4o's fallback is not down at the same time.
    first_refused = max(2, jobs // 20)
    faults: dict[str, dict[str, Any]] = {
        "gpt-4o": {"status": 503, "from_s": OUTAGE_S[0], "to_s": OUTAGE_S[1], "latency_ms": 60},
        "gpt-4o-mini": {
            "status": 429,
            "requests": [first_refused, first_refused + BURST - 1],
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
    """Plans the jobs, half of them over HTTP and half over NATS.

    Returns:
        Each job with its time of submission in seconds since the load began.
    """
    rng = random.Random(seed)  # noqa: S311  the same seed must give the same load
    # The agents of a hundred jobs, each spread evenly over them.
    spread = sorted(
        ((position + rng.random()) / share, agent) for agent, share in SHARES.items() for position in range(share)
    )
    return [
        (
            number * LOAD_S / jobs,
            Job(
                job_id=f"demo-{number + 1:04d}",
                agent=spread[number % len(spread)][1],
                prompt=rng.choice(_TASKS).format(*rng.sample(_SUBJECTS, 2)),
                metadata={"way": "nats" if number % 2 else "http"},
            ),
        )
        for number in range(jobs)
    ]
