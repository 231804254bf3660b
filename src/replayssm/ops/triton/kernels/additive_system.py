"""The small part of one pass for additive writes: from gates, keys and queries to coefficients.

Entries are 32 lines, a lane each: 0 .. 23 those of the ring from the boundary on, 24 .. 31 the
block's tokens. Entries and tokens that are not live have a strength of 0 and a decay of 1, so they
act on nothing; what a token behind a row's length holds reaches no column but its own, which is not
written. See :mod:`.additive_pass` for what the coefficients are for.
"""

# Triton reads tuple sums, not starred tuples
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.triton.kernels.common import decay_of, larger
from replayssm.ops.triton.kernels.hopper import (
    next_entry,
    of_entry,
    parts_of,
    product_from,
    sum_from,
)
from replayssm.ops.triton.kernels.one_pass_system import (
    BF16,
    BLOCK,
    ENTRIES,
    F32,
    LINE,
    PAIRS,
    TABLE,
    acts_on,
    decays_on_paths,
)

DIGITS_MAX = gl.constexpr(32512.0)  # 127 in the higher of two signed digits to the base 256
TO_INT = gl.constexpr(12582912.0)  # 1.5 2^23: the last bits of a small number plus it are its own

SWIZZLED_BYTES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
COEF = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))


@gluon.jit
def products_of(keys, queries, ancestors, row, T: gl.constexpr, TOKENS: gl.constexpr,
                TREE: gl.constexpr, LANES: gl.constexpr):  # fmt: skip
    """Return ``k_j . q_t`` ``[entries, tokens]``, 0 where a token does not see an entry.

    Also whether the entry is the token itself.
    """
    N: gl.constexpr = queries.shape[0]
    products = mma_v2(keys.load(gl.DotOperandLayout(0, PAIRS, 2)),
                      queries.permute((1, 0)).load(gl.DotOperandLayout(1, PAIRS, 2)),
                      gl.zeros([ENTRIES, N], F32, PAIRS))  # fmt: skip
    # columns of no token are 0
    products = gl.sum(gl.reshape(products, (ENTRIES, TOKENS, N // TOKENS)), 2)
    products = gl.convert_layout(products, gl.SliceLayout(0, LANES))
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(1, gl.SliceLayout(0, LANES)))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(0, LANES)))
    acts = acts_on(entry, ancestors, row, T, TOKENS, TREE, gl.SliceLayout(0, LANES))
    return gl.where(acts, products, 0.0), (entry - BLOCK)[:, None] == token[None, :]


