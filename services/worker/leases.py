"""The deliveries and claims of a worker's running jobs, and the cancellation of these jobs.

One task renews them for all jobs. Redis stores each cancel request, and returns it with every answer about the job's
claim: before each call and at each renewal. So the request works even if its notification is lost or the worker dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from time import monotonic

import structlog

from breakwater.jobs.contract.current_jobs import JobWait
from breakwater.jobs.contract.execution import PendingCancel
from breakwater.jobs.held_claims import ClaimLease
from breakwater.jobs.store.executions import Claim, ClaimKept, ClaimLostError, Executions
from breakwater.kernel.nats.core import ClientGetter, core_subscription
from breakwater.kernel.nats.delivery import Delivery, report_in_progress
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.subjects import CANCEL_REQUESTS
from breakwater.kernel.nats.topology import ACK_WAIT_S
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage, Outages

RETRY_S = 1.0


STALL_S = 5.0
"""The shortest pause that counts as a stall of the process or its machine, and not as load."""

BUFFERED_S = 30.0
"""The time after a stall in which messages may be old, as they were delivered before it."""


class Leases:
    """The deliveries and claims of running jobs. Each job adds its own, and removes them when it ends."""

    def __init__(self, executions: Executions, outages: Outages, clock: Callable[[], float] = monotonic) -> None:
        self._executions = executions
        self._liveness = executions.liveness
        self._outages = outages
        self._clock = clock
        self._ticked_at = self._stalled_at = float("-inf")
        self.deliveries: set[Delivery] = set()
        self.claims: dict[Claim, ClaimLease] = {}

    @contextmanager
    def renewing(self, claim: Claim, lease: ClaimLease, requested_at: float) -> Generator[None]:
        """Renews the lease of a claim while the block runs.

        Args:
            claim: the claim that Redis has granted.
            lease: its lease.
            requested_at: the time of the request for it, or an earlier one, by the monotonic clock.
        """
        lease.lease_valid_until = requested_at + self._liveness.claim_lease_s
        self.claims[claim] = lease
        try:
            yield
        finally:
            del self.claims[claim]
            lease.end()

    async def confirm(self, claim: Claim) -> None:
        """Confirms that this worker still holds a claim, before a call and before the decision.

        Asks Redis only if the lease has not been renewed for a while, as after a stall of this process.

        Raises:
            ClaimLostError: another handling has taken it over.
            StateUnavailableError: ask again.
        """
        lease = self.claims[claim]
        requested_at = self._clock()
        if requested_at < lease.lease_valid_until:
            return
        claim_state = await self._executions.checkpoint(claim, "")
        if claim_state is None:
            raise ClaimLostError(claim.execution_id)
        lease.cancel.receive(claim_state.cancels)
        if claim_state.incomplete:
            await self.restore(claim)
        lease.lease_valid_until = requested_at + self._liveness.claim_lease_s

    async def restore(self, claim: Claim, *, release: bool = False) -> None:
        """Writes an execution again that Redis has lost, under a new lease or, to release it, under none.

        Raises:
            ClaimLostError: another handling has the job.
            StateUnavailableError: do it again.
        """
        lease = self.claims[claim]
        if lease.restore is not None and not await lease.restore(lease.progress(), release=release):
            raise ClaimLostError(claim.execution_id)

    async def release(self, claim: Claim, wait: JobWait | None = None) -> ClaimKept | None:
        """Releases a job before its end: the next claim has it, with its checkpoint. `wait` is what it waits for.

        Returns:
            None if another handling has the job.

        Raises:
            StateUnavailableError: do it again.
        """
        claim_state = await self._executions.release(claim, wait)
        if claim_state is not None and claim_state.incomplete:
            try:
                await self.restore(claim, release=True)
            except ClaimLostError:
                return None
        return claim_state

    def cancel(self, request: PendingCancel) -> None:
        """Receives a request to cancel one of these jobs; ignores one for any other."""
        for claim, lease in self.claims.items():
            if claim.execution_id == request.execution_id:
                lease.cancel.receive([request])

    def may_be_late(self) -> bool:
        """Returns True if current deliveries may be old, and other workers may have them too."""
        now = self._clock()
        return now - self._stalled_at < BUFFERED_S or STALL_S < now - self._ticked_at < float("inf")

    async def run(self) -> None:
        """Renews deliveries and claims until cancelled, in separate tasks: deliveries do not depend on Redis."""
        await background.run_together(
            _keep("keeping deliveries", ACK_WAIT_S / 3, lambda: report_in_progress(tuple(self.deliveries))),
            _keep("renewing claims", self._liveness.renew_every_s, self._renew_claims),
            _keep("the clock", 1.0, self._tick),
        )

    async def _tick(self) -> None:
        last_tick_at = self._ticked_at
        self._ticked_at = self._clock()
        stalled_s = self._ticked_at - last_tick_at
        if STALL_S < stalled_s < float("inf"):
            self._stalled_at = self._ticked_at
            structlog.get_logger().warning("process_stalled", for_s=round(stalled_s, 1))

    async def _renew_claims(self) -> None:
        # Each try reads the claims again, as jobs may end during an outage.
        await self._outages.retry_while_unavailable(self.renew)
        for renew in [lease.on_renew for lease in self.claims.values() if lease.on_renew is not None]:
            await renew()

    async def renew(self, *, restore_all: bool = False) -> None:
        """Renews all claims, and restores those that Redis has lost. Raises StateUnavailableError.

        Args:
            restore_all: True if Redis may have earlier versions of them, as after a failover.
        """
        claims = tuple(self.claims)
        requested_at = self._clock()
        incomplete: list[Claim] = []
        for claim, claim_state in zip(claims, await self._executions.renew(claims), strict=True):
            if (lease := self.claims.get(claim)) is not None:
                lease.lease_valid_until = (
                    requested_at if claim_state is None else requested_at + self._liveness.claim_lease_s
                )
                if claim_state is not None and claim_state.cancels:
                    lease.cancel.receive(claim_state.cancels)
                if claim_state is not None and claim_state.has_children:
                    lease.has_children = True
                if claim_state is not None and (claim_state.incomplete or restore_all):
                    incomplete.append(claim)
        for claim in incomplete:
            # Jobs end while others are restored.
            if claim in self.claims:
                with suppress(ClaimLostError):
                    await self.restore(claim)
        if incomplete:
            structlog.get_logger().warning(
                "executions_restored", reason="Redis may have lost them", count=len(incomplete)
            )


async def _keep(name: str, every_s: float, work: Callable[[], Awaitable[None]]) -> None:
    """Repeats work at an interval and survives any error: all jobs of the worker depend on it."""
    outage = Outage(name)
    while True:
        await asyncio.sleep(background.aligned_delay(every_s))
        await outage.run_logged(work, expected=())


async def receive_cancel_requests(connection: ClientGetter, take: Callable[[PendingCancel], None]) -> None:
    """Receives requests to cancel jobs until it is cancelled itself."""

    async def receive() -> None:
        async with core_subscription(
            connection, CANCEL_REQUESTS, lambda data: take(PendingCancel.model_validate_json(data))
        ):
            await asyncio.Event().wait()

    await Outage("cancel requests").retry_until_available(receive, on=BusUnavailableError, retry_s=RETRY_S)
