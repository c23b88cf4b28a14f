"""Element types: operators declare all types that ONNX's schemas allow. Also tests of rarely used types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx
import pytest

from kernel_harness import run_model, run_op
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.ops import registry

OTHER_NAMES = {"float": "FLOAT32", "double": "FLOAT64"}
NOT_DECLARED: dict[tuple[str, str], frozenset[DType]] = {}
"""(operator, type constraint) -> types that the schema allows and the plugin declines. Give the reason at the entry."""


def device_types(type_strs: Iterable[str]) -> frozenset[DType]:
    """Return those of a schema's types that device memory can hold: not strings, complex numbers or sequences."""
    names = [text[len("tensor(") : -1] for text in type_strs if text.startswith("tensor(")]
    members = [DType.__members__.get(OTHER_NAMES.get(name, name).upper()) for name in names]
    return frozenset(dtype for dtype in members if dtype is not None and dtype.is_supported)


def schemas() -> list[onnx.defs.OpSchema]:
    """Return the schemas of all versions of all ai.onnx operators in the registry."""
    served = {operator.name for operator in registry.operators() if operator.domain == ""}
    return [
        schema
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == ""
        and schema.name in served
        and not schema.deprecated
        and schema.since_version <= registry.NEWEST_OPSETS[""]
    ]


def test_every_type_of_every_schema_is_declared() -> None:
    missing: dict[tuple[str, str], set[DType]] = defaultdict(set)
    for schema in schemas():
        declared = registry.lookup("", schema.name, schema.since_version).types
        for constraint in schema.type_constraints:
            name = constraint.type_param_str
            if name in declared:
                missing[schema.name, name] |= device_types(constraint.allowed_type_strs) - declared[name]
    assert {key: types for key, types in missing.items() if types} == NOT_DECLARED


def test_inputs_without_a_declaration_have_one_type_or_are_read_by_the_host() -> None:
    for schema in schemas():
        operator = registry.lookup("", schema.name, schema.since_version)
        allowed = {c.type_param_str: device_types(c.allowed_type_strs) for c in schema.type_constraints}
        for index, value in enumerate(schema.inputs):
            if operator.constraint(index) or index in operator.host_inputs:
                continue
            types = allowed.get(value.type_str, device_types([value.type_str]))
            assert len(types) <= 1, f"{schema.name}-{schema.since_version}: {value.name} has {types}"


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_unsigned_integers_are_reduced(dtype: type[np.generic]) -> None:
    x = np.array([[3, 7, 0], [2**20, 1, 9]], dtype)
    wide = x.astype(np.float64)
    for name, expected in [
        ("ReduceL1", x.sum(1)),
        ("ReduceL2", np.sqrt((wide**2).sum(1))),
        ("ReduceMean", x.sum(1) // 3),
        ("ReduceSumSquare", (x * x).sum(1)),
        ("ReduceLogSum", np.log(wide.sum(1))),
        ("ReduceLogSumExp", wide.max(1)),
    ]:
        (y,) = run_op(name, [x, np.array([1])], {"keepdims": 0}, 18, constant=[1])
        assert y.dtype == dtype
        # Results are truncated to integers, so a root or logarithm may be off by one.
        np.testing.assert_allclose(y, expected.astype(dtype), atol=name.startswith(("ReduceL2", "ReduceLog")))
    (y,) = run_op("CumSum", [x, np.array(1)], opset=14, constant=[1])
    np.testing.assert_array_equal(y, x.cumsum(1, dtype=dtype))
    (y,) = run_op("PRelu", [x, x], opset=16)
    np.testing.assert_array_equal(y, x)


def test_functions_of_integers_are_cut_off() -> None:
    assert run_op("Erf", [np.array([-7, -1, 0, 1, 7], np.int16)], opset=13)[0].tolist() == [-1, 0, 0, 0, 1]
    shrunk = run_op("Shrink", [np.array([-7, -2, 0, 1, 7], np.int16)], {"lambd": 1.5, "bias": 0.75}, opset=9)
    assert shrunk[0].tolist() == [-6, -1, 0, 0, 6]


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_constants_above_the_largest_int64(shape: tuple[int, ...]) -> None:
    x = np.array([5, 2**64 - 1, 2**64 - 2, 0], np.uint64)
    large = np.full(shape, 2**64 - 1, np.uint64)
    for name, expected in [("Div", x // large), ("Add", x + large), ("Min", x), ("Less", x < large)]:
        np.testing.assert_array_equal(run_op(name, [x, large], opset=17, constant=[1])[0], expected)
    (joined,) = run_op("Concat", [large.reshape(-1)] * 2, {"axis": 0}, constant=[0, 1])
    np.testing.assert_array_equal(joined, large.max())


def test_sizes_that_went_through_8_bits_have_wrapped_around() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        through (float[a, b] x, int64[2] sizes) => (float[c, d] y)
        { few = Cast <to = 2> (sizes)  wide = Cast <to = 7> (few)  y = Reshape (x, wide) }
    """)
    assert run_model(model, [np.zeros((3, 2), np.float32), np.array([258, -253])])[0].shape == (2, 3)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz])
def test_what_is_not_finite_is_found_in_8_bit_floats(dtype: type[np.generic]) -> None:
    x = np.arange(256, dtype=np.uint8).view(dtype)
    np.testing.assert_array_equal(run_op("IsNaN", [x], opset=20)[0], np.isnan(x.astype(np.float32)))
    np.testing.assert_array_equal(run_op("IsInf", [x], opset=20)[0], np.isinf(x.astype(np.float32)))
    np.testing.assert_array_equal(run_op("Dropout", [x], opset=22)[0], x.view(np.uint8))


@pytest.mark.parametrize("scale", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [False, True])
def test_products_of_8_bit_floats(scale: type[np.generic], rows: bool) -> None:
    random = np.random.default_rng(0)
    a = random.integers(-8, 8, (3, 20)).astype(ml_dtypes.float8_e4m3fn)
    b = random.integers(-8, 8, (20, 5)).astype(ml_dtypes.float8_e5m2)
    a_scale = np.array([0.5, 2.0, 1.0] if rows else 0.5).astype(scale)
    b_scale, y_scale = np.array(0.25).astype(scale), np.array(2.0).astype(scale)
    zeros = [np.zeros((), x.dtype) for x in (a, b)]
    a_zero = np.zeros(a_scale.shape, a.dtype)
    y_zero = np.zeros((), ml_dtypes.float8_e4m3fnuz)
    (y,) = run_op("QLinearMatMul", [a, a_scale, a_zero, b, b_scale, zeros[1], y_scale, y_zero], opset=21)
    factor = a_scale.astype(np.float32).reshape((3, 1) if rows else ()) * np.float32(0.125)
    total = a.astype(np.float32) @ b.astype(np.float32) * factor
    expected = np.clip(total, -240, 240).astype(ml_dtypes.float8_e4m3fnuz)
    np.testing.assert_array_equal(y.view(expected.dtype).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("depth", "indices"),
    [
        (np.float32, np.float32),
        (np.float64, np.int8),
        (np.float16, np.uint64),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.uint8, np.float16),
    ],
)
@pytest.mark.parametrize("constant", [[1], []])
def test_one_hot_with_a_depth_of_any_type(
    depth: type[np.generic], indices: type[np.generic], constant: list[int]
) -> None:
    x = np.array([[0, 2], [4, 9]]).astype(indices)
    (y,) = run_op("OneHot", [x, np.array(5).astype(depth), np.array([1, 3], np.int16)], opset=11, constant=constant)
    np.testing.assert_array_equal(y, 1 + 2 * (x[..., None] == np.arange(5)))
