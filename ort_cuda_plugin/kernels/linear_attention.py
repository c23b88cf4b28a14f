"""Attention whose cache is one matrix per head, which every step decays, corrects and adds to.

Columns of that matrix do not depend on each other: a thread has one, of one head of one sequence, and goes through time
without a barrier. Neighbouring threads have neighbouring columns.
"""

from __future__ import annotations

from ort_cuda_plugin.kernels.codegen import KernelBuilder, kernel_name, register_type
from ort_cuda_plugin.kernels.layout import Plane
from ort_cuda_plugin.kernels.recurrent import Elements
from ort_cuda_plugin.program import scalar as s
from ort_cuda_plugin.program.lowering import Lowering, Tensor
from ort_cuda_plugin.program.scalar import Scalar

THREADS = 64


def linear_attention(
    ctx: Lowering,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    outputs: Tensor,
    past: Tensor | None,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: Tensor,
) -> None:
    """Writes ``outputs`` and ``state``, of any strides but for ``state``, which is of the type that sums have.

    For each step: state *= exp(decay); v = beta * (value - key @ state), or value without ``beta``;
    state += outer(key, v); outputs = scale * query @ state. Shapes, with a group of query heads per head: query [batch,
    time, heads, group, k], key [batch, time, heads, k], value [batch, time, heads, v], outputs [batch, time, heads,
    group, v], past and state [batch, heads, k, v], decay as key, beta [batch, time, heads, 1]; ``scale`` is one number.
    """
    builder = KernelBuilder()
    emit = builder.emit
    batch, steps, heads, columns = value.shape
    compute = state.dtype
    zero = f"{register_type(compute)}(0)"
    n_steps, n_group, n = (builder.integer(dim) for dim in (steps, query.shape[3], query.shape[4]))
    q, k, v = Elements(builder, query), Elements(builder, key), Elements(builder, value)
    start = None if past is None else Elements(builder, past)
    decays = None if decay is None else Elements(builder, decay)
    betas = None if beta is None else Elements(builder, beta)
    factor = Elements(builder, scale)
    results, states = Elements(builder, outputs, written=True), Elements(builder, state, written=True)
    plane = Plane(ctx, builder, [batch, heads, columns], THREADS)

    def named(text: str) -> Scalar:
        leaf = Scalar(compute, "leaf")
        emit.bind(leaf, text)
        return leaf

    b, h, m = plane.names
    with emit.block(f"if {plane.inside}:"):
        with emit.block(f"for d in range({n}):"):
            states.store(named(zero if start is None else start.load(b, h, "d", m)), b, h, "d", m)
        with emit.block(f"for t in range({n_steps}):"):
            emit.line(f"added = {v.load(b, 't', h, m)}")
            if decays is not None or betas is not None:
                emit.line(f"retrieved = {zero}")
                with emit.block(f"for d in range({n}):"):
                    kept = named(states.load(b, h, "d", m))
                    if decays is not None:
                        kept = kept * s.exp(named(decays.load(b, "t", h, "d")))
                        states.store(kept, b, h, "d", m)
                    emit.line(f"retrieved += {emit.value(kept * named(k.load(b, 't', h, 'd')))}")
                if betas is not None:
                    emit.line(f"added = {betas.load(b, 't', h, '0')} * (added - retrieved)")
            with emit.block(f"for d in range({n}):"):
                product = named(k.load(b, "t", h, "d")) * named("added")
                states.store(named(states.load(b, h, "d", m)) + product, b, h, "d", m)
            with emit.block(f"for g in range({n_group}):"):
                emit.line(f"total = {zero}")
                with emit.block(f"for d in range({n}):"):
                    emit.line(f"total += {q.load(b, 't', h, 'g', 'd')} * {states.load(b, h, 'd', m)}")
                results.store(named("total") * named(factor.load()), b, "t", h, "g", m)
    builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block)
