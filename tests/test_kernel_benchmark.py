"""The kernel benchmark's own arithmetic: oracle, adapters, cycles, bytes, ratios, reports."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replayssm.ops import reference
from replayssm.types import Block, Format, ReadDepth

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from gpu import ours, report
from gpu.arms import Ceilings, Kind, Traffic, block_cycle, decode_cycle, standard_traffic
from gpu.cases import CASES, Point, draw, entries64, recurrence
from gpu.check import Wrong, check
from gpu.timing import Figure, Timed, figure, plan

CPU = torch.device("cpu")
TINY = {name: CASES[f"{name}-tiny"] for name in ("mamba2", "gdn", "kda")}
LARGE = Point(CASES["mamba2-128x64x128"], 256)


class ReferenceReplay:
    """The library's reference behind the interface that Triton kernels are bound to."""

    def choices(self, fmt, depth):
        return [ours.Choice(), ours.Choice("tiles 4", tiles=4)]

    def load(self, point, inputs):
        e = entries64(point, inputs)
        decay = e.decay if point.case.family == "kda" else e.decay[..., 0]
        heads = point.case.layer.heads_per_key
        block = Block(e.q[:, :, ::heads], e.k[:, :, ::heads], e.v, decay.log(), e.w)
        return block.to(torch.float32), e.skip

    def plan(self, store, rows, depth, tokens):
        return rows, [depth] * rows.rows

    def step_(self, store, plan, loaded, out, launch):
        rows, depth = plan
        block, skip = loaded
        reference.step_(store, rows, block, depth, out)
        out += skip


class ReferenceStandard:
    """The oracle itself as a standard kernel."""

    def load(self, point, inputs):
        return point, inputs

    def step_(self, state, loaded, out):
        out[:], state[:] = recurrence(loaded[0], state.double(), loaded[1])

    def snapshots_(self, states, kept, loaded, out):
        point, inputs = loaded
        state = states[:, int(kept[0]) - 1].double()
        for t in range(point.tokens):
            here = SimpleNamespace(case=point.case, tokens=t + 1, kept=t + 1)
            y, after = recurrence(here, state, inputs)
            out[:, t], states[:, t] = y[:, t], after


REPLAY, STANDARD = ReferenceReplay(), ReferenceStandard()


