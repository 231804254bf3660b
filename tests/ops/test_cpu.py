"""The compiled CPU path against the reference: budgets, and every bitwise promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")

from replayssm import formats  # noqa: E402
from replayssm.errors import ContractError  # noqa: E402
from replayssm.formats import column_amax, column_scale  # noqa: E402
from replayssm.ops import cpu, reference  # noqa: E402
from replayssm.ops.cpu import encode, layout  # noqa: E402
from replayssm.ops.cpu.common import IS_BF16, copy_in, copy_out  # noqa: E402
from replayssm.ops.cpu.vector import LANES, load, store, totals4, totals8  # noqa: E402
from replayssm.ops.cpu.vector import exp as exp_lanes  # noqa: E402
from replayssm.ops.cpu.vector import total as total_lanes  # noqa: E402
from replayssm.ring import RingSpec  # noqa: E402
from replayssm.storage import LayerStore, StorageSpec, allocate  # noqa: E402
from replayssm.testing import Regime, make_block, make_layer, make_plan, make_state  # noqa: E402
from replayssm.testing.budgets import clone_store, output_budget  # noqa: E402
from replayssm.testing.conformance import Case, cases, check_case  # noqa: E402
from replayssm.testing.factories import FAMILIES, take  # noqa: E402
from replayssm.testing.guard import plane_digest, poison_dead_, poison_slot_  # noqa: E402
from replayssm.types import Block, Decay, Format, LayerSpec, ReadDepth, Write  # noqa: E402

FULL, HIGH = ReadDepth.FULL, ReadDepth.HIGH
RING = RingSpec(window=4, keep=1, max_block=9)
GDN = make_layer(Write.DELTA, Decay.SCALAR, dims=(37, 21))


def make_store(
    layer: LayerSpec,
    fmt: Format,
    slots: int = 3,
    ring: RingSpec = RING,
    dtype: torch.dtype = torch.float32,
) -> LayerStore:
    spec = StorageSpec(layer, fmt, ring, dtype)
    filled = allocate(spec, slots, torch.device("cpu"))
    for slot in range(slots):
        reference.admit_(filled, slot, make_state(layer, seed=slot))
    return filled


def run(
    store_: LayerStore, tokens: Block, blocks: list[tuple[int, int]], depth: ReadDepth = FULL
) -> torch.Tensor:
    """Feed slot 1 the tokens in blocks of (length, kept); return the outputs of kept tokens."""
    done = folded = 0
    outputs = []
    for length, kept in blocks:
        block = take(tokens, [0], slice(done, done + length))
        out = torch.full_like(block.v, torch.nan)
        plan = make_plan([1], [length], [done], folded=[folded])
        cpu.step_(store_, plan, block, [depth], out)
        folded, done = done, done + kept
        outputs.append(out[:, :kept])
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("case", list(cases(tiles=False)), ids=str)
def test_conformance(case: Case) -> None:
    check_case(cpu.step_, case)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("tokens", [8, 33])
def test_long_blocks(family: tuple[Write, Decay], tokens: int) -> None:
    layer = make_layer(*family, dims=(33, 18))
    ring = RingSpec(window=16, max_block=33)
    ours = make_store(layer, Format.S32, ring=ring)
    block = make_block(layer, 2, tokens, seed=3)
    out = torch.empty_like(block.v)
    plan = make_plan([2, 0], [tokens, tokens - 3], [0, 0])
    cpu.step_(ours, plan, block, [FULL, HIGH], out)
    assert output_budget(ours, plan, block, [FULL, HIGH], torch.float32).excess(out) <= 1
    # the whole block at once is due for two windows or more
    after = make_plan([2], [1], [tokens])
    theirs = clone_store(ours)
    cpu.fold_(ours, replace(after, folded=np.array([0])))
    reference.fold_(theirs, replace(after, folded=np.array([0])))
    got, wanted = (reference.decode_tile(s, 2, 0, FULL) for s in (ours, theirs))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("fmt", [Format.F32, Format.S32, Format.Q24])
def test_folds_of_wide_heads(family: tuple[Write, Decay], fmt: Format) -> None:
    """Keys and rows that fill whole tiles of a fold, and some that do not."""
    layer = make_layer(*family, dims=(80, 37))
    ours, block = make_store(layer, fmt), make_block(layer, 1, 9, seed=3)
    cpu.step_(ours, make_plan([1], [9], [0]), block, [FULL], torch.empty_like(block.v))
    theirs, after = clone_store(ours), make_plan([1], [1], [9], folded=[0])
    cpu.fold_(ours, after)
    reference.fold_(theirs, after)
    got, wanted = (reference.decode_tile(s, 1, 0, FULL) for s in (ours, theirs))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)
    if ours.columns is not None:
        torch.testing.assert_close(ours.columns, theirs.columns, rtol=2**-7, atol=0)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_columns_look_at_finite_numbers_only(family: tuple[Write, Decay]) -> None:
    layer = make_layer(*family, dims=(80, 37))
    ours, block = make_store(layer, Format.Q24), make_block(layer, 1, 9, seed=3)
    block.v[:, 1, :, 3], block.v[:, 2, :, 36] = torch.inf, torch.nan
    cpu.step_(ours, make_plan([1], [9], [0]), block, [FULL], torch.empty_like(block.v))
    theirs, after = clone_store(ours), make_plan([1], [1], [9], folded=[0])
    cpu.fold_(ours, after)
    reference.fold_(theirs, after)
    assert torch.equal(ours.row_scale[1].isnan(), theirs.row_scale[1].isnan())
    assert bool(ours.row_scale[1, :, 3].isnan().all())
    torch.testing.assert_close(ours.columns, theirs.columns, rtol=2**-7, atol=0)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("fmt", [Format.Q24, Format.S32])
def test_planes_do_not_know_blocks_rejections_or_depth(
    family: tuple[Write, Decay], fmt: Format
) -> None:
    layer = make_layer(*family)
    tokens = make_block(layer, 1, 20, seed=5)
    single, blocks, drafts = (make_store(layer, fmt) for _ in range(3))
    y = run(single, tokens, [(1, 1)] * 14)
    z = run(blocks, tokens, [(3, 3), (1, 1), (5, 5), (4, 4), (1, 1)])
    run(drafts, tokens, [(4, 2), (3, 0), (5, 4), (6, 6), (3, 1), (1, 1)], HIGH)
    assert plane_digest(single, 1) == plane_digest(blocks, 1) == plane_digest(drafts, 1)
    if fmt is Format.S32:
        # full reads are exact, so they differ only by where the fold stood
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_s32_equals_f32(family: tuple[Write, Decay]) -> None:
    layer = make_layer(*family, dims=(40, 21))
    tokens = make_block(layer, 1, 20, seed=6, regime=Regime.CLOSED)
    plain, cut = make_store(layer, Format.F32), make_store(layer, Format.S32)
    plan = [(1, 1)] * 6 + [(9, 4), (2, 2), (5, 5)]
    assert torch.equal(run(plain, tokens, plan), run(cut, tokens, plan))
    states = [reference.decode_tile(s, 1, 0, FULL) for s in (plain, cut)]
    assert torch.equal(*states)


def test_tokens_see_no_later_token_and_no_block_length() -> None:
    tokens = make_block(GDN, 1, 9, seed=7)
    changed = take(tokens, [0], slice(0, 9))
    for x in (changed.q, changed.k, changed.v, changed.g, changed.w):
        x[:, 5:] = torch.nan
    one, two, three = (make_store(GDN, Format.Q24) for _ in range(3))
    y = run(one, tokens, [(9, 9)])
    assert torch.equal(y[:, :5], run(two, changed, [(9, 9)])[:, :5])
    assert torch.equal(y[:, :5], run(three, tokens, [(5, 5)]))


@pytest.mark.parametrize("serial", [True, False])
def test_batch_and_threads_do_not_show(serial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PARALLEL_BYTES", 1 << 60 if serial else 0)
    rows = 5
    ours = make_store(GDN, Format.Q24, rows)
    block, where = make_block(GDN, rows, 2, seed=8), [3, 0, 8, 9, 4]
    plan = make_plan(range(rows), [2, 1, 2, 2, 1], where, folded=[0] * rows)
    alone = clone_store(ours)
    out = torch.empty_like(block.v)
    cpu.step_(ours, plan, block, [FULL] * rows, out)
    for row in reversed(range(rows)):
        single = torch.empty_like(block.v[:1])
        part = make_plan([row], [int(plan.lengths[row])], [where[row]], folded=[0])
        cpu.step_(alone, part, take(block, [row], slice(0, 2)), [FULL], single)
        assert torch.equal(single[0], out[row])
    for name, x in ours.present().items():
        assert torch.equal(x, alone.present()[name]), name


def test_dead_memory_is_invisible() -> None:
    block = make_block(GDN, 3, 2, seed=9)
    clean = make_store(GDN, Format.Q24)
    cpu.step_(
        clean,
        make_plan([0], [2], [0]),
        take(block, [0], slice(0, 2)),
        [FULL],
        torch.empty_like(block.v[:1]),
    )
    dirty = clone_store(clean)
    poison_slot_(dirty, 2)
    poison_dead_(dirty, 0, range(2))
    poison_dead_(dirty, 1, range(0))
    spoiled = take(block, slice(0, 3), slice(0, 2))
    for x in (spoiled.q, spoiled.k, spoiled.v, spoiled.g, spoiled.w):
        x[1] = torch.nan
        x[2, 1] = torch.nan
    plan = make_plan([0, -1, 1], [2, 0, 1], [2, 0, 0], folded=[0, 0, 0])
    outs = [torch.full_like(block.v, torch.nan) for _ in range(2)]
    for one, tokens, out in zip((clean, dirty), (block, spoiled), outs, strict=True):
        cpu.step_(one, plan, tokens, [HIGH] * 3, out)
    assert torch.equal(*outs)
    assert bool((outs[0][1] == 0).all())
    assert bool((outs[0][2, 1] == 0).all())


def extremes(keys: int) -> torch.Tensor:
    """Return 20 rows with zeros, denormals, the largest numbers, infinities and NaN."""
    rng = torch.Generator().manual_seed(1)
    state = torch.randn(20, keys, generator=rng) * 10 ** (8 * torch.rand(20, 1, generator=rng) - 4)
    state[0] = 0
    state[1] *= 1e-42
    state[2] *= 3e34
    state[3, 1], state[4, 0], state[5, keys - 1] = torch.inf, -torch.inf, torch.nan
    state[6, 2], state[7, 3] = -0.0, 3.4e38
    # a row scale under the smallest that has a usable reciprocal
    state[8] *= 1e-35
    state[:, 4] = 0
    state[:, 5] *= 1e-5
    return state


@numba.njit
def write_head(at, here, state, columns, memory) -> None:
    """Encode ``state`` as a fold does; ``memory`` is scratch for it and two vectors."""
    inverse, amax, block = memory, memory + at.key_row, memory + 2 * at.key_row
    for r in range(at.value_dim):
        copy_in(block + r * at.key_row, state + 4 * r * at.key_dim, 0, at.key_dim)
    encode.collect_amax(amax, block, at.value_dim, at.key_row)
    encode.set_columns(columns, inverse, amax, at.key_dim)
    for r in range(0, at.value_dim, LANES):
        rows = min(LANES, at.value_dim - r)
        encode.encode_rows(at, here, inverse, r, rows, block + r * at.key_row)


@numba.njit
def read_head(at, here, state, columns, memory) -> None:
    column, block = memory, memory + at.key_row
    copy_in(column, columns, IS_BF16, at.key_dim)
    for r in range(0, at.value_dim, LANES):
        rows = min(LANES, at.value_dim - r)
        encode.decode_rows(at, here, column, r, rows, block)
        for i in range(rows):
            copy_out(state + 4 * (r + i) * at.key_dim, 0, block + i * at.key_row, at.key_dim)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, any NaN standing for any other."""
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    either = a.isnan() & b.isnan()
    return bool(((a.view(bits) == b.view(bits)) | either).all())


