"""Index maps of shape arithmetic: the host gathers sizes that it knows, so that no Run must read them back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...model.ir import DType
from ...program.expressions.fold import NotFoldable, fold
from ...program.expressions.scalar import Scalar, reachable
from ...program.expressions.symbolic import Dim, select
from ...program.lowering.context import Lowering, Tensor
from ...program.lowering.host import MAX_SYMBOLIC_ELEMENTS, HostArray, host_array, on_host


def may_hold_sizes(shape: Sequence[Dim], dtype: DType) -> bool:
    """Return whether a tensor is so small, and of such a type, that it may be the result of shape arithmetic."""
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return dtype is DType.INT64 and len(sizes) == len(shape) and 0 < math.prod(sizes) <= MAX_SYMBOLIC_ELEMENTS


def gather_on_host(
    ctx: Lowering,
    value: Scalar,
    coordinates: Sequence[Scalar],
    shape: Sequence[Dim],
    on_device: Callable[[], Tensor],
) -> Tensor:
    """Return an int64 tensor whose element at ``coordinates`` is ``value``, an expression of `Source.at` loads.

    The host computes it if it knows all tensors that ``value`` loads: shape arithmetic, or small constants, since some
    sizes are constants only after simplification. Otherwise, if ``value`` loads nothing, or if a coordinate of a load
    is not a number, return the result of ``on_device``.
    """
    sources = list(dict.fromkeys(x.value.tensor for x in reachable([value]) if x.op == "load"))
    if not sources or any(host_array(x) is None for x in sources):
        return on_device()

    def gathered(*arrays: HostArray) -> HostArray:
        contents = dict(zip(sources, arrays, strict=True))

        def load(x: Scalar, operands: Sequence[Dim]) -> Dim:
            array, rank = contents[x.value.tensor], x.value.rank
            if len(operands) == rank:
                return _element(array, operands)
            when, other = operands[rank:]
            return other if when == 0 else select(when, _element(array, operands[:rank]), other)

        handlers = {"load": load, "dim": lambda x, _: x.value}
        result = np.empty([dim for dim in shape if isinstance(dim, int)], object)
        for index in np.ndindex(result.shape):
            at = {c: i for c, i in zip(coordinates, index, strict=True) if c.op == "coordinate"}
            result[index] = fold(value, at, handlers)
        return result

    return on_host(ctx, gathered, sources, shape, value.dtype, on_device)


def _element(array: HostArray, at: Sequence[Dim]) -> Dim:
    """Return an element. Raises NotFoldable for coordinates that are expressions, or outside of the array."""
    if not all(isinstance(c, int) and 0 <= c < size for c, size in zip(at, array.shape, strict=True)):
        raise NotFoldable
    element: Dim = array[tuple(at)]
    return element
