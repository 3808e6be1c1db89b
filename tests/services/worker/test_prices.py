from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest
from genai_prices.data_snapshot import get_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from breakwater.config import Config, ModelSettings
from breakwater.config.pricing import pricing_of
from breakwater.config.targets import Targets, token_rules
from breakwater.prices.price_list import sells_embeddings
from breakwater.prices.rules.price import Cost, InputSize, estimate_input_tokens, size_of_messages, size_of_params
from breakwater.prices.rules.usage import Usage
from tests.tables import each_row


class PriceBook:
    """Prices of models at some provider."""

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        self._config = Config.model_construct(models=dict(models), providers={})

    def cost(self, model: str, usage: Usage) -> int | None:
        found = self.priced(model, usage)
        return None if found is None else found.nano

    def priced(self, model: str, usage: Usage) -> Cost | None:
        pricing = pricing_of(self._config, "sim", model)
        return None if pricing is None else pricing.cost(usage)

    def worst_case(self, model: str, input_tokens: int, max_tokens: int, asked: InputSize | None = None) -> int | None:
        pricing = pricing_of(self._config, "sim", model)
        return None if pricing is None else pricing.worst_case(input_tokens, max_tokens, asked)


LISTED = PriceBook({})
NANO = 10**9


def listed_nano(provider: str, name: str, **tokens: int) -> int:
    """What the price list has for a model, by its prices and not by its own calculation."""
    _, model = get_snapshot().find_provider_model(name, None, provider, None)
    prices = model.prices
    assert not isinstance(prices, list), "the test is of a model with one price"
    total = Decimal(0)
    for key, count in tokens.items():
        rate = getattr(prices, key)
        assert isinstance(rate, Decimal)
        total += rate * count / 1_000_000
    return int(total * NANO)


@each_row("model", ["openai/gpt-4o", "gpt-4o", "sim/gpt-4o", "my-openai/gpt-4o", "azure/gpt-4o"])
def test_a_model_is_found_by_its_id_its_provider_or_its_bare_name(model: str) -> None:
    expected = listed_nano("openai", "gpt-4o", input_mtok=1000, output_mtok=100)
    assert LISTED.cost(model, Usage(1000, 100)) == expected > 0


def test_the_provider_in_the_id_decides_which_of_several_prices_it_is() -> None:
    own = listed_nano("groq", "llama-3.3-70b-versatile", input_mtok=1000, output_mtok=100)
    assert LISTED.cost("groq/llama-3.3-70b-versatile", Usage(1000, 100)) == own
    assert LISTED.cost("llama-3.3-70b-versatile", Usage(1000, 100)) is None
    assert LISTED.cost("openrouter/openai/gpt-4o", Usage(1000, 100)) is not None, "a name may have a slash itself"


def test_what_the_provider_calls_a_model_is_looked_up_first() -> None:
    book = PriceBook(
        {"fast": ModelSettings(provider="openai", name="gpt-4o-mini"), "p/gpt-4o": ModelSettings(name="gpt-4")}
    )
    assert book.cost("fast", Usage(1000, 100)) == LISTED.cost("openai/gpt-4o-mini", Usage(1000, 100)) is not None
    assert book.cost("p/gpt-4o", Usage(1000, 100)) == LISTED.cost("openai/gpt-4", Usage(1000, 100)) is not None


def test_a_model_that_nobody_prices_costs_none_and_is_reported_once() -> None:
    agents = {name: {"model": "sim/none-such"} for name in ("one", "two")}
    targets = Targets(
        Config.model_validate({"providers": {"sim": {"base_url": "http://127.0.0.1:1/v1"}}, "agents": agents})
    )
    with capture_logs() as logs:
        assert [targets.of(name, "sim/none-such").pricing for name in ("one", "two", "one")] == [None] * 3
    assert [(entry["event"], entry["model"]) for entry in logs] == [("model_without_price", "sim/none-such")]


@pytest.mark.parametrize("model", ["x-ai/grok-voice-latest", "openai/text-embedding-3-small"])
def test_a_model_whose_tokens_have_no_price_is_not_free(model: str) -> None:
    assert LISTED.cost(model, Usage(1000, 100)) is None
    assert LISTED.worst_case(model, 1000, 100) is None


