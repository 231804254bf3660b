"""One request on its way: its times, the interruption laid over it, how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from replayssm.traffic.record import RESOLUTION, Record, Status, TokenClock
from replayssm.traffic.target import Outcome, SendError

if TYPE_CHECKING:
    from replayssm.traffic.target import Call, Target
    from replayssm.traffic.trace import TraceRequest

EMPTY = SendError("empty", "the reply has no token")


@dataclass(slots=True, eq=False)
class Sending:
    """A request on its way. All times are those of the event loop.

    Attributes:
        request: What the trace asks for.
        call: What is sent; without its prompt once it is over.
        index: Place in the trace.
        turn: Turn of its session.
        is_warmup: Left out of statistics.
        scheduled: When the trace asks for it.
        released: When it could be sent.
        start: When it was sent.
        end: When it was over; 0 while it runs.
        clock: When its tokens came.
        status: How it ended.
        outcome: How it ended, as the target tells it.
        error: What went wrong.
        moved: Whether it was told to move.
    """

    request: TraceRequest
    call: Call
    index: int
    turn: int
    is_warmup: bool
    scheduled: float
    released: float
    start: float = 0.0
    end: float = 0.0
    clock: TokenClock = field(default_factory=TokenClock)
    status: Status = Status.OK
    outcome: Outcome = field(default_factory=Outcome)
    error: SendError | None = None
    moved: bool = False
    _serving: asyncio.Task[Outcome] | None = None
    _stopped_as: Status | None = None

    async def run(self, target: Target) -> None:
        """Send the call and wait until it is over, whichever way it ends."""

        def on_tokens(count: int, at: float) -> None:
            self.clock.add(count, at)
            self._interrupt(target)

        now = asyncio.get_running_loop().time
        self.start = max(now(), self.released)
        self._serving = asyncio.ensure_future(target.send(self.call, on_tokens))
        try:
            self.outcome = await self._serving
            if not self.clock.times:
                self.status, self.error = Status.FAILED, EMPTY
        except SendError as error:
            self.status, self.error = Status.FAILED, error
        except asyncio.CancelledError:
            if self._stopped_as is None:
                raise
            self.status = self._stopped_as
        finally:
            self.end = max(now(), self.start, *self.clock.times[-1:])
            # a long trace has more prompt tokens than fit into memory at once
            self.call = replace(self.call, prompt_ids=None, text=None)

    def stop(self, status: Status) -> None:
        """Hang up; ``status`` says why."""
        if self._serving is not None and not self._serving.done() and self._stopped_as is None:
            self._stopped_as = status
            self._serving.cancel()

    def skip(self) -> None:
        """Do not send it: the run is over."""
        self.start = self.end = max(asyncio.get_running_loop().time(), self.released)
        self.status = Status.CUT

    def _interrupt(self, target: Target) -> None:
        seen, request = len(self.clock.times), self.request
        if request.cancel_after is not None and seen >= request.cancel_after:
            self.stop(Status.CANCELLED)
        elif request.move_after is not None and seen >= request.move_after > 0 and not self.moved:
            target.move(self.call.request_id)
            self.moved = True

    def record(self, zero: float) -> Record:
        """Return what became of it, with times from ``zero``."""

        def since(at: float) -> float:
            return round(at - zero, RESOLUTION)

        seen, told = len(self.clock.times), self.outcome.output_tokens or 0
        times = tuple(since(max(at, self.start)) for at in self.clock.times)
        return Record(
            request_id=self.call.request_id,
            index=self.index,
            cohort=self.request.cohort,
            session_id=self.request.session,
            turn=self.turn,
            warmup=self.is_warmup,
            status=self.status,
            finish_reason=self.outcome.finish_reason,
            error=None if self.error is None else str(self.error),
            scheduled_s=since(self.scheduled),
            released_s=since(self.released),
            send_s=since(self.start),
            first_token_s=times[0] if times else None,
            last_token_s=times[-1] if times else None,
            end_s=since(self.end),
            token_times_s=times,
            coalesced_tokens=self.clock.coalesced,
            uncounted_tokens=max(0, told - seen),
            requested_input_tokens=self.request.prompt_tokens,
            input_tokens=self.outcome.input_tokens,
            cached_tokens=self.outcome.cached_tokens,
            requested_output_tokens=self.request.output_tokens,
            output_tokens=max(seen, told),
            draft_tokens=self.outcome.draft_tokens,
            accepted_tokens=self.outcome.accepted_tokens,
            moved=self.moved,
        )
