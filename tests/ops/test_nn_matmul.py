"""MatMul and Gemm on the emulated device, compared with NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_harness import run_op
from nn_reference import check_op, noise
from ort_cuda_plugin.model.ir import InvalidModel, NodeError

few = settings(max_examples=12)
sizes = st.sampled_from([0, 1, 3, 4, 5, 17, 33, 64, 100, 130])


@few
@given(m=sizes, k=sizes, n=sizes, dynamic=st.booleans())
def test_matmul_of_any_size_is_numpys(m: int, k: int, n: int, dynamic: bool) -> None:
    check_op("MatMul", [noise(1, (m, k)), noise(2, (k, n))], dynamic=dynamic)


@few
@given(
    left=st.sampled_from([(), (3,), (2, 3), (1, 3), (2, 1), (4, 2, 3), (4, 1, 1)]),
    right=st.sampled_from([(), (3,), (2, 3), (2, 1), (1, 1, 3)]),
    dynamic=st.booleans(),
)
def test_matmul_broadcasts_batches(left: tuple[int, ...], right: tuple[int, ...], dynamic: bool) -> None:
    check_op("MatMul", [noise(1, (*left, 5, 20)), noise(2, (*right, 20, 9))], dynamic=dynamic)


@pytest.mark.parametrize(("left", "right"), [((20,), (20,)), ((20,), (3, 20, 4)), ((3, 4, 20), (20,))])
def test_matmul_of_vectors_drops_their_dimension(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    check_op("MatMul", [noise(1, left), noise(2, right)])


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "int64", "uint32", "uint64"])
def test_matmul_of_each_type(dtype: str) -> None:
    check_op("MatMul", [noise(1, (40, 50), dtype), noise(2, (50, 70), dtype)])
    check_op("MatMul", [noise(1, (1, 50), dtype), noise(2, (50, 70), dtype)])


def test_matmul_of_bfloat16_rounds_once() -> None:
    from ml_dtypes import bfloat16

    a, b = noise(1, (40, 50)).astype(bfloat16), noise(2, (50, 70)).astype(bfloat16)
    (result,) = run_op("MatMul", [a, b])
    wanted = (a.astype(np.float32) @ b.astype(np.float32)).astype(bfloat16).astype(np.float32)
    error = np.abs(result.view(bfloat16).astype(np.float32) - wanted)
    assert (error <= np.abs(wanted) * 2**-7 + 1e-4).all()


GEMMS: list[tuple[bool, bool, tuple[int, ...] | None, float, float]] = [
    (False, False, None, 1.0, 1.0),
    (False, True, (33,), 1.0, 1.0),
    (True, False, (-1, 1), 0.5, 2.0),
    (True, True, (-1, 33), 2.0, 1.0),
    (False, True, (), 1.0, 0.0),
]


@settings(max_examples=6)
@pytest.mark.parametrize(("trans_a", "trans_b", "addend", "alpha", "beta"), GEMMS)
@given(m=st.sampled_from([1, 4, 5, 70]), k=st.sampled_from([1, 21, 64]), constant=st.booleans(), dynamic=st.booleans())
def test_gemm_is_numpys(
    trans_a: bool, trans_b: bool, addend: tuple[int, ...] | None, alpha: float, beta: float,
    m: int, k: int, constant: bool, dynamic: bool,
) -> None:  # fmt: skip
    a = noise(1, (k, m) if trans_a else (m, k))
    b = noise(2, (33, k) if trans_b else (k, 33))
    c = [] if addend is None else [noise(3, [m if dim == -1 else dim for dim in addend])]
    attributes = {"transA": int(trans_a), "transB": int(trans_b), "alpha": alpha, "beta": beta}
    check_op("Gemm", [a, b, *c], attributes, constant=[1] * constant, dynamic=dynamic)


def test_gemm_of_integers_with_factors_is_declined() -> None:
    with pytest.raises(NodeError, match="alpha, beta"):
        run_op("Gemm", [noise(1, (3, 3), "int32"), noise(2, (3, 3), "int32")], {"alpha": 2.0})


def test_different_inner_dimensions_are_an_invalid_model() -> None:
    from ort_cuda_plugin.ops.onnx.math.matmul import matmul
    from ort_cuda_plugin.program.lowering.context import Buffer, BufferKind, DeviceProperties, DType, Lowering, Tensor

    a, b = (Tensor(DType.FLOAT32, shape, Buffer(BufferKind.INPUT, 0)) for shape in ((2, 3), (4, 5)))
    with pytest.raises(InvalidModel, match="inner dimensions"):
        matmul(Lowering(DeviceProperties()), a, b)
