"""Entry layout, GPU prototype: the folds of both layouts (see ``entry_layout_gpu.py``).

Raw rings: serial (``DOT`` 0), UT transform in one pass (1), two passes over the checkpoint (2), or
two kernels (3). Stored u: a rank-16 update, serial (0) or by dots (1). Every program folds a tile
of value rows; dots are fp32-grade (three bf16 parts times keys that are exact in bf16).
"""

import triton
import triton.language as tl

_STEP = ["step", "rows", "total"]


@triton.jit
def _decode(hi, lo, scale, rows, FMT: tl.constexpr, K: tl.constexpr):
    """Full read of a tile in fp32."""
    at = rows[:, None] * K + tl.arange(0, K)[None, :]
    if FMT == 0:
        s = tl.load(hi + at)
    else:
        code = (tl.load(hi + at).to(tl.int32) << 16) + (tl.load(lo + at).to(tl.int32) - 32768)
        s = code.to(tl.float32) * (tl.load(scale + rows) * (1.0 / 65536))[:, None]
    return s


@triton.jit
def _encode(hi, lo, scale, rows, s, FMT: tl.constexpr, K: tl.constexpr):
    """Write both planes of a tile; the row scale is set here."""
    at = rows[:, None] * K + tl.arange(0, K)[None, :]
    if FMT == 0:
        tl.store(hi + at, s)
    else:
        r = tl.max(tl.abs(s), 1) * (1.0 / 127)
        t = s * tl.where(r > 0, 65536.0 / r, 0.0)[:, None]
        code = (t + tl.where(t >= 0, 0.5, -0.5)).to(tl.int32)
        code = tl.minimum(tl.maximum(code, -127 * 65536), 127 * 65536)
        high = (code + 32768) >> 16
        tl.store(hi + at, high.to(tl.int8))
        tl.store(lo + at, (code - (high << 16) + 32768).to(tl.uint16))
        tl.store(scale + rows, r)


@triton.jit
def _dot3(a, b, ASM: tl.constexpr):
    """a (fp32, cut in three bf16 parts) times b (exact in bf16), fp32-grade."""
    if ASM:
        a0 = a.to(tl.bfloat16)
        a1f = a - a0.to(tl.float32)
        a1 = a1f.to(tl.bfloat16)
        a2 = (a1f - a1.to(tl.float32)).to(tl.bfloat16)
        out = tl.dot(a0, b, tl.dot(a1, b, tl.dot(a2, b)))
    else:  # the interpreter's bf16 dot is wrong
        out = tl.dot(a, b.to(tl.float32))
    return out