def test_cached_and_written_tokens_have_their_own_prices() -> None:
    cost = LISTED.cost("anthropic/claude-sonnet-4-0", Usage(1000, 10, cached_tokens=600, cache_write_tokens=300))
    _, model = get_snapshot().find_provider_model("claude-sonnet-4-0", None, "anthropic", None)
    assert cost == round((100 * 3 + 600 * 0.3 + 300 * 3.75 + 10 * 15) * 1000), model
    config = PriceBook(
        {
            "p/m": ModelSettings.model_validate(
                {
                    "price": {
                        "input_usd_per_mtok": 3,
                        "output_usd_per_mtok": 15,
                        "cached_input_usd_per_mtok": "0.3",
                        "cache_write_usd_per_mtok": 3.75,
                    }
                }
            )
        }
    )
    assert config.cost("p/m", Usage(1000, 10, cached_tokens=600, cache_write_tokens=300)) == cost


def test_reasoning_is_a_part_of_the_output_and_not_paid_twice() -> None:
    assert LISTED.cost("openai/o3", Usage(10, 1000, reasoning_tokens=900)) == LISTED.cost("openai/o3", Usage(10, 1000))
    thought = listed_nano(
        "perplexity", "sonar-deep-research", input_mtok=10, output_mtok=100, output_reasoning_mtok=900
    )
    assert LISTED.cost("perplexity/sonar-deep-research", Usage(10, 1000, reasoning_tokens=900)) == thought


@pytest.mark.parametrize("usage", [Usage(None, 5), Usage(5, None), Usage(None, None)])
def test_what_was_not_reported_costs_none(usage: Usage) -> None:
    assert LISTED.cost("openai/gpt-4o", usage) is None


def test_parts_that_are_more_than_the_whole_are_cut_the_cheapest_first() -> None:
    whole = LISTED.cost("anthropic/claude-sonnet-4-0", Usage(100, 10, cached_tokens=30, cache_write_tokens=70))
    odd = Usage(100, 10, cached_tokens=150, cache_write_tokens=70, reasoning_tokens=50)
    assert LISTED.cost("anthropic/claude-sonnet-4-0", odd) == whole


