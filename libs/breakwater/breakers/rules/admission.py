"""The admission of a call by a breaker, as the script `admit` decides it in Redis, for a breaker that is a value.

Workers ask the script, which decides and takes the probe in one step. This is for those who replay recorded calls.
"""

from __future__ import annotations

from breakwater.breakers.rules.breaker import Breaker
from breakwater.kernel.immutable import changed, immutable

PROBE_WAIT_S = 2.0
"""The longest wait for the end of another call's probe. Longer waits would delay the agent's other jobs."""


@immutable()
class BreakerAnswer:
    """The answer of a breaker to a call.

    Attributes:
        admitted: True if the call may be made.
        version: the breaker's version, for which its outcome counts.
        is_probe: True if the call is the probe of a half-open breaker, or while it is refused: another call is.
        became_half_open: True if this admission made the breaker half-open.
        until_ms: the end of the refusal, in milliseconds since the epoch; 0 if there is none, or none is known.
    """

    admitted: bool
    version: int
    is_probe: bool = False
    became_half_open: bool = False
    until_ms: int = 0


def admit(
    breaker: Breaker, attempt_id: str, now_ms: int, lease_ms: int, caller: str = "", task: str = ""
) -> tuple[Breaker, BreakerAnswer]:
    """Asks a breaker for the admission of a call.

    Args:
        breaker: the current state.
        attempt_id: the call.
        now_ms: the current time, in milliseconds since the epoch.
        lease_ms: the time for which a probe keeps others out.
        caller: the caller as `caller_of` names it; empty if unknown.
        task: the hash of the task if that has a breaker of its own, and so is not stopped by what it has opened.

    Returns:
        The next state, and the answer.
    """
    version = breaker.version
    if breaker.state == "closed":
        return breaker, BreakerAnswer(True, version)
    if breaker.state == "isolated":
        return breaker, BreakerAnswer(False, version)
    if _is_of_another(breaker.alone, caller) or (task and breaker.task == task):
        return breaker, BreakerAnswer(True, version)
    probe_until_ms = now_ms + lease_ms
    if breaker.state == "open":
        probes_early = now_ms < breaker.open_until_ms and _is_of_another(breaker.probed_by, caller)
        if now_ms < breaker.open_until_ms and not probes_early:
            return breaker, BreakerAnswer(False, version, until_ms=breaker.open_until_ms)
        half_open = changed(
            breaker,
            state="half_open",
            version=version + 1,
            counts_from=breaker.counts_from if breaker.alone else version + 1,
            changed_ms=now_ms,
            probed_by=breaker.probed_by if probes_early else "",
            probe=attempt_id,
            probe_until_ms=probe_until_ms,
        )
        return half_open, BreakerAnswer(True, version + 1, is_probe=True, became_half_open=True)
    if breaker.probe not in {None, attempt_id} and now_ms < breaker.probe_until_ms:
        return breaker, BreakerAnswer(False, version, is_probe=True, until_ms=breaker.probe_until_ms)
    asks_again = breaker.probe == attempt_id
    probed = changed(breaker, probe=attempt_id, probe_until_ms=probe_until_ms)
    return probed, BreakerAnswer(True, version, is_probe=True, became_half_open=asks_again)


def give_back(breaker: Breaker, attempt_id: str) -> Breaker:
    """Returns a breaker without its probe, if this attempt holds it: its call was not made."""
    return changed(breaker, probe=None, probe_until_ms=0) if breaker.probe == attempt_id else breaker


def _is_of_another(names: str, caller: str) -> bool:
    """Returns True if a key or tenant is not the caller's; False if the caller is unknown."""
    return bool(caller) and not set(names.split()) <= set(caller.split())