@triton.jit(do_not_specialize=_STEP)
def fold_inverse(kr, gr, wr, t_out, step, rows,
                 H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
                 R: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """T = (I + A)^-1 of the fold rows, one program per row and value head."""
    row = tl.program_id(0) * W + step % W
    hv = (row * H * G + tl.program_id(1)).to(tl.int64)
    committed = step + W - row % W
    js, ks = tl.arange(0, W), tl.arange(0, K)
    s = (committed - W + js) % R
    kt = tl.load(kr + (hv // G * R + s[:, None]) * K + ks[None, :])
    if ASM:
        gram = tl.dot(kt, tl.trans(kt))
    else:
        gram = tl.dot(kt.to(tl.float32), tl.trans(kt.to(tl.float32)))
    gv = tl.load(gr + hv * R + s)
    below = js[:, None] > js[None, :]
    seg = tl.cumsum(tl.where(below, gv[:, None], 0.0), 0)
    m = tl.where(below, tl.load(wr + hv * R + s)[:, None] * gram * tl.exp(seg), 0.0)
    inv = tl.where(js[:, None] == js[None, :], 1.0, 0.0)
    for j in tl.static_range(W - 1):
        col = tl.sum(tl.where(js[None, :] == j, m, 0.0), 1)
        line = tl.sum(tl.where(js[:, None] == j, inv, 0.0), 0)
        inv -= col[:, None] * line[None, :]
    at = (tl.program_id(0) * H * G + tl.program_id(1)) * W * W
    tl.store(t_out + at + js[:, None] * W + js[None, :], inv)


@triton.jit
def _solve_u(ph, pl, ps, kr, vr, gr, wr, t_in, bh, kh, committed, rows, FMT: tl.constexpr,
             V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
             CK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """U of a tile from raw inputs, reading the checkpoint in chunks of key channels."""
    js = tl.arange(0, W)
    sl = (committed - W + js) % R
    p = tl.zeros([rows.shape[0], W], tl.float32)
    for c0 in range(0, K, CK):
        cs = c0 + tl.arange(0, CK)
        at = rows[:, None] * K + cs[None, :]
        kt = tl.load(kr + (kh * R + sl[None, :]) * K + cs[:, None])
        if FMT == 0:
            s = tl.load(ph + at)
        else:
            s = ((tl.load(ph + at).to(tl.int32) << 16) + (tl.load(pl + at).to(tl.int32) - 32768)
                 ).to(tl.float32)  # fmt: skip
        p += _dot3(s, kt, ASM)
    if FMT == 1:
        p *= (tl.load(ps + rows) * (1.0 / 65536))[:, None]
    gv = tl.load(gr + bh * R + sl)
    v = tl.load(vr + (bh * R + sl[None, :]) * V + rows[:, None]).to(tl.float32)
    rhs = tl.load(wr + bh * R + sl)[None, :] * (v - p * tl.exp(tl.cumsum(gv, 0))[None, :])
    u = tl.dot(rhs, tl.load(t_in + js[None, :] * W + js[:, None]), input_precision="tf32x3")
    return u * tl.exp(tl.cumsum(gv, 0, reverse=True) - gv)[None, :]


@triton.jit(do_not_specialize=_STEP)
def fold_solve(hi, lo, scale, kr, vr, gr, wr, t_in, u_out, step, total,
               HV: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
               R: tl.constexpr, G: tl.constexpr, BV: tl.constexpr, FMT: tl.constexpr,
               CK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """First half of a raw fold in two kernels: U of the fold rows, one program per tile."""
    tiles: tl.constexpr = V // BV
    item = tl.program_id(0)
    tile, head, fold_row = item % tiles, item // tiles % HV, item // (tiles * HV)
    row = fold_row * W + step % W
    bh = (row * HV + head).to(tl.int64)
    rows = tile * BV + tl.arange(0, BV)
    u = _solve_u(hi + bh * V * K, lo + bh * V * K, scale + bh * V, kr, vr, gr, wr,
                 t_in + (fold_row * HV + head) * W * W, bh, bh // G, step + W - row % W, rows, FMT,
                 V, K, W, R, CK, ASM)  # fmt: skip
    at = ((fold_row * HV + head) * V + rows[:, None]) * W + tl.arange(0, W)[None, :]
    tl.store(u_out + at, u)


@triton.jit
def _fold_tile(s, kr, vr, gr, wr, t_in, bh, kh, committed, rows, LAYOUT: tl.constexpr,
               DOT: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
               R: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Move W entries into a tile of value rows."""
    ks = tl.arange(0, K)
    if DOT:
        js = tl.arange(0, W)
        sl = (committed - W + js) % R
        kt = tl.load(kr + (kh * R + sl[:, None]) * K + ks[None, :])
        gv = tl.load(gr + bh * R + sl)
        u = tl.load(vr + (bh * R + sl[None, :]) * V + rows[:, None]).to(tl.float32)
        if LAYOUT == 0:
            p = _dot3(s, tl.trans(kt), ASM) * tl.exp(tl.cumsum(gv, 0))[None, :]
            rhs = tl.load(wr + bh * R + sl)[None, :] * (u - p)
            t = tl.load(t_in + js[None, :] * W + js[:, None])
            u = tl.dot(rhs, t, input_precision="tf32x3")
        u = u * tl.exp(tl.cumsum(gv, 0, reverse=True) - gv)[None, :]
        s = s * tl.exp(tl.sum(gv, 0)) + _dot3(u, kt, ASM)
    elif LAYOUT == 0:
        for j in range(W):
            sl = (committed - W + j) % R
            kj = tl.load(kr + (kh * R + sl) * K + ks).to(tl.float32)
            vj = tl.load(vr + (bh * R + sl) * V + rows).to(tl.float32)
            s = s * tl.exp(tl.load(gr + bh * R + sl))
            u = tl.load(wr + bh * R + sl) * (vj - tl.sum(s * kj[None, :], 1))
            s += u[:, None] * kj[None, :]
    else:
        s *= tl.exp(tl.sum(tl.load(gr + bh * R + (committed - W + tl.arange(0, W)) % R), 0))
        after = tl.zeros([], tl.float32)
        for i in range(1, W + 1):  # newest first: the decay of entry j is a running sum
            sl = (committed - i) % R
            kj = tl.load(kr + (kh * R + sl) * K + ks).to(tl.float32)
            u = tl.load(vr + (bh * R + sl) * V + rows).to(tl.float32) * tl.exp(after)
            s += u[:, None] * kj[None, :]
            after += tl.load(gr + bh * R + sl)
    return s


@triton.jit(do_not_specialize=_STEP)
def fold(hi, lo, scale, q, k, v, g, w, kr, vr, gr, wr, t_in, u_in, y, step, total,
         HV: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
         G: tl.constexpr, BV: tl.constexpr, LAYOUT: tl.constexpr, DOT: tl.constexpr,
         FMT: tl.constexpr, CK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Fold the rows whose ring is full, then run their step: a fixed grid walks the tiles."""
    ks = tl.arange(0, K)
    tiles: tl.constexpr = V // BV
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = item % tiles
        head = item // tiles % HV
        fold_row = item // (tiles * HV)
        row = fold_row * W + step % W
        committed = step + W - row % W
        bh = (row * HV + head).to(tl.int64)
        kh = bh // G
        rows = tile * BV + tl.arange(0, BV)
        ph, pl, ps = hi + bh * V * K, lo + bh * V * K, scale + bh * V
        t_at = t_in + (fold_row * HV + head) * W * W
        if DOT >= 2 and LAYOUT == 0:
            if DOT == 2:
                u = _solve_u(ph, pl, ps, kr, vr, gr, wr, t_at, bh, kh, committed, rows, FMT, V, K,
                             W, R, CK, ASM)  # fmt: skip
            else:
                at = ((fold_row * HV + head) * V + rows[:, None]) * W + tl.arange(0, W)[None, :]
                u = tl.load(u_in + at)
            sl = (committed - W + tl.arange(0, W)) % R
            kt = tl.load(kr + (kh * R + sl[:, None]) * K + ks[None, :])
            decay = tl.exp(tl.sum(tl.load(gr + bh * R + sl), 0))
            s = _decode(ph, pl, ps, rows, FMT, K) * decay + _dot3(u, kt, ASM)
        else:
            s = _decode(ph, pl, ps, rows, FMT, K)
            s = _fold_tile(s, kr, vr, gr, wr, t_at, bh, kh, committed, rows, LAYOUT, DOT, V, K, W,
                           R, ASM)  # fmt: skip
        _encode(ph, pl, ps, rows, s, FMT, K)
        kb = tl.load(k + kh * K + ks)
        kn, qn = kb.to(tl.float32), tl.load(q + kh * K + ks).to(tl.float32)
        vn = tl.load(v + bh * V + rows)
        gn, wn = tl.load(g + bh), tl.load(w + bh)
        d, kq = tl.exp(gn), tl.sum(kn * qn, 0)
        slot = committed % R
        if LAYOUT == 0:
            c = wn * kq
            out = tl.sum(s * (d * (qn - c * kn))[None, :], 1) + c * vn.to(tl.float32)
        else:
            u = wn * (vn.to(tl.float32) - d * tl.sum(s * kn[None, :], 1))
            out = d * tl.sum(s * qn[None, :], 1) + u * kq
            vn = u.to(tl.bfloat16)
        tl.store(vr + (bh * R + slot) * V + rows, vn)
        tl.store(y + bh * V + rows, out.to(tl.bfloat16))
        if tile == 0:
            tl.store(gr + bh * R + slot, gn)
            if LAYOUT == 0:
                tl.store(wr + bh * R + slot, wn)
            if head % G == 0:
                tl.store(kr + (kh * R + slot) * K + ks, kb)
