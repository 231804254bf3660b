"""Entry layout, CPU prototype: the numba kernels (see ``entry_layout_cpu.py``)."""

import math

import numba as nb
import numpy as np

W, K, V = 16, 128, 128
CHAIN, SOLVE, STORED = 0, 1, 2
fast = nb.njit(fastmath=True, inline="never", error_model="numpy")
wide = nb.njit(parallel=True, fastmath=True, error_model="numpy")


@nb.njit(inline="always")
def from_bf16(bits: int) -> float:
    """bf16 bits to fp32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@nb.njit(inline="always")
def to_bf16(value: float) -> int:
    """fp32 to bf16 bits, to nearest even."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
                     >> np.uint32(16))  # fmt: skip


@fast
def dot(a, b):
    """a . b"""
    s = np.float32(0)
    for i in range(K):
        s += a[i] * b[i]
    return s


@fast
def axpy(y, a, x):
    """y += a x"""
    for i in range(K):
        y[i] += a * x[i]


@fast
def load(dst, src):
    """Unpack one bf16 vector."""
    for i in range(K):
        dst[i] = from_bf16(src[i])


@fast
def read(s, r, x, y):
    """y = S x, four value rows at a time."""
    for v in range(0, V, 4):
        s0, s1, s2, s3 = s[v], s[v + 1], s[v + 2], s[v + 3]
        a0 = a1 = a2 = a3 = np.float32(0)
        for i in range(K):
            xi = x[i]
            a0 += np.float32(s0[i]) * xi
            a1 += np.float32(s1[i]) * xi
            a2 += np.float32(s2[i]) * xi
            a3 += np.float32(s3[i]) * xi
        y[v], y[v + 1], y[v + 2], y[v + 3] = a0 * r[v], a1 * r[v + 1], a2 * r[v + 2], a3 * r[v + 3]


@fast
def read2(s, r, x, z, y, p):
    """y = S x and p = S z in one pass."""
    for v in range(0, V, 2):
        s0, s1 = s[v], s[v + 1]
        a0 = a1 = b0 = b1 = np.float32(0)
        for i in range(K):
            t0, t1 = np.float32(s0[i]), np.float32(s1[i])
            a0 += t0 * x[i]
            a1 += t1 * x[i]
            b0 += t0 * z[i]
            b1 += t1 * z[i]
        y[v], y[v + 1], p[v], p[v + 1] = a0 * r[v], a1 * r[v + 1], b0 * r[v], b1 * r[v + 1]


@fast
def fold_products(s, kt, p):
    """p[j] = S k_j for the 16 keys: four value rows times four keys at a time."""
    for v in range(0, V, 4):
        r0, r1, r2, r3 = s[v], s[v + 1], s[v + 2], s[v + 3]
        for j in range(0, W, 4):
            k0, k1, k2, k3 = kt[j], kt[j + 1], kt[j + 2], kt[j + 3]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
            c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0)
            for i in range(K):
                a, b, c, d = r0[i], r1[i], r2[i], r3[i]
                a0, b0, c0, d0 = a0 + a * k0[i], b0 + b * k0[i], c0 + c * k0[i], d0 + d * k0[i]
                a1, b1, c1, d1 = a1 + a * k1[i], b1 + b * k1[i], c1 + c * k1[i], d1 + d * k1[i]
                a2, b2, c2, d2 = a2 + a * k2[i], b2 + b * k2[i], c2 + c * k2[i], d2 + d * k2[i]
                a3, b3, c3, d3 = a3 + a * k3[i], b3 + b * k3[i], c3 + c * k3[i], d3 + d * k3[i]
            p[j, v], p[j, v + 1], p[j, v + 2], p[j, v + 3] = a0, b0, c0, d0
            p[j + 1, v], p[j + 1, v + 1], p[j + 1, v + 2], p[j + 1, v + 3] = a1, b1, c1, d1
            p[j + 2, v], p[j + 2, v + 1], p[j + 2, v + 2], p[j + 2, v + 3] = a2, b2, c2, d2
            p[j + 3, v], p[j + 3, v + 1], p[j + 3, v + 2], p[j + 3, v + 3] = a3, b3, c3, d3