@pytest.mark.parametrize("keys", [32, 37, 85, 128])
@pytest.mark.parametrize("fmt", list(Format))
def test_planes_are_those_of_formats(fmt: Format, keys: int) -> None:
    layer, state = LayerSpec(Write.ADDITIVE, Decay.SCALAR, 1, 1, keys, 20), extremes(keys)
    ours = make_store(layer, fmt, 1, RingSpec(window=4))
    columns, wanted_scale = torch.zeros(keys).bfloat16(), column_scale(column_amax(state))
    planes, scratch = layout.planes_at(ours), torch.zeros(1 << 14)
    here = layout.HeadAt._make(
        (planes.high, planes.high_row, planes.low, planes.low_row, planes.scale, *[0] * 8)
    )
    at = layout.geometry_of(ours.spec)
    where = (state.data_ptr(), columns.data_ptr(), scratch.data_ptr())
    write_head(at, here, *where)
    assert torch.equal(columns, wanted_scale)
    wanted, got = formats.encode(state, fmt, columns), ours.planes(0)
    for name in ("high", "low", "row_scale"):
        a, b = getattr(wanted, name), getattr(got, name)
        assert (a is None) == (b is None)
        assert a is None or same(a, b[0]), name
    decoded = torch.empty_like(state)
    read_head(at, here, decoded.data_ptr(), columns.data_ptr(), scratch.data_ptr())
    assert same(decoded, formats.decode(wanted, fmt, FULL, columns))


