"""Cost tags: which of a job's metadata its costs are grouped by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import JsonValue

MAX_TAGS = 10
"""Keys in the config. Each attempt carries its tags, on the bus and in ClickHouse."""
MAX_LENGTH = 128
"""Characters of a value; the rest of a longer one is cut off."""


def cost_tags(keys: Iterable[str], metadata: Mapping[str, JsonValue]) -> dict[str, str]:
    """The tags of a job: its metadata under the keys of the config, as text, in the order of the config.

    Args:
        keys: that are kept, `cost_tags` of the config.
        metadata: of the job, redacted: a part of a secret is not known for one.

    Returns:
        A text as it is, a number as JSON has it, `true` or `false`. Lists, objects, null and the empty text are no
        values to group by, and left out.
    """
    found = ((key, _text(metadata.get(key))) for key in keys)
    return {key: text[:MAX_LENGTH] for key, text in found if text}


def _text(value: JsonValue) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value.strip()
        case int():
            return str(value)
        case float() if math.isfinite(value):
            return str(value)
        case _:
            return ""
