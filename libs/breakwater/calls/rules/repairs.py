"""Repairs of a conversation that a model could not answer, or answered badly. Pure: no I/O.

The decisions are kept, not the conversation that came of them: a checkpoint stays small, and the worker that takes the
job over derives the same conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from breakwater.calls.rules.classify import UNFAMILIAR, Classification
from breakwater.calls.rules.output import correction_message
from breakwater.calls.rules.parameters import MAX_LEFT_OUT, TRANSLATED
from breakwater.dialects.rules.context_overflow import keep_ratio_from, most_output_in, output_limit_from
from breakwater.dialects.rules.conversation import JsonMessage, prune_orphans, trim
from breakwater.dialects.rules.provider_state import StateRepair, state_repair
from breakwater.jobs.contract.execution import Attempt, Cause, Notification
from breakwater.kernel.types import Count, Event
from breakwater.prices.rules.price import InputSize, size_of_added

MAX_TRIMS = 3
"""A conversation is shortened so often for one model before it counts as too long for it."""

CUT_OFF = frozenset({"OutputCutOffError", "OutputLimitError"})
"""The classes of answers that ended at the output limit: in mid-sentence, or before they said anything."""

_HALF = 0.5


class Correction(Event):
    """An answer that did not satisfy the agent's schema, and what was wrong with it."""

    answer: str | None
    """None if the answer was lost with its worker: the correction counts, and nothing more is known of it."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Repaired:
    """The decision to ask the same model again immediately, after a repair. It does not count as a try."""

    cause: Cause
    repairs: Repairs
    event: Notification | None = None
    count: Count = 0
    """The number of tool calls that were pruned, or of messages that were trimmed."""


class Repairs(Event):
    """The repairs of one job. All but the pruning are made for one model, and end with it."""

    pruned: bool = False
    """True once orphaned tool calls were removed, which holds for all models."""
    keep_ratios: tuple[float, ...] = ()
    """The share of the conversation that each trim was to keep."""
    corrections: tuple[Correction, ...] = ()
    credential_refreshed: bool = False
    full_output: bool = False
    """True once an answer was truncated at its reservation: from then on, the job's own limit applies."""
    output_limit: Count | None = None
    """The limit of the output, which else does not fit into the model's window next to the conversation."""
    left_out: tuple[str, ...] = ()
    """Parameters that the model refuses."""
    state: tuple[StateRepair, ...] = ()
    """Repairs of what models of earlier turns wrote besides their texts, and this model refused."""

    def for_next_model(self) -> Repairs:
        """Returns the repairs that the next model gets, too."""
        return Repairs(pruned=self.pruned, full_output=self.full_output)

    @property
    def correction_size(self) -> InputSize:
        """The size of the corrections in a call."""
        return size_of_added(_dialogue(self.corrections))

    def apply_to(self, messages: Sequence[JsonMessage]) -> tuple[list[JsonMessage], Count]:
        """Returns the conversation as it is sent, and the number of the job's messages that are left out of it."""
        repaired: list[JsonMessage] = list(messages)
        if self.pruned:
            repaired, _ = prune_orphans(repaired)
        for ratio in self.keep_ratios:
            repaired, _ = trim(repaired, ratio)
        return [*repaired, *_dialogue(self.corrections)], len(messages) - len(repaired)

    def replay(
        self,
        cause: Cause,
        messages: Sequence[JsonMessage],
        attempts: Sequence[Attempt],
        dropped_params: Collection[str] = (),
    ) -> Repairs:
        """Returns the repairs with the one that led to a recorded attempt, derived again from the attempts before it.

        `dropped_params`: of that attempt.
        """
        match cause:
            case "orphan_recovery":
                pruned = self.prune(messages)
                return self if pruned is None else pruned[0]
            case "context_trim":
                error = attempts[-1].error if attempts else None
                shorter = self.shorten(messages, error.message if error is not None else "")
                return self if shorter is None else shorter[0]
            case "self_correction":
                # The answer itself was lost; that it was corrected counts.
                return self.model_copy(update={"corrections": (*self.corrections, Correction(answer=None))})
            case "credential_refresh":
                return self.model_copy(update={"credential_refreshed": True})
            case "provider_state" if attempts and (error := attempts[-1].error) is not None:
                return self.mend_state(error.class_, error.param) or self
            case "output_limit" | "parameter" if attempts and (error := attempts[-1].error) is not None:
                if error.class_ in CUT_OFF:
                    return self.model_copy(update={"full_output": True})
                translated = [error.param] if error.param in TRANSLATED else []
                return self.leave_out([*dropped_params, *translated]) or self.limit_output(error.message) or self
            case _:
                return self

    def after(
        self,
        failure: Classification,
        messages: Sequence[JsonMessage],
        correction: Correction | None,
        *,
        may_trim: bool,
        max_corrections: int,
        lowered: bool = False,
        refused_params: Collection[str] = (),
        may_ask_for_less_than: int | None = None,
    ) -> Repaired | None:
        """Returns the repair to make after a failed attempt; None if none helps.

        Args:
            failure: what the failure means.
            messages: of the job.
            correction: what was wrong with the answer; None where the answer was lost with its worker.
            may_trim: a conversation that is too long may lose its oldest turns.
            max_corrections: feedback on invalid answers for a model, at most.
            lowered: the call's output limit was lower than the job's.
            refused_params: that the refusal is about, and that may be left out.
            may_ask_for_less_than: the call's output limit, if that was not written for this model, and may be over its
                own.
        """
        if lowered and failure.class_name in CUT_OFF:
            return Repaired("output_limit", self.model_copy(update={"full_output": True}))
        if (mended := self.mend_state(failure.class_name, failure.param)) is not None:
            return Repaired("provider_state", mended)
        if (without := self.leave_out(refused_params)) is not None:
            return Repaired("parameter", without)
        is_overflow = failure.kind == "context_overflow"
        sent = may_ask_for_less_than or 0
        limited = self.limit_output(failure.message) if is_overflow or failure.status_code in {400, 422} else None
        if limited is not None and (is_overflow or (limited.output_limit or 0) < sent):
            return Repaired("output_limit", limited)
        # Providers word it in many ways. An unfamiliar 400 may be about the orphans, where there are any.
        may_be_orphans = failure.kind == "orphan_tool_calls" or failure.class_name == UNFAMILIAR
        if may_be_orphans and (pruned := self.prune(messages)) is not None:
            repairs, count = pruned
            return Repaired("orphan_recovery", repairs, "orphan_tool_calls_pruned", count)
        if is_overflow and may_trim:
            if (shorter := self.shorten(messages, failure.message)) is None:
                return None
            repairs, count = shorter
            return Repaired("context_trim", repairs, "context_trimmed", count)
        if failure.kind == "logic":
            # The provider withheld the answer: ask for another one, once.
            max_tries = max_corrections if failure.status_code is None else 1
            corrected = self.correct(correction or Correction(answer=None), max_tries)
            return None if corrected is None else Repaired("self_correction", corrected)
        return None

    def leave_out(self, params: Iterable[str]) -> Repairs | None:
        """Leaves parameters out, or sends their older or newer names. None if that was done before, or often enough."""
        new = [param for param in params if param not in self.left_out]
        if not new or len(self.left_out) + len(new) > MAX_LEFT_OUT:
            return None
        return self.model_copy(update={"left_out": (*self.left_out, *new)})

    def mend_state(self, class_name: str, param: str | None) -> Repairs | None:
        """Changes the state in the conversation that the provider refused. None if that was done before."""
        repair = state_repair(class_name, param)
        return (
            None if repair is None or repair in self.state else self.model_copy(update={"state": (*self.state, repair)})
        )

    def limit_output(self, complaint: str) -> Repairs | None:
        """Limits the output to the room that is left, or that the model has. None if that was done before.

        Args:
            complaint: what the provider said, which names its limit, and what was asked for.
        """
        limit = output_limit_from(complaint) or most_output_in(complaint) if self.output_limit is None else None
        return None if limit is None else self.model_copy(update={"output_limit": limit})

    def prune(self, messages: Sequence[JsonMessage]) -> tuple[Repairs, int] | None:
        """Removes orphaned tool calls. None if that was done before, or there are none."""
        if self.pruned:
            return None
        _, count = prune_orphans(list(messages))
        return (self.model_copy(update={"pruned": True}), count) if count else None

    def shorten(self, messages: Sequence[JsonMessage], complaint: str) -> tuple[Repairs, int] | None:
        """Drops the oldest turns. None if that was done often enough, or nothing more can be dropped.

        Args:
            messages: of the job.
            complaint: what the provider said, which may name its limit.
        """
        if len(self.keep_ratios) >= MAX_TRIMS:
            return None
        repaired, before = self.model_copy(update={"corrections": ()}).apply_to(messages)
        ratio = keep_ratio_from(complaint) or _HALF
        _, dropped = trim(repaired, ratio)
        if not dropped:
            return None
        return self.model_copy(update={"keep_ratios": (*self.keep_ratios, ratio)}), before + dropped

    def correct(self, correction: Correction, max_corrections: int) -> Repairs | None:
        """Tells the model what was wrong with its answer. None if `max_corrections` is reached."""
        if len(self.corrections) >= max_corrections:
            return None
        return self.model_copy(update={"corrections": (*self.corrections, correction)})


NO_REPAIRS = Repairs()


def _dialogue(corrections: Sequence[Correction]) -> list[JsonMessage]:
    messages: list[JsonMessage] = []
    for correction in corrections:
        if correction.answer is not None:
            messages.append({"role": "assistant", "content": correction.answer})
            messages.append(correction_message(correction.problems))
    return messages
