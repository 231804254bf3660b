"""Entry layout, GPU prototype: a raw-only ring with pull-back against a ring with stored u.

One layer-step of Gated DeltaNet decode (T = 1, window 16). Rows sit at different positions, so one
row in 16 folds in every step. A CUDA graph holds a whole fold cycle over several state sets.

    python benchmarks/prototypes/entry_layout_gpu_bench.py --out entry-layout-h200.json
    TRITON_INTERPRET=1 python benchmarks/prototypes/entry_layout_gpu_bench.py --check-only --tiny

``raw``: ring (k, v, g, w); one query is pulled back, the checkpoint is read at one vector; the
fold solves for u. ``u``: ring (k, u, g); the checkpoint is read at k and q; the fold is a rank-16
update. Formats: ``f32``, and ``q24`` (int8 high plane, biased uint16 low plane, row scales; a step
reads the high plane only). Here: pull-back and step; ``entry_layout_gpu_fold.py``: folds;
``entry_layout_gpu_bench.py``: driver and timing.
"""

# Triton reads tuple sums, not starred tuples
# ruff: noqa: RUF005
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
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], tl.int32, True, 1
        )
    else:
        for i in tl.static_range(4):
            acc += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def _read(hi, scale, x, dig, xs, rows, FMT: tl.constexpr, K: tl.constexpr, ASM: tl.constexpr):
    """Return S x for a tile of value rows; x and dig point at this head's vector."""
    if FMT == 0:
        ks = tl.arange(0, K)
        s = tl.load(hi + rows[:, None] * K + ks[None, :])
        out = tl.sum(s * tl.load(x + ks)[None, :].to(tl.float32), 1)
    else:
        ws = tl.arange(0, K // 4)
        s = tl.load(hi + rows[:, None] * (K // 4) + ws[None, :])
        d1 = tl.load(dig + ws)[None, :]
        d0 = tl.load(dig + K // 4 + ws)[None, :]
        acc = _dp4a(s, d0, _dp4a(s, d1, tl.zeros_like(s), ASM) << 8, ASM)
        out = tl.sum(acc, 1).to(tl.float32) * (tl.load(xs) * tl.load(scale + rows))
    return out


@triton.jit
def _read2(hi, scale, x, x2, dig, xs, rows, FMT: tl.constexpr, K: tl.constexpr, ASM: tl.constexpr):
    """Return S k and S q with one pass over the tile."""
    if FMT == 0:
        ks = tl.arange(0, K)
        s = tl.load(hi + rows[:, None] * K + ks[None, :])
        yk = tl.sum(s * tl.load(x + ks)[None, :].to(tl.float32), 1)
        yq = tl.sum(s * tl.load(x2 + ks)[None, :].to(tl.float32), 1)
    else:
        ws = tl.arange(0, K // 4)
        s = tl.load(hi + rows[:, None] * (K // 4) + ws[None, :])
        zero = tl.zeros_like(s)
        k1, k0 = tl.load(dig + ws)[None, :], tl.load(dig + K // 4 + ws)[None, :]
        q1, q0 = tl.load(dig + K // 2 + ws)[None, :], tl.load(dig + 3 * (K // 4) + ws)[None, :]
        ak = tl.sum(_dp4a(s, k0, _dp4a(s, k1, zero, ASM) << 8, ASM), 1).to(tl.float32)
        aq = tl.sum(_dp4a(s, q0, _dp4a(s, q1, zero, ASM) << 8, ASM), 1).to(tl.float32)
        r = tl.load(scale + rows)
        yk = ak * (r * tl.load(xs))
        yq = aq * (r * tl.load(xs + 1))
    return yk, yq


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


@triton.jit
def _products(at, kt, q, W: tl.constexpr, ASM: tl.constexpr):
    """Write k_i . k_j and k_j . q of a [W, K] tile to scratch."""
    js = tl.arange(0, W)
    if ASM:
        prod = tl.dot(kt, tl.trans(kt))
    else:
        prod = tl.dot(kt.to(tl.float32), tl.trans(kt.to(tl.float32)))
    tl.store(at + js[:, None] * W + js[None, :], prod)
    tl.store(at + W * W + js, tl.sum(kt.to(tl.float32) * q[None, :], 1))


@triton.jit(do_not_specialize=_STEP)
def prep_gram(q, k, g, w, kr, gr, wr, x_out, c_out, dig, xs, gram, step,
              HV: tl.constexpr, G: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
              W: tl.constexpr, R: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """prep_raw with the chain on scalars, P value heads a program: r_j = k_j . x by Gram matrix.

    r_j = d_i (r_j - c_i k_i . k_j) for every older j; then x = d_j (x - c_j k_j), no reduction.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    committed = step + W - row % W
    n0 = committed % W
    if n0 > 0:
        hv0 = (row * HV + part * P).to(tl.int64)
        bh = hv0 // G
        ks, js = tl.arange(0, K), tl.arange(0, W)
        hv = hv0 + tl.arange(0, P)
        slot = committed % R
        kn, gn, wn = tl.load(k + bh * K + ks), tl.load(g + hv), tl.load(w + hv)
        qn = tl.load(q + bh * K + ks).to(tl.float32)
        # entry 0 is the newest, so that every loop is static
        live = (js > 0) & (js <= n0)
        s = (committed + R - js) % R
        kt = tl.load(kr + (bh * R + s[:, None]) * K + ks[None, :], mask=live[:, None], other=0.0)
        kt = tl.where(js[:, None] == 0, kn[None, :], kt)
        at = gram + hv0 * (W * W + W)
        _products(at, kt, qn, W, ASM)
        dec, wgt, r, cs = (tl.exp(gn),), (wn,), (), ()
        for j in tl.static_range(1, W):
            sj = (committed + R - j) % R
            dec = dec + (tl.exp(tl.load(gr + hv * R + sj, mask=j <= n0, other=0.0)),)
            wgt = wgt + (tl.load(wr + hv * R + sj, mask=j <= n0, other=0.0),)
        tl.debug_barrier()
        for j in tl.static_range(W):
            r = r + (tl.zeros([P], tl.float32) + tl.load(at + W * W + j),)
        for i in tl.static_range(W):
            c = wgt[i] * r[i]
            older = ()
            for j in tl.static_range(W):
                older = older + (dec[i] * (r[j] - c * tl.load(at + i * W + j)) if j > i else r[j],)
            r = older
            cs = cs + (c,)
        x = tl.zeros([P, K], tl.float32) + qn[None, :]
        for i in tl.static_range(W):
            if i == 0:
                ki = kn.to(tl.float32)
            else:
                si = (committed + R - i) % R
                ki = tl.load(kr + (bh * R + si) * K + ks, mask=i <= n0, other=0.0).to(tl.float32)
            x = dec[i][:, None] * (x - cs[i][:, None] * ki[None, :])
        for i in tl.static_range(W):
            tl.store(c_out + hv * W + (n0 - i), cs[i], mask=i <= n0)
        if FMT == 0:
            tl.store(x_out + hv[:, None] * K + ks[None, :], x)
        else:
            w1, w0, scale = _digits(x, P, K)
            ws = tl.arange(0, K // 4)
            tl.store(dig + hv[:, None] * (K // 2) + ws[None, :], w1)
            tl.store(dig + hv[:, None] * (K // 2) + K // 4 + ws[None, :], w0)
            tl.store(xs + hv, scale)
        tl.store(kr + (bh * R + slot) * K + ks, kn, mask=part * P % G == 0)
        tl.store(gr + hv * R + slot, gn)
        tl.store(wr + hv * R + slot, wn)


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