@pytest.mark.parametrize("fmt", [Format.Q24, Format.Q16])
def test_column_scales_are_those_of_the_reference(fmt: Format) -> None:
    """Channels that grow and fade by orders of magnitude, over several cycles."""
    layer = make_layer(Write.ADDITIVE, Decay.CHANNEL)
    ours, tokens = make_store(layer, fmt), make_block(layer, 1, 20, seed=11)
    theirs = clone_store(ours)
    tokens.k[:, 4:8] *= 100
    tokens.k[:, 8:12] *= 1e4
    tokens.g[:, 12:] = -3.0
    for done in range(18):
        block = take(tokens, [0], [done])
        plan = make_plan([1], [1], [done], folded=[max(done - 1, 0)])
        for verb, one in ((cpu.step_, ours), (reference.step_, theirs)):
            verb(one, plan, block, [FULL], torch.empty_like(block.v))
        # a bf16 maximum may round the other way
        torch.testing.assert_close(ours.columns, theirs.columns, rtol=2**-7, atol=0)


@numba.njit
def lanes(at: int, to: int) -> None:
    a, b, c, d = load(at), load(at + 64), load(at + 128), load(at + 192)
    totals4(to, a, b, c, d)
    totals8(to + 16, d, c, b, a, a, b, c, d)
    store(to + 64, exp_lanes(a))


