"""A high estimate of the input tokens of a call, before it is made: what a hard budget must have room for.

An estimate must not be below what the provider will count, and is settled by that as soon as it is known. So it is
taken from the least favourable of what providers document and of what has been measured of their tokenizers, which the
plane does not have. Of English it makes two to three times the tokens that it is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from breakwater.policy.input_size import InputSize

BASE_TOKENS = 32
"""What a call has around its messages."""
PAGE_TEXT_TOKENS = 3_000
"""Of a page of a PDF, beside its picture: Anthropic documents 1,500 to 3,000."""
BYTES_PER_DOCUMENT_TOKEN = 2
"""Of PDFs. Their text is compressed, and each page is seen as a picture as well; scans come to far less."""
BYTES_PER_MEDIA_TOKEN = 32
"""Of sound and film: Gemini's 32 tokens a second, at one kilobyte a second. Speech is hardly ever smaller."""
LINKED_FILE_TOKENS = 200_000
"""Of a file whose size can't be told: all that fits in the context of most models."""

MAX_INPUT_TOKENS = 100_000_000
"""More than any model takes: such a call is refused by its provider, whatever it was estimated to cost."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How a provider counts. A sign of ASCII other than a small letter may be a token of its own with all of them.

    Attributes:
        lowercase_bytes: bytes of small Latin letters and spaces for a token.
        foreign_bytes: bytes of other scripts for a token. Byte-level tokenizers make no more than one of each.
        image_tokens: for the largest image at the highest resolution.
        tool_tokens: of the instructions that a provider adds where there are tools or a schema.
        message_tokens: of what stands between two messages.
    """

    lowercase_bytes: float
    foreign_bytes: float
    image_tokens: int
    tool_tokens: int
    message_tokens: int = 8


OPENAI = TokenRules(lowercase_bytes=2.0, foreign_bytes=1.2, image_tokens=12_000, tool_tokens=200)
"""Images: 10,000 patches of GPT-5.4's `detail: original`, and a fifth for what its multipliers may add."""
ANTHROPIC = TokenRules(lowercase_bytes=1.75, foreign_bytes=1.2, image_tokens=5_000, tool_tokens=1_000)
"""Text: Opus 4.7 makes up to 1.47 times the tokens of its predecessors of the same text. Images: 2,576 pixels at the
long edge are 4,784 tokens. Tools: up to 530 tokens documented, and headroom for newer models."""
GEMINI = TokenRules(lowercase_bytes=2.0, foreign_bytes=1.5, image_tokens=5_000, tool_tokens=200)
"""Images: 258 tokens for each tile, at most sixteen of them; at most 2,240 tokens with Gemini 3."""
GENERIC = TokenRules(lowercase_bytes=1.75, foreign_bytes=1.0, image_tokens=16_384, tool_tokens=1_000)
"""Of an endpoint that serves anything. Images: Qwen-VL's own limit."""

_OPENAI_IMAGES = (("gpt-4o-mini", 48_169), ("gpt-4o", 1_445), ("gpt-4-turbo", 1_445), ("gpt-4.1", 3_779))
"""Base and eight tiles at high detail (2,833 + 8 x 5,667 and 85 + 8 x 170); 1,536 patches by nano's 2.46."""
_OPENAI_NAME = re.compile(r"(ft:)?(gpt-|chatgpt-|o\d)")


def estimate_input_tokens(size: InputSize, rules: TokenRules) -> int:
    """A high estimate of the tokens that a provider will count as input."""
    text = size.lowercase / rules.lowercase_bytes + size.signs + size.foreign / rules.foreign_bytes
    files = size.document_bytes / BYTES_PER_DOCUMENT_TOKEN + size.media_bytes / BYTES_PER_MEDIA_TOKEN
    total = (
        math.ceil(text + files)
        + BASE_TOKENS
        + size.messages * rules.message_tokens
        + size.images * rules.image_tokens
        + size.documents * (rules.image_tokens + PAGE_TEXT_TOKENS)
        + size.linked_files * LINKED_FILE_TOKENS
        + (rules.tool_tokens if size.tools else 0)
    )
    return min(total, MAX_INPUT_TOKENS)


@lru_cache(maxsize=1024)
def rules_for(kind: str, base_url: str, models: tuple[str, ...], image_tokens: int | None = None) -> TokenRules:
    """The rules of a model.

    Args:
        kind: of its provider.
        base_url: of its provider; empty where it has none.
        models: the names it goes by, the surest first: an Azure deployment's own name may say nothing.
        image_tokens: of the config, which wins.
    """
    names = [model.rpartition("/")[2].lower() for model in models]
    rules = _rules_of(kind, base_url, names)
    if rules is OPENAI:
        known = (most for part, most in _OPENAI_IMAGES for name in names if part in name)
        rules = replace(rules, image_tokens=next(known, rules.image_tokens))
    return rules if image_tokens is None else replace(rules, image_tokens=image_tokens)


def _rules_of(kind: str, base_url: str, names: list[str]) -> TokenRules:
    # The model's own name first: a gateway serves those of every maker.
    if kind == "anthropic" or any("claude" in name for name in names):
        return ANTHROPIC
    if "googleapis.com" in base_url or any("gemini" in name for name in names):
        return GEMINI
    if kind == "azure" or "api.openai.com" in base_url or any(_OPENAI_NAME.match(name) for name in names):
        return OPENAI
    return GENERIC
