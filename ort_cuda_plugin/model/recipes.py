"""Recipes of constants that the host derives from other constants: weight layouts and folded batch normalizations.

A recipe is plain data, so a compiled model can store the recipe instead of the contents. If the source constants
change, the derived contents change with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .ir import Array, Constant, ConstantView, DType, Recipe, dense_strides


def derived_constant(recipe: Recipe, dtype: DType, shape: tuple[int, ...]) -> Constant:
    """Return the constant that ``recipe`` derives, computed on first use. Equal recipes return the same object."""
    first = recipe.parts[0].constant
    known = first.derived.get((recipe, dtype, shape))
    if known is None:
        compute = FUNCTIONS[recipe.function]

        def load() -> Array:
            return compute(recipe.parts, dtype, shape, *recipe.parameters)

        known = Constant(dtype, shape, load, is_initializer=first.is_initializer)
        known.recipe = recipe
        first.derived[recipe, dtype, shape] = known
    return known


Parts: TypeAlias = Sequence[ConstantView]
Shape: TypeAlias = tuple[int, ...]


def parts_inside(home: Constant) -> Iterator[tuple[Constant, ConstantView]]:
    """Yield the source constants whose elements ``home`` contains unchanged, each with its view into ``home``."""
    recipe = home.recipe
    if recipe is None or any(part.constant.dtype is not home.dtype for part in recipe.parts):
        return
    if recipe.function == "tiles":
        (part,) = recipe.parts
        groups, depth, columns = home.shape
        if part.is_whole:
            shape: Shape = (groups, part.shape[0] // groups, part.constant.size // part.shape[0])
            yield part.constant, ConstantView(home, shape, (depth * columns, 1, columns), 0)
    elif recipe.function == "strips":
        (part,) = recipe.parts
        groups, tiles, channels, count, rows = home.shape
        taps, transposed = recipe.parameters
        in_order = taps == tuple(range(count)) and not transposed
        if part.is_whole and in_order and home.size == part.constant.size:
            shape, depth = (groups, tiles, rows, channels, count), channels * count * rows
            yield part.constant, ConstantView(home, shape, (tiles * depth, depth, 1, count * rows, rows), 0)
    elif recipe.function == "join":
        strides, position = dense_strides(home.shape), 0
        axis = int(recipe.parameters[0])  # type: ignore[arg-type]
        for part in recipe.parts:
            if part.is_whole:
                yield part.constant, ConstantView(home, part.shape, tuple(strides), position * strides[axis])
            position += part.shape[axis]


def _view(parts: Parts, dtype: DType, shape: Shape) -> Array:
    (view,) = parts
    return np.ascontiguousarray(view.array).reshape(shape)


def _join(parts: Parts, dtype: DType, shape: Shape, axis: int) -> Array:
    return np.concatenate([view.array for view in parts], axis=axis)


def _batch_norm_factor(parts: Parts, dtype: DType, shape: Shape, epsilon: float) -> Array:
    """Return scale / sqrt(var + epsilon), from scale, bias, mean and variance."""
    scale, _, _, variance = (view.array for view in parts)
    result: Array = scale / np.sqrt(variance.astype(np.float64) + epsilon)
    return result.astype(scale.dtype)


def _batch_norm_offset(parts: Parts, dtype: DType, shape: Shape, epsilon: float) -> Array:
    """Return bias - mean * factor, with the factor of `_batch_norm_factor`."""
    scale, bias, mean, _ = (view.array for view in parts)
    result: Array = bias - mean * _batch_norm_factor(parts, dtype, shape, epsilon).astype(np.float64)
    return result.astype(scale.dtype)


def pack_tiles(weights: Array, shape: Shape) -> Array:
    """Pack weights [groups * rows, channels, *kernel] as ``shape`` [groups, k, rows], padded with zeros.

    ``rows`` are the output channels of a group, k is channels * filter taps.
    """
    groups = shape[0]
    matrix = weights.reshape(groups, weights.shape[0] // groups, -1).transpose(0, 2, 1)
    padded = np.zeros(shape, weights.dtype)
    padded[:, : matrix.shape[1], : matrix.shape[2]] = matrix
    return padded


def pack_strips(weights: Array, shape: Shape, taps: Sequence[int], transposed: bool) -> Array:
    """Pack ONNX weights as ``shape`` [groups, tiles, channels, taps, output channels of a thread].

    A tile has the output channels that one thread computes. ``taps`` is the order of the filter taps.
    """
    groups, tiles, channels, count, thread_rows = shape
    if len(taps) != count:
        raise ValueError(f"packed weights: got the shape {shape} with {count} taps, expected {len(taps)} taps")
    flat = weights.reshape(*weights.shape[:2], -1)[:, :, list(taps)]
    matrix = flat.reshape(groups, -1, *flat.shape[1:])
    if transposed:
        matrix = matrix.transpose(0, 2, 1, 3)
    padded = np.zeros((groups, tiles * thread_rows, channels, count), weights.dtype)
    padded[:, : matrix.shape[1]] = matrix
    split = padded.reshape(groups, tiles, thread_rows, channels, count)
    return np.ascontiguousarray(split.transpose(0, 1, 3, 4, 2))


def _tiles(parts: Parts, dtype: DType, shape: Shape) -> Array:
    return pack_tiles(parts[0].array, shape)


def _strips(parts: Parts, dtype: DType, shape: Shape, taps: tuple[int, ...], transposed: bool) -> Array:
    array = _as_float32(parts[0]) if parts[0].constant.dtype is DType.BFLOAT16 else parts[0].array
    return pack_strips(array.astype(dtype.numpy), shape, taps, transposed)


def _full(parts: Parts, dtype: DType, shape: Shape, value: float) -> Array:
    """Return an array filled with ``value``; ``parts`` is not used."""
    if dtype is DType.BFLOAT16:
        return np.full(shape, np.float32(value).view(np.uint32) >> 16, dtype.numpy)
    return np.full(shape, value, dtype.numpy)


def _float32(parts: Parts, dtype: DType, shape: Shape) -> Array:
    """Return a float16 or bfloat16 array as float32."""
    return _as_float32(parts[0]).reshape(shape)


def _as_float32(view: ConstantView) -> Array:
    array = view.array
    if view.constant.dtype is DType.BFLOAT16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array.astype(np.float32))


FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "view": _view,
    "join": _join,
    "batch_norm_factor": _batch_norm_factor,
    "batch_norm_offset": _batch_norm_offset,
    "tiles": _tiles,
    "strips": _strips,
    "full": _full,
    "float32": _float32,
}
"""Name in compiled models -> function of the operands, the result's type and shape, and the recipe's parameters."""
