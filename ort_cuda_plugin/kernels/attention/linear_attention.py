"""Linear attention: a recurrent matrix state per head, which each time step decays, corrects and updates.

The columns of the state are independent: a thread computes one column of one head of one sequence through all time
steps, without a barrier. Adjacent threads own adjacent columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.expressions.symbolic import Dim, floordiv
from ...program.lowering.context import Lowering, Tensor
from ...program.steps.trace import in_place_of
from ..codegen.launch_geometry import Plane
from ..codegen.source import KernelBuilder, kernel_name, register_type
from ..rnn.rnn_cell import Elements

THREADS = 64  # threads per block


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Tensors of a linear attention launch, of any strides. ``state`` has the accumulators' type.

    query [batch, time, query heads, group, k], key [batch, time, key heads, k], value [batch, time, heads, v], outputs
    [batch, time, heads, group, v], past and state [batch, heads, k, v], decay [batch, time, heads, k], beta [batch,
    time, heads, 1]; ``scale`` is one number. The numbers of query heads and key heads divide heads: adjacent heads
    share a query head or a key head.

    Attributes:
        past: the state before the first time step; None for zeros.
        decay: None for a state that does not decay.
        beta: None if the state is not corrected.
        bounds: int32 [batch + 1], first time steps of packed sequences; None if each sequence has all time steps.
        window: [slots, batch, heads, k, v], the states after the last time steps, oldest first; slots before the first
            time step are zero.
        added: [batch, slots, heads, v]; row t is the second factor of ``state += outer(key, ...)`` in time step t.
        past_window: a tensor of the shape of ``window``; ``past`` is a slice of it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    past: Tensor | None
    decay: Tensor | None
    beta: Tensor | None
    scale: Tensor
    state: Tensor
    outputs: Tensor
    bounds: Tensor | None = None
    window: Tensor | None = None
    added: Tensor | None = None
    past_window: Tensor | None = None


def linear_attention(ctx: Lowering, given: LinearAttention) -> None:
    """Launch linear attention. Each time step decays, corrects, updates and reads the state:

    state *= exp(decay), if there is a decay; v = beta * (value - key @ state), or value without ``beta``;
    state += outer(key, v); outputs = scale * query @ state.
    """
    builder = KernelBuilder()
    emit = builder.emit
    batch, steps, heads, columns = given.value.shape
    compute = given.state.dtype
    zero = f"{register_type(compute)}(0)"
    n_steps, n_group, n = (builder.integer(dim) for dim in (steps, given.query.shape[3], given.query.shape[4]))
    q, k, v = (Elements(builder, x) for x in (given.query, given.key, given.value))
    start, decays, betas = (None if x is None else Elements(builder, x) for x in (given.past, given.decay, given.beta))
    factor = Elements(builder, given.scale)
    results, states = (Elements(builder, x, written=True) for x in (given.outputs, given.state))
    windows, additions = (
        None if x is None else Elements(builder, x, written=True) for x in (given.window, given.added)
    )
    plane = Plane(ctx, builder, [batch, heads, columns], THREADS)
    b, h, m = plane.names

    def named(text: str) -> Scalar:
        leaf = Scalar(compute, "leaf")
        emit.bind(leaf, text)
        return leaf

    def shared_head(count: Dim) -> str:
        """Return the index of the query or key head, one of ``count``, that the thread's head reads."""
        ratio = floordiv(heads, count)
        return h if ratio == 1 else emit.assign(f"{h} // {builder.integer(ratio)}")

    with emit.block(f"if {plane.inside}:"):
        hq, hk = shared_head(given.query.shape[2]), shared_head(given.key.shape[2])
        with emit.block(f"for d in range({n}):"):
            states.store(named(zero if start is None else start.load(b, h, "d", m)), b, h, "d", m)
        begin, end = "int64(0)", n_steps
        if given.bounds is not None:
            # The host cannot check bounds that are computed on the device: clamp them to the time axis.
            bounds, stride = builder.tensor(given.bounds), builder.stride(given.bounds.strides[0])
            begin = emit.assign(f"max(int64({bounds}[{b} * {stride}]), int64(0))")
            end = emit.assign(f"min(int64({bounds}[({b} + 1) * {stride}]), {n_steps})")
        slots = "0" if given.window is None else builder.integer(given.window.shape[0])
        if windows is not None:
            lacking = f"{slots} - max({end} - {begin}, int64(0))"
            with emit.block(f"for slot in range({lacking}):"), emit.block(f"for d in range({n}):"):
                windows.store(named(zero), "slot", b, h, "d", m)
        with emit.block(f"for t in range({begin}, {end}):"):
            emit.line(f"added = {v.load(b, 't', h, m)}")
            if decays is not None or betas is not None:
                emit.line(f"retrieved = {zero}")
                with emit.block(f"for d in range({n}):"):
                    kept = named(states.load(b, h, "d", m))
                    if decays is not None:
                        kept = kept * s.exp(named(decays.load(b, "t", h, "d")))
                        states.store(kept, b, h, "d", m)
                    emit.line(f"retrieved += {emit.value(kept * named(k.load(b, 't', hk, 'd')))}")
                if betas is not None:
                    emit.line(f"added = {betas.load(b, 't', h, '0')} * (added - retrieved)")
            if additions is not None and given.added is not None:
                with emit.block(f"if t - {begin} < {builder.integer(given.added.shape[1])}:"):
                    additions.store(named("added"), b, f"(t - {begin})", h, m)
            with emit.block(f"for d in range({n}):"):
                product = named(k.load(b, "t", hk, "d")) * named("added")
                states.store(named(states.load(b, h, "d", m)) + product, b, h, "d", m)
            if windows is not None:
                emit.line(f"slot = t - {end} + {slots}")
                with emit.block("if slot >= 0:"), emit.block(f"for d in range({n}):"):
                    windows.store(named(states.load(b, h, "d", m)), "slot", b, h, "d", m)
            with emit.block(f"for g in range({n_group}):"):
                emit.line(f"total = {zero}")
                with emit.block(f"for d in range({n}):"):
                    emit.line(f"total += {q.load(b, 't', hq, 'g', 'd')} * {states.load(b, h, 'd', m)}")
                results.store(named("total") * named(factor.load()), b, "t", h, "g", m)
    # The state may overwrite the past state: a thread reads its column of the past before it writes that column.
    in_place = list(in_place_of(given.past, given.state))
    if given.window is not None:
        in_place += in_place_of(given.past_window, given.window)
    builder.launch(ctx, kernel_name(ctx), plane.grid, plane.block, in_place=in_place)