@fast
def fold_update(s, decay, u, kt):
    """S = decay S + sum_j u_j k_j^T, eight entries at a time."""
    for v in range(V):
        row = s[v]
        d = decay
        for j in range(0, W, 8):
            u0, u1, u2, u3 = u[j, v], u[j + 1, v], u[j + 2, v], u[j + 3, v]
            u4, u5, u6, u7 = u[j + 4, v], u[j + 5, v], u[j + 6, v], u[j + 7, v]
            k0, k1, k2, k3 = kt[j], kt[j + 1], kt[j + 2], kt[j + 3]
            k4, k5, k6, k7 = kt[j + 4], kt[j + 5], kt[j + 6], kt[j + 7]
            for i in range(K):
                row[i] = (d * row[i] + (u0 * k0[i] + u1 * k1[i]) + (u2 * k2[i] + u3 * k3[i])
                          + (u4 * k4[i] + u5 * k5[i]) + (u6 * k6[i] + u7 * k7[i]))  # fmt: skip
            d = np.float32(1)


@fast
def decode(hi, lo, r, tile):
    """Both planes of a head to fp32."""
    for v in range(V):
        scale = r[v] * np.float32(1 / 65536)
        for i in range(K):  # exact in fp32; numba would widen integer products to 64 bits
            code = np.float32(hi[v, i]) * np.float32(65536) + np.float32(lo[v, i])
            tile[v, i] = (code - np.float32(32768)) * scale


@fast
def encode(tile, hi, lo, r):
    """Set the row scales and write both planes of a head."""
    t = np.empty(K, np.float32)
    for v in range(V):
        row, high_row, low_row, half = tile[v], hi[v], lo[v], K // 2
        for i in range(K):
            t[i] = abs(row[i])
        while half > 0:  # halving: a plain max reduction is not vectorised
            for i in range(half):
                t[i] = t[i] if t[i] > t[i + half] else t[i + half]
            half //= 2
        r[v] = t[0] * np.float32(1 / 127)
        inv = np.float32(65536) / r[v] if r[v] > 0 else np.float32(0)
        for i in range(K):
            code = np.floor(row[i] * inv + np.float32(0.5))
            high = np.floor((code + np.float32(32768)) * np.float32(1 / 65536))
            high_row[i] = np.int32(high)
            low_row[i] = np.int32(code - high * np.float32(65536) + np.float32(32768))


@fast
def fold_u(gram, g, w, u, p, mode):
    """Weighted U of the fold in u; raw rings hold v there and are solved from p = S k_j."""
    if mode != STORED:
        run = np.float32(0)
        for j in range(W):
            run += g[j]
            e = np.float32(math.exp(run))
            for v in range(V):
                u[j, v] = w[j] * (u[j, v] - e * p[j, v])
            seg = np.float32(0)
            for i in range(j - 1, -1, -1):
                seg += g[i + 1]
                axpy(u[j], -w[j] * gram[j, i] * np.float32(math.exp(seg)), u[i])
    run = np.float32(0)
    for j in range(W - 1, -1, -1):
        e = np.float32(math.exp(run))
        for v in range(V):
            u[j, v] *= e
        run += g[j]
    return np.float32(math.exp(run))


@fast
def fold_head(s, hi, lo, r, full, kt, gram, ring, g, w, u, p, mode):
    """Move the 16 entries of one head into its checkpoint; s is its fp32 state or scratch."""
    for j in range(W):
        load(u[j], ring[j])
    if not full:
        decode(hi, lo, r, s)
    if mode != STORED:
        fold_products(s, kt, p)
    fold_update(s, fold_u(gram, g, w, u, p, mode), u, kt)
    if not full:
        encode(s, hi, lo, r)


@fast
def pull_back(n, kt, gram, b, q, g, w, x, c, mode):
    """c and x for one head; entries 0 .. n, newest last."""
    if mode == CHAIN:
        for i in range(K):
            x[i] = q[i]
        for j in range(n, -1, -1):
            c[j] = w[j] * dot(kt[j], x)
            d = np.float32(math.exp(g[j]))
            for i in range(K):
                x[i] = d * (x[i] - c[j] * kt[j, i])
        return
    for j in range(n, -1, -1):  # b[j] runs as k_j . x, from the Gram matrix alone
        c[j] = w[j] * b[j]
        d = np.float32(math.exp(g[j]))
        for i in range(j):
            b[i] = d * (b[i] - c[j] * gram[j, i])
    for i in range(K):
        x[i] = q[i]
    for j in range(n, -1, -1):
        d = np.float32(math.exp(g[j]))
        for i in range(K):
            x[i] = d * (x[i] - c[j] * kt[j, i])


