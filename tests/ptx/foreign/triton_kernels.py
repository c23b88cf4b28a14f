"""Triton kernels; tests/harness/foreign_kernels.py launches them and compares with NumPy."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, mask=inside, other=-float("inf"))
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * columns + at, e / tl.sum(e, axis=0), mask=inside)


@triton.jit
def layer_norm(x, w, b, out, eps, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < columns, other=0.0).to(tl.float32)
        v = tl.where(at < columns, v - mean, 0.0)
        total += v * v
    scale = 1 / tl.sqrt(tl.sum(total, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        v = (v - mean) * scale * tl.load(w + at, mask=inside) + tl.load(b + at, mask=inside)
        tl.store(out + at, v, mask=inside)


@triton.jit
def matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    ks = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        left = tl.load(
            a + rows[:, None] * k + (start + ks)[None, :],
            mask=(rows[:, None] < m) & (start + ks[None, :] < k),
            other=0.0,
        )
        right = tl.load(
            b + (start + ks)[:, None] * n + columns[None, :],
            mask=(start + ks[:, None] < k) & (columns[None, :] < n),
            other=0.0,
        )
        total = tl.dot(left, right, total)
    tl.store(
        c + rows[:, None] * n + columns[None, :],
        total.to(c.dtype.element_ty),
        mask=(rows[:, None] < m) & (columns[None, :] < n),
    )


@triton.jit
def attention(q, k, v, out, scale, length, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1) * length * D
    d = tl.arange(0, D)
    queries = tl.load(q + head + rows[:, None] * D + d[None, :], mask=rows[:, None] < length, other=0.0)
    highest = tl.full([M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    result = tl.zeros([M, D], dtype=tl.float32)
    for start in range(0, length, N):
        keys_at = start + tl.arange(0, N)
        keys = tl.load(k + head + keys_at[None, :] * D + d[:, None], mask=keys_at[None, :] < length, other=0.0)
        scores = tl.dot(queries, keys) * scale
        scores = tl.where(keys_at[None, :] < length, scores, -float("inf"))
        new = tl.maximum(highest, tl.max(scores, axis=1))
        p = tl.exp2(scores - new[:, None])
        correction = tl.exp2(highest - new)
        total = total * correction + tl.sum(p, axis=1)
        values = tl.load(v + head + keys_at[:, None] * D + d[None, :], mask=keys_at[:, None] < length, other=0.0)
        result = tl.dot(p.to(values.dtype), values, result * correction[:, None])
        highest = new
    result = result / total[:, None]
    tl.store(out + head + rows[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=rows[:, None] < length)
