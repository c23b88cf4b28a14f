"""Attributes shared by convolutions and pooling: kernel, strides, dilations and padding of sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Required, TypedDict

from ....program.expressions.symbolic import Dim, ceildiv, is_read_back, le, select, sym_max, truncdiv
from ....program.lowering.context import Lowering
from ....program.steps.windows import Windows
from ... import requirements as require

Ints = Sequence[int]
MAX_SPATIAL = 3  # maximum number of spatial dimensions


class PaddingAttributes(TypedDict, total=False):
    """Padding and strides of sliding windows; see `windows`."""

    auto_pad: str
    pads: Ints | None
    strides: Ints | None


class WindowAttributes(PaddingAttributes, total=False):
    """Padding, strides and dilations of sliding windows."""

    dilations: Ints | None


class PoolAttributes(WindowAttributes, total=False):
    """Attributes of pooling."""

    kernel_shape: Required[Ints]
    ceil_mode: int


class ConvAttributes(WindowAttributes, total=False):
    """Attributes of Conv."""

    group: int
    kernel_shape: Ints | None


def per_axis(name: str, values: Ints | None, default: int, rank: int, minimum: int = 1) -> tuple[int, ...]:
    """Check and return an attribute of ``rank`` integers, by default all ``default``."""
    values = (default,) * rank if values is None else tuple(values)
    require.that(len(values) == rank, name, f"have {rank} entries", len(values))
    require.that(all(value >= minimum for value in values), name, f"have entries of at least {minimum}", list(values))
    return values


def windows(
    size: Sequence[Dim], kernel: Sequence[Dim], *, auto_pad: str = "NOTSET", dilations: Ints | None = None,
    pads: Ints | None = None, strides: Ints | None = None,
) -> Windows:  # fmt: skip
    """Return the sliding windows that the shared attributes of convolutions and pooling describe.

    Raises Unsupported for a rank or padding that kernels do not support, InvalidModel for contradictions.
    """
    rank = len(size)
    require.count(rank, kernel_shape=kernel)
    if not 1 <= rank <= MAX_SPATIAL:
        raise require.unsupported("shape", "the number of spatial dimensions", rank, f"1 to {MAX_SPATIAL}")
    steps = per_axis("strides", strides, 1, rank)
    gaps = per_axis("dilations", dilations, 1, rank)
    extent = [(k - 1) * gap + 1 for k, gap in zip(kernel, gaps, strict=True)]
    begin: tuple[Dim, ...] = (0,) * rank
    end = begin
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            sym_max((ceildiv(n, step) - 1) * step + reach - n, 0)
            for n, step, reach in zip(size, steps, extent, strict=True)
        ]
        smaller, larger = tuple(total // 2 for total in totals), tuple(ceildiv(total, 2) for total in totals)
        begin, end = (smaller, larger) if auto_pad == "SAME_UPPER" else (larger, smaller)
    elif auto_pad == "NOTSET":
        if pads is not None and any(pad < 0 for pad in pads):
            raise require.unsupported("attribute", "pads", list(pads), "entries of at least 0")
        both = per_axis("pads", pads, 0, 2 * rank, 0)
        begin, end = both[:rank], both[rank:]
    require.one_of(("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"), auto_pad=auto_pad)
    return Windows(tuple(size), tuple(kernel), steps, gaps, begin, end)


def count_windows(
    ctx: Lowering, windows: Windows, ceil_mode: bool = False, *, may_exceed: bool = False
) -> tuple[Dim, ...]:
    """Return the number of windows along each dimension.

    With ``ceil_mode`` the last window may extend past the end of the padded input, but may not start after it. With
    ``may_exceed`` a window may be larger than the padded input; the number is then 0 or 1, by ONNX's formula with
    truncating division. Raises InvalidModel if the formula gives a negative number.
    """
    result = []
    for size, extent, stride, begin, end in zip(
        windows.size, windows.extent, windows.strides, windows.begin, windows.end, strict=True
    ):
        room = size + begin + end - extent
        if may_exceed and not is_read_back(room) and not ctx.guard(le(0, room)):
            number = truncdiv(room, stride) + 1
            require.least_dim(ctx, 0, **{"the number of windows": number})
            result.append(number)
            continue
        require.most_dim(ctx, size + begin + end, **{"the extent of a window on the padded input": extent})
        if ceil_mode:
            number = ceildiv(room, stride) + 1
            result.append(select(le(size + begin, (number - 1) * stride), number - 1, number))
        else:
            result.append(room // stride + 1)
    return tuple(result)
