"""Decides which params of a job may go to its provider.

A call is sent as it was admitted, priced and limited, so params that are known to change that are always refused. Under
a hard limit, or where jobs choose their models, nothing is guessed: only params that are known to cost nothing but
tokens may pass.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from pydantic import JsonValue

from breakwater.jobs.contract.job import ChatMessage
from breakwater.jobs.rules.chat_messages import FILES
from breakwater.kernel.formats import words
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import CHOICES, MAX_CHOICES, OUTPUT_LIMITS
from breakwater.prices.settings import MAX_OUTPUT_TOKENS

RESERVED_PARAMS = {
    "model": "has a place of its own in a job",
    "messages": "have a place of their own in a job",
    "stream": "has a place of its own in a job",
    "stream_options": "are set by the plane: usage is always asked for",
    "web_search_options": "are not supported: searches have prices of their own, which budgets don't know",
}

_PRICED_APART: Mapping[str, JsonValue] = {
    "audio": None,
    "inference_geo": "global",
    "mcp_servers": [],
    "modalities": ["text"],
    "plugins": [],
    "search_parameters": None,
    "speed": "standard",
}
"""Params of some providers that change a call's price or add to it, each with the value that has no effect."""

_OF_THE_CONNECTION = words(
    """
    api_base api_key api_version base_url custom_llm_provider default_headers default_query extra_body extra_headers
    extra_query headers max_retries organization proxies proxy timeout
    """
)
"""Params of clients and gateways that set a request's address, identity and connection."""

_RUN_BY_PROVIDER = ("code_", "file_search", "google_", "image_generation", "mcp", "web_", "x_search")
"""Prefixes of the types of tools that the provider runs itself, and charges for in addition to the tokens."""

_COMMON = words(
    """
    frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata n
    parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort
    response_format safety_identifier seed service_tier stop store temperature thinking tool_choice tools top_k
    top_logprobs top_p user verbosity
    """
)
_OF_SERVERS = words(
    """
    add_generation_prompt allowed_token_ids bad_words best_of chat_template_kwargs continue_final_message do_sample
    dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range ebnf echo
    enable_thinking grammar guided_choice guided_decoding_backend guided_grammar guided_json guided_regex ignore_eos
    include_reasoning include_stop_str_in_output json_schema length_penalty min_keep min_p min_tokens mirostat
    mirostat_eta mirostat_tau no_repeat_ngram_size penalize_nl prompt_mode random_seed reasoning reasoning_format
    reasoning_split regex repeat_last_n repeat_penalty repetition_penalty return_reasoning safe_prompt
    separate_reasoning skip_special_tokens spaces_between_special_tokens stop_regex stop_token_ids
    structured_outputs thinking_budget tool_stream top_a top_n_sigma truncate_prompt_tokens typical_p usage
    xtc_probability xtc_threshold
    """
)
"""Params of OpenRouter, vLLM, SGLang, llama.cpp, Ollama, and of makers whose API is compatible with OpenAI's."""
_OF_ANTHROPIC = frozenset({"cache_control", "output_config", "output_format", "stop_sequences", "system"})

_OF_GEMINI = frozenset({"cached_content", "labels", "safety_settings", "thinking_config", "tool_config"})

_BY_KIND: Mapping[str, frozenset[str]] = {
    "openai": _COMMON | _OF_SERVERS,
    "azure": _COMMON,
    "anthropic": _COMMON | _OF_ANTHROPIC,
    "bedrock": _COMMON | _OF_ANTHROPIC,
    "gemini": _COMMON | _OF_GEMINI,
}
"""Params that cost nothing but tokens, by the kind of provider."""
KNOWN_PARAMS = (
    _COMMON
    | _OF_SERVERS
    | _OF_ANTHROPIC
    | _OF_GEMINI
    | {"cached_content"}
    | RESERVED_PARAMS.keys()
    | _PRICED_APART.keys()
    | _OF_THE_CONNECTION
)