@pytest.mark.parametrize("family", TINY)
def test_the_oracle_is_the_librarys_recurrence(family):
    point = Point(TINY[family], 2, tokens=4)
    e = entries64(point, draw(point, CPU, 1))
    state = torch.randn(2, 2, 16, 32, dtype=torch.float64)
    got, _ = recurrence(point, state, draw(point, CPU, 1))
    for row in range(2):
        entries = reference.Entries(e.k[row], e.v[row], e.decay[row].log(), e.w[row])
        want, _ = reference.recurrence(state[row], e.q[row], entries, point.case.layer.write)
        torch.testing.assert_close(got[row], want + e.skip[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("family", TINY)
def test_our_adapter_stands_where_the_reference_agrees_with_the_oracle(family, tokens):
    point = Point(TINY[family], 3, tokens, 8)
    for arm in ours.arms_of(REPLAY, STANDARD):
        if not arm.refuses(point):
            assert check(arm, point, CPU).error <= arm.tolerance


def test_a_kernel_that_writes_nothing_is_refused():
    class Idle(ReferenceStandard):
        def step_(self, state, loaded, out):
            pass

    with pytest.raises(Wrong, match="nan"):
        check(ours.OurStandard(Idle(), "f32", Kind.STANDARD), Point(TINY["gdn"], 3, window=8), CPU)


def test_a_kernel_that_never_folds_is_refused():
    class Lazy(ReferenceReplay):
        def plan(self, store, rows, depth, tokens):
            return super().plan(store, replace(rows, folded=rows.committed), depth, tokens)

    point = Point(TINY["mamba2"], 3, 1, 8)
    with pytest.raises(Wrong, match="relative error"):
        check(ours.OurReplay(Lazy(), Format.F32, ReadDepth.FULL), point, CPU)


def test_every_row_folds_as_often_as_a_window_passes():
    point = Point(TINY["mamba2"], 11, 4, 16)
    period = ours.OurReplay(REPLAY, Format.F32, ReadDepth.FULL).period(point)
    windows = sum(p.committed // 16 - p.folded // 16 for p in ours.plans(point, period))
    assert period == 16
    assert windows.tolist() == [3] * 11  # 48 tokens


def test_cycles_of_the_packages():
    assert decode_cycle(16).filled == tuple(range(16))
    assert block_cycle(20, 4, 3).filled == (3, 6, 9, 12, 15)
    assert block_cycle(24, 8, 5).filled == (5, 10)
    assert block_cycle(17, 1, 1).filled == tuple(range(1, 17))
    assert block_cycle(17, 1, 1).folds == (False,) * 15 + (True,)


def test_bytes_are_those_counted_by_hand():
    traffic = standard_traffic(LARGE, "f32")
    assert [round(x / 1e6) for x in (traffic.state_read, traffic.state_written)] == [1074, 1074]
    assert round(traffic.io / 1e6, 1) == 9.5
    entry = 256 * (2 * 8 * 128 + 2 * 128 * 64 + 4 * 128)
    traffic = decode_cycle(16).traffic(LARGE, 1074e6, entry, 15 / 16)
    assert [round(x / 1e6) for x in (traffic.state_written, traffic.ring)] == [67, 41]
    q24 = ours.OurReplay(REPLAY, Format.Q24, ReadDepth.HIGH).traffic(LARGE)
    elements, scales = LARGE.state_elements, 256 * 128 * (4 * 64 + 2 * 128)
    assert q24.state_read == elements * (1 + 2 / 16) + scales
    assert q24.state_written == (elements * 3 + scales) / 16


def test_state_sets_exceed_the_cache():
    arm = ours.OurReplay(REPLAY, Format.Q24, ReadDepth.HIGH)
    for batch in (1, 8, 512):
        point = LARGE.at(batch)
        sets, cycles = plan(arm, point)
        assert sets * arm.traffic(point).state_read >= 130e6
        assert sets >= 2
        assert cycles >= 1


def test_a_ceiling_lies_between_its_streams():
    ceilings = Ceilings(read=4.6, rewrite=4.2, copy=4.3, write=4.7)
    assert ceilings.of(Traffic(1, 0, 0, 0)) == 4.6
    assert ceilings.of(Traffic(1, 1, 0, 0)) == 4.2
    assert ceilings.of(Traffic(1, 1e9, 0, 0)) == pytest.approx(4.7)


def test_a_figure_is_the_median():
    timed = Timed(None, [None, None], 32, [3.0, 1.0, 2.0, 100.0, 2.5])
    assert figure(timed).us == 2.5
    assert figure(timed).sets == 2


def records():
    found = []
    ceilings = Ceilings(read=4.6e12, rewrite=4.2e12, copy=4.3e12, write=4.7e12)
    for arm, us in (
        (ours.OurStandard(STANDARD, "f32", Kind.STANDARD), 520.0),
        (ours.OurStandard(STANDARD, "bf16", Kind.STANDARD), 270.0),
        (ours.OurReplay(REPLAY, Format.Q24, ReadDepth.HIGH), 130.0),
        (ours.OurReplay(REPLAY, Format.Q16, ReadDepth.HIGH), 100.0),
        (ours.OurReplay(REPLAY, Format.S32, ReadDepth.HIGH), "ImportError: not there"),
    ):
        value = us if isinstance(us, str) else Figure(us, 0.01, 9, 2, 32)
        found.append(report.record(arm, LARGE, value, ceilings, 1e-3))
    found[0]["arm"] = "vllm standard f32"
    report.add_ratios(found)
    return found


def test_ratios_are_to_the_best_standard_kernel_with_as_many_bytes():
    by_name = {r["arm"]: r for r in records()}
    assert by_name["ours replay q24 high"]["ratio"] == 4.0
    assert by_name["ours replay q24 high"]["ratio_to_peers"] == 4.0
    assert by_name["ours replay q16 high"]["ratio"] == 2.7
    assert by_name["ours replay q16 high"]["ratio_to_peers"] is None
    assert "ratio" not in by_name["ours replay s32 high"]


def test_the_report_names_what_is_absent(tmp_path):
    text = report.table(records())
    assert "130.0 (4.00)" in text
    assert "ours replay s32 high: ImportError: not there" in text
    report.save(tmp_path / "run.json", {"results": records()})
    assert json.loads((tmp_path / "run.json").read_text())["results"][0]["us"] == 520.0
    report.plot({"results": records()}, tmp_path / "run.svg")
    assert "ours replay q24 high" in (tmp_path / "run.svg").read_text()


def test_a_run_becomes_a_policy_table(tmp_path):
    found = records()
    found[0]["arm"] = "ours standard f32"
    (row, other) = report.policy_rows({"results": found})
    assert (row.layer, row.format, row.depth) == (LARGE.case.layer, Format.Q24, ReadDepth.HIGH)
    assert (row.batches, row.standard_us, row.replay_us) == ((256,), (520.0,), (130.0,))
    assert other.format is Format.Q16
    assert other.standard_us == (520.0,)  # what auto would choose instead, not the one of its size


@pytest.mark.parametrize("axis", report.AXES)
def test_a_sweep_is_drawn_over_any_of_its_axes(tmp_path, axis):
    drawn = [r | {"window": w} for r in records() if "us" in r for w in (8, 16)]
    report.add_ratios(drawn)
    report.plot({"results": drawn}, tmp_path / "run.svg", axis)
    assert report.AXES[axis][1] in (tmp_path / "run.svg").read_text()
