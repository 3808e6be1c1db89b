"""What providers report, and what is counted of it: the table of docs/costs.md, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from breakwater.prices.settings import Price

PRICE = Price.model_validate(
    {
        "input_usd_per_mtok": 1,
        "output_usd_per_mtok": 2,
        "cached_input_usd_per_mtok": "0.5",
        "cache_write_usd_per_mtok": "1.25",
        "cache_write_1h_usd_per_mtok": 2,
    }
)

GENAI_PRICES = "[genai-prices](https://github.com/pydantic/genai-prices)"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to report.

    Attributes:
        provider: whose.
        place: what it reports where.
        counted: in the words of the table.
        source: of the fact, or whose decision it is.
        usage: as it comes.
        nano: what it costs at `PRICE`; None where it can't be said without the texts.
        basis: of that cost.
        dialect: Anthropic's or OpenAI's.
        more: of the answer.
        host: of the provider, where its table differs.
    """

    provider: str
    place: str
    counted: str
    source: str
    usage: Any
    nano: int | None
    basis: Literal["billed", "estimated"] = "billed"
    dialect: Literal["openai", "anthropic"] = "openai"
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    host: str = "127.0.0.1"

    def __str__(self) -> str:
        return f"| {self.provider} | {self.place} | {self.counted} | {self.basis} | {self.source} |"


