"""LabelEncoder of ai.onnx.ml: replaces each key of a table by its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, Unpack

import numpy as np

from ...kernels.elementwise.index_map import IndexMap, gather_map
from ...model.ir import Array, Constant, DType
from ...program.expressions import scalar as s
from ...program.expressions.scalar import Scalar
from ...program.lowering.context import Lowering, Tensor
from .. import requirements as require
from ..folds import lower_bound
from ..registry import T1, op
from .features import DOMAIN

_KEYS_2 = frozenset({DType.FLOAT32, DType.INT64})
_KEYS_4 = _KEYS_2 | {DType.FLOAT64, DType.INT32, DType.INT16}


def _encode(ctx: Lowering, x: Tensor, keys: Array, values: Array, default: Array, *, finds_nan: bool) -> Tensor:
    """Map each element to the value of the first equal key, else ``default``, by binary search in sorted keys.

    A NaN element gets the value of the first NaN key if ``finds_nan``, else ``default``.
    """
    require.that(len(keys) > 0, "keys", "have at least one element", "none")
    require.count(len(keys), values=values)
    is_nan = np.isnan(keys)
    for_nan = values[is_nan][:1] if finds_nan and is_nan.any() else default.reshape(1)
    ordered, first = np.unique(keys[~is_nan], return_index=True)
    arrays = (ordered, values[~is_nan][first], np.concatenate([default.reshape(1), for_nan]))
    table, results, others = map(ctx.constant, arrays)

    def element(maps: IndexMap, c: list[Scalar]) -> Scalar:
        value = maps.source(x).at(c)
        other = maps.source(others)
        unknown = other.at([s.constant(0, DType.INT64)])
        if x.dtype.is_float:
            unknown = s.where(s.is_nan(value), other.at([s.constant(1, DType.INT64)]), unknown)
        if not len(ordered):
            return unknown
        source = maps.source(table)
        found = lower_bound(maps, len(ordered), lambda at: source.at([at]) < value)
        return s.where(s.equal(source.at([found]), value), maps.source(results).at([found]), unknown)

    return gather_map(ctx, x.shape, DType.from_numpy(values.dtype), element)


class LabelAttributes(TypedDict, total=False):
    """Keys, values and default value, each in the attribute of its type."""

    default_float: float
    default_int64: int
    default_string: str
    keys_floats: tuple[float, ...]
    keys_int64s: tuple[int, ...]
    keys_strings: tuple[str, ...]
    values_floats: tuple[float, ...]
    values_int64s: tuple[int, ...]
    values_strings: tuple[str, ...]


class TensorLabelAttributes(LabelAttributes, total=False):
    """Keys, values and default value as lists or tensors."""

    default_tensor: Constant
    keys_tensor: Constant
    values_tensor: Constant


def _listed(what: str, attributes: Mapping[str, object]) -> Array:
    """Return the values of the only attribute whose name begins with ``what``, in its element type.

    Raises InvalidModel for no or several such attributes, Unsupported for strings.
    """
    given = [name for name in attributes if name.startswith(f"{what}_")]
    expected = f"be given by one attribute whose name begins with {what}_"
    require.that(len(given) == 1, what, expected, " and ".join(given) or "none")
    (name,) = given
    require.supported(not name.endswith("_strings"), "dtype", f"the type of {what}", "string", "numbers")
    values = attributes[name]
    if isinstance(values, Constant):
        return values.array.reshape(-1)
    return np.array(values, np.float32 if name.endswith("_floats") else np.int64)


def _encode_listed(ctx: Lowering, x: Tensor, attributes: Mapping[str, object], *, finds_nan: bool) -> Tensor:
    keys, values = _listed("keys", attributes), _listed("values", attributes)
    stored = DType.from_numpy(keys.dtype)
    require.that(stored is x.dtype, "keys", f"have the type {x.dtype.short} of the input", stored.short)
    number = attributes.get("default_float", -0.0) if values.dtype.kind == "f" else attributes.get("default_int64", -1)
    default, tensor = np.array(number).astype(values.dtype), attributes.get("default_tensor")
    if isinstance(tensor, Constant):
        default = tensor.array.reshape(-1)
        fits = len(default) == 1 and default.dtype == values.dtype
        found = f"{len(default)} elements of type {default.dtype}"
        require.that(fits, "default_tensor", f"have one element of type {values.dtype}", found)
    return _encode(ctx, x, keys, values, default, finds_nan=finds_nan)


@op("LabelEncoder", domain=DOMAIN, since=2, types={"T1": _KEYS_2})
def label_encoder_2(ctx: Lowering, x: T1, **attributes: Unpack[LabelAttributes]) -> Tensor:
    """Encode labels; a NaN key matches nothing. From version 4 on it matches NaN, as in ONNX Runtime."""
    return _encode_listed(ctx, x, attributes, finds_nan=False)


@op("LabelEncoder", domain=DOMAIN, since=4, types={"T1": _KEYS_4})
def label_encoder_4(ctx: Lowering, x: T1, **attributes: Unpack[TensorLabelAttributes]) -> Tensor:
    return _encode_listed(ctx, x, attributes, finds_nan=True)
