"""Kernels of applications whose tensors are arrays with a shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from custom_models import in_place_of, model
from custom_operators import stock_session
from ort_cuda_plugin.compiler.compile import compile_kernel
from ort_cuda_plugin.compiler.targets import Target
from ort_cuda_plugin.custom import array_kernel, ceildiv, launch, reshape
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.lowering import Buffer, BufferKind, Lowering, Tensor


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


def test_it_is_compiled_for_gpus() -> None:
    sizes = [Tensor(DType.FLOAT32, dims, Buffer(BufferKind.SCRATCH, 64)) for dims in ((4, 2, 1), (), (4, 2))]
    kernel, args = flipped.for_arguments([*sizes, 0.5])
    assert len(args) == 4 + 3 + 0 + 2
    signature = ("*f32", "i64", "i64", "i64", "*f32", "*f32", "i64", "i64", "f32")
    image = compile_kernel(kernel.spec(signature, 32), Target.cuda(9, 0))
    assert (image.data[:4], image.metadata["spill_store_bytes"]) == (b"\x7fELF", 0)