@gluon.jit
def _side_by_side(xs, N: gl.constexpr):
    """Return ``[..., N]`` of N tensors ``[heads, entries]``."""
    if N == 1:
        return gl.expand_dims(xs[0], 2)
    else:  # noqa: RET505 - what is not taken must not be compiled
        first, second = _side_by_side(xs[: N // 2], N // 2), _side_by_side(xs[N // 2 :], N // 2)
        both = gl.permute(gl.join(first, second), (0, 1, 3, 2))
        return gl.reshape(both, (both.shape[0], both.shape[1], N))


@gluon.jit
def decays_behind(decay, entry, ancestors, row, T: gl.constexpr, TOKENS: gl.constexpr,
                  TREE: gl.constexpr, LANES: gl.constexpr):  # fmt: skip
    """Return D(j + 1, t) ``[heads, entries, tokens]`` of the decays behind each entry.

    A scan over the ring's entries, then a token at a time; of a tree, a scan a token.
    """
    if TREE:
        return decays_on_paths(decay, ancestors, row, T, TOKENS, TREE, LANES)
    else:  # noqa: RET505 - what is not taken must not be compiled
        at = gl.expand_dims(entry, 0)
        behind = product_from(gl.where(at + 1 < BLOCK, next_entry(decay), 1.0))
        behinds = ()
        for t in gl.static_range(TOKENS):
            own = of_entry(decay, BLOCK + t)
            behind = gl.where(at < BLOCK + t, behind * own, 1.0)
            behinds = behinds + (behind,)
        return gl.convert_layout(_side_by_side(behinds, TOKENS), LANES)


@gluon.jit
def fold_weights(gates, strength, entry, due):
    """Return the weights of a due row's values and the decays of its states, in shared memory.

    Log-decays are added up before they become a decay: sixteen rounded decays would multiply their
    errors, and a checkpoint keeps them.
    """
    HEADS: gl.constexpr = gates.shape[0]
    weights = gl.allocate_shared_memory(F32, [HEADS, ENTRIES], TABLE)
    wholes = gl.allocate_shared_memory(F32, [HEADS], LINE)
    behind = gl.where((entry + 1 < due)[None, :], next_entry(gates), 0.0)
    behind = sum_from(behind)
    weights.store(strength * decay_of(behind))
    wholes.store(gl.max(decay_of(of_entry(behind + gates, 0)), 1))
    return (weights._reinterpret(F32, [HEADS, ENTRIES], LINE),
            wholes._reinterpret(F32, [HEADS, 1], LINE))  # fmt: skip


@gluon.jit
def put_coefficients(coef, x):
    """Store ``[heads, entries, tokens]``, two bf16 parts of each side by side.

    A single token's stand in the columns of all four, which nobody reads.
    """
    top, rest = parts_of(x, 2)
    both = gl.permute(gl.join(top, rest), (0, 2, 3, 1))
    if x.shape[2] == 1:
        both = both.broadcast_to((x.shape[0], coef.shape[1] // 2, 2, ENTRIES))
    rows: gl.constexpr = coef.shape[0] * coef.shape[1]
    target = coef._reinterpret(BF16, [rows, ENTRIES], COEF)
    target.store(gl.reshape(both, (rows, ENTRIES)))


@gluon.jit
def put_digits(digits, factors, columns, query):
    """Cut every head's column scales times the queries into two signed digits, as they are stored.

    ``query``: fp32, ``[1, tokens, K]`` of all heads, or of each of up to four; or a single token's.
    ``factors`` ``[heads, tokens]`` take what one unit is worth.
    """
    layout: gl.constexpr = query.type.layout
    HEADS: gl.constexpr = factors.shape[0]
    TOKENS: gl.constexpr = factors.shape[1]
    MADE: gl.constexpr = query.shape[1]
    K: gl.constexpr = query.shape[2]
    AT_ONCE: gl.constexpr = min(HEADS, 8 if MADE == 1 else 4)
    target = digits._reinterpret(gl.int8, [HEADS * TOKENS * 2, K], SWIZZLED_BYTES)
    units = ()
    for first in gl.static_range(0, HEADS, AT_ONCE):
        scales = columns.slice(first, AT_ONCE, 0).load(gl.SliceLayout(1, layout)).to(F32)
        part = query * gl.expand_dims(scales, 1)
        # a query that is not finite has a unit that is not, and shows
        amax = gl.reduce(gl.abs(part), 2, larger)
        per_unit = gl.where(amax > 0, DIGITS_MAX / amax, 0.0)
        # the last bits are the number, in two's complement
        number = (part * gl.expand_dims(per_unit, 2) + TO_INT).to(gl.int32, bitcast=True)
        both = gl.join(((number + 128) >> 8).to(gl.int8), number.to(gl.int8))
        both = gl.permute(both, (0, 1, 3, 2)).broadcast_to((AT_ONCE, TOKENS, 2, K))
        both = gl.reshape(both, (AT_ONCE * TOKENS * 2, K))
        target.slice(first * TOKENS * 2, AT_ONCE * TOKENS * 2, 0).store(both)
        units = units + (amax * (1.0 / DIGITS_MAX),)
    for i in gl.static_range(len(units)):
        part = factors.slice(i * AT_ONCE, AT_ONCE, 0)
        part.store(part.load(gl.SliceLayout(2, layout)) * units[i])


@gluon.jit
def digits_of(plain_queries, column_scales, factors, MADE: gl.constexpr):
    """Return every head's digits ``[heads, 2 tokens, K]``; ``factors`` take their units."""
    HEADS: gl.constexpr = factors.shape[0]
    TOKENS: gl.constexpr = factors.shape[1]
    K: gl.constexpr = plain_queries.shape[1]
    by_token: gl.constexpr = (
        gl.BlockedLayout([1, 1, 8], [2, 1, 16], [4, 1, 1], [2, 1, 0]) if MADE == 1
        else gl.BlockedLayout([1, TOKENS // 4, 16], [1, 4, 8], [4, 1, 1], [2, 1, 0])
    )  # fmt: skip
    query = plain_queries.slice(0, MADE, 0).load(gl.SliceLayout(0, by_token)).to(F32)
    digits = gl.allocate_shared_memory(gl.int8, [HEADS, 2 * TOKENS, K], SWIZZLED_BYTES)
    put_digits(digits, factors, column_scales, gl.expand_dims(query, 0))
    return digits
