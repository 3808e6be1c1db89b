"""Takes secrets whose values are known out of what a provider says. It is cut afterwards, never before."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

LEAST = 8
"""Characters; what is shorter is as likely an ordinary word, and hidden only where it is none and stands by itself."""
_LEAST_ODD = 4
_ESCAPED = re.compile(rb"\\[u/\\\"]|\0")
"""What JSON may write other signs as, and what UTF-16 has in it."""
_GAP = r"(?:\s|\\[nrt])+"


class KnownSecrets:
    """Secrets, and what stands for each in a text: for a whole one however its lines are broken, and for each line."""

    def __init__(self, secrets: Iterable[str], placeholder: str) -> None:
        self._secrets = tuple(secrets)
        self._placeholder = placeholder
        self._raw = [secret.encode(errors="surrogatepass") for secret in self._secrets]
        parts = {part for secret in self._secrets for part in (secret, *secret.splitlines())}
        patterns = [pattern for part in sorted(parts, key=len, reverse=True) if (pattern := _pattern(part.strip()))]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def hidden(self, text: str) -> str:
        """The text without them."""
        return text if self._pattern is None else self._pattern.sub(lambda _: self._placeholder, text)

    def hidden_in(self, value: Any) -> Any:
        """JSON without them, in names and texts."""
        match value:
            case str():
                return self.hidden(value)
            case dict():
                fields = cast(dict[str, Any], value).items()
                return {self.hidden(name): self.hidden_in(inner) for name, inner in fields}
            case list():
                return [self.hidden_in(inner) for inner in cast(list[Any], value)]
            case _:
                return value

    def hidden_in_read(self, raw: bytes, value: Any) -> Any:
        """The same of what was read from JSON, which is looked through only where they may stand in it."""
        if self._pattern is None or not (any(map(raw.__contains__, self._raw)) or _ESCAPED.search(raw)):
            return value
        return self.hidden_in(value)

    def hidden_in_rest(self, text: str) -> str:
        """A text without them whose beginning is missing, and with it perhaps that of a secret."""
        rests = (secret[begin : begin + len(text)] for secret in self._secrets for begin in range(1, len(secret)))
        cut = max((len(rest) for rest in rests if text.startswith(rest)), default=0)
        return self.hidden(text[cut:])


def cut(text: str, length: int) -> str:
    """The beginning of a text; one that is too long ends between two words, as nobody knows a part of a key for one."""
    return text if len(text) <= length else "".join((text[:length] + "…").rsplit(None, 1)[:-1])


def _pattern(secret: str) -> str | None:
    pattern = _GAP.join(map(re.escape, secret.split()))
    if len(secret) >= LEAST:
        return pattern
    return None if len(secret) < _LEAST_ODD or secret.isalpha() or secret.isdigit() else rf"(?<!\w){pattern}(?!\w)"