CONFIGURED = {
    "own/written": ModelSettings.model_validate(
        {"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2, "cache_write_usd_per_mtok": 5}}
    ),
    "own/plain": ModelSettings.model_validate({"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2}}),
}
BOOK = PriceBook(CONFIGURED)
MODELS = (
    "own/written", "own/plain", "openai/gpt-4o", "anthropic/claude-sonnet-4-5", "anthropic/claude-opus-4-1",
    "google/gemini-2.5-pro", "deepseek/deepseek-chat", "openrouter/~deepseek/deepseek-pro-latest",
    "perplexity/sonar-deep-research", "x-ai/grok-4",
)  # fmt: skip


@settings(deadline=None)
@given(st.data(), st.sampled_from(MODELS), st.integers(0, 2_000_000), st.integers(0, 100_000))
def test_no_use_of_a_call_costs_more_than_its_worst_case(
    data: st.DataObject, model: str, most: int, max_tokens: int
) -> None:
    tokens = data.draw(st.integers(0, most))
    cached = data.draw(st.integers(0, tokens))
    written = data.draw(st.integers(0, tokens - cached))
    output = data.draw(st.integers(0, max_tokens))
    usage = Usage(tokens, output, cached, written, data.draw(st.integers(0, output)))
    asked = InputSize(cache_ttl_s=300 if written else 0)  # Anthropic writes to its cache what it is asked to
    worst, cost = BOOK.worst_case(model, most, max_tokens, asked), BOOK.cost(model, usage)
    assert worst is not None
    assert cost is not None
    assert cost <= worst


def test_the_list_has_prices_of_terms_lifetimes_and_sound() -> None:
    usual, dear = (BOOK.cost("openai/gpt-5", Usage(1000, 10, terms=terms)) for terms in ((), ("priority",)))
    assert (usual, dear) == (1000 * 1250 + 10 * 10_000, 1000 * 2500 + 10 * 20_000)
    hour = Usage(50_000, 10, cache_write_tokens=50_000, parts={"cache_write_1h": 40_000})
    assert BOOK.cost("anthropic/claude-opus-4-7", hour) == 10_000 * 6250 + 40_000 * 10_000 + 10 * 25_000
    sound = BOOK.priced("google/gemini-2.5-flash", Usage(1000, 10, parts={"input_audio": 900}))
    assert sound == Cost(900 * 1000 + 100 * 300 + 10 * 2500)
    unpriced = BOOK.priced("openai/gpt-4o-audio-preview", Usage(1000, 10, parts={"input_audio": 900}))
    assert unpriced is not None
    assert unpriced.doubt == "no price is known for input audio tokens"
    asked = size_of_messages([{"role": "user", "content": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}])
    assert BOOK.worst_case("anthropic/claude-opus-4-7", 1000, 0, asked) == 1000 * 10_000
    assert BOOK.worst_case("google/gemini-2.5-pro", 200_001, 0) == 200_001 * 2500


def test_the_worst_case_is_that_all_of_the_input_is_written_to_a_cache_where_that_costs_more() -> None:
    tokens = 10_000
    assert BOOK.worst_case("own/written", 10_000, 7) == tokens * 5000 + 7 * 2000
    assert BOOK.worst_case("own/plain", 10_000, 7) == tokens * 1000 + 7 * 2000
    assert BOOK.worst_case("anthropic/claude-sonnet-4-0", 10_000, 7) == tokens * 3750 + 7 * 15_000
    assert BOOK.worst_case("openai/gpt-4o", 10_000, 7) == tokens * 2500 + 7 * 10_000


CONFIG = Config.model_validate(
    {
        "providers": {
            "openai": {"base_url": "https://api.openai.com/v1"},
            "azure": {"kind": "azure", "base_url": "https://x.openai.azure.com"},
            "anthropic": {"kind": "anthropic"},
            "gemini": {"base_url": "https://generativelanguage.googleapis.com/v1beta/openai"},
            "vllm": {"base_url": "http://127.0.0.1:8000/v1"},
            "script": {"kind": "process", "command": ["true"]},
        },
        "models": {
            "azure/prod": {"name": "gpt-4o"},
            "vllm/qwen": {"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}},
            "vllm/small": {"image_tokens": 256, "price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}},
            "script": {"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}},
        },
        "agents": {"a": {"provider": "script", "model": "script"}},
    }
)
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
ASKED = "What does this picture show, and who may have taken it? " * 20
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}


@each_row(
    ("model", "image"),
    [
        ("openai/gpt-4o-mini", 48_169),
        ("openai/gpt-5", 12_000),
        ("azure/prod", 1_445),
        ("anthropic/claude-sonnet-4-5", 5_000),
        ("gemini/gemini-2.5-pro", 5_000),
        ("vllm/qwen", 16_384),
        ("vllm/small", 256),
        ("script", 16_384),
    ],
)
def test_the_worst_case_of_a_call_goes_by_its_provider(model: str, image: int) -> None:
    book, rules = PriceBook(CONFIG.models), token_rules(CONFIG, CONFIG.deployments(CONFIG.defaults, model)[0])
    content: list[Any] = [{"type": "text", "text": ASKED}, IMAGE]
    size = size_of_messages([{"role": "user", "content": content}]) + size_of_params({"tools": [TOOL], "max_tokens": 1})
    tokens = estimate_input_tokens(size, rules)
    text = tokens - image
    assert len(ASKED) / 4 < text < len(ASKED) + 1_500, "the picture is not counted as text"
    worst, cost = book.worst_case(model, tokens, 1), book.cost(model, Usage(len(ASKED) // 4 + image, 1))
    assert worst is not None
    assert cost is not None
    assert cost <= worst


def test_embeddings_are_priced_by_their_input_alone() -> None:
    small, listed = "openai/text-embedding-3-small", listed_nano("openai", "text-embedding-3-small", input_mtok=1000)
    assert LISTED.cost(small, Usage(1000, 0)) == LISTED.worst_case(small, 1000, 0) == listed > 0
    assert LISTED.cost(small, Usage(1000, None)) is LISTED.cost(small, Usage(None, 0)) is None
    book = PriceBook(
        {"p/m": ModelSettings.model_validate({"price": {"input_usd_per_mtok": "0.1", "output_usd_per_mtok": 0}})}
    )
    assert book.cost("p/m", Usage(1000, 0)) == book.worst_case("p/m", 1000, 0) == 100_000


@pytest.mark.parametrize(
    ("model", "embeds"),
    [("openai/text-embedding-3-small", True), ("openai/gpt-4o", False), ("openai/whisper-1", False)],
)
def test_a_model_of_embeddings_has_a_price_of_its_input_alone(model: str, *, embeds: bool) -> None:
    assert sells_embeddings(pricing_of(Config.model_construct(models={}, providers={}), "openai", model)) is embeds
