"""Where an answer that broke off is joined with its continuation, which may repeat what was already said."""

from __future__ import annotations

MIN_OVERLAP = 8
"""Characters. A shorter repetition is as likely the text's own: `the the` may be meant, and two line breaks are."""

CONTINUE = (
    "Your answer was cut off here. Continue it from exactly where it stopped, beginning with the next character. "
    "Repeat nothing of it, and write nothing about the interruption."
)


class Join:
    """The beginning of a continuation, held back for as long as it may be a repetition of the end of what was said.

    Models are asked to go on, and often begin with the last words again, or with the whole answer.
    """

    def __init__(self, said: str) -> None:
        self._said = said
        self._held: str | None = ""

    def feed(self, text: str) -> str:
        """Takes the next piece of the continuation. Returns what of it is new; what may be a repetition is held."""
        if self._held is None:
            return text
        self._held += text
        # Where in what was said the text so far may be a quotation that goes on to its end.
        at = self._said.find(self._held)
        if at >= 0 and at + len(self._held) < len(self._said):
            return ""
        return self.end()

    def end(self) -> str:
        """What was held and is new, once nothing more comes or it is clear."""
        held, self._held = self._held or "", None
        longest = min(len(held), len(self._said))
        overlap = next((n for n in range(longest, MIN_OVERLAP - 1, -1) if self._said.endswith(held[:n])), 0)
        return held[overlap:]
