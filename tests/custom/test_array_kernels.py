"""Custom kernels whose tensors are arrays with a shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda

from custom_models import in_place_of, model
from custom_operators import stock_session
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.custom import array_kernel, ceildiv, f16_to_f32, f32_to_f16, launch, reshape
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.lowering.context import Buffer, BufferKind, Lowering, Tensor
from plugins import context, tensor


@array_kernel
def flipped(x: Any, scale: Any, y: Any, offset: Any) -> None:
    i = cuda.grid(1)
    if i < y.shape[0]:
        for j in range(y.shape[1]):
            y[i, j] = x[x.shape[0] - 1 - i, j, 0] * scale[()] + offset


def function(ctx: Lowering, inputs: Any, attributes: object) -> list[Tensor]:
    (x,) = inputs
    y = ctx.empty(x.shape, x.dtype)
    scale = ctx.constant(np.array(2.0, np.float32))
    x = reshape(ctx, ctx.contiguous(x), (*x.shape, 1))
    launch(ctx, flipped, ceildiv(x.shape[0], 32), 32, [x, scale, y, 0.5], writes=[y])
    return [y]


def test_a_kernel_indexes_its_tensors_by_dimensions() -> None:
    with in_place_of("Sign", function):
        session = stock_session(model())
    for rows in (3, 40):
        x = np.random.default_rng(rows).standard_normal((rows, 4), dtype=np.float32)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], -(2 * np.exp(x)[::-1] + 0.5), rtol=1e-6)


def doubles(x: Any, y: Any) -> None:
    y[0] = x[0] * 2


def doubles_a_variable(x: Any, y: Any) -> None:
    value = x[0]
    y[0] = value * 2


def compares(x: Any, y: Any) -> None:
    if x[0] < x[1]:
        y[0] = x[0]


def adds(x: Any, y: Any) -> None:
    y[0] += 1


def moves(x: Any, y: Any) -> None:
    value = x[0]
    y[x.shape[0] - 1] = value
    y[0] = x[1] if x[0] == x[1] else x[2] & 0x7FFF


def converts(x: Any, y: Any) -> None:
    value = x[0]
    value = f16_to_f32(value)
    y[0] = f32_to_f16(f16_to_f32(x[0]) * 2 + value * 2)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_the_bits_of_16_bit_floats_are_no_numbers(dtype: DType) -> None:
    def launched(function: Any, dtype: DType) -> None:
        ctx = context()
        y = ctx.empty((4,), dtype)
        launch(ctx, array_kernel(function), 1, 1, [tensor([4], dtype), y], writes=[y])

    for function in (doubles, doubles_a_variable, compares, adds):
        said = rf"kernel {function.__name__} computes with elements of parameter \d.*{dtype.short}_to_f32"
        with pytest.raises(TypeError, match=said):
            launched(function, dtype)
        launched(function, DType.FLOAT32)
    launched(moves, dtype)
    launched(converts, dtype)


def test_it_is_compiled_for_gpus() -> None:
    sizes = [Tensor(DType.FLOAT32, dims, Buffer(BufferKind.SCRATCH, 64)) for dims in ((4, 2, 1), (), (4, 2))]
    kernel, args = flipped.for_arguments([*sizes, 0.5])
    assert len(args) == 4 + 3 + 0 + 2
    signature = ("*f32", "i64", "i64", "i64", "*f32", "*f32", "i64", "i64", "f32")
    image = compile_kernel(kernel.spec(signature, 32), Target.cuda(9, 0))
    assert (image.data[:4], image.metadata["spill_store_bytes"]) == (b"\x7fELF", 0)