_OF_FUNCTION = words(
    """
    type function custom name description parameters strict cache_control defer_loading input_examples
    """
)
_RUN_BY_CLIENT = re.compile(r"(bash|computer|memory|text_editor)_\d{8}")
_PARTS = FILES | words(
    """
    input_text output_text reasoning redacted_thinking refusal search_result summary_text text thinking tool_result
    tool_use
    """
)
"""Types of message parts that cost nothing but their tokens."""


_MAXIMA = dict.fromkeys(OUTPUT_LIMITS, MAX_OUTPUT_TOKENS) | dict.fromkeys(CHOICES, MAX_CHOICES)


def is_run_by_client(kind: Any) -> bool:
    """Returns True for the type of an Anthropic tool that the client runs, such as `bash_20250124`."""
    return isinstance(kind, str) and _RUN_BY_CLIENT.fullmatch(kind) is not None


def params_objection(params: Mapping[str, JsonValue]) -> FieldError | None:
    """Returns the reason why params can't be sent to any provider; None if they can."""
    for name in params:
        if name in RESERVED_PARAMS:
            return FieldError(name, RESERVED_PARAMS[name])
        if name in _PRICED_APART and params[name] not in (None, _PRICED_APART[name]):
            return FieldError(name, "is not supported: it has prices of its own, which budgets don't know")
    for place, tool in _tools(params):
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(_RUN_BY_PROVIDER):
            return FieldError(
                f"{place}.type", f"{kind!r} is not supported: providers charge for such tools, unknown to budgets"
            )
    for name, maximum in _MAXIMA.items():
        value = params.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            return FieldError(name, f"must be a whole number from 1 to {maximum}")
    return None


def connection_objection(params: Mapping[str, JsonValue]) -> FieldError | None:
    """Returns the reason why a job may not set params of the connection to the provider; None if it sets none."""
    name = next((name for name in params if name in _OF_THE_CONNECTION), None)
    return None if name is None else FieldError(name, "is for the config of the provider to set")


def unknown_objection(params: Mapping[str, JsonValue], kind: str, allowed: Collection[str]) -> FieldError | None:
    """Returns the reason why params may cost more than tokens; None if they are known not to.

    Args:
        params: the job's params.
        kind: the kind of the provider.
        allowed: the params that the config allows in addition.
    """
    for name in params:
        if name not in _BY_KIND[kind] and name not in _PRICED_APART and name not in allowed:
            return FieldError(name, "is not known to cost tokens alone, and to leave the model as it is")
    for place, tool in () if "tools" in allowed else _tools(params):
        type_ = tool.get("type")
        if kind in ("anthropic", "bedrock"):
            if type_ not in (None, "function", "custom") and not is_run_by_client(type_):
                return FieldError(f"{place}.type", f"{type_!r} is not known to be run by the client")
        elif type_ not in ("function", "custom"):
            return FieldError(f"{place}.type", "must be `function` or `custom`: others may be run by the provider")
        elif odd := tool.keys() - _OF_FUNCTION:
            return FieldError(f"{place}.{min(odd)}", "is not known of a tool that the client runs")
    return None


def unknown_part(messages: Iterable[ChatMessage], allowed: Collection[str]) -> FieldError | None:
    """Returns the reason why parts of messages may cost more than tokens; None if they are known not to.

    Args:
        messages: the job's messages.
        allowed: the fields that the config allows in addition; `messages` allows all parts.
    """
    for number, message in enumerate(messages) if "messages" not in allowed else ():
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            kind = part.get("type", "text")
            if not isinstance(kind, str) or kind not in _PARTS:
                return FieldError(f"{number}.content.{index}.type", f"{kind!r} is not known to cost tokens alone")
    return None


def _tools(params: Mapping[str, JsonValue]) -> list[tuple[str, Mapping[str, Any]]]:
    tools = params.get("tools")
    numbered = enumerate(tools) if isinstance(tools, list) else ()
    return [
        (f"tools.{number}", cast(dict[str, Any], tool) if isinstance(tool, dict) else {}) for number, tool in numbered
    ]
