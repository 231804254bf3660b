"""Training data of the tiny models: corpus, held-out sample, sequences with recall tasks.

Build the corpus from what is installed (each ``--packages`` argument is a package folder):

    python benchmarks/tiny_data.py --out tiny-data --stdlib LIB --docs DOCS --packages A B ...

It writes ``corpus.xz`` (sections behind a JSON header) and ``heldout.txt.xz`` (standard-library
files chosen by a hash of their path, excluded from the corpus).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replayssm.evaluate.probes import Fact, copy_fact, key_value_facts, passkey_fact

IGNORE, TEXT, ANSWER = 0, 1, 2
"""Classes of a byte as a training target: random payload, running text, answer of a task."""

HELDOUT_BYTES = 320_000
SKIPPED_PARTS = {"__pycache__", "encodings", "idlelib", "test", "tests", "turtledemo"}
MARKERS = bytes(range(5))


def _readable(path: Path, limit: int = 400_000) -> bytes:
    data = path.read_bytes()
    if not 200 <= len(data) <= limit or any(bytes([m]) in data for m in MARKERS):
        return b""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return b""
    return data.replace(b"\r\n", b"\n").rstrip() + b"\n\n"


def _rank(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split_stdlib(root: Path) -> tuple[list[Path], list[Path]]:
    """Return (training files, held-out files) of a standard-library folder.

    Files of 2 to 40 KB outside tests and bundled tools are ordered by the SHA-256 of their
    relative path; the first ones, up to ``HELDOUT_BYTES``, are held out.
    """
    every = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    candidates = [
        p
        for p in every
        if not SKIPPED_PARTS & set(p.relative_to(root).parts)
        and 2_000 <= p.stat().st_size <= 40_000
        and _readable(p)
    ]
    held: list[Path] = []
    total = 0
    for path in sorted(candidates, key=lambda p: _rank(p.relative_to(root).as_posix())):
        size = path.stat().st_size
        if total + size <= HELDOUT_BYTES:
            held.append(path)
            total += size
    chosen = set(held)
    return [p for p in every if p not in chosen], held


def build(out: Path, stdlib: Path, docs: Path, packages: list[Path], cap: int) -> None:
    """Write ``corpus.xz`` and ``heldout.txt.xz`` into ``out``; ``cap`` bounds a package's bytes."""
    out.mkdir(parents=True, exist_ok=True)
    train, held = split_stdlib(stdlib)
    sections = {"stdlib": b"".join(_readable(p) for p in train)}
    sections["docs"] = b"".join(_readable(p) for p in sorted(docs.rglob("*.txt")))
    parts = []
    for root in packages:
        every = sorted(root.rglob("*.py"), key=lambda p: _rank(p.as_posix()))
        texts = [_readable(p, 200_000) for p in every]
        parts.append(b"".join(texts)[:cap])
    sections["packages"] = b"".join(parts)
    header = json.dumps({name: len(data) for name, data in sections.items()}).encode()
    packed = header + b"\n" + b"".join(sections.values())
    (out / "corpus.xz").write_bytes(lzma.compress(packed, preset=3))
    sample = b"".join(_readable(p) for p in held)
    (out / "heldout.txt.xz").write_bytes(lzma.compress(sample, preset=9))
    names = [p.relative_to(stdlib).as_posix() for p in held]
    (out / "heldout.json").write_text(json.dumps(names, indent=1))
    print(json.dumps({"sections": json.loads(header), "heldout": len(sample), "files": len(held)}))


def read_corpus(path: Path) -> dict[str, np.ndarray]:
    """Return the sections of ``corpus.xz`` as uint8 arrays."""
    header, _, body = lzma.decompress(path.read_bytes()).partition(b"\n")
    sections, start = {}, 0
    for name, size in json.loads(header).items():
        sections[name] = np.frombuffer(body, dtype=np.uint8, count=size, offset=start)
        start += size
    return sections


