from __future__ import annotations

from breakwater.dialects.rules.provider_words import is_same_model
from tests.tables import each_row

SAME = [
    # OpenAI
    ("gpt-4.1-mini", "gpt-4.1-mini-2025-04-14"),
    ("gpt-4o", "gpt-4o-2024-08-06"),
    ("gpt-4", "gpt-4-0613"),
    ("gpt-3.5-turbo", "gpt-3.5-turbo-0125"),
    ("gpt-4-turbo-preview", "gpt-4-turbo-2024-04-09"),
    ("o3-mini", "o3-mini-2025-01-31"),
    ("chatgpt-4o-latest", "chatgpt-4o-latest"),
    ("ft:gpt-4o-mini-2024-07-18:acme::abc123", "ft:gpt-4o-mini-2024-07-18:acme::abc123"),
    # Anthropic, and by Vertex and Bedrock
    ("claude-3-5-sonnet-latest", "claude-3-5-sonnet-20241022"),
    ("claude-sonnet-4-0", "claude-sonnet-4-0"),
    ("claude-opus-4-1", "claude-opus-4-1-20250805"),
    ("claude-3-5-sonnet@20240620", "claude-3-5-sonnet-20240620"),
    ("us.anthropic.claude-3-5-sonnet-20241022-v2:0", "claude-3-5-sonnet-20241022"),
    ("anthropic.claude-3-haiku-20240307-v1:0", "claude-3-haiku-20240307"),
    ("meta.llama3-1-70b-instruct-v1:0", "meta.llama3-1-70b-instruct-v1:0"),
    # Gemini
    ("gemini-2.5-flash", "models/gemini-2.5-flash"),
    ("gemini-2.5-flash", "gemini-2.5-flash-preview-04-17"),
    ("gemini-1.5-pro", "gemini-1.5-pro-002"),
    ("google/gemini-2.0-flash-001", "gemini-2.0-flash-001"),
    # OpenRouter and other gateways
    ("openai/gpt-4o-mini", "gpt-4o-mini-2024-07-18"),
    ("anthropic/claude-sonnet-4", "anthropic/claude-4-sonnet-20250522"),
    ("anthropic/claude-3.5-sonnet", "anthropic/claude-3-5-sonnet-20241022"),
    ("meta-llama/llama-3.1-8b-instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
    ("deepseek/deepseek-r1:free", "deepseek/deepseek-r1"),
    ("llama-v3p1-8b-instruct", "accounts/fireworks/models/llama-v3p1-8b-instruct"),
    ("mistral-large-latest", "mistral-large-2411"),
    ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct"),
    # Servers on one's own machine
    ("llama3.2", "llama3.2:latest"),
    ("llama3", "/models/Meta-Llama-3-8B-Instruct.Q4_K_M.gguf"),
    ("llama3", "mistral-7b-instruct-v0.2.Q4_K_M.gguf"),
    ("llama3", "C:\\models\\llama"),
    ("llama3", "default"),
    ("tgi", "meta-llama/Llama-3.1-8B-Instruct"),
    ("local-model", "whatever"),
    ("llama-3.1-8b", "llama-3.1-8b-fp8"),
    ("GPT-4o", "gpt-4o"),
]
OTHER = [
    ("gpt-4o-mini", "gpt-4o"),
    ("gpt-4o-mini", "gpt-4o-2024-08-06"),
    ("gpt-4.1-mini", "gpt-4.1-nano"),
    ("gpt-4.1", "gpt-4"),
    ("gpt-4o-2024-08-06", "gpt-4o-2024-05-13"),
    ("o1", "o1-pro"),
    ("o3-mini", "o4-mini"),
    ("claude-3-5-haiku-latest", "claude-3-opus-20240229"),
    ("claude-sonnet-4", "claude-opus-4"),
    ("gemini-2.5-flash", "gemini-2.5-pro"),
    ("gemini-2.5-flash", "gemini-2.5-flash-lite"),
    ("openrouter/auto", "anthropic/claude-opus-4"),
    ("deepseek-chat", "deepseek-reasoner"),
    ("llama3:8b", "llama3:70b"),
    ("llama-3.1-8b-instruct", "llama-3.1-405b-instruct"),
    ("mistral-small-latest", "mistral-large-2411"),
    ("anthropic.claude-3-haiku-20240307-v1:0", "anthropic.claude-3-opus-20240229-v1:0"),
    ("m", "gpt-4o"),
]


@each_row(("asked", "answered"), SAME)
def test_a_snapshot_a_prefix_and_a_file_are_the_model_that_was_asked_for(asked: str, answered: str) -> None:
    assert is_same_model(answered, (asked,))


@each_row(("asked", "answered"), OTHER)
def test_another_model_is_another(asked: str, answered: str) -> None:
    assert not is_same_model(answered, (asked,))


def test_each_name_that_the_model_goes_by_counts() -> None:
    assert is_same_model("gpt-4o-2024-08-06", ("my-deployment", "openai/gpt-4o"))
