"""Custom operators: the names that authors of operators import. See docs/custom_kernels.md.

Modules are imported when one of their names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compiler.intrinsics import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16
    from ..kernels.elementwise.index_map import gather_map, scatter_map
    from ..kernels.scan_sort.scan import scan
    from ..kernels.scan_sort.select import count_prefixes, sort_rows
    from ..model.ir import Constant, DType, InvalidModel, Unsupported
    from ..ops.registry import ALL_TENSORS, ARITHMETIC, FLOATS, INTS
    from ..program.expressions import scalar
    from ..program.expressions.symbolic import Dim, ceildiv, eq, floordiv, le, lt, product, sym_max, sym_min
    from ..program.lowering.context import Lowering, Tensor
    from ..program.lowering.elementwise import elementwise
    from ..program.lowering.reduce import reduce, row_map
    from ..program.lowering.views import expand, permute, reshape, squeeze, unsqueeze
    from ..program.steps.row_program import MAX, MIN, PRODUCT, SUM
    from .checks import check
    from .kernels.array_kernels import array_kernel
    from .kernels.kernels import cubin_kernel, cuda_kernel, launch, ltoir_kernel, numba_kernel, ptx_kernel
    from .operator import CustomOperator
    from .registry import register, unregister
    from .resources import RESOURCES
    from .short_form import Op, op
    from .tensor_types import (
        T1,
        T2,
        T3,
        Alias,
        BFloat16,
        Bool,
        Float16,
        Float32,
        Float64,
        HostInt32,
        HostInt64,
        Int8,
        Int16,
        Int32,
        Int64,
        T,
        U,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
        V,
    )

_NAMES = {
    "..compiler.intrinsics": ("bf16_to_f32", "f16_to_f32", "f32_to_bf16", "f32_to_f16"),
    "..kernels.elementwise.index_map": ("gather_map", "scatter_map"),
    "..kernels.scan_sort.scan": ("scan",),
    "..kernels.scan_sort.select": ("count_prefixes", "sort_rows"),
    "..model.ir": ("Constant", "DType", "InvalidModel", "Unsupported"),
    "..ops.registry": ("ALL_TENSORS", "ARITHMETIC", "FLOATS", "INTS"),
    "..program.lowering.elementwise": ("elementwise",),
    "..program.lowering.context": ("Lowering", "Tensor"),
    "..program.lowering.reduce": ("reduce", "row_map"),
    "..program.steps.row_program": ("MAX", "MIN", "PRODUCT", "SUM"),
    "..program.expressions.symbolic": ("Dim", "ceildiv", "eq", "floordiv", "le", "lt", "product", "sym_max", "sym_min"),
    "..program.lowering.views": ("expand", "permute", "reshape", "squeeze", "unsqueeze"),
    ".tensor_types": (
        "Alias",
        "BFloat16",
        "Bool",
        "Float16",
        "Float32",
        "Float64",
        "HostInt32",
        "HostInt64",
        "Int8",
        "Int16",
        "Int32",
        "Int64",
        "T",
        "T1",
        "T2",
        "T3",
        "U",
        "UInt8",
        "UInt16",
        "UInt32",
        "UInt64",
        "V",
    ),
    ".kernels.array_kernels": ("array_kernel",),
    ".checks": ("check",),
    ".kernels.kernels": ("cubin_kernel", "cuda_kernel", "launch", "ltoir_kernel", "numba_kernel", "ptx_kernel"),
    ".operator": ("CustomOperator",),
    ".registry": ("register", "unregister"),
    ".resources": ("RESOURCES",),
    ".short_form": ("Op", "op"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ALL_TENSORS",
    "ARITHMETIC",
    "FLOATS",
    "INTS",
    "MAX",
    "MIN",
    "PRODUCT",
    "RESOURCES",
    "SUM",
    "T1",
    "T2",
    "T3",
    "Alias",
    "BFloat16",
    "Bool",
    "Constant",
    "CustomOperator",
    "DType",
    "Dim",
    "Float16",
    "Float32",
    "Float64",
    "HostInt32",
    "HostInt64",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "InvalidModel",
    "Lowering",
    "Op",
    "T",
    "Tensor",
    "U",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "Unsupported",
    "V",
    "array_kernel",
    "bf16_to_f32",
    "ceildiv",
    "check",
    "count_prefixes",
    "cubin_kernel",
    "cuda_kernel",
    "elementwise",
    "eq",
    "expand",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "floordiv",
    "gather_map",
    "launch",
    "le",
    "lt",
    "ltoir_kernel",
    "numba_kernel",
    "op",
    "permute",
    "product",
    "ptx_kernel",
    "reduce",
    "register",
    "reshape",
    "row_map",
    "scalar",
    "scan",
    "scatter_map",
    "sort_rows",
    "squeeze",
    "sym_max",
    "sym_min",
    "unregister",
    "unsqueeze",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "scalar":
        return import_module("..program.expressions.scalar", __name__)
    return getattr(import_module(_MODULES[name], __name__), name)
