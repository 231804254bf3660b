"""The small part of one pass: from keys, queries and gates to the coefficients of values and S k.

A program's entries are 32 lines: 0 .. 23 those of the ring from the boundary on, 24 .. 31 the
block's tokens. ``b [heads, entries, tokens]`` solves

    b_jt = w_j (k_j . q_t - sum_{s > j} b_st (k_s . k_j)),

entry by entry from the newest, a lane each; no decay stands in it. Of a tree, only a token's
ancestors act on it. See :mod:`.one_pass` for what the coefficients are for.
"""

# Triton reads tuple sums, not starred tuples
# ruff: noqa: RUF005
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.triton.kernels.common import decay_of
from replayssm.ops.triton.kernels.hopper import (
    WARPS,
    next_entry,
    of_entry,
    parts_of,
    product_from,
    sum_from,
)

FOLDED = gl.constexpr(16)  # entries that a fold takes at most
ENTRIES = gl.constexpr(32)
BLOCK = gl.constexpr(24)  # the entry that the block's first token is
BF16, F32 = gl.constexpr(gl.bfloat16), gl.constexpr(gl.float32)

PAIRS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, WARPS // 2], [16, 8]))
TABLE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
READ = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
FOLD = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))


@gluon.jit
def _allocate_parts(COUNT: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Allocate shared memory for coefficients ``[heads * N, entries]``, part by part."""
    parts = (gl.allocate_shared_memory(BF16, SHAPE, LAYOUT),)
    for _ in gl.static_range(COUNT - 1):
        parts = parts + (gl.allocate_shared_memory(BF16, SHAPE, LAYOUT),)
    return parts


@gluon.jit
def _put(target, x):
    """Store ``[heads, entries, N]`` as rows of ``[heads * N, entries]``."""
    target.store(gl.reshape(gl.permute(x, (0, 2, 1)), (x.shape[0] * x.shape[2], x.shape[1])))


@gluon.jit
def _put_parts(targets, x):
    """Store coefficients; in a single target both parts of four tokens are side by side."""
    parts = parts_of(x, 3 if len(targets) == 3 else 2)
    if len(targets) == 1:
        _put(targets[0], gl.reshape(gl.join(parts[0], parts[1]), (x.shape[0], x.shape[1], 8)))
    else:
        for i in gl.static_range(len(targets)):
            _put(targets[i], parts[i])


@gluon.jit
def products_of_keys(keys, rows):
    """Store products of keys with older keys; ``rows``: the keys as an operand."""
    gram = mma_v2(rows, keys.permute((1, 0)).load(gl.DotOperandLayout(1, PAIRS, 2)),
                  gl.zeros([ENTRIES, ENTRIES], F32, PAIRS))  # fmt: skip
    newer = gl.arange(0, ENTRIES, gl.SliceLayout(1, PAIRS))[:, None]
    older = gl.arange(0, ENTRIES, gl.SliceLayout(0, PAIRS))[None, :]
    products = gl.allocate_shared_memory(F32, [ENTRIES, ENTRIES], TABLE)
    products.store(gl.where(older < newer, gram, 0.0))
    return products


@gluon.jit
def key_products(keys, queries, q_norm, TOKENS: gl.constexpr):
    """Store products of keys with older keys, and with the tokens' scaled queries."""
    rows = keys.load(gl.DotOperandLayout(0, PAIRS, 2))
    products = products_of_keys(keys, rows)
    by_query = mma_v2(rows, queries.permute((1, 0)).load(gl.DotOperandLayout(1, PAIRS, 2)),
                      gl.zeros([ENTRIES, 8], F32, PAIRS))  # fmt: skip
    by_query = by_query * q_norm.load(gl.SliceLayout(0, PAIRS))[None, :]
    with_queries = gl.allocate_shared_memory(F32, [ENTRIES, TOKENS], TABLE)
    if TOKENS == 8:
        with_queries.store(by_query)
    else:
        with_queries.store(gl.sum(gl.reshape(by_query, (ENTRIES, TOKENS, 2)), 2))
    return products, with_queries


@gluon.jit
def acts_on(entry, ancestors, row, T: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
          LAYOUT: gl.constexpr):  # fmt: skip
    """Whether an entry acts on a token ``[entries, tokens]``: the past and its ancestors do."""
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    in_block = (entry - BLOCK)[:, None]
    acts = in_block <= token[None, :]
    if TREE:
        path = gl.load(ancestors + row * T + gl.minimum(token, T - 1))[None, :].to(gl.int32)
        acts = (in_block < 0) | ((path >> gl.maximum(in_block, 0)) & 1 != 0)
    return acts


@gluon.jit
def substitute(products, with_queries, strength, past, length, ancestors, row,
               T: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
               LANES: gl.constexpr):  # fmt: skip
    """Return b ``[heads, entries, tokens]``, from the newest entry to the oldest.

    ``products``: of keys, in shared memory; ``with_queries [entries, tokens]``.
    """
    matrix: gl.constexpr = gl.SliceLayout(0, LANES)
    line: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LANES))
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(1, matrix))
    acts = acts_on(entry, ancestors, row, T, TOKENS, TREE, matrix)[None, :, :]
    b = strength[:, :, None] * gl.where(acts, with_queries[None, :, :], 0.0)
    rows = products._reinterpret(F32, [ENTRIES, ENTRIES], LINE)
    at = BLOCK + length - 1
    keys = rows.index(at).load(line)
    for _ in range(1, past + length):
        weight = strength * keys[None, :]
        older = gl.where(at == BLOCK, past, at) - 1
        keys = rows.index(gl.maximum(older, 0)).load(line)
        passed = of_entry(b, at) * weight[:, :, None]
        b = b - (gl.where(acts, passed, 0.0) if TREE else passed)
        at = older
    return b


