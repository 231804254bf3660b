"""Rows of a manifest that every report has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.evaluate.report.words import NONE, size

if TYPE_CHECKING:
    from replayssm.evaluate.manifest import Manifest

Rows = list[tuple[str, str]]


def command(m: Manifest) -> Rows:
    """Return what was run, and when."""
    return [("command", " ".join(m.argv)), ("created", m.created)]


def machine(m: Manifest) -> Rows:
    """Return processor and memory."""
    found = m.machine
    return [
        ("cpu", f"{found.cpu}, {found.cores} cores used"),
        ("memory", size(found.memory_bytes)),
    ]


def software(m: Manifest, prefix: str = "") -> Rows:
    """Return accelerators, system, threads, seed, commit, choices and versions.

    Args:
        m: The manifest.
        prefix: Put before the names of choices.
    """
    return [
        ("gpu", ", ".join(m.machine.gpus) or "none"),
        ("system", m.machine.system),
        ("threads", str(m.threads)),
        ("seed", str(m.seed)),
        ("commit", NONE if m.commit is None else m.commit + (" with changes" if m.dirty else "")),
        *((f"{prefix}{name}", value) for name, value in m.choices.items()),
        ("versions", ", ".join(f"{name} {v}" for name, v in m.versions.items())),
    ]
