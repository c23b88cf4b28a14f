"""Scatter operators, also with several updates of one element, compared with loops in Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_harness import run_op
from ort_cuda_plugin.abi.core import PluginError
from ort_cuda_plugin.model.ir import InvalidModel, NodeError
from ort_cuda_plugin.program.lowering.context import LoweringOptions

Array = np.ndarray[Any, np.dtype[Any]]

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda a, b: b,
    "add": operator.add,
    "mul": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
}
ON_BOOLEANS = COMBINE | {"add": np.logical_or, "mul": np.logical_and}
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.int64]
DTYPES += [np.uint8, np.uint16, np.uint32, np.uint64, np.bool_]


def expected(op_type: str, data: Array, indices: Array, updates: Array, axis: int, reduction: str) -> Array:
    """Compute a scatter operator in Python. 16-bit floats are combined in float32 and rounded at the end."""
    wide = np.float32 if data.dtype in (np.float16, ml_dtypes.bfloat16) else data.dtype
    result, updates = data.astype(wide), updates.astype(wide)
    step = (ON_BOOLEANS if data.dtype == np.bool_ else COMBINE)[reduction]
    with np.errstate(over="ignore"):
        if op_type == "ScatterElements":
            for at in np.ndindex(*indices.shape):
                place = list(at)
                place[axis] = indices[at]
                result[tuple(place)] = step(result[tuple(place)], updates[at])
        else:
            for at in np.ndindex(*indices.shape[:-1]):
                result[tuple(indices[at])] = step(result[tuple(indices[at])], updates[at])
    return result.astype(data.dtype)


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return small multiples of 0.5 or integers; short sums and products are exact in all types, in any order."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    values = rng.integers(0 if np.dtype(dtype).kind == "u" else -3, 4, shape)
    return (values / (1 if np.dtype(dtype).kind in "iu" else 2)).astype(dtype)


def check(op_type: str, data: Array, indices: Array, updates: Array, axis: int = 0, reduction: str = "none") -> None:
    attributes = {"axis": axis} if op_type == "ScatterElements" else {}
    reference = expected(op_type, data, indices, updates, axis, reduction)
    for dynamic in (False, True):
        # ScatterND needs a static length of its index tuples.
        constant = (1,) if dynamic and op_type == "ScatterND" else ()
        for options in (LoweringOptions(), LoweringOptions(deterministic=True)):
            (y,) = run_op(
                op_type, [data, indices, updates], attributes | {"reduction": reduction}, 18, dynamic=dynamic,
                options=options, constant=constant,
            )  # fmt: skip
            np.testing.assert_array_equal(y.view(data.dtype), reference)


@pytest.mark.parametrize("reduction", ["add", "mul", "min", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(dtype: type[np.generic], reduction: str) -> None:
    rng = np.random.default_rng(0)
    data = numbers(rng, (3, 4), dtype)
    check("ScatterElements", data, rng.integers(-4, 4, (2, 5)), numbers(rng, (2, 5), dtype), 1, reduction)
    check("ScatterND", data, rng.integers(-3, 3, (6, 1)), numbers(rng, (6, 4), dtype), 0, reduction)


@settings(max_examples=20)
@given(st.data())
def test_shapes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    reduction = data.draw(st.sampled_from(["add", "mul", "min", "max"]))
    table = numbers(rng, shape, np.int64)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    places = [data.draw(st.integers(0, dim)) for dim in shape]
    places[axis] = data.draw(st.integers(0, 7))
    indices = rng.integers(0, shape[axis], places)
    check("ScatterElements", table, indices, numbers(rng, indices.shape, np.int64), axis % len(shape), reduction)
    length = data.draw(st.integers(1, len(shape)))
    lead = tuple(data.draw(st.lists(st.integers(0, 4), max_size=2)))
    tuples = np.stack([rng.integers(-dim, dim, lead) for dim in shape[:length]], -1)
    check("ScatterND", table, tuples, numbers(rng, lead + shape[length:], np.int64), 0, reduction)


@pytest.mark.parametrize("reduction", ["min", "max", "add", "mul"])
def test_nan_spreads(reduction: str) -> None:
    data, updates = np.zeros(4, np.float32), np.array([1, np.nan, 2, np.nan, 3], np.float32)
    (y,) = run_op("ScatterElements", [data, np.array([0, 0, 0, 1, 2]), updates], {"reduction": reduction}, 18)
    assert np.isnan(y).tolist() == [True, True, False, False]


def test_many_updates_of_one_element() -> None:
    updates = np.ones(5000, np.float16)
    (y,) = run_op("ScatterElements", [np.zeros(1, np.float16), np.zeros(5000, np.int64), updates], {"reduction": "add"})
    assert y.tolist() == [5000.0]


def test_deterministic_sums_are_in_order() -> None:
    rng = np.random.default_rng(0)
    data, updates = np.zeros(3, np.float32), rng.standard_normal(300).astype(np.float32)
    indices = rng.integers(0, 3, 300)
    (y,) = run_op(
        "ScatterElements", [data, indices, updates], {"reduction": "add"}, options=LoweringOptions(deterministic=True)
    )
    np.testing.assert_array_equal(y, expected("ScatterElements", data, indices, updates, 0, "add"))


X = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("op_type", "indices", "updates"),
    [
        ("ScatterElements", (4, 2), (4, 2)),
        ("ScatterElements", (2, 2), (2, 1)),
        ("ScatterND", (5, 1), (5, 3)),
        ("ScatterND", (5, 2), (4,)),
        ("GatherElements", (4, 2), None),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_shapes_that_lead_out_of_a_tensor_are_refused(
    op_type: str, indices: tuple[int, ...], updates: tuple[int, ...] | None, dynamic: bool
) -> None:
    inputs: list[Array] = [X, np.zeros(indices, np.int64)]
    if updates is not None:
        inputs.append(np.zeros(updates, np.float32))
    attributes = {} if op_type == "ScatterND" else {"axis": 1}
    with pytest.raises((NodeError, InvalidModel, PluginError), match=r"must (be at most|have)"):
        run_op(op_type, inputs, attributes, dynamic=dynamic, constant=(1,))


def test_indices_outside_are_ignored() -> None:
    (y,) = run_op("ScatterND", [np.zeros(3, np.float32), np.array([[7], [-9], [1]]), np.ones(3, np.float32)])
    assert y.tolist() == [0, 1, 0]
