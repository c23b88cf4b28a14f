"""Rewriting of tensors: a pass that moves a tensor updates all fields of all steps that refer to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper, parser

from contributed import noise
from kernel_harness import run_model
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.passes.simplification.concat_elimination import Copy, with_view
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.steps.row_program import Row
from ort_cuda_plugin.program.steps.steps import Attend, Contract, Conversion, Convolve, Input, Map, Rows
from ort_cuda_plugin.program.steps.tensor import Buffer, BufferKind, Tensor
from ort_cuda_plugin.program.steps.windows import Windows

K, N, BLOCK = 64, 8, 32
SCALES = N * K // BLOCK


def quantized(body: str, inputs: str, **constants: np.ndarray) -> ModelProto:
    """Return a model with y = MatMulNBits(x, codes, s); the nodes in ``body`` compute the scales s and the output z."""
    product = f"y = com.microsoft.MatMulNBits<K = {K}, N = {N}, bits = 4, block_size = {BLOCK}>(x, codes, s)"
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
        f" g (float[3, {K}] x, {inputs}) => (float[3, {N}] y, float[k] z) {{ {body} {product} }}"
    )
    codes = np.random.default_rng(0).integers(0, 256, (N, K // BLOCK, BLOCK // 2), dtype=np.uint8)
    constants |= {"codes": codes, "flat": np.array([-1]), "two": np.array(2, np.float32)}
    names = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in constants.items() if name in names)
    return model


MODELS: dict[str, Callable[[], tuple[ModelProto, list[np.ndarray]]]] = {
    "concat_elimination": lambda: (
        quantized("s = Mul(s0, two) z = Concat<axis = 0>(s, t)", f"float[{SCALES}] s0, float[4] t"),
        [noise(SCALES, seed=1), noise(4, seed=2)],
    ),
    "horizontal_gemm": lambda: (
        quantized(
            "a = MatMul(u, v) b = MatMul(u, w) s = Reshape(b, flat) r = Reshape(a, flat) z = Softmax<axis = 0>(r)",
            "float[1, 8] u",
            v=noise(8, SCALES, seed=3),
            w=noise(8, SCALES, seed=4),
        ),
        [noise(1, 8, seed=1)],
    ),
    "common_subexpression_elimination": lambda: (
        quantized("e = Exp(s0) r = Mul(e, two) s = Mul(e, two) z = Softmax<axis = 0>(r)", f"float[{SCALES}] s0"),
        [noise(SCALES, seed=1)],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_scales_that_a_pass_moves_are_read_where_they_are(name: str) -> None:
    model, inputs = MODELS[name]()
    inputs = [noise(3, K, seed=9), *inputs]
    feeds = {value.name: array for value, array in zip(model.graph.input, inputs, strict=True)}
    cpu = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(run_model(model, inputs), cpu.run(None, feeds), strict=True):
        np.testing.assert_allclose(got, np.asarray(want), rtol=1e-4, atol=1e-4)


def _tensor(*shape: int, kind: BufferKind = BufferKind.SCRATCH) -> Tensor:
    return Tensor(DType.FLOAT32, shape, Buffer(kind, 4 * int(np.prod(shape))))


def _leaf() -> Scalar:
    return Scalar(DType.FLOAT32, "leaf")


def _steps(x: Tensor) -> dict[str, Map]:
    """Return a step of each class. All its tensor fields refer to ``x``, a tensor [4, 4]."""
    (own, other, total), y = (_leaf() for _ in range(3)), _tensor(4, 4)
    inputs: tuple[Input, ...] = ((own, x),)
    conversion = Conversion(other, other, inputs)
    pairs: dict[str, Any] = {"inputs": inputs, "outputs": ((own, x), (own, y))}
    image = Tensor(x.dtype, (4, 4, 1, 1), x.buffer)
    windows = Windows((4, 4), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0))
    step = Map((), (4, 4), **pairs)
    sums: dict[str, Any] = {**pairs, "total": total, "conversions": (conversion, conversion)}
    contract = Contract((), (4, 4), operands=(x, x), **sums)
    attend = Attend(
        (),
        (4, 4),
        operands=(x, x, x),
        **sums,
        score=own,
        score_inputs=inputs,
        weight=own,
        row=Row(),
        parts=(contract, step, contract),
    )
    return {
        "Map": step,
        "Rows": Rows((), (4, 4), **pairs, axes=frozenset({1}), row_outputs=((own, x),)),
        "Contract": contract,
        "Attend": attend,
        "Convolve": Convolve((), (4, 4, 1, 1), operands=(image, image), windows=windows, **sums),
    }


@pytest.mark.parametrize("kind", ["Map", "Rows", "Contract", "Attend", "Convolve"])
def test_no_field_keeps_a_tensor_that_has_moved(kind: str) -> None:
    x = _tensor(4, 4)
    step = _steps(x)[kind]
    assert x.buffer in step.reads
    assert x.buffer in step.writes
    large = _tensor(8, 4)
    moved = with_view(step, Copy(0, x, Tensor(x.dtype, x.shape, large.buffer, offset=16)))
    assert isinstance(moved, Map)
    found = moved.tensors()
    assert len(found) == len(step.tensors())
    assert not [y for y in found if y.buffer is x.buffer]
    assert sum(y.buffer is large.buffer for y in found) == sum(y.buffer is x.buffer for y in step.tensors())
    assert all(y.offset == 16 for y in found if y.buffer is large.buffer)
    assert large.buffer in moved.reads
    assert large.buffer in moved.writes


def test_each_field_that_has_tensors_is_among_the_reads_or_the_writes() -> None:
    """Give each tensor of a step its own buffer; ``reads`` and ``writes`` together must contain all of them."""
    for step in _steps(_tensor(4, 4)).values():
        apart = step.map_tensors(lambda y: Tensor(y.dtype, y.shape, Buffer(y.buffer.kind, y.buffer.nbytes)))
        used = {y.buffer for y in apart.tensors(without=("parts",))}
        assert used == {*apart.reads, *apart.writes}


def test_codes_of_less_than_a_byte_do_not_move() -> None:
    x, own = _tensor(4, 4), _leaf()
    conversion = Conversion(own, own, (), bits=4, block=16)
    step = Contract(
        (),
        (4, 4),
        inputs=(),
        outputs=((own, _tensor(4, 4)),),
        operands=(_tensor(4, 4), x),
        total=own,
        conversions=(None, conversion),
    )
    copy = Copy(0, x, Tensor(x.dtype, x.shape, _tensor(8, 4).buffer, offset=16))
    assert with_view(step, copy) is None
    assert with_view(dataclasses.replace(step, conversions=(None, None)), copy) is not None
