"""Whether the model that an answer names is the one that was asked for.

Providers answer with a snapshot's date, with the maker's name or without, in another order or case; servers on one's
own machine with the path of a file, or with a word that means nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

_FILE = re.compile(r"[/.~]|[a-z]:\\|file:|.*\.(gguf|ggml|bin|safetensors|pt|pth|onnx|engine)$", re.I)
"""A path on the server, or the name of a file."""
_ANY = frozenset(
    {"", "any", "base", "default", "dummy", "ensemble", "local", "local-model", "model", "none", "null"}
    | {"test", "test-model", "tgi"}
)
"""Names that servers go by which serve one model."""
_TOO_SHORT = re.compile(r"[a-z]{1,4}")
_WHERE = re.compile(r"(?:(?:us|eu|apac|au|ca|jp|us-gov|global)\.)?[a-z0-9]+\.(?=[a-z][a-z0-9-]*[-.])")
"""Bedrock's regions and makers: `us.anthropic.claude-…`."""
_VERSION_THERE = re.compile(r"(?:-v\d+)?:\d+(?::\w+)?$")
_DATE = re.compile(r"[-@](20\d\d[-.]?[01]\d[-.]?[0-3]\d|[01]\d[-.][0-3]\d(?:[-.]20\d\d)?|\d{4}|00\d)(?=$|[-:@])")
"""`2025-04-14`, `20241022`, `04-17`, `0613`, `2411`, `002`."""
_TAG = re.compile(r":([\w.-]+)$")
_SAYS_NOTHING = frozenset({"latest", "preview", "exp", "experimental", "meta", "hf", "it", "instruct", "chat"})
_QUANTISED = re.compile(r"(?:fp|bf|int|w)\d+(?:a\d+)?|awq|gptq|gguf|mlx|\d+bit|q\d\w*|nvfp\d|mxfp\d|dynamic")


@lru_cache(maxsize=4096)
def is_same_model(answered: str, asked: tuple[str, ...]) -> bool:
    """Whether an answer's model is one of those asked for, or of its family where one of the two has no date.

    Args:
        answered: the name in the answer.
        asked: the names that the model goes by.
    """
    if _is_nameless(answered):
        return True
    wanted = [name for name in asked if name]
    return any(_is_nameless(name) or _matches(answered, name) for name in wanted) or not wanted


def is_placeholder(answered: str) -> bool:
    """Whether a name that no price list knows is too short to be a model's: `m`, `gpt`."""
    return _TOO_SHORT.fullmatch(answered.strip().lower()) is not None


def _is_nameless(name: str) -> bool:
    stripped = name.strip().lower()
    return stripped in _ANY or _FILE.match(stripped) is not None


def _matches(one: str, other: str) -> bool:
    (words, dates, tag), (others, other_dates, other_tag) = _parts(one), _parts(other)
    return words == others and all(not a or not b or a == b for a, b in ((dates, other_dates), (tag, other_tag)))


def _parts(name: str) -> tuple[list[str], str, str]:
    """Its words in any order, its date as digits, and its tag."""
    name = name.strip().lower().rpartition("/")[2]
    name = _VERSION_THERE.sub("", _WHERE.sub("", name, count=1) if "." in name else name)
    tag = "" if name.startswith("ft:") or (found := _TAG.search(name)) is None else found[1]
    if tag:
        name = name[: -len(tag) - 1]
    dates = "".join(re.sub(r"\D", "", date) for date in _DATE.findall(name))
    words = re.findall(r"[a-z]+\d*[a-z]*|\d+[a-z]*", _DATE.sub("", name))
    significant = sorted(word for word in words if word not in _SAYS_NOTHING and not _QUANTISED.fullmatch(word))
    return significant, dates, "" if tag in ("latest", "free", "nitro", "floor", "beta") else tag
