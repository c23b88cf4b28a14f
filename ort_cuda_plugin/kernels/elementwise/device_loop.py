"""Kernels of loops whose iterations the device counts: the counter, the condition, and slices at the counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ort_cuda_plugin.compiler.kernel import KernelSpec
from ort_cuda_plugin.program.expressions.polynomial import ceildiv
from ort_cuda_plugin.program.expressions.symbolic import Dim, product
from ort_cuda_plugin.program.lowering.context import Arg, Int64, Lowering, Tensor
from ort_cuda_plugin.program.steps.trace import LoopCondition, Use

__all__ = ["Counter", "begin", "copy_slice", "count_iteration"]

THREADS = 128  # threads per block of `copy_slice`


@dataclass(frozen=True)
class Counter:
    """What the device knows about a running loop.

    ``flag`` (int32 [1]) is 1 while the loop continues, ``number`` (int64 []) counts the iterations. ``limit`` is their
    maximum: a size, a tensor of one int64, or None for no maximum. ``condition`` is set like the flag.
    """

    flag: Tensor
    number: Tensor
    limit: Dim | Tensor | None
    condition: LoopCondition


def begin(ctx: Lowering, counter: Counter, on: Tensor | None) -> None:
    """Record the launch before the first iteration: 0 iterations; the loop continues if ``on`` (bool [1], None: true)
    and the limit permit it.
    """
    _update(ctx, "loop_begin", counter, on, "0", ())


def count_iteration(ctx: Lowering, counter: Counter, on: Tensor | None) -> None:
    """Record the last launch of an iteration, which counts it. ``on`` as for `begin`."""
    _update(ctx, "loop_next", counter, on, "number[0] + 1", (counter.number,))


def _update(
    ctx: Lowering, name: str, counter: Counter, on: Tensor | None, number: str, reads: Sequence[Tensor]
) -> None:
    arguments: dict[str, Arg] = {"flag": counter.flag, "number": counter.number}
    conditions = []
    if on is not None:
        arguments["on"] = on
        conditions.append("on[0] != 0")
    if counter.limit is not None:
        is_tensor = isinstance(counter.limit, Tensor)
        arguments["limit"] = counter.limit if isinstance(counter.limit, Tensor) else Int64(counter.limit)
        conditions.append("count < limit[0]" if is_tensor else "count < limit")
    arguments["handle"] = counter.condition
    source = f"""
def kernel({", ".join(arguments)}):
    count = int64({number})
    goes_on = int32(1) if {" and ".join(conditions) or "True"} else int32(0)
    number[0] = count
    flag[0] = goes_on
    if handle != 0:
        set_conditional(handle, goes_on)
"""
    signature = tuple(f"*{x.dtype.short}" if isinstance(x, Tensor) else "i64" for x in arguments.values())
    spec = KernelSpec(name, signature, source, launch_bounds=1)
    writes = (counter.flag, counter.number)
    ctx.launch(spec, (1, 1, 1), (1, 1, 1), [*arguments.values()], reads=reads, writes=writes)


_copy_source = """
def kernel(to, source, number, count, inner, to_outer, to_first, to_step, source_outer, source_first, source_step):
    i = int64(cuda.blockIdx.x) * {threads} + int64(cuda.threadIdx.x)
    if i < count:
        outer = quotient_i64(i, inner)
        within = i - outer * inner
        to[outer * to_outer + to_first + number[0] * to_step + within] = source[
            outer * source_outer + source_first + number[0] * source_step + within
        ]
"""


def copy_slice(
    ctx: Lowering, to: Tensor, source: Tensor, number: Tensor, axis: int, *, stacks: bool, backwards: bool
) -> None:
    """Record a copy between a contiguous tensor and its slices along ``axis``, without this dimension.

    With ``stacks``, ``source`` becomes the slice ``number`` (int64 [], on the device) of ``to``, else ``to`` becomes
    the slice ``number`` of ``source``. ``backwards``: slices are counted from the end.
    """
    whole, part = (to, source) if stacks else (source, to)
    inner = product(whole.shape[axis + 1 :])
    length = whole.shape[axis]
    first = (length - 1) * inner if backwards else 0
    of_whole = (length * inner, first, inner * (-1 if backwards else 1))
    of_part = (inner, 0, 0)
    own, other = (of_whole, of_part) if stacks else (of_part, of_whole)
    numbers = [part.size, inner, *own, *other]
    kind = f"*{to.dtype.short}"
    spec = KernelSpec(
        "loop_stack" if stacks else "loop_slice",
        (kind, kind, "*i64", *["i64"] * len(numbers)),
        _copy_source.format(threads=THREADS),
        launch_bounds=THREADS,
    )
    grid = (ceildiv(part.size, THREADS), 1, 1)
    arguments: list[Arg] = [to, source, number, *map(Int64, numbers)]
    ctx.launch(spec, grid, (THREADS, 1, 1), arguments, writes=(to,), uses={whole: Use(elements=part.size)})
