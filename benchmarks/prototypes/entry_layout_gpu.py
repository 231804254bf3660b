"""Entry layout, GPU prototype: a raw-only ring with pull-back against a ring with stored u.

One layer-step of Gated DeltaNet decode (T = 1, window 16). Rows sit at different positions, so one
row in 16 folds in every step. A CUDA graph holds a whole fold cycle over several state sets.

    python benchmarks/prototypes/entry_layout_gpu.py --out entry-layout-h200.json
    TRITON_INTERPRET=1 python benchmarks/prototypes/entry_layout_gpu.py --check-only --tiny

``raw``: ring (k, v, g, w); one query is pulled back, the checkpoint is read at one vector; the fold
solves for u. ``u``: ring (k, u, g); the checkpoint is read at k and q; the fold is a rank-16 update.
Formats: ``f32``, and ``q24`` (int8 high plane, biased uint16 low plane, row scales; a step reads the
high plane only). The driver and the timing live in ``entry_layout_gpu_bench.py``.
"""

import os

import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
_STEP = ["step", "rows", "total"]


@triton.jit
def _digits(x, G: tl.constexpr, K: tl.constexpr):
    """Cut x [G, K] into two packed base-256 digits [G, K / 4] and a scale [G]."""
    amax = tl.max(tl.abs(x), 1)
    inv = tl.where(amax > 0, 32512.0 / amax, 0.0)
    t = x * inv[:, None]
    i = (t + tl.where(t >= 0, 0.5, -0.5)).to(tl.int32)
    d1 = (i + 128) >> 8
    d0 = i - (d1 << 8)
    shift = (tl.arange(0, 4) * 8)[None, None, :]
    w1 = tl.sum((tl.reshape(d1, (G, K // 4, 4)) & 255) << shift, 2)
    w0 = tl.sum((tl.reshape(d0, (G, K // 4, 4)) & 255) << shift, 2)
    return w1, w0, amax / 32512.0


@triton.jit
def _dp4a(a, b, acc, ASM: tl.constexpr):
    """Add the dot products of four signed bytes to acc."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], tl.int32, True, 1
        )
    out = acc
    for i in tl.static_range(4):
        out += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return out


@triton.jit
def _read(hi, scale, x, dig, xs, rows, FMT: tl.constexpr, K: tl.constexpr, ASM: tl.constexpr):
    """Return S x for a tile of value rows; x and dig point at this head's vector."""
    if FMT == 0:
        ks = tl.arange(0, K)
        s = tl.load(hi + rows[:, None] * K + ks[None, :])
        return tl.sum(s * tl.load(x + ks)[None, :].to(tl.float32), 1)
    ws = tl.arange(0, K // 4)
    s = tl.load(hi + rows[:, None] * (K // 4) + ws[None, :])
    d1 = tl.load(dig + ws)[None, :]
    d0 = tl.load(dig + K // 4 + ws)[None, :]
    acc = _dp4a(s, d0, _dp4a(s, d1, tl.zeros_like(s), ASM) << 8, ASM)
    return tl.sum(acc, 1).to(tl.float32) * (tl.load(xs) * tl.load(scale + rows))


@triton.jit
def _read2(hi, scale, x, x2, dig, xs, rows, FMT: tl.constexpr, K: tl.constexpr, ASM: tl.constexpr):
    """Return S k and S q with one pass over the tile."""
    if FMT == 0:
        ks = tl.arange(0, K)
        s = tl.load(hi + rows[:, None] * K + ks[None, :])
        y0 = tl.sum(s * tl.load(x + ks)[None, :].to(tl.float32), 1)
        return y0, tl.sum(s * tl.load(x2 + ks)[None, :].to(tl.float32), 1)
    ws = tl.arange(0, K // 4)
    s = tl.load(hi + rows[:, None] * (K // 4) + ws[None, :])
    zero = tl.zeros_like(s)
    k1, k0 = tl.load(dig + ws)[None, :], tl.load(dig + K // 4 + ws)[None, :]
    q1, q0 = tl.load(dig + K // 2 + ws)[None, :], tl.load(dig + 3 * (K // 4) + ws)[None, :]
    ak = tl.sum(_dp4a(s, k0, _dp4a(s, k1, zero, ASM) << 8, ASM), 1).to(tl.float32)
    aq = tl.sum(_dp4a(s, q0, _dp4a(s, q1, zero, ASM) << 8, ASM), 1).to(tl.float32)
    r = tl.load(scale + rows)
    return ak * (r * tl.load(xs)), aq * (r * tl.load(xs + 1))


@triton.jit(do_not_specialize=_STEP)
def prep_raw(q, k, g, w, kr, gr, wr, x_out, c_out, dig, xs, step,
             H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
             R: tl.constexpr, FMT: tl.constexpr):  # fmt: skip
    """Append (k, g, w) and pull q back through the ring: one program per row and key head."""
    row, head = tl.program_id(0), tl.program_id(1)
    committed = step + W - row % W
    n0 = committed % W
    if n0 > 0:
        bh = (row * H + head).to(tl.int64)
        gs, ks = tl.arange(0, G), tl.arange(0, K)
        hv = bh * G + gs
        kn = tl.load(k + bh * K + ks)
        gn, wn = tl.load(g + hv), tl.load(w + hv)
        slot = committed % R
        tl.store(kr + (bh * R + slot) * K + ks, kn)
        tl.store(gr + hv * R + slot, gn)
        tl.store(wr + hv * R + slot, wn)
        kn = kn.to(tl.float32)
        qn = tl.load(q + bh * K + ks).to(tl.float32)
        c = wn * tl.sum(kn * qn, 0)
        tl.store(c_out + hv * W + n0, c)
        x = tl.exp(gn)[:, None] * (qn[None, :] - c[:, None] * kn[None, :])
        for i in tl.static_range(1, W):
            j = n0 - i
            live = j >= 0
            s = (committed - i) % R
            kj = tl.load(kr + (bh * R + s) * K + ks, mask=live, other=0.0).to(tl.float32)
            dj = tl.exp(tl.load(gr + hv * R + s, mask=live, other=0.0))
            wj = tl.load(wr + hv * R + s, mask=live, other=0.0)
            c = wj * tl.sum(x * kj[None, :], 1)
            tl.store(c_out + hv * W + j, c, mask=live)
            x = dj[:, None] * (x - c[:, None] * kj[None, :])
        if FMT == 0:
            tl.store(x_out + hv[:, None] * K + ks[None, :], x)
        else:
            w1, w0, scale = _digits(x, G, K)
            ws = tl.arange(0, K // 4)
            tl.store(dig + hv[:, None] * (K // 2) + ws[None, :], w1)
            tl.store(dig + hv[:, None] * (K // 2) + K // 4 + ws[None, :], w0)
            tl.store(xs + hv, scale)


@triton.jit(do_not_specialize=_STEP)
def prep_u(q, k, g, kr, gr, a_out, b_out, e_out, dig, xs, step,
           H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
           R: tl.constexpr, FMT: tl.constexpr):  # fmt: skip
    """Append (k, g) and form the weights of the stored u for k and for q."""
    row, head = tl.program_id(0), tl.program_id(1)
    committed = step + W - row % W
    n0 = committed % W
    if n0 > 0:
        bh = (row * H + head).to(tl.int64)
        gs, ks, js = tl.arange(0, G), tl.arange(0, K), tl.arange(0, W)
        hv = bh * G + gs
        kn = tl.load(k + bh * K + ks)
        gn = tl.load(g + hv)
        slot = committed % R
        tl.store(kr + (bh * R + slot) * K + ks, kn)
        tl.store(gr + hv * R + slot, gn)
        kn = kn.to(tl.float32)
        qn = tl.load(q + bh * K + ks).to(tl.float32)
        live = js < n0
        s = (committed - n0 + js) % R
        kt = tl.load(kr + (bh * R + s[:, None]) * K + ks[None, :], mask=live[:, None], other=0.0)
        kt = kt.to(tl.float32)
        a = tl.sum(kt * kn[None, :], 1)
        b = tl.sum(kt * qn[None, :], 1)
        gt = tl.load(gr + hv[:, None] * R + s[None, :], mask=live[None, :], other=0.0)
        # decay of entry j: gates of the entries after it and of the new token
        after = gn[:, None] + (tl.cumsum(gt, 1, reverse=True) - gt)
        e = tl.exp(after)
        out = hv[:, None] * W + js[None, :]
        tl.store(a_out + out, e * a[None, :])
        tl.store(b_out + out, e * b[None, :])
        tl.store(e_out + hv * 2, tl.exp(gn + tl.sum(gt, 1)))
        tl.store(e_out + hv * 2 + 1, tl.zeros([G], tl.float32) + tl.sum(kn * qn, 0))
        if FMT == 1:
            ws = tl.arange(0, K // 4)
            for i in tl.static_range(2):
                vec = kn if i == 0 else qn
                w1, w0, scale = _digits(vec[None, :], 1, K)
                at = dig + (bh * 2 + i) * (K // 2) + ws[None, :]
                tl.store(at, w1)
                tl.store(at + K // 4, w0)
                tl.store(xs + bh * 2 + i + tl.arange(0, 1), scale)


@triton.jit(do_not_specialize=_STEP)
def step_raw(hi, scale, x, dig, xs, c, v, vr, y, step,
             HV: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
             R: tl.constexpr, BV: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """y = S_0 x + sum c_j v_j for rows that do not fold; append v."""
    row, head, tile = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    committed = step + W - row % W
    n0 = committed % W
    if n0 > 0:
        bh = (row * HV + head).to(tl.int64)
        rows = tile * BV + tl.arange(0, BV)
        js = tl.arange(0, W)
        words = K if FMT == 0 else K // 4
        out = _read(hi + bh * V * words, scale + bh * V, x + bh * K, dig + bh * (K // 2), xs + bh,
                    rows, FMT, K, ASM)  # fmt: skip
        live = js < n0
        at = vr + (bh * R + (committed - n0 + js)[:, None] % R) * V + rows[None, :]
        vt = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
        ct = tl.load(c + bh * W + js, mask=live, other=0.0)
        vn = tl.load(v + bh * V + rows)
        tl.store(vr + (bh * R + committed % R) * V + rows, vn)
        out += tl.sum(ct[:, None] * vt, 0) + tl.load(c + bh * W + n0) * vn.to(tl.float32)
        tl.store(y + bh * V + rows, out.to(tl.bfloat16))


@triton.jit(do_not_specialize=_STEP)
def step_u(hi, scale, k, q, dig, xs, a, b, e, v, w, ur, y, step,
           HV: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
           G: tl.constexpr, BV: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """u = w (v - S k), y = S q for rows that do not fold; append u."""
    row, head, tile = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    committed = step + W - row % W
    n0 = committed % W
    if n0 > 0:
        bh = (row * HV + head).to(tl.int64)
        kh = bh // G
        rows = tile * BV + tl.arange(0, BV)
        js = tl.arange(0, W)
        words = K if FMT == 0 else K // 4
        p, out = _read2(hi + bh * V * words, scale + bh * V, k + kh * K, q + kh * K, dig + kh * K,
                        xs + kh * 2, rows, FMT, K, ASM)  # fmt: skip
        live = js < n0
        at = ur + (bh * R + (committed - n0 + js)[:, None] % R) * V + rows[None, :]
        ut = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
        at_ = tl.load(a + bh * W + js, mask=live, other=0.0)
        bt = tl.load(b + bh * W + js, mask=live, other=0.0)
        e0 = tl.load(e + bh * 2)
        p = e0 * p + tl.sum(at_[:, None] * ut, 0)
        out = e0 * out + tl.sum(bt[:, None] * ut, 0)
        u = tl.load(w + bh) * (tl.load(v + bh * V + rows).to(tl.float32) - p)
        tl.store(ur + (bh * R + committed % R) * V + rows, u.to(tl.bfloat16))
        tl.store(y + bh * V + rows, (out + u * tl.load(e + bh * 2 + 1)).to(tl.bfloat16))


@triton.jit
def _decode(hi, lo, scale, rows, FMT: tl.constexpr, K: tl.constexpr):
    """Full read of a tile in fp32."""
    at = rows[:, None] * K + tl.arange(0, K)[None, :]
    if FMT == 0:
        return tl.load(hi + at)
    code = (tl.load(hi + at).to(tl.int32) << 16) + (tl.load(lo + at).to(tl.int32) - 32768)
    return code.to(tl.float32) * (tl.load(scale + rows) * (1.0 / 65536))[:, None]


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
    if not ASM:  # the interpreter's bf16 dot is wrong
        return tl.dot(a, b.to(tl.float32))
    a0 = a.to(tl.bfloat16)
    a1f = a - a0.to(tl.float32)
    a1 = a1f.to(tl.bfloat16)
    a2 = (a1f - a1.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a0, b, tl.dot(a1, b, tl.dot(a2, b)))


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
        return s * tl.exp(tl.sum(gv, 0)) + _dot3(u, kt, ASM)
    for j in range(W):
        sl = (committed - W + j) % R
        kj = tl.load(kr + (kh * R + sl) * K + ks).to(tl.float32)
        u = tl.load(vr + (bh * R + sl) * V + rows).to(tl.float32)
        s = s * tl.exp(tl.load(gr + bh * R + sl))
        if LAYOUT == 0:
            u = tl.load(wr + bh * R + sl) * (u - tl.sum(s * kj[None, :], 1))
        s += u[:, None] * kj[None, :]
    return s


@triton.jit(do_not_specialize=_STEP)
def fold(hi, lo, scale, q, k, v, g, w, kr, vr, gr, wr, t_in, y, step, total,
         HV: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
         G: tl.constexpr, BV: tl.constexpr, LAYOUT: tl.constexpr, DOT: tl.constexpr,
         FMT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
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
        s = _decode(ph, pl, ps, rows, FMT, K)
        t_at = t_in + (fold_row * HV + head) * W * W
        s = _fold_tile(s, kr, vr, gr, wr, t_at, bh, kh, committed, rows, LAYOUT, DOT, V, K, W, R,
                       ASM)  # fmt: skip
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
