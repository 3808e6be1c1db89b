"""The prompt caches of the simulated provider: what each model has read lately under each API key."""

from __future__ import annotations

from hashlib import blake2b

from breakwater.local.provider.behaviour import ChatRequest, tokens_of
from breakwater.local.provider.script import PromptCache

MAX_PREFIXES = 100_000


class PromptCaches:
    """Remembers the beginnings of conversations: a digest of each message with all before it."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str | None, bytes], float] = {}
        """When each beginning is forgotten, in seconds of a monotonic clock."""

    def read(self, rules: PromptCache, model: str, request: ChatRequest, now: float) -> int:
        """Returns the tokens of a request that the cache has, and writes the request to it.

        Args:
            rules: of the model.
            model: the model.
            request: the request, with its key.
            now: seconds of a monotonic clock.
        """
        digest = blake2b(digest_size=16)
        length = 0
        cached = 0
        for message in request.messages:
            digest.update(f"{message.role}\n{len(message.text)}\n{message.text}".encode("utf-8", "surrogatepass"))
            length += len(message.text)
            place = model, request.key, digest.digest()
            if self._ends.pop(place, 0.0) > now:
                cached = tokens_of(length)
            self._ends[place] = now + rules.ttl_s
        while len(self._ends) > MAX_PREFIXES:
            del self._ends[next(iter(self._ends))]
        return cached if cached >= rules.min_tokens else 0
