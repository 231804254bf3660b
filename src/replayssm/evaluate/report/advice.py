"""What a run advises and why: a headline per question, and the summary with its reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.evaluate.report.tables import Table, summary

if TYPE_CHECKING:
    from replayssm.evaluate.result import Result
    from replayssm.evaluate.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Headline:
    """One verdict.

    Attributes:
        subject: What it is about.
        verdict: What to do.
        text: The numbers, in one or two sentences.
    """

    subject: str
    verdict: Verdict
    text: str


def headlines(result: Result) -> tuple[Headline, Headline]:
    """Return the verdict on plain decode, which sets the exit code, and that on speculation."""
    plain, speculation = result.judgement, result.speculation
    return (
        Headline("Plain decode", plain.verdict, plain.headline),
        Headline("Speculative decoding", speculation.verdict, speculation.advice),
    )


def reasons(result: Result) -> Table:
    """The summary with a last column that says why; too wide for a terminal."""
    short = summary(result)
    rows = tuple((*row, result.judgement.arm(row[0]).reason) for row in short.rows)
    return Table((*short.columns, "why"), rows, short.notes)
