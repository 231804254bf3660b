"""Tables and the figure of the speculation section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replayssm.evaluate.report.plots import categories, legend, limit_ratio, with_interval
from replayssm.evaluate.report.tables import Table
from replayssm.evaluate.report.theme import FAINT, SERIES, drawing, figure, to_svg
from replayssm.evaluate.report.words import (
    NONE,
    number,
    number_range,
    percent,
    percent_range,
    ratio,
    ratio_range,
    size,
)
from replayssm.evaluate.verifying import RECOMPUTE, SNAPSHOT

if TYPE_CHECKING:
    from replayssm.evaluate.result import Result


def drafted(result: Result) -> Table:
    """Every drafter and draft length in the loop."""
    rows = []
    for d in result.speculation.drafted:
        rate = d.break_even_rate
        needed = "out of reach" if rate is None else percent(rate, 0)
        rows.append(
            (
                d.drafter,
                str(d.drafts),
                percent_range(d.rate, 0),
                number_range(d.kept),
                str(sum(d.counts)),
                f"{d.equal} of {d.sequences}",
                number(d.ms_per_token),
                ratio_range(d.speedup),
                f"{number(d.break_even, 2)} kept, {needed}",
            )
        )
    columns = (
        "drafter",
        "drafts",
        "accepted",
        "kept per verify",
        "verifies",
        "same tokens",
        "ms a token",
        "vs plain decode",
        "break-even",
    )
    notes = (
        "Accepted: share of drafted tokens. Kept per verify: entries that stay, the pending token "
        "and accepted drafts. Same tokens: sequences equal to plain decode. Break-even: what a "
        "verify has to keep to take plain decode's time, and the acceptance that keeps as many."
    )
    return Table(columns, tuple(rows), notes)


def rollbacks(result: Result) -> Table:
    """Time per committed token of every way, by drafter and draft length."""
    found = result.speculation.verified
    ways = list(dict.fromkeys(v.way for v in found))
    ways.sort(key=lambda way: way in (SNAPSHOT, RECOMPUTE))
    rows = []
    for drafter, drafts in dict.fromkeys((v.drafter, v.drafts) for v in found):
        mine = {v.way: v for v in found if (v.drafter, v.drafts) == (drafter, drafts)}
        cells = []
        for way in ways:
            v = mine.get(way)
            text = NONE if v is None else number(v.us_per_token)
            if v is not None and v.versus_snapshot and v.versus_recompute:
                text += f" ({ratio(v.versus_snapshot)}, {ratio(v.versus_recompute)})"
            cells.append(text)
        rows.append((drafter, str(drafts), *cells))
    notes = (
        "Microseconds per committed token and layer; in brackets the speed-up over snapshots and "
        "over recomputation."
    )
    return Table(("drafter", "drafts", *ways), tuple(rows), notes)


def verified(result: Result) -> Table:
    """Every way to verify and commit, with intervals and bytes."""
    found = result.speculation
    rows = tuple(
        (
            v.drafter,
            str(v.drafts),
            v.way,
            number(v.us_per_token),
            ratio_range(v.versus_plain),
            ratio_range(v.versus_snapshot),
            ratio_range(v.versus_recompute),
            size(int(v.moved_bytes)),
            size(v.slot_bytes),
            number(v.error, 2),
        )
        for v in found.verified
    )
    columns = (
        "drafter",
        "drafts",
        "way",
        "us a token and layer",
        "vs plain decode",
        "vs snapshot",
        "vs recompute",
        "moved a verify",
        "peak a layer",
        "output error",
    )
    return Table(columns, rows)


def memory(result: Result) -> Table:
    """What one sequence holds while it verifies, over all recurrent layers."""
    found, rows = result.speculation, []
    for drafts in sorted({v.drafts for v in found.verified}):
        sizes = {
            v.way: v.slot_bytes * found.model_layers for v in found.verified if v.drafts == drafts
        }
        snapshots = (drafts + 1) * found.state_bytes * found.model_layers
        own = [n for way, n in sizes.items() if way not in (SNAPSHOT, RECOMPUTE)]
        rows.append(
            (
                str(drafts),
                size(snapshots),
                size(sizes[SNAPSHOT]),
                size(sizes[RECOMPUTE]),
                f"{size(min(own))} to {size(max(own))}" if own else NONE,
            )
        )
    columns = (
        "drafts",
        "snapshots avoided",
        "peak with snapshots",
        "peak with recompute",
        "peak with state replay, rings included",
    )
    return Table(columns, tuple(rows))


def torture(result: Result) -> Table:
    """What the rollback torture did."""
    t = result.speculation.torture
    rows = (
        ("outcome", "no trace left" if t.failure is None else t.failure),
        ("arm", t.arm),
        ("rounds", f"{t.rounds:,}, {t.trees:,} of them trees"),
        ("rows kept in part", f"{t.partial:,}"),
        ("committed entries taken back", f"{t.cropped:,}"),
        ("requests replaced between a verify and its commit", f"{t.departures:,}"),
        ("states and convolution windows compared", f"{t.states:,}, at {t.phases} phases"),
        ("largest error of a state", "0, bit for bit" if t.worst_state == 0 else
         number(t.worst_state, 2)),
        ("largest error of a later output", number(t.worst_output, 2)),
    )  # fmt: skip
    return Table(("what", "value"), rows)


def speed_by_drafts(result: Result) -> str:
    """Speed-up of the loop over plain decode by draft length, one line a drafter."""
    found = result.speculation.drafted
    lengths = sorted({d.drafts for d in found})
    with drawing("speed-drafts"):
        fig, (ax, *_) = figure()
        names = list(dict.fromkeys(d.drafter for d in found))
        for i, name in enumerate(names):
            mine = [d for d in found if d.drafter == name]
            offset = (i - (len(names) - 1) / 2) * 0.07
            xs = [lengths.index(d.drafts) + offset for d in mine]
            with_interval(ax, xs, [d.speedup for d in mine], SERIES[2 + i], name)
        ax.axhline(1, color=FAINT, linewidth=1)
        categories(ax, lengths)
        limit_ratio(ax, [d.speedup for d in found])
        ax.set(xlabel="drafts a round", ylabel="speed-up over plain decode")
        ax.set_title(f"Tokens per second, batch 1, {result.speculation.arm}")
        legend(fig, ax)
        return to_svg(fig, "Speed-up of speculative decode by draft length")