BASE = {"prompt_tokens": 100, "completion_tokens": 50}
OURS = "ours"
ROWS = (
    Row(
        "OpenAI and most others",
        "`completion_tokens_details.reasoning_tokens`",
        "a part of the output",
        "[API reference](https://platform.openai.com/docs/api-reference/chat/object)",
        {**BASE, "total_tokens": 150, "completion_tokens_details": {"reasoning_tokens": 40}},
        200_000,
    ),
    Row(
        "Gemini, xAI, any",
        "`total_tokens` over the sum of the parts",
        "the rest is output",
        "[Gemini](https://github.com/mozilla-ai/any-llm/issues/1290), [xAI](https://docs.x.ai/docs/guides/reasoning)",
        {**BASE, "total_tokens": 1150, "completion_tokens_details": {"reasoning_tokens": 1000}},
        2_200_000,
    ),
    Row(
        "Perplexity",
        "`reasoning_tokens`, `citation_tokens`",
        "output, in addition to the other and outside the total",
        GENAI_PRICES,
        {**BASE, "total_tokens": 150, "reasoning_tokens": 1000, "citation_tokens": 10},
        2_220_000,
        host="api.perplexity.ai",
    ),
    Row(
        "any",
        "more reasoning than output, without a total that has it",
        "output, in addition to the other",
        OURS,
        {**BASE, "completion_tokens_details": {"reasoning_tokens": 1000}},
        2_200_000,
        "estimated",
    ),
    Row(
        "OpenAI and most others",
        "`prompt_tokens_details.cached_tokens`",
        "cached, a part of the input",
        "[API reference](https://platform.openai.com/docs/api-reference/chat/object)",
        {**BASE, "prompt_tokens_details": {"cached_tokens": 80}},
        160_000,
    ),
    Row(
        "DeepSeek",
        "`prompt_cache_hit_tokens`",
        "cached, a part of the input",
        "[context caching](https://api-docs.deepseek.com/guides/kv_cache)",
        {
            **BASE,
            "prompt_cache_hit_tokens": 80,
            "prompt_cache_miss_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": None},
        },
        160_000,
    ),
    Row(
        "Moonshot",
        "`cached_tokens`; in streams `choices[].usage`",
        "cached, a part of the input",
        "[API](https://platform.moonshot.ai/docs/api/chat)",
        None,
        160_000,
        more={"choices": [{"usage": {**BASE, "cached_tokens": 80}}]},
    ),
    Row(
        "Databricks and gateways",
        "`cache_read_input_tokens` next to `prompt_tokens`",
        "cached, a part of the input",
        GENAI_PRICES,
        {**BASE, "cache_read_input_tokens": 80},
        160_000,
    ),
    Row(
        "OpenAI, OpenRouter, Alibaba",
        "`prompt_tokens_details.cache_write_tokens`, `cache_creation_…`",
        "written to a cache, a part of the input",
        GENAI_PRICES,
        {**BASE, "prompt_tokens_details": {"cache_write_tokens": 80}},
        220_000,
    ),
    Row(
        "Anthropic",
        "`cache_read_input_tokens`, `cache_creation_input_tokens`",
        "in addition to `input_tokens`",
        "[caching](https://platform.claude.com/docs/en/build-with-claude/prompt-caching)",
        {"input_tokens": 20, "cache_read_input_tokens": 80, "cache_creation_input_tokens": 40, "output_tokens": 50},
        210_000,
        dialect="anthropic",
    ),
    Row(
        "Anthropic",
        "`cache_creation.ephemeral_1h_input_tokens`",
        "at the price of an hour, the rest at that of 5 minutes",
        "[caching](https://platform.claude.com/docs/en/build-with-claude/prompt-caching)",
        {
            "input_tokens": 20,
            "cache_creation_input_tokens": 50_000,
            "cache_creation": {"ephemeral_1h_input_tokens": 40_000, "ephemeral_5m_input_tokens": 10_000},
            "output_tokens": 50,
        },
        92_620_000,
        dialect="anthropic",
    ),
    Row(
        "OpenAI, Gemini, Groq, Anthropic",
        "`service_tier`, `usage.service_tier`, `speed`, `inference_geo`",
        "at the price on these terms; where none is known at 2.5 times the standard one, `flex` and the like at that",
        "[Gemini](https://ai.google.dev/gemini-api/docs/optimization), "
        "[Groq](https://console.groq.com/docs/service-tiers), "
        "[Anthropic](https://platform.claude.com/docs/en/api/service-tiers)",
        BASE,
        500_000,
        "estimated",
        more={"service_tier": "Priority"},
    ),
    Row(
        "Anthropic",
        "`speed: fast`",
        "at the price on these terms; where none is known at 6 times the standard one",
        "[fast mode](https://platform.claude.com/docs/en/build-with-claude/fast-mode)",
        {"input_tokens": 100, "output_tokens": 50, "speed": "fast"},
        1_200_000,
        "estimated",
        "anthropic",
    ),
    Row(
        "Anthropic",
        "`iterations`",
        "their sum, where it is more: what shortened the conversation is counted there alone",
        "[compaction](https://platform.claude.com/docs/en/build-with-claude/compaction)",
        {
            "input_tokens": 100,
            "output_tokens": 50,
            "iterations": [
                {"type": "compaction", "input_tokens": 900, "output_tokens": 100},
                {"type": "message", "input_tokens": 100, "output_tokens": 50},
            ],
        },
        1_300_000,
        dialect="anthropic",
    ),
    Row(
        "Anthropic, OpenRouter",
        "`server_tool_use.web_search_requests`",
        "$0.01 each in addition to the tokens",
        "[web search](https://platform.claude.com/docs/en/agents-and-tools/tool-use/web-search-tool)",
        {"input_tokens": 100, "output_tokens": 50, "server_tool_use": {"web_search_requests": 2}},
        20_200_000,
        "estimated",
        "anthropic",
    ),
    Row(
        "xAI",
        "`num_sources_used`",
        "$0.025 each in addition to the tokens",
        "[live search](https://docs.x.ai/docs/guides/live-search)",
        {**BASE, "num_sources_used": 2},
        50_200_000,
        "estimated",
    ),
    Row(
        "Perplexity",
        "`num_search_queries`",
        "$0.005 each in addition to the tokens",
        "[pricing](https://docs.perplexity.ai/getting-started/pricing)",
        {**BASE, "num_search_queries": 2},
        10_200_000,
        "estimated",
    ),
    Row(
        "OpenAI, Gemini",
        "`prompt_tokens_details.audio_tokens`, and of the output",
        "at their own price; where none is known at 16 and 10 times that of text",
        "[API reference](https://platform.openai.com/docs/api-reference/chat/object)",
        {**BASE, "prompt_tokens_details": {"audio_tokens": 80}},
        1_400_000,
        "estimated",
    ),
    Row(
        "any",
        "kinds of tokens that are not known, in the details",
        "at 5 times the price of all others",
        OURS,
        {**BASE, "prompt_tokens_details": {"scent_tokens": 80}},
        520_000,
        "estimated",
    ),
    Row(
        "any",
        "numbers as strings or whole floats",
        "as numbers",
        OURS,
        {"prompt_tokens": "100", "completion_tokens": 50.0, "total_tokens": " 150 "},
        200_000,
    ),
    Row(
        "any",
        "more cached than input, or written",
        "in addition to the input",
        OURS,
        {**BASE, "prompt_tokens_details": {"cached_tokens": 150}},
        275_000,
        "estimated",
    ),
    Row(
        "any",
        "a sum over the total",
        "the sum",
        OURS,
        {**BASE, "total_tokens": 120},
        200_000,
        "estimated",
    ),
    Row(
        "any",
        "two figures of the same tokens",
        "the more expensive reading",
        OURS,
        {**BASE, "prompt_cache_hit_tokens": 80, "prompt_tokens_details": {"cached_tokens": 20}},
        190_000,
        "estimated",
    ),
    Row(
        "any",
        "0 for input, or for the output of an answer with content",
        "by the texts",
        OURS,
        {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        None,
        "estimated",
    ),
    Row(
        "any",
        "negative, or not a number",
        "input by the texts, output as reserved, everything else ignored",
        OURS,
        {"prompt_tokens": -100, "completion_tokens": 50},
        None,
        "estimated",
    ),
)
