"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from replayssm.engine.speculative import AcceptanceStats


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made, and where it stands now.

    Attributes:
        steps: Scheduler iterations that ran a forward.
        forwards: Forwards of the model, by kind: ``prefill``, ``decode``, ``shadow``.
        prompt_tokens: Prompt tokens brought into states; those of a restart count again.
        output_tokens: Tokens emitted.
        finished: Requests finished, by reason.
        cancelled: Requests cancelled.
        failed: Requests given up.
        preemptions: Swaps out.
        resumptions: Returns from a swap or a restart.
        moved_out: Requests exported.
        moved_in: Requests imported.
        restarts: Sequences rebuilt from their tokens after a failed forward or a guard's trip.
        faults: Forwards that raised.
        non_finite: Rows whose logits held NaN or infinity.
        flushes: Folds, one a value tile of a row.
        rollbacks: Verified blocks of which some draft was dropped.
        fallbacks: Routes that a guard has taken down, by cohort.
        shadows: Requests that got a shadow.
        shadows_dropped: Shadows given up before their request ended, for want of room or with it.
        swapped_bytes: Bytes of all images that were swapped out.
        forward_seconds: Time in forwards of the model.
        decode_rows: Rows of all decode forwards.
        decode_seconds: Time in decode forwards.
        flushing_forwards: Decode forwards in which some fold was due.
        flushing_seconds: Time in those.
        step_seconds: Time in steps.
        acceptance: Acceptance by cohort.
        running: Requests that hold a seat.
        waiting: Requests that hold none.
        live_shadows: Shadows that hold a seat.
        used: Share of the budget that is taken, 0 to 1.
        used_bytes: Bytes of the seats that are taken.
        allocated_bytes: Bytes allocated for seats.
    """

    steps: int = 0
    forwards: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    cancelled: int = 0
    failed: int = 0
    preemptions: int = 0
    resumptions: int = 0
    moved_out: int = 0
    moved_in: int = 0
    restarts: int = 0
    faults: int = 0
    non_finite: int = 0
    flushes: int = 0
    rollbacks: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    shadows: int = 0
    shadows_dropped: int = 0
    swapped_bytes: int = 0
    forward_seconds: float = 0.0
    decode_rows: int = 0
    decode_seconds: float = 0.0
    flushing_forwards: int = 0
    flushing_seconds: float = 0.0
    step_seconds: float = 0.0
    acceptance: dict[str, AcceptanceStats] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    live_shadows: int = 0
    used: float = 0.0
    used_bytes: int = 0
    allocated_bytes: int = 0

    @property
    def decode_forwards(self) -> int:
        """Decode forwards."""
        return self.forwards.get("decode", 0)

    @property
    def drafted(self) -> int:
        """Drafts verified, all cohorts."""
        return sum(stats.drafted for stats in self.acceptance.values())

    @property
    def accepted(self) -> int:
        """Drafts accepted, all cohorts."""
        return sum(stats.accepted for stats in self.acceptance.values())


def count(table: dict[str, int], name: str) -> None:
    """Mutates ``table``: one more of ``name``."""
    table[name] = table.get(name, 0) + 1
