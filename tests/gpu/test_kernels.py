"""Every kernel against the fp64 oracle, by the budgets of the reference; on a GPU or interpreted.

Inputs are fresh in every step, outputs, dead ring entries and lanes past a row's length are NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest
import torch

from replayssm.ops import conv_, standard_
from replayssm.ops.reference import standard_ as reference_standard_
from replayssm.ring import BlockPlan, RingSpec
from replayssm.state import StatePool
from replayssm.storage import LayerStore, StorageSpec, allocate
from replayssm.testing.budgets import fold_budget, folded_states, output_budget
from replayssm.testing.factories import Regime, make_block, make_state
from replayssm.types import Block, ConvSpec, Decay, Format, Impl, LayerSpec, ReadDepth, Write

if TYPE_CHECKING:
    from replayssm.ops.triton.launch import Launch

A, D, S, C = Write.ADDITIVE, Write.DELTA, Decay.SCALAR, Decay.CHANNEL
HIGH, FULL = ReadDepth.HIGH, ReadDepth.FULL


@dataclass(frozen=True)
class Case:
    """One layer, its storage, and how it is driven."""

    layer: LayerSpec
    format: str
    depth: ReadDepth | None
    window: int = 4
    keep: int = 0
    tokens: int = 1
    tiles: int = 1
    dtype: torch.dtype = torch.float32
    regime: Regime = Regime.TYPICAL
    is_tree: bool = False
    is_whole: bool = False
    launch: Launch | None = None

    def __str__(self) -> str:
        at = self.layer
        shape = f"{at.key_heads}-{at.value_heads}x{at.value_dim}x{at.key_dim}"
        depth = "mixed" if self.depth is None else self.depth.value
        name = f"{at.write.value}-{at.decay.value}-{shape}-{self.format}-{depth}"
        tree = "-tree" if self.is_tree else "-whole" if self.is_whole else ""
        more = f"-w{self.window}-k{self.keep}-t{self.tokens}-n{self.tiles}{tree}"
        return f"{name}{more}-{str(self.dtype)[6:]}-{self.regime.value}"


SMALL_FAMILIES = (
    LayerSpec(Write.ADDITIVE, Decay.SCALAR, 1, 4, key_dim=128, value_dim=64),
    LayerSpec(Write.DELTA, Decay.SCALAR, 1, 4, key_dim=128, value_dim=128),
    LayerSpec(Write.DELTA, Decay.CHANNEL, 2, 2, key_dim=128, value_dim=128),
)


def launches_of(at: LayerSpec, fmt: Format, tokens: int) -> list[Launch]:
    """Return what the table of an H200 launches for a layer, from one row to hundreds."""
    from replayssm import policy
    from replayssm.ops.triton import launch

    table = json.loads((policy.SHIPPED / "nvidia-h200.json").read_text())
    spec = StorageSpec(at, fmt, RingSpec(8, max_block=tokens), torch.bfloat16)
    with patch.object(launch, "table_of", lambda _: table):
        rows = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        chosen = [launch.choose_launch(spec, n, tokens, torch.device("cuda")) for n in rows]
    return list(dict.fromkeys(chosen))


def layer(write: Write, decay: Decay, heads: int, value_heads: int, k: int, v: int) -> LayerSpec:
    return LayerSpec(write, decay, heads, value_heads, key_dim=k, value_dim=v)


def on_cpu(store: LayerStore) -> LayerStore:
    return LayerStore(store.spec, **{name: x.cpu().clone() for name, x in store.present().items()})


def make_pool(case: Case, device: torch.device, slots: int = 5) -> StatePool:
    ring = RingSpec(case.window, case.keep, case.tokens, case.tiles)
    return StatePool(
        [case.layer], slots, state=Format(case.format), ring=ring, ring_dtype=case.dtype,
        device=device, impl=Impl.TRITON,
    )  # fmt: skip


def block_on(block: Block, device: torch.device, dtype: torch.dtype) -> Block:
    q, k, v = (x.to(device, dtype) for x in (block.q, block.k, block.v))
    return Block(q, k, v, block.g.to(device), block.w.to(device))


@contextmanager
def forced(case: Case) -> Iterator[None]:
    """Have a step launched as the case says, where it says so, whatever the table does."""
    from replayssm.ops.triton import host
    from replayssm.ops.triton.launch import default_launch

    def choose(spec: StorageSpec, rows: int, *_: object) -> Launch:
        if case.launch is not None:
            return case.launch
        # one launch, or one of the tiles that fold beside the others
        return replace(default_launch(spec), whole=True, fold_programs=case.keep)

    if not case.is_whole and case.launch is None:
        yield
        return
    with (
        patch.object(host, "choose_launch", choose),
        patch.object(host.one_pass, "folds", lambda *_: False),
    ):
        yield


def excess_as_read(
    before: LayerStore,
    after: LayerStore,
    plan: BlockPlan,
    block: Block,
    depth: list[ReadDepth],
    out: torch.Tensor,
) -> float:
    """Return the excess of outputs that were made of the checkpoint as it was before its fold.

    One pass reads a row that folds so. The high planes of the two are a rounding to eight bits
    apart, which is the format's own and as large as all that a budget allows.
    """
    ring = after.spec.ring
    counts = zip(plan.base.tolist(), plan.folded.tolist(), strict=True)
    stands = [ring.folded_to(0, *count) for count in counts]
    planes = {n: x for n, x in before.present().items() if n not in ("k", "v", "g", "w", "conv")}
    store = LayerStore(after.spec, **{**after.present(), **planes})
    with patch.object(RingSpec, "folded_to", lambda _, tile, base, folded: base):
        read = output_budget(store, replace(plan, base=np.array(stands)), block, depth, out.dtype)
    return read.excess(out)


def reads_before_it_folds(store: LayerStore, case: Case, depth: list[ReadDepth]) -> bool:
    """Whether a step of a fixed-point format is one pass."""
    if find_spec("triton") is None or store.columns is None or case.launch or case.is_whole:
        return False
    from replayssm.ops.triton import one_pass

    in_one_pass = one_pass.folds(store.spec, store.high.device)
    return in_one_pass and case.tokens <= 8 and all(d is HIGH for d in depth)


def worst_excess(case: Case, device: torch.device, steps: int = 6) -> tuple[float, float]:
    """Drive three sequences and a pad row; return the worst output and checkpoint excess.

    Every row has its own phase, length and acceptance, every output is NaN before it is written and
    so is every dead ring entry, and the lanes past a row's length hold NaN.
    """
    pool = make_pool(case, device)
    refs = [
        pool.admit_([make_state(case.layer, seed=i).to(device)], position=3 * i) for i in range(3)
    ]
    rows = [refs[0], None, refs[1], refs[2]]
    store = pool.stores[0]
    for ring in (store.k, store.v, store.g, store.w):
        ring.fill_(float("nan"))
    depth = [case.depth] * 4 if case.depth else [HIGH, FULL, FULL, HIGH]
    worst_output = worst_fold = 0.0
    for step in range(steps):
        lengths = [1 + (step + i) % case.tokens for i in range(4)]
        trees = [[(t - 1) // 2 for t in range(n)] for n in lengths] if case.is_tree else None
        ticket = pool.begin(rows, lengths, trees)
        block = make_block(case.layer, 4, case.tokens, seed=step, regime=case.regime)
        for row, length in enumerate(lengths):
            cut = 0 if rows[row] is None else length
            for x in (block.q, block.k, block.v, block.g, block.w):
                x[row, cut:] = float("nan")
        given = block_on(block, device, case.dtype)
        before = on_cpu(store)
        out = torch.full_like(given.v, float("nan"))
        with forced(case):
            pool.step_(ticket, 0, given, depth=depth, out=out)
        after, seen = on_cpu(store), block_on(block, torch.device("cpu"), case.dtype)
        if reads_before_it_folds(store, case, depth):
            excess = excess_as_read(before, after, ticket.plan, seen, depth, out.cpu())
        else:
            exact = output_budget(after, ticket.plan, seen, depth, case.dtype)
            excess = exact.excess(out.cpu())
        worst_output = max(worst_output, excess)
        folded = fold_budget(before, ticket.plan)
        worst_fold = max(worst_fold, folded.excess(folded_states(after, ticket.plan)))
        if case.is_tree:
            kept = [ticket.plan.ancestors(row, n - 1) for row, n in enumerate(lengths)]
            pool.commit_paths_(ticket, [None if rows[i] is None else p for i, p in enumerate(kept)])
        else:
            pool.commit_(ticket, [1 + step % n for n in lengths])
    return worst_output, worst_fold


TINY = layer(A, S, 1, 2, 16, 16)
ODD = {
    (A, S): layer(A, S, 2, 6, 20, 24),
    (A, C): layer(A, C, 1, 2, 20, 24),
    (D, S): layer(D, S, 2, 4, 20, 24),
    (D, C): layer(D, C, 2, 2, 20, 24),
}
CASES = [
    *(Case(at, fmt, FULL) for at in ODD.values() for fmt in ("f32", "q24")),
    *(Case(ODD[A, S], fmt, HIGH) for fmt in ("s32", "q24", "q16", "bf16")),
    *(Case(ODD[D, S], fmt, HIGH, dtype=torch.bfloat16) for fmt in ("s32", "q24", "q16", "bf16")),
    Case(ODD[D, S], "s32", None, keep=2, tokens=3, tiles=2),
    Case(ODD[A, S], "q24", None, keep=1, tokens=4, tiles=4),
    Case(ODD[D, C], "q16", FULL, tokens=3, keep=1),
    Case(ODD[A, S], "q16", None),
    Case(ODD[A, C], "s32", HIGH, tokens=2, tiles=4),
    # lines of a key head that fill several programs
    *(Case(layer(A, S, 1, 16, 20, 24), "f32", FULL, tokens=t) for t in (5, 7)),
    *(Case(at, "f32", FULL, tokens=5, is_tree=True, window=6) for at in ODD.values()),
    *(Case(ODD[D, S], "q24", FULL, regime=r) for r in (Regime.CLOSED, Regime.RESET, Regime.OPEN)),
    *(Case(ODD[A, S], "f32", FULL, regime=r) for r in (Regime.CLOSED, Regime.HUGE_WRITES)),
    *(Case(ODD[D, C], "f32", FULL, regime=r) for r in (Regime.CLOSED, Regime.RESET)),
]
CASES += [
    Case(ODD[A, S], fmt, depth, keep=keep, tiles=2, is_whole=True)
    for fmt, depth in (("f32", FULL), ("s32", HIGH), ("s32", None), ("q24", HIGH), ("bf16", HIGH))
    for keep in (0, 1)
]
LARGE = [
    Case(layer(A, S, 8, 128, 128, 64), fmt, depth, 16, dtype=torch.bfloat16)
    for fmt, depth in (("f32", HIGH), ("s32", HIGH), ("q24", HIGH), ("q24", FULL), ("q16", HIGH))
] + [
    Case(at, fmt, depth, 16, tokens=t, tiles=2, dtype=torch.bfloat16)
    for at in (layer(D, S, 16, 64, 128, 128), layer(D, C, 8, 8, 128, 128))
    for fmt, depth in (("f32", HIGH), ("q24", HIGH), ("q24", None), ("bf16", HIGH))
    for t in (1, 4)
]  # fmt: skip


SHARED = layer(D, S, 2, 8, 128, 128)
# on Hopper, one pass without a pull-back
CASES += [
    *(Case(SHARED, fmt, FULL, 16, tokens=t, dtype=torch.bfloat16)
      for fmt in ("bf16", "f32") for t in (1, 3, 4, 8, 9)),
    *(Case(SHARED, "s32", depth, 16, tokens=t, dtype=torch.bfloat16)
      for depth in (HIGH, FULL, None) for t in (1, 4, 9)),
    *(Case(layer(D, S, 2, n, 128, v), "bf16", FULL, 8, tokens=t, dtype=torch.bfloat16)
      for n, v, t in ((2, 64, 2), (4, 192, 5), (16, 128, 8))),
    *(Case(SHARED, fmt, FULL, 16, tokens=5, is_tree=True, dtype=torch.bfloat16)
      for fmt in ("bf16", "f32", "s32")),
    # what acts on the token is then one for all that a lane holds, and two heads leave warps over
    *(Case(layer(D, S, 2, 4, 128, 128), fmt, FULL, 4, tokens=1, is_tree=True, dtype=torch.bfloat16)
      for fmt in ("bf16", "f32", "s32")),
    *(Case(SHARED, fmt, FULL, w, tokens=3, keep=2, dtype=torch.bfloat16)
      for fmt, w in (("bf16", 16), ("f32", 5), ("s32", 5))),
    *(Case(SHARED, fmt, FULL, 8, tokens=4, dtype=torch.bfloat16, regime=r)
      for fmt in ("bf16", "f32") for r in (Regime.CLOSED, Regime.RESET, Regime.OPEN)),
]  # fmt: skip
GROUPS = layer(A, S, 2, 16, 128, 64)
CASES += [
    *(Case(GROUPS, fmt, depth, 16, tokens=t, dtype=torch.bfloat16)
      for fmt, depth in (("bf16", FULL), ("q24", HIGH), ("q16", HIGH)) for t in (1, 3, 4, 8, 9)),
    # both planes, which the kernels fold but do not read
    *(Case(GROUPS, fmt, depth, 16, tokens=t, dtype=torch.bfloat16)
      for fmt in ("q24", "q16") for depth in (FULL, None) for t in (1, 4)),
    # heads in fours, and one key head; short windows
    *(Case(layer(A, S, h, n, 128, 64), fmt, depth, w, tokens=t, dtype=torch.bfloat16)
      for fmt, depth in (("bf16", FULL), ("q24", HIGH))
      for h, n, w, t in ((1, 12, 8, 2), (4, 16, 4, 4), (1, 8, 5, 3))),
    # the last program of a group has fewer heads
    *(Case(layer(A, S, h, n, 128, 64), fmt, depth, 8, tokens=t, dtype=torch.bfloat16)
      for fmt, depth in (("bf16", FULL), ("q24", HIGH), ("q16", HIGH))
      for h, n, t in ((1, 14, 4), (2, 14, 1), (2, 10, 3))),
    *(Case(GROUPS, fmt, depth, 16, tokens=5, is_tree=True, dtype=torch.bfloat16)
      for fmt, depth in (("bf16", FULL), ("q24", HIGH), ("q16", HIGH))),
    *(Case(GROUPS, fmt, depth, 4, tokens=1, is_tree=True, dtype=torch.bfloat16)
      for fmt, depth in (("bf16", FULL), ("q24", HIGH), ("q16", HIGH))),
    *(Case(GROUPS, fmt, depth, w, tokens=3, keep=2, dtype=torch.bfloat16)
      for fmt, depth, w in (("bf16", FULL, 16), ("q24", HIGH, 16), ("q16", HIGH, 8))),
    *(Case(GROUPS, fmt, depth, 8, tokens=t, dtype=torch.bfloat16, regime=r)
      for fmt, depth in (("bf16", FULL), ("q24", HIGH), ("q16", HIGH)) for t in (1, 4)
      for r in (Regime.CLOSED, Regime.RESET, Regime.OPEN, Regime.HUGE_WRITES)),
]  # fmt: skip


INTERPRETED = (
    Case(TINY, "q24", HIGH, dtype=torch.bfloat16, window=3),
    Case(ODD[A, S], "q24", None, dtype=torch.bfloat16, keep=1, tiles=2, window=3, is_whole=True),
    Case(ODD[A, S], "s32", None, tokens=2, keep=1, tiles=2, window=3),
    Case(ODD[D, S], "q16", FULL, tokens=2, window=3),
    Case(ODD[D, S], "f32", FULL, tokens=3, is_tree=True, window=3),
    Case(ODD[D, C], "bf16", HIGH, window=3, regime=Regime.CLOSED),
    Case(ODD[A, C], "q24", FULL, window=3, regime=Regime.RESET),
)


@pytest.mark.parametrize("case", [*INTERPRETED, *CASES], ids=str)
def test_outputs_and_checkpoints_are_within_the_budget(case: Case, device: torch.device) -> None:
    if device.type != "cuda" and case not in INTERPRETED:
        pytest.skip("half a minute each under the interpreter; run it on a GPU")
    worst_output, worst_fold = worst_excess(case, device, steps=2 * case.window)
    assert worst_output <= 1
    assert worst_fold <= 1


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_real_shapes_are_within_the_budget(case: Case, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("real shapes take hours under the interpreter; run it on a GPU")
    worst_output, worst_fold = worst_excess(case, device, steps=18)
    assert worst_output <= 1
    assert worst_fold <= 1


def checkpoint(
    at: LayerSpec, device: torch.device, depth: ReadDepth = FULL, drafts: int = 0
) -> dict[str, torch.Tensor]:
    """Return two rows' planes after seven tokens, each a block with rejected drafts behind it."""
    # the interpreter's bf16 products are wrong
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pool = make_pool(Case(at, "q24", depth, dtype=dtype, tokens=3), device)
    refs = [pool.admit_([make_state(at, seed=i).to(device)]) for i in range(2)]
    for i in range(7):
        kept, junk = make_block(at, 2, 1, seed=i), make_block(at, 2, drafts, seed=99 + i)
        both = (
            torch.cat((getattr(kept, x), getattr(junk, x)), 1) for x in ("q", "k", "v", "g", "w")
        )
        ticket = pool.begin(refs, 1 + drafts)
        pool.step_(ticket, 0, block_on(Block(*both), device, dtype), depth=depth)
        pool.commit_(ticket, 1)
    pool.fold_(refs)
    present = pool.stores[0].present()
    return {name: present[name].cpu() for name in ("high", "low", "row_scale", "columns")}


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("at", SMALL_FAMILIES, ids=lambda at: f"{at.write}-{at.decay}")
def test_every_launch_of_the_table_is_within_the_budget(
    at: LayerSpec, fmt: Format, tokens: int, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("heads of 128 take minutes under the interpreter; run it on a GPU")
    for how in launches_of(at, fmt, tokens):
        case = Case(at, fmt.value, HIGH, 8, tokens=tokens, dtype=torch.bfloat16, launch=how)
        assert max(worst_excess(case, device, steps=10)) <= 1, how


PULLED = [
    *(Case(SHARED, fmt, HIGH, 16, tokens=t, dtype=torch.bfloat16)
      for fmt in ("q24", "q16") for t in (1, 2, 4, 8)),
    *(Case(layer(D, S, 2, n, 128, v), "q24", HIGH, w, tokens=t, dtype=torch.bfloat16)
      for n, v, w, t in ((4, 128, 8, 1), (4, 64, 4, 4), (16, 256, 8, 3), (16, 128, 5, 5))),
    *(Case(SHARED, fmt, HIGH, w, tokens=t, is_tree=True, dtype=torch.bfloat16)
      for fmt, w, t in (("q24", 16, 5), ("q16", 16, 3), ("q24", 4, 1))),
    *(Case(SHARED, fmt, HIGH, w, tokens=3, keep=2, dtype=torch.bfloat16)
      for fmt, w in (("q24", 16), ("q16", 5))),
    *(Case(SHARED, "q24", HIGH, 8, tokens=t, dtype=torch.bfloat16, regime=r)
      for t in (1, 4) for r in (Regime.CLOSED, Regime.RESET, Regime.OPEN, Regime.HUGE_WRITES)),
]  # fmt: skip


@pytest.mark.parametrize("case", PULLED, ids=str)
def test_a_read_that_pulls_back_by_itself_is_within_the_budget(
    case: Case, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("Gluon has no interpreter; run it on a GPU")
    from replayssm.ops.triton import pull_and_read
    from replayssm.ops.triton.launch import Launch

    if not pull_and_read.serves(make_pool(case, device).stores[0].spec, device):
        pytest.skip("written for Hopper and Triton 3.6")
    # rows that fold beside those that do not: what the table has for many
    driven = replace(case, launch=Launch(64, 64, 16, fold_programs=4))
    with (
        patch.object(pull_and_read, "LEAST_ROWS", 1),
        patch.object(pull_and_read, "read_call", wraps=pull_and_read.read_call) as made,
    ):
        assert max(worst_excess(driven, device, steps=2 * case.window)) <= 1
    assert made.call_count == 2 * case.window


@pytest.mark.parametrize("at", ODD.values(), ids=lambda at: f"{at.write}-{at.decay}")
def test_neither_read_depth_nor_rejected_drafts_leave_a_trace_in_a_checkpoint(
    at: LayerSpec, device: torch.device
) -> None:
    plain = checkpoint(at, device)
    for other in (checkpoint(at, device, HIGH), checkpoint(at, device, drafts=2)):
        assert all(torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.parametrize(("decay", "tiles"), [(S, 1), (S, 2), (C, 2)])
def test_normed_keys_have_the_same_bits_in_blocks_of_any_length(
    decay: Decay, tiles: int, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter sums in one order; run it on a GPU")
    from replayssm.ops.triton.call import Fused
    from replayssm.ops.triton.host import step_
    from replayssm.ops.triton.launch import choose_launch
    from replayssm.ops.triton.plan import device_plan

    rows, window = 256, 16
    at = LayerSpec(D, decay, 8, 32 if decay is S else 8, key_dim=128, value_dim=128)
    spec = StorageSpec(at, Format.F32, RingSpec(window, max_block=8, tiles=tiles), torch.bfloat16)
    # keys of many sizes: of unit ones every sum would be about 1
    drawn = make_block(at, rows, window, seed=0)
    keys = torch.randn(drawn.k.shape, generator=torch.Generator().manual_seed(1))
    whole = block_on(replace(drawn, k=keys), device, torch.bfloat16)
    zero, rings = np.zeros(rows, np.int64), []
    # of few rows and of many, which are launched with other numbers of warps
    for tokens, as_of in product((1, 2, 4, 8), (3, rows)):
        how = choose_launch(spec, as_of, tokens, device)
        store = allocate(spec, rows, device)
        for start in range(0, window, tokens):
            part = (getattr(whole, x)[:, start : start + tokens] for x in ("q", "k", "v", "g", "w"))
            block = Block(*(x.contiguous() for x in part))
            plan = BlockPlan(np.arange(rows), zero, zero + start, zero + start, zero + tokens)
            on_device = device_plan(plan, spec.ring, [FULL] * rows, tokens, device)
            out = torch.empty_like(block.v)
            step_(store, on_device, block, out, Fused(norm=True), how)
        rings.append(store.k.cpu())
    assert all(torch.equal(ring, rings[0]) for ring in rings)


@pytest.mark.parametrize("at", ODD.values(), ids=lambda at: f"{at.write}-{at.decay}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("has_targets", [False, True], ids=["in-place", "snapshots"])
def test_the_standard_step_is_the_recurrence(
    at: LayerSpec, dtype: torch.dtype, has_targets: bool, device: torch.device
) -> None:
    slots = np.array([3, -1, 0])
    zero = np.zeros(3, np.int64)
    plan = BlockPlan(slots, zero, zero, zero, np.array([3, 0, 2]))
    targets = np.array([[1, 4, 3], [0, 0, 0], [2, 0, 0]]) if has_targets else None
    block = make_block(at, 3, 3, seed=1)
    states = torch.stack([make_state(at, seed=i) for i in range(5)]).to(dtype)
    expected_states, expected = states.clone(), torch.zeros_like(block.v)
    reference_standard_(expected_states, plan, block, at.write, expected, targets)
    given = states.to(device)
    out = standard_(
        given, at, plan, block_on(block, device, torch.float32), impl=Impl.TRITON, targets=targets
    )
    # the same operations; only sums over keys run in another order
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=2e-5 if ulp < 1e-3 else 5e-2)
    torch.testing.assert_close(given.cpu(), expected_states, rtol=4 * ulp, atol=1e-5 + 4 * ulp)


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_the_convolution_is_the_reference_bit_for_bit(is_tree: bool, device: torch.device) -> None:
    at = LayerSpec(D, S, 1, 2, 16, 16, ConvSpec(channels=300, width=4))
    rng = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(300, 4, generator=rng), torch.randn(300, generator=rng)
    ring = RingSpec(4, 1, 3)
    pools = [
        StatePool([at], 3, ring=ring, device=where, impl=impl)
        for where, impl in ((torch.device("cpu"), Impl.REFERENCE), (device, Impl.TRITON))
    ]
    refs = [[pool.admit_(), pool.admit_()] for pool in pools]
    for step in range(7):
        x = torch.randn(2, 3, 300, generator=rng)
        lengths = [1 + step % 3, 3]
        trees = [[-1, 0, 0][: lengths[0]], [-1, 0, 0]] if is_tree else None
        outputs = []
        for pool, rows in zip(pools, refs, strict=True):
            where = pool.device
            ticket = pool.begin(rows, lengths, trees)
            given = (x.to(where), weight.to(where), bias.to(where))
            outputs.append(conv_(pool.stores[0], ticket.plan, *given, impl=pool.impl).cpu())
            ticket.stepped.add(0)
            ticket.convolved.add(0)
            paths = [[0], [0, 2]] if is_tree else None
            pool.commit_paths_(ticket, paths) if paths else pool.commit_(ticket, [1, 2])
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(pools[0].stores[0].conv, pools[1].stores[0].conv.cpu())
