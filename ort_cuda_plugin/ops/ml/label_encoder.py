"""LabelEncoder: a table of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ort_cuda_plugin.kernels.elementwise.index_map import IndexMap, gather_map
from ort_cuda_plugin.model.ir import Array, Constant, DType
from ort_cuda_plugin.ops import requirements as require
from ort_cuda_plugin.ops.registry import T1, op
from ort_cuda_plugin.program.expressions import scalar as s
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.lowering.context import Lowering, Tensor
from ort_cuda_plugin.program.steps.row_program import Reduction, Values

_KEYS_2 = frozenset({DType.FLOAT32, DType.INT64})
_KEYS_4 = _KEYS_2 | {DType.FLOAT64, DType.INT32, DType.INT16}


def _encode(ctx: Lowering, x: Tensor, keys: Array, values: Array, default: Array, *, finds_nan: bool) -> Tensor:
    """For each element the value of the first key that it equals, else ``default``.

    A thread looks for its element in the sorted keys.
    """
    require.that(len(keys) > 0, "keys", "be given", "none")
    require.count(len(keys), values=values)
    is_nan = np.isnan(keys)
    for_nan = values[is_nan][:1] if finds_nan and is_nan.any() else default.reshape(1)
    ordered, first = np.unique(keys[~is_nan], return_index=True)
    found_values = values[~is_nan][first]
    dtype = DType.from_numpy(values.dtype)
    table, results, others = (
        ctx.constant(array) for array in (ordered, found_values, np.concatenate([default.reshape(1), for_nan]))
    )
    last = len(ordered) - 1

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        value = maps.source(x).at(c)
        other = maps.source(others)
        unknown = other.at([s.constant(0, DType.INT64)])
        if x.dtype.is_float:
            unknown = s.where(s.is_nan(value), other.at([s.constant(1, DType.INT64)]), unknown)
        if last < 0:
            return unknown
        source, end = maps.source(table), maps.dim(last)

        def halve(totals: Values, _: Values) -> Values:
            low, high = totals
            middle = (low + high) >> 1
            less = source.at([middle]) < value
            return s.where(less, s.minimum(middle + 1, end), low), s.where(less, high, middle)

        search = Reduction(lambda dtypes: (s.constant(0, DType.INT64), end), halve, lambda a, b: a)
        place, _ = maps.fold(search, maps.dim(len(ordered).bit_length()), lambda i: (i,))
        return s.where(s.equal(source.at([place]), value), maps.source(results).at([place]), unknown)

    return gather_map(ctx, x.shape, dtype, element)


def _one(what: str, given: dict[str, Any]) -> tuple[str, Any]:
    """The attribute that is there, of those that may give the ``what``."""
    there = [(name, value) for name, value in given.items() if value is not None]
    require.that(len(there) == 1, what, "be given by one attribute", len(there))
    if there[0][0].endswith("_strings"):
        raise require.unsupported("dtype", f"the type of {what}", "string", "numbers")
    return there[0]


def _listed(what: str, given: dict[str, Any]) -> Array:
    """The numbers of an attribute, in its element type."""
    name, values = _one(what, given)
    if isinstance(values, Constant):
        return values.array.reshape(-1)
    return np.array(values, np.float32 if name.endswith("_floats") else np.int64)


def _checked_keys(x: Tensor, keys: Array) -> Array:
    stored = DType.from_numpy(keys.dtype)
    require.that(stored is x.dtype, "keys", f"have the type {x.dtype.short} of the input", stored.short)
    return keys


@op("LabelEncoder", domain="ai.onnx.ml", since=2, types={"T1": _KEYS_2})
def label_encoder_2(
    ctx: Lowering,
    x: T1,
    *,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "",
    keys_floats: tuple[float, ...] | None = None,
    keys_int64s: tuple[int, ...] | None = None,
    keys_strings: tuple[str, ...] | None = None,
    values_floats: tuple[float, ...] | None = None,
    values_int64s: tuple[int, ...] | None = None,
    values_strings: tuple[str, ...] | None = None,
) -> Tensor:
    keys = _listed("keys", {"keys_floats": keys_floats, "keys_int64s": keys_int64s, "keys_strings": keys_strings})
    values = _listed(
        "values", {"values_floats": values_floats, "values_int64s": values_int64s, "values_strings": values_strings}
    )
    default = np.array(default_float if values.dtype.kind == "f" else default_int64).astype(values.dtype)
    # ONNX Runtime finds a NaN among the keys from version 4 on.
    return _encode(ctx, x, _checked_keys(x, keys), values, default, finds_nan=False)


@op("LabelEncoder", domain="ai.onnx.ml", since=4, types={"T1": _KEYS_4})
def label_encoder_4(
    ctx: Lowering,
    x: T1,
    *,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "",
    default_tensor: Constant | None = None,
    keys_floats: tuple[float, ...] | None = None,
    keys_int64s: tuple[int, ...] | None = None,
    keys_strings: tuple[str, ...] | None = None,
    keys_tensor: Constant | None = None,
    values_floats: tuple[float, ...] | None = None,
    values_int64s: tuple[int, ...] | None = None,
    values_strings: tuple[str, ...] | None = None,
    values_tensor: Constant | None = None,
) -> Tensor:
    keys = _listed(
        "keys",
        {
            "keys_floats": keys_floats, "keys_int64s": keys_int64s, "keys_strings": keys_strings,
            "keys_tensor": keys_tensor,
        },
    )  # fmt: skip
    values = _listed(
        "values",
        {
            "values_floats": values_floats, "values_int64s": values_int64s, "values_strings": values_strings,
            "values_tensor": values_tensor,
        },
    )  # fmt: skip
    default = np.array(default_float if values.dtype.kind == "f" else default_int64).astype(values.dtype)
    if default_tensor is not None:
        default = default_tensor.array.reshape(-1)
        require.that(
            len(default) == 1 and default.dtype == values.dtype, "default_tensor", f"be one {values.dtype}", default
        )
    return _encode(ctx, x, _checked_keys(x, keys), values, default, finds_nan=True)
