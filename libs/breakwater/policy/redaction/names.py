"""Names of fields whose values are secret."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from breakwater.policy.redaction import known

SEPARATORS = b"-_. "

_REMEMBERED = 4096
_LONGEST_REMEMBERED = 64


def squashed(name: str) -> bytes:
    """A name without what spellings differ in: `apiKey`, `Api-Key` and `API_KEY` are all `apikey`."""
    return name.lower().encode(errors="surrogatepass").translate(None, SEPARATORS)


class SecretNames:
    """Names that are secret as a whole, and endings of names that are."""

    def __init__(self, own: Iterable[str], *, built_in: bool) -> None:
        whole = [*own]
        if built_in:
            whole += (*known.SECRET_NAMES, *known.COMMON_NAMES, *known.QUOTED_NAMES)
        self._whole = frozenset(map(squashed, whole))
        self._endings = tuple(map(squashed, known.SECRET_ENDINGS)) if built_in else ()
        self._is_secret = lru_cache(_REMEMBERED)(self._look)

    def __contains__(self, name: str) -> bool:
        return self._is_secret(name) if len(name) <= _LONGEST_REMEMBERED else self._look(name)

    def _look(self, name: str) -> bool:
        name_only = squashed(name)
        return name_only in self._whole or name_only.endswith(self._endings)
