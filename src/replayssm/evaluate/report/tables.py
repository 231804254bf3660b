"""Tables of a result: one definition for the report and for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replayssm.evaluate.checks import Status
from replayssm.evaluate.report import manifest as stamps
from replayssm.evaluate.report.words import (
    NONE,
    limit,
    number,
    number_range,
    percent,
    percent_range,
    ratio,
    ratio_range,
    share_range,
    size,
)
from replayssm.evaluate.verdict import Verdict, batch_words, fastest

if TYPE_CHECKING:
    from replayssm.evaluate.result import Result

TONES = {
    "enable": "good",
    "do not enable": "bad",
    "inconclusive": "open",
    "pass": "good",
    "fail": "bad",
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        columns: Headings.
        rows: Cells as text.
        notes: What the columns mean.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: str = ""


def summary(result: Result) -> Table:
    """One line per arm: what it costs, keeps and gains."""
    rows = []
    for arm in result.plan.arms:
        verdict = result.judgement.arm(arm.name)
        precision = result.precision.arm(arm.name)
        mine = [s for s in result.judgement.settings if s.arm == arm.name]
        best = fastest(mine)
        equal = result.window.equal_memory.timing(arm.name)
        worst = max(
            (b.mean_kl for b in precision.buckets if b.mean_kl), key=lambda e: e.high, default=None
        )
        rows.append(
            (
                arm.name,
                size(equal.slot_bytes),
                number(worst.value, 2) if worst else NONE,
                percent(precision.recall_all.value, 0),
                verdict.quality.value if arm != result.plan.arms[0] else "reference",
                f"{ratio(best.speedup)} @ {best.batch}" if best else NONE,
                ratio(equal.speedup),
                verdict.verdict.value if verdict.verdict else "baseline",
            )
        )
    columns = (
        "arm",
        "state/layer",
        "mean KL",
        "recall",
        "precision",
        "best update",
        "equal memory",
        "verdict",
    )
    notes = (
        "State/layer: bytes of one sequence in one layer, rings and scales included. Mean KL: "
        "worst length bucket, nats per token. Best update: speed-up of a state update @ its batch, "
        "against the fastest standard arm that keeps the margins. Equal memory: tokens per second "
        "against standard f32, every arm at the largest batch that fits "
        f"{size(result.window.budget_bytes)}."
    )
    return Table(columns, tuple(rows), notes)


def routes(result: Result) -> Table:
    """The routing table."""
    rows = tuple((batch_words(r), r.arm, r.reason) for r in result.judgement.routes)
    return Table(("when", "serve with", "why"), rows)


def settings(result: Result) -> Table:
    """Every candidate at every batch."""
    rows = tuple(
        (
            s.arm,
            str(s.batch),
            ratio_range(s.speedup),
            s.against,
            ratio_range(s.whole_model),
            s.verdict.value,
            s.reason,
        )
        for s in result.judgement.settings
    )
    columns = ("arm", "batch", "state update", "against", "whole step", "verdict", "reason")
    return Table(columns, rows)


def checks(result: Result) -> Table:
    """Every number that was held against a precision margin."""
    rows = []
    for arm in result.judgement.arms:
        for c in arm.checks:
            text = number_range(c.value) if c.value else NONE
            if c.value and c.value.low == c.value.high:
                text = number(c.value.value, 2)
            n = str(c.value.n) if c.value else NONE
            rows.append((arm.arm, c.name, text, limit(c.margin), n, c.status.value, c.note))
    return Table(
        ("arm", "check", "value (95 % interval)", "margin", "n", "status", "note"), tuple(rows)
    )


def layers(result: Result) -> Table:
    """The recurrent layers and whether they qualify."""
    rows = tuple(
        (line.kind, ", ".join(map(str, line.layers)), "yes" if line.qualifies else "no", line.note)
        for line in result.compatibility.layers
    )
    return Table(("mixer", "layers", "qualifies", "geometry or reason"), rows)


def agreements(result: Result) -> Table:
    """Step-by-step agreement."""
    rows = tuple(
        (
            a.arm,
            "single steps" if a.block == 1 else f"blocks of {a.block}",
            str(a.prefill),
            str(a.steps),
            number(a.logit_error, 2),
            number(a.state_error, 2),
            str(a.flips),
            str(a.ties),
        )
        for a in result.compatibility.agreements
    )
    columns = (
        "arm",
        "fed as",
        "prompt",
        "steps",
        "logit error",
        "state error",
        "other top token",
        "of these ties",
    )
    return Table(columns, rows)


def profiles(result: Result) -> Table:
    """Where a decode step goes."""
    rows = tuple(
        (
            str(p.batch),
            number(p.step_ms),
            share_range(p.mixer_share),
            share_range(p.update_share),
            ratio_range(p.ceiling),
            str(p.update_share.n),
        )
        for p in result.bottleneck.profiles
    )
    columns = ("batch", "step, ms", "recurrent mixers", "state updates alone", "ceiling", "n")
    return Table(columns, rows)


def whole_model(result: Result) -> Table:
    """The whole decode step under every arm."""
    names = [arm.name for arm in result.plan.arms]
    rows = tuple(
        (
            str(p.batch),
            *(
                f"{number(a.step_ms)} ms" if a.speedup is None else ratio_range(a.speedup)
                for a in p.arms
            ),
        )
        for p in result.bottleneck.profiles
    )
    return Table(("batch", *names), rows)


def timings(result: Result) -> Table:
    """Every timed cell."""
    rows = []
    for cell in result.window.cells:
        for t in cell.timings:
            folds = NONE if t.folds_per_row_step == 0 else f"1 / {1 / t.folds_per_row_step:.0f}"
            rows.append(
                (
                    str(t.batch),
                    str(cell.window),
                    t.arm,
                    number(t.step_ms),
                    ratio_range(t.speedup),
                    ratio_range(t.versus_today),
                    str(t.speedup.n) if t.speedup else NONE,
                    number(t.error, 2),
                    folds,
                    size(cell.state_bytes),
                    str(t.switches),
                )
            )
    columns = (
        "batch",
        "window",
        "arm",
        "ms a layer",
        "vs standard f32",
        "vs standard bf16",
        "pairs",
        "output error",
        "folds a step",
        "fp32 states",
        "switches",
    )
    return Table(columns, tuple(rows))


def equal_memory(result: Result) -> Table:
    """Every arm at its own largest batch."""
    rows = tuple(
        (
            t.arm,
            str(t.batch),
            size(t.slot_bytes),
            number(t.tokens_per_s),
            ratio_range(t.speedup),
            ratio_range(t.versus_today),
        )
        for t in result.window.equal_memory.timings
    )
    columns = (
        "arm",
        "largest batch",
        "state a layer",
        "tokens/s a layer",
        "vs standard f32",
        "vs standard bf16",
    )
    return Table(columns, rows)


def break_even(result: Result) -> Table:
    """The batch from which each candidate pays for good."""
    rows = tuple(
        (arm, "none measured" if batch is None else str(batch))
        for arm, batch in result.window.break_even.items()
    )
    return Table(("arm", "break-even batch against standard f32"), rows)


def buckets(result: Result) -> Table:
    """Precision by arm and length bucket."""
    rows = tuple(
        (
            arm.arm,
            f"{b.start}-{b.stop}",
            f"{b.bits_per_byte.value:.4f}",
            percent_range(b.increase, 3),
            number_range(b.mean_kl),
            number_range(b.p99_kl),
            percent(b.flips, 2),
            f"{b.tokens:,}",
            str(b.bits_per_byte.n),
        )
        for arm in result.precision.arms
        for b in arm.buckets
    )
    columns = (
        "arm",
        "tokens at",
        "bits/byte",
        "increase",
        "mean KL",
        "p99 KL",
        "other top token",
        "tokens",
        "blocks",
    )
    return Table(columns, rows)


def recalls(result: Result) -> Table:
    """Recall by arm, kind and length."""
    rows = [
        (
            arm.arm,
            r.kind.replace("_", "-"),
            str(r.length),
            percent_range(r.right, 0),
            str(r.right.n),
        )
        for arm in result.precision.arms
        for r in arm.recall
    ]
    rows += [
        (arm.arm, "all", "all", percent_range(arm.recall_all, 0), str(arm.recall_all.n))
        for arm in result.precision.arms
    ]
    return Table(("arm", "kind", "length", "answered right", "n"), tuple(rows))


def margins(result: Result) -> Table:
    """The margins of the plan."""
    at = result.plan.margins
    rows = (
        (
            "logit error",
            limit(at.logit_error),
            "largest, over the logits' standard deviation; arms with full fp32-grade reads",
        ),
        (
            "state error",
            limit(at.state_error),
            "largest relative difference of a layer's state; same arms",
        ),
        (
            "mean KL",
            limit(at.mean_kl),
            "nats per token, worst length bucket: at most about 3 in 100 sampled tokens differ",
        ),
        ("p99 KL", limit(at.p99_kl), "nats, worst length bucket"),
        ("bits per byte", percent(at.bits_per_byte), "relative increase, worst length bucket"),
        ("recall drop", percent(at.recall_drop), "of the share of probes answered right, paired"),
        ("speed-up", f"{at.speedup:g}x", "of a state update, and its interval above 1"),
    )
    return Table(("margin", "limit", "meaning"), rows)


def manifest(result: Result) -> Table:
    """What ran where."""
    m, spans = result.manifest, section_seconds(result)
    rows = [
        *stamps.command(m),
        ("plan", f"sha256 {result.plan_digest}"),
        ("model", f"{result.plan.model}, {result.parameters / 1e6:.1f} M parameters"),
        *stamps.machine(m),
        ("last-level cache", f"{size(m.machine.cache_bytes)} as the system reports it"),
        *stamps.software(m, "auto "),
        ("time", ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spans.items())),
    ]
    return Table(("what", "value"), tuple(rows))


def section_seconds(result: Result) -> dict[str, float]:
    """Return the time of every section and of the whole run."""
    return {
        "compatibility": result.compatibility.seconds,
        "bottleneck": result.bottleneck.seconds,
        "window and batch": result.window.seconds,
        "precision": result.precision.seconds,
        "speculation": result.speculation.seconds,
        "in all": result.seconds,
    }


def tone(text: str) -> str:
    """Return the tone of a verdict or status word, or an empty string."""
    known = {v.value for v in Verdict} | {s.value for s in Status}
    return TONES[text] if text in known else ""