@dataclass(frozen=True, slots=True)
class Event:
    """Bytes placed at a relative time, and their class as training targets."""

    time: float
    line: bytes
    classes: bytes


def _ask(time: float, question: bytes, answer: bytes) -> Event:
    # The payload of a question cannot be predicted; the fixed wording is short, so skip it all.
    classes = bytes([IGNORE]) * len(question) + bytes([ANSWER]) * len(answer)
    return Event(time, question + answer, classes)


def _fact_events(rng: np.random.Generator, fact: Fact, spread: float, asks: int) -> list[Event]:
    line, question, answer = fact
    stated = float(rng.random()) * spread
    events = [Event(stated, line, bytes([IGNORE]) * len(line))]
    for _ in range(asks):
        later = stated + (1.0 - stated) * float(rng.uniform(0.02, 1.0))
        events.append(_ask(later, question, answer))
    return events


def task_events(rng: np.random.Generator, length: int) -> list[Event]:
    """Return facts and questions for one sequence, in order of time.

    Up to one pair per 24 bytes (at most 32 pairs), each asked once or twice, and often one copy
    task and one pass key. Questions come anywhere after their fact, so their distances cover the
    whole length.
    """
    spread = float(rng.choice([0.15, 0.5, 0.9]))
    events: list[Event] = []
    pairs = int(rng.integers(1, min(32, length // 24) + 1))
    for fact in key_value_facts(rng, pairs):
        events += _fact_events(rng, fact, spread, 1 + int(rng.random() < 0.3))
    if rng.random() < 0.6:
        events += _fact_events(rng, copy_fact(rng), spread, int(rng.integers(1, 4)))
    if rng.random() < 0.4:
        events += _fact_events(rng, passkey_fact(rng), spread, int(rng.integers(1, 3)))
    return sorted(events, key=lambda event: event.time)


def _slice(rng: np.random.Generator, corpus: dict[str, np.ndarray], size: int) -> np.ndarray:
    name = rng.choice(["stdlib", "docs", "packages"], p=[0.45, 0.1, 0.45])
    section = corpus[str(name)]
    start = int(rng.integers(len(section) - size))
    return section[start : start + size]


def task_sequence(
    rng: np.random.Generator, corpus: dict[str, np.ndarray], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes, target classes), both uint8 ``[length]``: facts and questions in filler."""
    events = task_events(rng, length)
    while sum(len(event.line) for event in events) > 0.8 * length:
        events = task_events(rng, length)
    free = length - sum(len(event.line) for event in events)
    filler = _slice(rng, corpus, free).tobytes()
    text, classes, last = [], [], 0
    for event in events:
        cut = max(last, int(event.time * free))
        text += [filler[last:cut], event.line]
        classes += [bytes([TEXT]) * (cut - last), event.classes]
        last = cut
    text.append(filler[last:])
    classes.append(bytes([TEXT]) * (free - last))
    return (
        np.frombuffer(b"".join(text), dtype=np.uint8),
        np.frombuffer(b"".join(classes), dtype=np.uint8),
    )


def make_batch(
    corpus: dict[str, np.ndarray], seed: int, count: int, length: int, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, classes), both uint8 ``[count, length + 1]``.

    ``share`` of the sequences hold tasks; the rest are plain text.
    """
    rng = np.random.default_rng(seed)
    ids = np.empty((count, length + 1), dtype=np.uint8)
    classes = np.full((count, length + 1), TEXT, dtype=np.uint8)
    for row in range(count):
        if row < round(share * count):
            ids[row], classes[row] = task_sequence(rng, corpus, length + 1)
        else:
            ids[row] = _slice(rng, corpus, length + 1)
    return ids, classes


def main() -> None:
    """Build the corpus from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, required=True)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--packages", type=Path, nargs="*", default=[])
    parser.add_argument("--cap", type=int, default=9_000_000)
    args = parser.parse_args()
    build(args.out, args.stdlib, args.docs, args.packages, args.cap)


if __name__ == "__main__":
    main()
