"""The integer cut is exact, s32 is fp32 bit for bit, and scales survive every extreme."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replayssm.errors import ContractError
from replayssm.formats import (
    COLUMN_SCALE_MAX,
    COLUMN_SCALE_MIN,
    FORMATS,
    HIGH_MAX,
    column_amax,
    column_scale,
    cut,
    decode,
    encode,
    join,
)
from replayssm.testing.budgets import FORMAT_ROUNDING
from replayssm.types import Format, ReadDepth

SCALED = [Format.Q24, Format.Q16]
bits32 = st.integers(-(2**31), 2**31 - 1)
# the largest magnitude whose row and column scales and their product stay in the fp32 range
sane = st.floats(-(2.0**100), 2.0**100, width=32)


def state_of(elements, *, least=1):
    shape = st.tuples(st.integers(least, 5), st.integers(least, 7))
    return hnp.arrays(np.float32, shape, elements=elements).map(torch.from_numpy)


def columns_of(state, fmt):
    return column_scale(column_amax(state)) if FORMATS[fmt].scaled else None


def from_bits(values):
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("low_bits", [8, 16])
@given(st.data())
def test_cut_is_exact_and_the_high_part_is_the_rounded_integer(low_bits, data):
    # q + half must stay in int32: formats never come closer (s32: canonical NaN is the largest)
    q = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1 - 2**15), min_size=1, max_size=20))
    high, low = cut(torch.tensor(q, dtype=torch.int32), low_bits)
    assert join(high, low, low_bits).tolist() == q
    assert all(0 <= x < 1 << low_bits for x in low.tolist())
    half = 1 << (low_bits - 1)
    assert high.tolist() == [(x + half) >> low_bits for x in q]


@pytest.mark.parametrize("fmt", SCALED)
def test_cut_is_exact_for_every_integer_at_the_edges(fmt):
    bits = FORMATS[fmt].low_bits
    limit = HIGH_MAX << bits
    edge = 1 << (bits - 1)
    near = [s * n + d for s in (-1, 1) for n in (0, edge, 1 << bits, limit) for d in range(-3, 4)]
    q = torch.tensor([x for x in near if -limit <= x <= limit], dtype=torch.int32)
    high, low = cut(q, bits)
    stored_high, stored_low = high.to(FORMATS[fmt].high), low.to(FORMATS[fmt].low)
    assert torch.equal(join(stored_high, stored_low, bits), q)
    assert high.abs().max() <= HIGH_MAX


@given(st.lists(bits32, min_size=1, max_size=30))
def test_s32_gives_back_every_fp32_bit_pattern(patterns):
    state = from_bits(patterns).unsqueeze(0)
    back = decode(encode(state, Format.S32), Format.S32, ReadDepth.FULL)
    is_nan = state.isnan()
    assert torch.equal(back.isnan(), is_nan)
    assert torch.equal(back.view(torch.int32)[~is_nan], state.view(torch.int32)[~is_nan])


def test_s32_gives_back_the_patterns_where_rounding_carries():
    tops = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x8000, 0x8001, 0xFF7F, 0xFF80]
    ends = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    patterns = np.array([t << 16 | e for t in tops for e in ends], np.uint32).view(np.float32)
    state = torch.from_numpy(patterns.copy()).unsqueeze(0)
    back = decode(encode(state, Format.S32), Format.S32, ReadDepth.FULL)
    same = (back.view(torch.int32) == state.view(torch.int32)) | (back.isnan() & state.isnan())
    assert bool(same.all())


@given(st.lists(bits32, min_size=1, max_size=30))
def test_high_plane_of_s32_is_a_bf16_rounding_and_keeps_nan(patterns):
    state = from_bits(patterns).unsqueeze(0)
    high = decode(encode(state, Format.S32), Format.S32, ReadDepth.HIGH)
    assert torch.equal(high.isnan(), state.isnan())
    ordinary = state.isfinite() & (state.abs() < 3e38)
    ulp = state.abs().clamp(min=2.0**-126) * 2.0**-7
    assert bool(((high - state).abs() <= ulp / 2)[ordinary].all())


@given(state_of(st.floats(width=32, allow_nan=False)))
def test_f32_and_s32_hold_the_same_numbers(state):
    f32, s32 = (decode(encode(state, f), f, ReadDepth.FULL) for f in (Format.F32, Format.S32))
    assert torch.equal(f32.view(torch.int32), s32.view(torch.int32))


@pytest.mark.parametrize("fmt", SCALED)
@given(state_of(sane))
def test_fixed_point_error_is_half_a_step_of_its_row(fmt, state):
    columns = columns_of(state, fmt)
    planes = encode(state, fmt, columns)
    assert int(planes.high.abs().max()) <= HIGH_MAX
    scale = columns.double()
    for depth, bits in ((ReadDepth.FULL, FORMATS[fmt].low_bits), (ReadDepth.HIGH, 0)):
        error = (decode(planes, fmt, depth, columns).double() - state.double()).abs()
        step = planes.row_scale.double().unsqueeze(-1) * 2.0**-bits
        # half a step, and the fp32 roundings of scaling there and back; tiny rows read as 0
        bound = scale * (step * 0.5 + 127 * step * 2.0 ** (bits - 22))
        if depth is ReadDepth.HIGH:  # the high plane rounds an integer that was rounded before
            bound = bound + scale * step * 0.5 * 2.0 ** -FORMATS[fmt].low_bits
        bound = torch.where(planes.row_scale.unsqueeze(-1) > 0, bound, scale * 128 * 2.0**-100)
        assert bool((error <= bound + 2.0**-149).all())


@pytest.mark.parametrize("fmt", list(Format))
@given(state_of(sane, least=2), st.data())
def test_zero_rows_and_columns_read_as_exactly_zero(fmt, state, data):
    row = data.draw(st.integers(0, state.shape[0] - 1))
    column = data.draw(st.integers(0, state.shape[1] - 1))
    state = state.clone()
    state[row], state[:, column] = 0, 0
    columns = columns_of(state, fmt)
    for depth in ReadDepth:
        back = decode(encode(state, fmt, columns), fmt, depth, columns)
        assert bool((back[row] == 0).all())
        assert bool((back[:, column] == 0).all())


@pytest.mark.parametrize("fmt", list(Format))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("depth", list(ReadDepth))
def test_a_non_finite_element_stays_visible_and_stays_in_its_row(fmt, bad, depth):
    state = torch.linspace(-1, 1, 12).reshape(3, 4).contiguous()
    state[1, 2] = bad
    columns = columns_of(state, fmt)
    back = decode(encode(state, fmt, columns), fmt, depth, columns)
    assert not bool(back[1, 2].isfinite())
    assert bool(back[[0, 2]].isfinite().all())


@pytest.mark.parametrize("fmt", SCALED)
@given(state_of(st.floats(-(2.0**30), 2.0**30, width=32)), st.data())
def test_any_positive_column_scale_is_correct(fmt, state, data):
    exponents = data.draw(
        st.lists(st.integers(-20, 20), min_size=state.shape[1], max_size=state.shape[1])
    )
    columns = torch.tensor([2.0**e for e in exponents]).to(torch.bfloat16)
    planes = encode(state, fmt, columns)
    back = decode(planes, fmt, ReadDepth.FULL, columns)
    step = planes.row_scale.double().unsqueeze(-1) * columns.double()
    bound = step * (2.0 ** -FORMATS[fmt].low_bits + 2.0**-14)
    tiny = columns.double() * 128 * 2.0**-100
    assert bool(((back.double() - state.double()).abs() <= bound + tiny).all())


@given(hnp.arrays(np.float32, st.integers(1, 8), elements=st.floats(0, width=32, allow_nan=False)))
def test_column_scales_are_positive_finite_and_bounded(amax):
    finite = torch.from_numpy(amax).nan_to_num(posinf=torch.finfo(torch.float32).max)
    scale = column_scale(finite).float()
    assert bool(((scale >= COLUMN_SCALE_MIN) & (scale <= COLUMN_SCALE_MAX)).all())


def test_a_silent_channel_takes_the_smallest_scale():
    assert column_scale(torch.tensor([0.0, 3.0, 1.0])).tolist() == [COLUMN_SCALE_MIN, 3.0, 1.0]


def test_column_amax_ignores_what_is_not_finite():
    state = torch.tensor([[1.0, torch.nan], [torch.inf, -2.0]])
    assert column_amax(state).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("fmt", SCALED)
def test_rows_of_denormals_read_as_zero_and_poison_nothing(fmt):
    state = torch.full((2, 3), 1e-42)
    state[1] = torch.tensor([1e30, 1.0, -1e-30])
    columns = columns_of(state, fmt)
    back = decode(encode(state, fmt, columns), fmt, ReadDepth.FULL, columns)
    assert bool(back.isfinite().all())
    assert bool((back[0].abs() <= 1e-40).all())


@pytest.mark.parametrize("fmt", list(Format))
def test_encoding_leaves_its_input_alone_and_shares_nothing(fmt):
    state = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    kept, columns = state.clone(), columns_of(state, fmt)
    planes = encode(state, fmt, columns)
    planes.high.zero_()
    assert torch.equal(state, kept)


@pytest.mark.parametrize("fmt", list(Format))
def test_encoding_twice_changes_nothing_more_than_once(fmt):
    """A decoded state encodes to itself: folding nothing would lose nothing."""
    state = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    columns = columns_of(state, fmt)
    once = decode(encode(state, fmt, columns), fmt, ReadDepth.FULL, columns)
    twice = decode(encode(once, fmt, columns), fmt, ReadDepth.FULL, columns)
    assert bool(((twice - once).abs() <= FORMAT_ROUNDING[fmt] * once.abs().amax()).all())


@pytest.mark.parametrize("fmt", list(Format))
def test_bytes_match_the_dtypes(fmt):
    spec = FORMATS[fmt]
    expected = {"f32": (4, 4), "s32": (2, 4), "q24": (1, 3), "q16": (1, 2), "bf16": (2, 2)}
    got = (spec.read_bytes[ReadDepth.HIGH], spec.read_bytes[ReadDepth.FULL])
    assert got == expected[fmt.value]
    assert spec.stored_bytes == got[1]


@pytest.mark.parametrize("fmt", SCALED)
def test_scaled_formats_ask_for_their_columns(fmt):
    with pytest.raises(ContractError, match="columns: expected column scales"):
        encode(torch.zeros(1, 1), fmt)


@pytest.mark.parametrize("fmt", list(Format))
def test_names_mean_the_same_as_members(fmt):
    state = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    columns = column_scale(column_amax(state))
    planes, named = encode(state, fmt, columns), encode(state, fmt.value, columns)
    assert torch.equal(planes.high, named.high)
    for depth in ReadDepth:
        expected = decode(planes, fmt, depth, columns)
        assert torch.equal(decode(named, fmt.value, depth.value, columns), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fmt", list(Format))
def test_a_state_of_another_dtype_is_refused(fmt, dtype):
    with pytest.raises(ContractError, match="state: expected float32"):
        encode(torch.zeros(2, 4, dtype=dtype), fmt, torch.ones(4, dtype=torch.bfloat16))
