"""Creates Numba arrays with a shape from pointers, in kernels that applications write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.np.arrayobj import populate_array
from numba.cuda.typing import signature

Function = Callable[..., Any]


def as_array(typingctx: Any, pointer: Any, shape: Any) -> Any:
    """Return the contiguous array at ``pointer``; its shape is a tuple of int64."""
    kind = types.Array(pointer.dtype, len(shape), "C")

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        data, dims = args[0], cgutils.unpack_tuple(builder, args[1])
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        strides, stride = [], itemsize
        for dim in reversed(dims):
            strides.append(stride)
            stride = builder.mul(stride, dim)
        array = context.make_array(kind)(context, builder)
        data = builder.bitcast(data, array.data.type)
        populate_array(array, data=data, shape=dims, strides=strides[::-1], itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return signature(kind, pointer, shape), codegen


FUNCTIONS: dict[str, Function] = {"as_array": as_array}
"""The intrinsics by name."""
