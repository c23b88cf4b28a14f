"""Kernels of loops whose iterations the device counts: the counter, the condition, and slices at the counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...compiler.kernel import KernelSpec
from ...program.expressions.polynomial import ceildiv
from ...program.expressions.symbolic import Dim, product, sym_max
from ...program.lowering.context import Arg, Int64, Lowering, Tensor
from ...program.steps.trace import LoopCondition, Use

THREADS = 128  # threads per block of `copy_slices`
MAX_SLICES = 8  # maximum slices of one launch: the emulated device accepts 64 parameters


@dataclass(frozen=True)
class Counter:
    """The state of a running loop in device memory.

    ``flag`` (int32 [1]) is 1 while the loop continues, ``number`` (int64 []) counts the iterations. ``limit`` is their
    maximum: a size, a tensor of one int64, or None for no maximum. In a CUDA graph the kernels also set ``condition``,
    the conditional node of the loop, to the value of the flag.
    """

    flag: Tensor
    number: Tensor
    limit: Dim | Tensor | None
    condition: LoopCondition


def begin(ctx: Lowering, counter: Counter, on: Tensor | None) -> None:
    """Record the launch before the first iteration, which sets the counter.

    The first iteration runs if ``on`` (bool [1], None: true) and the limit permit it.
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


_slice_source = """
    if cuda.blockIdx.y == {number} and i < count{number}:
        outer = quotient_i64(i, inner{number})
        within = i - outer * inner{number}
        index = outer * stride{number} + first{number} + number[0] * step{number} + within
        {move}
"""
_move_out = "part{number}[i] = whole{number}[index]"
_move_in = "whole{number}[index] = part{number}[i]"


@dataclass(frozen=True)
class Slice:
    """A contiguous tensor ``whole``, and its slice ``part`` at an index of ``axis``, from the end if ``backwards``."""

    whole: Tensor
    part: Tensor
    axis: int
    backwards: bool


def copy_slices(ctx: Lowering, slices: Sequence[Slice], number: Tensor, *, stacks: bool) -> None:
    """Record launches that copy slice ``number`` (int64 [], on the device) of each tensor to its part.

    With ``stacks`` they copy the parts to the slices.
    """
    for start in range(0, len(slices), MAX_SLICES):
        _copy_slices(ctx, slices[start : start + MAX_SLICES], number, stacks)


def _copy_slices(ctx: Lowering, slices: Sequence[Slice], number: Tensor, stacks: bool) -> None:
    lines, arguments = [], dict[str, Arg](number=number)
    for position, each in enumerate(slices):
        length, inner = each.whole.shape[each.axis], product(each.whole.shape[each.axis + 1 :])
        numbers = {
            "count": each.part.size,
            "inner": inner,
            "stride": length * inner,
            "first": (length - 1) * inner if each.backwards else 0,
            "step": inner * (-1 if each.backwards else 1),
        }
        arguments[f"whole{position}"], arguments[f"part{position}"] = each.whole, each.part
        arguments.update((f"{name}{position}", Int64(value)) for name, value in numbers.items())
        move = (_move_in if stacks else _move_out).format(number=position)
        lines.append(_slice_source.format(number=position, move=move))
    source = (
        f"\ndef kernel({', '.join(arguments)}):\n"
        f"    i = int64(cuda.blockIdx.x) * {THREADS} + int64(cuda.threadIdx.x)\n{''.join(lines)}"
    )
    signature = tuple(f"*{x.dtype.short}" if isinstance(x, Tensor) else "i64" for x in arguments.values())
    spec = KernelSpec("loop_stack" if stacks else "loop_slice", signature, source, launch_bounds=THREADS)
    most = slices[0].part.size
    for each in slices[1:]:
        most = sym_max(most, each.part.size)
    ctx.launch(
        spec,
        (ceildiv(most, THREADS), len(slices), 1),
        (THREADS, 1, 1),
        [*arguments.values()],
        writes=[each.whole if stacks else each.part for each in slices],
        uses={each.whole: Use(elements=each.part.size) for each in slices},
    )
