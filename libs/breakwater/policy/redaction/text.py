"""One text without its secrets, cut to a length."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.policy.redaction.finders import Work
from breakwater.policy.redaction.scanner import Scanner
from breakwater.policy.redaction.values import LONGEST

ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class TextRedactor:
    """Redacts, then cuts.

    Of a text that is too long, as much is looked at as can be shown, and `LONGEST` characters more, of which none is
    shown: a secret that begins in what is shown and is no longer than that is recognised.
    """

    scanner: Scanner
    placeholder: str
    max_length: int

    def part_looked_at(self, text: str) -> str:
        """The beginning of a text that decides what is shown of it."""
        return text if len(text) <= self.max_length else text[: self.max_length + LONGEST]

    def redacted(self, text: str, work: Work, *, is_json: bool = False) -> str:
        """The text with placeholders for its secrets.

        Args:
            text: Any text. Lone surrogates pass.
            work: What may still be looked at closely.
            is_json: Whether the text is JSON whose content was redacted before.

        Raises:
            TooMuchWorkError: there are too many places to look at.
        """
        shown = self._once(text, work, is_json=is_json)
        # A cut can make of harmless characters what looks like a secret; what is stored should stand a second look.
        return shown if len(text) <= self.max_length else self._once(shown, work, is_json=False)

    def _once(self, text: str, work: Work, *, is_json: bool) -> str:
        data = self.part_looked_at(text).encode(errors="surrogatepass")
        if not self.scanner.suspects(data):
            return text if len(text) <= self.max_length else self._cut(text, self.max_length)
        limit = len(data)
        if len(text) > self.max_length:
            limit = len(text[: self.max_length].encode(errors="surrogatepass"))
        data, limit = self.scanner.redacted(data, limit, work, is_json=is_json)
        shown = data[:limit].decode(errors="surrogatepass")
        whole = data.decode(errors="surrogatepass")
        return self._cut(whole, min(len(shown), self.max_length))

    def _cut(self, text: str, length: int) -> str:
        """The beginning of a text, in which a placeholder that begins is whole."""
        reach = len(self.placeholder) - 1
        straddling = text.find(self.placeholder, max(0, length - reach), length + reach)
        end = length if straddling < 0 else straddling + reach + 1
        return text if end >= len(text) else text[:end] + ELLIPSIS
