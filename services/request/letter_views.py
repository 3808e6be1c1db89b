"""Dead letters as people may see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from breakwater.bus.lookup import Found
from breakwater.contracts.api import DeadLetterDetails, ListedDeadLetter
from breakwater.contracts.events import ReplayNote
from breakwater.policy.redact import Redactor
from services.request.letters import Kept, read_dead_letter
from services.request.replays import SUCCEEDED, Replays

MOST_PAYLOAD = 64 * 1024
"""How much of a dead letter's payload is shown, in bytes."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A dead letter, and whether its job could run; without its payload."""

    kept: Kept
    why_not: str | None


class DeadLetterViews:
    """Makes what people see of dead letters."""

    def __init__(self, replays: Replays, redactor: Redactor, now: Callable[[], datetime]) -> None:
        self._replays = replays
        self._redactor = redactor
        self._now = now

    def judged(self, found: Found) -> Judged | None:
        """What is kept of a dead letter to list it; None where it can't be read."""
        kept = read_dead_letter(found)
        if kept is None:
            return None
        why_not = self._replays.why_not(kept)
        # The payload, and what it was read from: there may be hundreds of dead letters, of megabytes each.
        light = kept.dead_letter.model_copy(update={"payload_base64": "", "headers": {}})
        return Judged(dataclasses.replace(kept, dead_letter=light, payload=b""), why_not)

    async def _told(self, judged: Sequence[Judged]) -> tuple[tuple[ListedDeadLetter, ...], dict[int, ReplayNote]]:
        """The dead letters with what is known of their jobs and of their replays."""
        jobs = [one.kept for one in judged if one.kept.kind == "job"]
        notes = await self._replays.notes([kept.number for kept in jobs])
        executions = {note.execution_id: note.agent for note in notes.values()}
        for kept in jobs:
            if kept.dead_letter.execution_id and kept.dead_letter.agent and kept.number not in notes:
                executions[kept.dead_letter.execution_id] = kept.dead_letter.agent
        ended, now = await self._replays.ended(executions), self._now()
        told: list[ListedDeadLetter] = []
        for one in judged:
            kept, note, why_not = one.kept, notes.get(one.kept.number), one.why_not
            if note is not None:
                why_not = f"it was replayed before, as {note.execution_id}"
            elif why_not is None and ended.get(kept.dead_letter.execution_id or "") == "succeeded":
                why_not = SUCCEEDED
            told.append(
                ListedDeadLetter(
                    dead_letter_id=kept.number,
                    kind=kept.kind,
                    reason=kept.dead_letter.reason,
                    agent=kept.dead_letter.agent,
                    execution_id=kept.dead_letter.execution_id,
                    error=self._redactor.text(kept.dead_letter.error),
                    at=kept.dead_letter.at,
                    replayable=why_not is None,
                    why_not=why_not,
                    replayed_as=None if note is None else note.execution_id,
                    replay_status=None if note is None else self._replays.status(note, ended, now),
                )
            )
        return tuple(told), notes

    async def listed(self, judged: Sequence[Judged]) -> tuple[ListedDeadLetter, ...]:
        """Dead letters with what is known of their jobs and of their replays. Raises BusError."""
        dead_letters, _ = await self._told(judged)
        return dead_letters

    async def shown(self, kept: Kept) -> DeadLetterDetails:
        """All that may be seen of a dead letter. Raises BusError."""
        [told], notes = await self._told([Judged(kept, self._replays.why_not(kept))])
        note = notes.get(kept.number)
        payload, cut = self._visible(kept.payload)
        headers = self._redactor.json(dict(kept.dead_letter.headers))
        return DeadLetterDetails.model_validate(
            {
                **told.model_dump(),
                "stream": kept.dead_letter.stream,
                "subject": kept.dead_letter.subject,
                "sequence": kept.dead_letter.sequence,
                "headers": headers,
                "payload": payload,
                "payload_bytes": len(kept.payload),
                "payload_cut": cut,
                "replayed_by": None if note is None else note.by,
                "replayed_at": None if note is None else note.at,
            }
        )

    def _visible(self, payload: bytes) -> tuple[JsonValue, bool]:
        """What may be seen of a payload, and whether that is only its beginning."""
        try:
            document: JsonValue = self._redactor.json(from_json(payload, allow_inf_nan=False))
            written = to_json(document)
        except ValueError:
            text = payload.decode("utf-8", "replace")
            beginning, cut = _beginning(self._redactor.text(text).encode())
            return beginning, cut or len(text) > self._redactor.texts.max_length
        return (document, False) if len(written) <= MOST_PAYLOAD else (_beginning(written)[0], True)


def _beginning(text: bytes) -> tuple[str, bool]:
    return text[:MOST_PAYLOAD].decode("utf-8", "ignore"), len(text) > MOST_PAYLOAD
