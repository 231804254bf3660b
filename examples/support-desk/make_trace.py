"""Write the trace of a made-up support desk: ``python examples/support-desk/make_trace.py``.

Three kinds of traffic, on text that the bundled byte-level models know how to continue:

* ``day-pool``: short tickets that state a key and ask for it again, many at once;
* ``overnight``: one person at a time, who rewrites a form letter again and again;
* ``long-history``: tickets with a long history between the key and the question.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from replayssm.models import tiny
from replayssm.traffic.formats import canonical
from replayssm.traffic.trace import Provenance, Trace, TraceRequest

SEED = 11
SPAN_S = 3.0
QUESTION = "\n# What is the pass key? The pass key is "
# cohort: requests in the trace, tokens of history, tokens of the reply
TICKETS = {"day-pool": (32, (40, 90), 16), "long-history": (12, (400, 700), 16)}
LETTERS = (8, 3, 48)
# the pool has gone home, and the letters come one after the other
NIGHT_S, PAUSE_S = 6.0, 0.5


def ticket(rng: np.random.Generator, text: bytes, size: int) -> str:
    """Return a ticket that states a key somewhere in ``size`` bytes of history."""
    key = "".join(str(d) for d in rng.integers(10, size=5))
    start = int(rng.integers(len(text) - size))
    history = text[start : start + size].decode("ascii", errors="replace")
    cut = int(rng.integers(1, size // 2))
    stated = f"\n# The pass key is {key}.\n"
    return history[:cut] + stated + history[cut:] + QUESTION


def letter(rng: np.random.Generator, text: bytes, copies: int) -> str:
    """Return a form letter, ``copies`` times in full and once more begun."""
    start = int(rng.integers(len(text) - 80))
    body = text[start : start + 64].decode("ascii", errors="replace")
    return (body + "\n") * copies + body[:12]


def main() -> None:
    """Write ``trace.jsonl`` beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "trace.jsonl")
    args = parser.parse_args()
    rng = np.random.default_rng(SEED)
    text = bytes(c for c in tiny.heldout_text() if c < 128)
    made: list[TraceRequest] = []
    for cohort, (count, (low, high), output) in TICKETS.items():
        for at in np.sort(rng.uniform(0, SPAN_S, count)):
            words = ticket(rng, text, int(rng.integers(low, high)))
            made.append(request(float(at), words, output, cohort))
    count, copies, output = LETTERS
    made += [
        request(NIGHT_S + PAUSE_S * i, letter(rng, text, copies), output, "overnight")
        for i in range(count)
    ]
    made.sort(key=lambda r: r.at)
    origin = Provenance("make_trace.py", None, "generated", len(made))
    canonical.write(Trace(tuple(made), origin), args.out)
    print(f"{len(made)} requests in {args.out.name}")


def request(at: float, words: str, output: int, cohort: str) -> TraceRequest:
    """Return a request with its text."""
    size = len(tiny.encode(words))
    return TraceRequest(round(at, 3), size, output, cohort=cohort, text=words)


if __name__ == "__main__":
    main()