@fast
def step_raw(n, s, hi, r, full, kt, gram, b, q, g, w, vr, x, c, t, y, mode):
    """y = S_0 x + sum c_j v_j for one head."""
    pull_back(n, kt, gram, b, q, g, w, x, c, mode)
    if full:
        read(s, r, x, y)
    else:
        read(hi, r, x, y)
    for j in range(n + 1):
        load(t, vr[j])
        axpy(y, c[j], t)


@fast
def step_stored(n, s, hi, r, full, a, b, k, q, g, w, v, ur, t, p, y):
    """u = w (v - S k) and y = S q for one head; append u."""
    if full:
        read2(s, r, q, k, y, p)
    else:
        read2(hi, r, q, k, y, p)
    run = g[n]
    for j in range(n - 1, -1, -1):
        run += g[j]
    e = np.float32(math.exp(run))
    for i in range(V):
        y[i] *= e
        p[i] *= e
    run = g[n]
    for j in range(n - 1, -1, -1):
        e = np.float32(math.exp(run))
        load(t, ur[j])
        axpy(y, e * b[j], t)
        axpy(p, e * a[j], t)
        run += g[j]
    for i in range(V):
        u = w * (from_bf16(v[i]) - p[i])
        ur[n, i] = to_bf16(u)
        y[i] += u * b[n]


@wide
def layer_step(step, state, hi, lo, sc, full, kr, vr, gr, wr, q, k, v, g, w, y, mode):
    """One decode step of a layer: rows whose ring is full fold first, then every row reads."""
    B, H = q.shape[0], q.shape[1]
    group = vr.shape[1] // H
    for item in nb.prange(B * H):
        b, h = item // H, item % H
        n = (step + W - b % W) % W
        kt, gram = np.empty((W, K), np.float32), np.empty((W, W), np.float32)
        bq, ak, c = np.empty(W, np.float32), np.empty(W, np.float32), np.empty(W, np.float32)
        x, t, p = np.empty(K, np.float32), np.empty(V, np.float32), np.empty(V, np.float32)
        run, qf, kf = np.empty(W, np.float32), q[b, h], k[b, h]
        if n == 0:
            u, pt = np.empty((W, V), np.float32), np.empty((W, V), np.float32)
            tile = np.empty((1 if full else V, K), np.float32)
            for j in range(W):
                load(kt[j], kr[b, h, j])
                if mode != STORED:
                    for i in range(j):
                        gram[j, i] = dot(kt[j], kt[i])
            for i in range(group):
                a = h * group + i
                fold_head(state[b, a] if full else tile, hi[b, a], lo[b, a], sc[b, a], full, kt,
                          gram, vr[b, a], gr[b, a], wr[b, a], u, pt, mode)  # fmt: skip
        for i in range(K):
            kr[b, h, n, i] = to_bf16(kf[i])
        for j in range(n + 1):
            load(kt[j], kr[b, h, j])
            if mode != CHAIN:
                bq[j] = dot(kt[j], qf)
            if mode == STORED:
                ak[j] = dot(kt[j], kf)
            if mode == SOLVE:
                for i in range(j):
                    gram[j, i] = dot(kt[j], kt[i])
        for i in range(group):
            a = h * group + i
            gr[b, a, n] = g[b, a]
            if mode == STORED:
                step_stored(n, state[b, a], hi[b, a], sc[b, a], full, ak, bq, kf, qf, gr[b, a],
                            w[b, a], v[b, a], vr[b, a], t, p, y[b, a])  # fmt: skip
            else:
                wr[b, a, n] = w[b, a]
                vr[b, a, n] = v[b, a]
                run[:] = bq
                step_raw(n, state[b, a], hi[b, a], sc[b, a], full, kt, gram, run, qf, gr[b, a],
                         wr[b, a], vr[b, a], x, c, t, y[b, a], mode)  # fmt: skip