@numba.njit
def one_total(at: int) -> float:
    return total_lanes(load(at))


def test_totals_agree_and_exp_is_good() -> None:
    x = torch.tensor([0.0, -0.0, -1000, -torch.inf, -104, -87.3, -1e-30, torch.nan]).repeat(8)
    x[16:] = torch.randn(48, generator=torch.Generator().manual_seed(0))
    x[8:15] = torch.tensor([-3.0, -0.5, -20, -60, -1, -2, -1e-3])
    out = torch.zeros(32)
    lanes(x.data_ptr(), out.data_ptr())
    single = torch.tensor([one_total(x[LANES * i :].data_ptr()) for i in range(4)])
    assert torch.equal(out[1:4], single[1:])
    assert torch.equal(out[4:7], single.flip(0)[:3])
    exact = x[:16].double().exp()
    normal = exact > torch.finfo(torch.float32).tiny
    error = ((out[16:].double() - exact) / exact)[normal].abs()
    assert float(error.max()) < 2**-23
    assert torch.equal(
        out[16:][~normal & ~x[:16].isnan()] <= 1.2e-38,
        torch.ones(int((~normal & ~x[:16].isnan()).sum()), dtype=torch.bool),
    )
    assert bool(out[16:][x[:16].isnan()].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_standard_step(family: tuple[Write, Decay], dtype: torch.dtype) -> None:
    layer = make_layer(*family, dims=(37, 18))
    wide = torch.zeros(5, layer.value_heads, layer.value_dim + 1, layer.key_dim + 3, dtype=dtype)
    state = wide[:, :, :-1, :-3]
    state.copy_(torch.stack([make_state(layer, seed=s) for s in range(5)]))
    theirs, block = state.clone(), make_block(layer, 3, 3, seed=2, regime=Regime.CLOSED)
    plan = make_plan([4, -1, 1], [3, 0, 2], [0, 0, 0])
    outs = [torch.full_like(block.v, torch.nan) for _ in range(2)]
    cpu.standard_(state, plan, block, layer.write, outs[0])
    reference.standard_(theirs, plan, block, layer.write, outs[1])
    # a bf16 state may round the other way once, and the next token then reads that
    close = (
        {"rtol": 1e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(*outs, **close)
    torch.testing.assert_close(state, theirs, **close)
    assert torch.equal(state[[0, 2, 3]], theirs[[0, 2, 3]])
    assert bool((wide[:, :, -1] == 0).all())
    assert bool((wide[..., -3:] == 0).all())


@pytest.mark.parametrize("ring", [torch.bfloat16, torch.float16], ids=str)
def test_any_input_dtype_and_stride(ring: torch.dtype) -> None:
    """The reference sees a block's entries as the ring stores them; so do we, in any dtype."""
    ours = make_store(GDN, Format.F32, dtype=ring)
    block = make_block(GDN, 2, 2, seed=4).to(torch.float64)
    plan = make_plan([0, 2], [2, 2], [0, 0])
    theirs, wanted = clone_store(ours), torch.empty_like(block.v)
    got = torch.empty(2, 2, GDN.value_dim, GDN.value_heads, dtype=torch.float64).transpose(2, 3)
    reference.step_(theirs, plan, block, [FULL, FULL], wanted)
    strided = replace(block, q=block.q.transpose(2, 3).contiguous().transpose(2, 3))
    cpu.step_(ours, plan, strided, [FULL, FULL], got)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    for name in ("k", "v", "g", "w"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_what_would_leave_memory_is_refused() -> None:
    ours, block = make_store(GDN, Format.F32), make_block(GDN, 1, 2, seed=1)
    before = clone_store(ours)
    plan = make_plan([0], [2], [RING.ring_len - 1], folded=[0])
    with pytest.raises(ContractError, match="unfolded entries"):
        cpu.step_(ours, plan, block, [FULL], torch.empty_like(block.v))
    state = torch.zeros(1, GDN.value_heads, GDN.value_dim, GDN.key_dim)
    for wrong in (state.double(), state.transpose(2, 3).contiguous().transpose(2, 3)):
        with pytest.raises(ContractError, match="state"):
            cpu.standard_(wrong, plan, block, GDN.write, torch.empty_like(block.v))
    for name, x in ours.present().items():
        assert torch.equal(x, before.present()[name]), name
