"""Records by hand."""

from __future__ import annotations

from replayssm.traffic.record import Record, Status


def record(
    index=0, *, scheduled_s=0.0, released_s=None, send_s=None, times=(0.5, 1.0), end_s=None,
    status=Status.OK, **fields,
) -> Record:  # fmt: skip
    released = scheduled_s if released_s is None else released_s
    send = released if send_s is None else send_s
    given = {
        "request_id": f"r{index}",
        "index": index,
        "cohort": "default",
        "session_id": None,
        "turn": 0,
        "warmup": False,
        "status": status,
        "finish_reason": "length",
        "error": "http 500: no" if status is Status.FAILED else None,
        "scheduled_s": scheduled_s,
        "released_s": released,
        "send_s": send,
        "first_token_s": times[0] if times else None,
        "last_token_s": times[-1] if times else None,
        "end_s": (times[-1] if times else send) if end_s is None else end_s,
        "token_times_s": tuple(times),
        "coalesced_tokens": 0,
        "uncounted_tokens": 0,
        "requested_input_tokens": 8,
        "input_tokens": None,
        "cached_tokens": None,
        "requested_output_tokens": len(times),
        "output_tokens": len(times),
        "draft_tokens": None,
        "accepted_tokens": None,
        "moved": False,
    }
    return Record(**{**given, **fields})


def steady_load(n, *, rate=1.0, ttft=0.1, tpot=0.05, tokens=3, **fields) -> list[Record]:
    """Requests at even gaps that all take the same time."""
    made = []
    for i in range(n):
        start = i / rate
        times = tuple(start + ttft + tpot * j for j in range(tokens))
        made.append(record(i, scheduled_s=start, times=times, **fields))
    return made
