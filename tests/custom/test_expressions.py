"""Elementwise expressions and row reductions of custom operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from custom_operators import DOMAIN, kept_registry, model, stock_session
from ort_cuda_plugin.custom import ARITHMETIC, SUM, DType, Lowering, T, elementwise, op, row_map, scalar


@pytest.fixture(autouse=True)
def own_operators() -> Iterator[None]:
    with kept_registry():
        yield


NODE = helper.make_node("Tried", ["x"], ["y"], domain=DOMAIN)
NUMBERS: dict[int, Any] = {
    TensorProto.INT64: np.array([-7, -6, -1, 1, 2, 7, 2**62 + 1]),
    TensorProto.INT32: np.array([-7, -6, -1, 1, 2, 7, 2**31 - 1], np.int32),
    TensorProto.UINT8: np.array([1, 2, 7, 200, 255], np.uint8),
    TensorProto.FLOAT: np.array([-7.5, -1.0, 0.5, 3.0], np.float32),
}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_division_rounds_down_as_in_python(dtype: int) -> None:
    def parts(a: Any) -> list[Any]:
        return [a // 3, a % 3, 100 // a, 100 % a]

    @op("my.domain::Tried", types={"T": ARITHMETIC})
    def tried(ctx: Lowering, x: T) -> tuple[T, T, T, T]:
        y0, y1, y2, y3 = (elementwise(ctx, lambda a, i=i: parts(a)[i], x) for i in range(4))
        return y0, y1, y2, y3

    x = NUMBERS[dtype]
    names = ["a", "b", "c", "d"]
    built = model([helper.make_node("Tried", ["x"], names, domain=DOMAIN)], {"x": ["n"]}, names, dtype)
    for found, expected in zip(stock_session(built).run(None, {"x": x}), parts(x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_division_by_zero_gives_zero() -> None:
    @op("my.domain::Tried", types={"T": ARITHMETIC})
    def tried(ctx: Lowering, x: T) -> T:
        return elementwise(ctx, lambda a: 7 // (a - a), x)

    session = stock_session(model([NODE], {"x": ["n"]}, ["y"], TensorProto.INT32))
    np.testing.assert_array_equal(session.run(None, {"x": np.ones(3, np.int32)})[0], np.zeros(3))


def test_a_number_to_the_power_of_an_element() -> None:
    @op("my.domain::Tried")
    def tried(ctx: Lowering, x: T) -> T:
        return elementwise(ctx, lambda a: 10.0**a, x)

    session = stock_session(model([NODE], {"x": ["n"]}, ["y"]))
    np.testing.assert_allclose(session.run(None, {"x": np.array([0, 2, -1], np.float32)})[0], [1, 100, 0.1], rtol=1e-6)


def test_rows_are_reduced_and_their_elements_follow() -> None:
    @op("my.domain::Tried")
    def tried(ctx: Lowering, x: T) -> T:
        def normalized(row: Any, a: Any) -> Any:
            a = scalar.cast(a, DType.FLOAT32)
            return [scalar.cast(a / scalar.sqrt(row.reduce(SUM, a * a)), x.dtype)], []

        (y,) = row_map(ctx, normalized, [x.rank - 1], x)
        return y

    session = stock_session(model([NODE], {"x": ["n", "m"]}, ["y"]))
    x = np.random.default_rng(3).standard_normal((5, 300), np.float32)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x / np.linalg.norm(x, axis=1)[:, None], rtol=1e-5)
