"""Who is live, who holds a seat, and every way into and out of one."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from replayssm.engine.image import RequestImage
from replayssm.engine.request import Event
from replayssm.engine.sequence import Sequence, Shadow
from replayssm.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from replayssm.engine.clock import Clock
    from replayssm.engine.pools import Pools
    from replayssm.engine.request import Kind, Route
    from replayssm.engine.standard import StandardImage
    from replayssm.engine.stats import EngineStats
    from replayssm.transfer import SlotImage


class Roster:
    """The live requests of an engine.

    Args:
        pools: Where they sit.
        clock: Stamps events.
        stats: Counts to add to.

    Attributes:
        waiting: Those without a seat, next one first.
        running: Those with one, by id.
    """

    def __init__(self, pools: Pools, clock: Clock, stats: EngineStats) -> None:
        self._pools, self._clock, self._stats = pools, clock, stats
        self.waiting: deque[Sequence] = deque()
        self.running: dict[str, Sequence] = {}
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def live(self) -> list[Sequence]:
        """Return every live sequence."""
        return [*self.running.values(), *self.waiting]

    def find(self, request_id: str) -> Sequence:
        """Return a live sequence.

        Raises:
            ContractError: There is none of that id.
        """
        for sequence in self.live():
            if sequence.id == request_id:
                return sequence
        raise ContractError("request_id", "a live request", request_id)

    def tell(
        self, sequence: Sequence, kind: Kind, token: int | None = None, reason: str = ""
    ) -> None:
        """Mutates the events: one more."""
        self._events.append(Event(sequence.id, kind, token, self._clock.now(), reason))

    @property
    def has_news(self) -> bool:
        """Whether some event was not collected yet."""
        return bool(self._events)

    def collect(self) -> list[Event]:
        """Mutates the events: return them all and forget them."""
        events, self._events = self._events, []
        return events

    def sit(self, sequence: Sequence) -> None:
        """Give a waiting sequence a seat, with what it was swapped out with.

        Raises:
            CapacityError: There is no seat.
        """
        image, path = sequence.image, sequence.route.path
        if image is None or image.slot is None:
            sequence.seat = self._pools.take(path)
        else:
            sequence.seat = self._pools.import_(image.slot, image.kv, image.position)
            self._pools.switch(sequence.seat, path, sequence.position)
        sequence.image, sequence.resident = None, 0
        self.waiting.remove(sequence)
        self.running[sequence.id] = sequence
        if sequence.started:
            self._stats.resumptions += 1
        self.tell(sequence, "resumed" if sequence.started else "admitted")
        sequence.started = True

    def add_shadow(self, sequence: Sequence) -> None:
        """Give a sequence that has read nothing yet a shadow."""
        sequence.shadow = Shadow(self._pools.take("standard"))
        self._stats.shadows += 1

    def drop_shadow(self, sequence: Sequence) -> None:
        """Take a sequence's shadow away, if it has one."""
        if sequence.shadow is not None:
            self._pools.free(sequence.shadow.seat)
            sequence.shadow = None
            self._stats.shadows_dropped += not sequence.finish_reason

    def swap_out(self, sequence: Sequence) -> None:
        """Exchange a running sequence's seat for an image and queue it; its shadow ends."""
        sequence.image = self.image(sequence)
        self._stand(sequence)
        self.waiting.append(sequence)
        self._stats.preemptions += 1
        self._stats.swapped_bytes += sequence.image.nbytes
        self.tell(sequence, "preempted")

    def restart(self, sequence: Sequence) -> None:
        """Forget a sequence's state, wherever it is; it is rebuilt from its tokens, as the next."""
        if sequence.seat is not None:
            self._stand(sequence)
            self.tell(sequence, "preempted", reason="restart")
        else:
            self.waiting.remove(sequence)
        sequence.restart()
        self.waiting.appendleft(sequence)
        self._stats.restarts += 1

    def leave(self, sequence: Sequence, kind: Kind, reason: str = "") -> None:
        """Let a live sequence go, with whatever it holds."""
        if sequence.seat is not None:
            self._stand(sequence)
        else:
            self.waiting.remove(sequence)
        self.tell(sequence, kind, reason=reason)

    def switch(self, sequence: Sequence, path: str) -> None:
        """Carry a running sequence over to another path; make room by dropping and swapping others.

        Raises:
            CapacityError: There is no room for it even alone.
        """
        seat = sequence.seat
        if seat is None:
            return  # an image is carried over when it gets its seat
        self._pools.check_ever(path)
        self.drop_shadow(sequence)
        others = [x for x in reversed(self.running.values()) if x is not sequence]
        for other in others:
            if not self._pools.fits(path, instead=seat):
                self.drop_shadow(other)
        for other in others:
            if not self._pools.fits(path, instead=seat):
                self.swap_out(other)
        self._pools.switch(seat, path, sequence.position)

    def image(self, sequence: Sequence) -> RequestImage:
        """Return all of a sequence as one value."""
        slot: SlotImage | StandardImage | None = None
        kv: Iterable[Tensor] = ()
        if sequence.seat is not None:
            slot, kv = self._pools.export(sequence.seat, sequence.position)
        elif sequence.image is not None:
            slot, kv = sequence.image.slot, sequence.image.kv
        rng = sequence.rng
        return RequestImage(
            request=sequence.request,
            route=sequence.asked,
            tokens=tuple(sequence.tokens),
            position=sequence.position,
            slot=slot,
            kv=tuple(kv),
            rng=None if rng is None else dict(rng.bit_generator.state),
            retries=sequence.retries,
        )

    def admit_image(self, image: RequestImage, route: Route) -> Sequence:
        """Queue a request that arrived as an image."""
        sequence = Sequence(image.request, image.route)
        sequence.route = route
        sequence.tokens, sequence.position = list(image.tokens), image.position
        sequence.retries, sequence.started = image.retries, True
        sequence.image = None if image.slot is None else image
        if sequence.rng is not None and image.rng is not None:
            sequence.rng.bit_generator.state = image.rng
        self.waiting.append(sequence)
        return sequence

    def _stand(self, sequence: Sequence) -> None:
        self.drop_shadow(sequence)
        if sequence.seat is not None:
            self._pools.free(sequence.seat)
            sequence.seat = None
        sequence.last_at = None
        del self.running[sequence.id]