@gluon.jit
def decays_on_paths(decay, ancestors, row, T: gl.constexpr, TOKENS: gl.constexpr,
                  TREE: gl.constexpr, LANES: gl.constexpr):  # fmt: skip
    """Return D(j + 1, t) ``[heads, entries, tokens]`` of the decays behind each entry."""
    matrix: gl.constexpr = gl.SliceLayout(0, LANES)
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(1, matrix))
    acts = acts_on(entry + 1, ancestors, row, T, TOKENS, TREE, matrix)
    acts = acts & (entry < ENTRIES - 1)[:, None]
    return product_from(gl.where(acts[None, :, :], next_entry(decay)[:, :, None], 1.0))


@gluon.jit
def _prepare_fold(products, strength, gates, due, fold_v, fold_p, whole):
    """Store the coefficients of a due row's fold and the decay of its states.

    The unit vectors of the first entries stand in the place of ``k . q``. One lane holds an entry
    and half of the unit vectors: 16 entries of a head are a warp. Log-decays are added up before
    they become a decay: sixteen rounded decays would multiply their errors.
    """
    PER: gl.constexpr = strength.shape[0]
    lanes: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0])
    heads: gl.constexpr = gl.SliceLayout(2, lanes)
    row: gl.constexpr = gl.SliceLayout(0, heads)
    entry = gl.arange(0, ENTRIES, gl.SliceLayout(0, strength.type.layout))
    behind = gl.where((entry + 1 < due)[None, :], next_entry(gates), 0.0)
    behind = sum_from(behind)
    after, all_decays = decay_of(behind), decay_of(of_entry(behind + gates, 0))
    whole.store(gl.max(all_decays, 1))
    tables = (gl.allocate_shared_memory(F32, [ENTRIES, PER], TABLE),
              gl.allocate_shared_memory(F32, [ENTRIES, PER], TABLE),
              gl.allocate_shared_memory(F32, [ENTRIES, PER], TABLE))  # fmt: skip
    tables[0].store(gl.permute(strength, (1, 0)))
    tables[1].store(gl.permute(after, (1, 0)))
    tables[2].store(gl.permute(all_decays, (1, 0)))
    folded = gl.arange(0, FOLDED, row)
    unit = gl.arange(0, FOLDED, gl.SliceLayout(0, gl.SliceLayout(0, lanes)))
    weights = tables[0].slice(0, FOLDED, 0).permute((1, 0)).load(heads)
    weights = gl.where((folded < due)[None, :], weights, 0.0)
    diagonal = (gl.arange(0, FOLDED, gl.SliceLayout(1, gl.SliceLayout(0, lanes)))[:, None]
                == unit[None, :])  # fmt: skip
    b = gl.where(diagonal[None, :, :], weights[:, :, None], 0.0)
    rows = products._reinterpret(F32, [ENTRIES * 2, FOLDED], LINE)
    for i in range(1, due):
        at = due - i
        weight = weights * rows.index(at * 2).load(row)[None, :]
        b = b - of_entry(b, at) * weight[:, :, None]
    decays = tables[1].slice(0, FOLDED, 0).permute((1, 0)).load(heads)
    _put_parts(fold_v, b * decays[:, :, None])
    decays = tables[2].slice(0, FOLDED, 0).permute((1, 0)).load(heads)
    _put_parts(fold_p, -b * decays[:, :, None])


@gluon.jit
def coefficients(products, with_queries, strength, gates, past, length, due, ancestors, row,
                 T: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
                 FOLD_PARTS: gl.constexpr, LANES: gl.constexpr):  # fmt: skip
    """Return, in shared memory, what values, S k and S q are multiplied with: to read, to fold.

    Of each, three: coefficients of values, of S k, and the decay of the whole state.
    ``FOLD_PARTS``: bf16 parts of a coefficient of the fold, 0 where nothing folds.
    """
    PER: gl.constexpr = strength.shape[0]
    b = substitute(products, with_queries.load(gl.SliceLayout(0, LANES)), strength, past, length,
                   ancestors, row, T, TOKENS, TREE, LANES)  # fmt: skip
    decay = decay_of(gates)
    behind = decays_on_paths(decay, ancestors, row, T, TOKENS, TREE, LANES)
    whole = of_entry(behind * decay[:, :, None], 0)
    fold = ()
    if FOLD_PARTS:
        fold_whole = gl.allocate_shared_memory(F32, [PER], LINE)
        fold_v = _allocate_parts(FOLD_PARTS, [PER * FOLDED, FOLDED], FOLD)
        fold_p = _allocate_parts(FOLD_PARTS, [PER * FOLDED, FOLDED], FOLD)
        if due > 0:
            _prepare_fold(products, strength, gates, due, fold_v, fold_p, fold_whole)
        fold = (fold_v, fold_p, fold_whole._reinterpret(F32, [PER, 1], LINE))
    read_v = _allocate_parts(TOKENS // 4, [PER * 8, ENTRIES], READ)
    read_p = _allocate_parts(TOKENS // 4, [PER * 8, ENTRIES], READ)
    _put_parts(read_v, b * behind)
    _put_parts(read_p, -b * whole)
    read_whole = gl.allocate_shared_memory(F32, [PER, 8], TABLE)
    whole = gl.max(whole, 1)
    read_whole.store(whole if TOKENS == 8 else gl.reshape(gl.join(whole, whole), (PER, 8)))
    return (read_v, read_p, read_whole._reinterpret(F32, [PER, 8], LINE)), fold
