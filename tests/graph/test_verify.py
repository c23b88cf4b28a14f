"""The verifier of programs: violations of each invariant, its errors, and when it runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from contributed import noise
from ort_cuda_plugin.clusters.cluster import CompiledCluster
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.model.onnx_graph import read_model
from ort_cuda_plugin.passes.simplification.concat_elimination import eliminate_concats
from ort_cuda_plugin.passes.table import PASSES
from ort_cuda_plugin.program.analysis import verify
from ort_cuda_plugin.program.analysis.verify import InvalidProgramError, Verifier
from ort_cuda_plugin.program.expressions.scalar import Scalar
from ort_cuda_plugin.program.expressions.symbolic import Dim, symbol
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering, LoweringOptions
from ort_cuda_plugin.program.steps.steps import Attend, Contract, Conversion, Input, Map, Rows
from ort_cuda_plugin.program.steps.tensor import Buffer, BufferKind, Tensor
from ort_cuda_plugin.program.steps.trace import Copy, Step

SIZE = symbol(0, "n", 3, 1, None)


def tensor(*shape: Dim, kind: BufferKind = BufferKind.INPUT, index: int = 2) -> Tensor:
    nbytes: Dim = 4
    for dim in shape:
        nbytes = nbytes * dim
    host = (SIZE,) * 2 if kind is BufferKind.HOST else None
    return Tensor(DType.FLOAT32, shape, Buffer(kind, nbytes, index=index, host=host))


def leaf() -> Scalar:
    return Scalar(DType.FLOAT32, "leaf")


def copied(x: Tensor, y: Tensor) -> Map:
    own = leaf()
    return Map((), y.shape, ((own, x),), ((own, y),))


def part(x: Tensor, start: int, rows: int) -> Tensor:
    return Tensor(x.dtype, (rows, *x.shape[1:]), x.buffer, strides=x.strides, offset=start * x.strides[0])


def product(a: Tensor, b: Tensor, y: Tensor, inputs: tuple[Input, ...] = (), value: Scalar | None = None) -> Contract:
    total = leaf()
    return Contract((), y.shape, inputs, ((value or total, y),), operands=(a, b), total=total)


X, Y = tensor(4, 4), tensor(4, 4, kind=BufferKind.OUTPUT, index=0)
BETWEEN = tensor(4, 4, kind=BufferKind.SCRATCH)
BROKEN: dict[str, tuple[list[Step], str]] = {
    "a copy of what it does not say": (
        [Copy((), (), (Y.buffer,), Y, X)],
        r"step 0: copy: invariant 1: tensor f32\[4, 4\] of INPUT 2 is missing in the step",
    ),
    "a view that runs backwards from the first element": (
        [copied(X, Tensor(Y.dtype, (4, 4), Y.buffer, strides=(4, -1)))],
        r"step 0: map: invariant 5: tensor f32\[4, 4\] of OUTPUT 0 exceeds its buffer",
    ),
    "a host value of two elements": (
        [copied(tensor(2, kind=BufferKind.HOST), tensor(2, kind=BufferKind.OUTPUT))],
        r"step 0: map: invariant 2: tensor f32\[2\] of HOST",
    ),
    "a read before the write": (
        [copied(BETWEEN, Y), copied(X, BETWEEN)],
        r"step 0: map: invariant 3: tensor f32\[4, 4\] of SCRATCH is read",
    ),
    "a conversion that reads what nobody writes": (
        [
            replace(
                product(X, X, Y), conversions=(Conversion(one := leaf(), one, ((leaf(), part(BETWEEN, 0, 1)),)), None)
            )
        ],
        r"step 0: product: invariant 3: tensor f32\[1, 4\] of SCRATCH",
    ),
    "a gap in a concatenation": (
        [copied(part(X, 0, 1), part(Y, 0, 1)), copied(part(X, 0, 2), part(Y, 2, 2))],
        r"step 1: map: invariant 4: tensor f32\[2, 4\] of OUTPUT 0 is written in parts",
    ),
    "parts of a concatenation in one place": (
        [copied(part(X, 0, 2), part(Y, 0, 2)), copied(part(X, 0, 2), part(Y, 0, 2))],
        "step 1: map: invariant 4",
    ),
    "a gap of unknown size": (
        [copied(tensor(SIZE, 3), Tensor(DType.FLOAT32, (SIZE, 3), tensor(SIZE, 4, kind=BufferKind.OUTPUT).buffer))],
        "step 0: map: invariant 4",
    ),
    "a view behind the end": (
        [copied(part(X, 2, 3), tensor(3, 4, kind=BufferKind.OUTPUT))],
        r"step 0: map: invariant 5: tensor f32\[3, 4\] of INPUT 2 exceeds",
    ),
    "a shape that does not broadcast": (
        [replace(copied(X, Y), inputs=((leaf(), tensor(3, 4)),))],
        r"step 0: map: invariant 6: tensor f32\[3, 4\] of INPUT 2 does not broadcast to \[4, 4\]",
    ),
    "a shape of unknown size that does not broadcast": (
        [copied(tensor(SIZE + 1, 4), tensor(SIZE + 2, 4, kind=BufferKind.OUTPUT))],
        "step 0: map: invariant 6",
    ),
    "results of rows that have columns": (
        [Rows((), (4, 4), (), ((one := Scalar(DType.FLOAT32, "constant", value=0.0), Y),), frozenset({1}),
              row_outputs=((one, tensor(4, 4, kind=BufferKind.OUTPUT)),))],
        r"step 0: reduction over axis 1: invariant 6: .* does not broadcast to \[4, 1\]",
    ),
    "a product of other depths": ([product(X, tensor(3, 4), Y)], r"step 0: product: invariant 6: tensor f32\[3, 4\]"),
    "an expression of a leaf without input": (
        [Map((), (4, 4), (), ((leaf(), Y),))],
        "step 0: map: invariant 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_program_that_breaks_an_invariant_is_refused(name: str) -> None:
    steps, message = BROKEN[name]
    with pytest.raises(InvalidProgramError, match=f"^pass tried, {message}"):
        Verifier()("tried", steps)


def test_an_attention_whose_parts_read_what_it_does_not_is_refused() -> None:
    scores, weights = (tensor(4, 4, kind=BufferKind.SCRATCH) for _ in range(2))
    parts = (product(X, X, scores), copied(scores, weights), product(weights, X, Y))
    total, score = leaf(), leaf()
    step = Attend(
        (), (4, 4), (), ((total, Y),), operands=(X, X, X), total=total, score=score, score_inputs=(), weight=score,
        row=None, parts=parts,  # type: ignore[arg-type]
    )  # fmt: skip
    Verifier()("tried", [step])
    with pytest.raises(InvalidProgramError, match="step 0: attention: invariant 1: a part of the step, a map,"):
        Verifier()("tried", [replace(step, parts=(parts[0], copied(tensor(4, 4), weights), parts[2]))])


def test_what_fills_a_buffer_may_be_written_over_in_parts() -> None:
    Verifier()("tried", [copied(X, Y), copied(part(X, 0, 1), part(Y, 1, 1))])


def test_no_earlier_step_writes_what_is_empty_or_stands_for_unknown_results_or_is_the_launchs_own() -> None:
    ctx = Lowering(DeviceProperties())
    x = ctx.stand_in((4, 4), DType.FLOAT32)
    Verifier(ctx.stand_ins)("tried", [copied(x, Y)])
    joined, own = tensor(8, 4, kind=BufferKind.OUTPUT, index=1), leaf()
    reader = Map((), Y.shape, ((own, x),), ((own + own, Y),))
    moved = eliminate_concats(ctx, [copied(x, part(joined, 0, 4)), copied(X, part(joined, 4, 4)), reader])
    assert [step.reads for step in moved] == [(X.buffer,), (joined.buffer,)]
    Verifier(ctx.stand_ins)("moved", moved)
    with pytest.raises(InvalidProgramError, match="invariant 4"):
        Verifier()("moved", moved)
    Verifier()("tried", [copied(ctx.empty((0, 4), DType.FLOAT32), tensor(0, 4, kind=BufferKind.OUTPUT))])
    Verifier()("tried", [Copy((), (X.buffer, Y.buffer), (Y.buffer,), Y, X)])
    with pytest.raises(InvalidProgramError, match="invariant 3"):
        Verifier()("tried", [copied(x, Y)])


# ---- passes that forget something ----


def quantized(dtype: str) -> ModelProto:
    """Return two convolutions and a MatMulNBits whose scales are the result of the first one."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
        f""" g ({dtype}[3, 256] x, {dtype}[1, 16, 2, 2] v) => ({dtype}[3, 8] y, {dtype}[1, 16, 2, 2] z)
        {{ a = Conv<pads = [1, 1, 1, 1]>(v, w) s = Reshape(a, flat) r = Relu(a) z = Conv<pads = [1, 1, 1, 1]>(r, w)
           y = com.microsoft.MatMulNBits<K = 256, N = 8, bits = 4, block_size = 32>(x, codes, s) }}"""
    )
    numbers = np.random.default_rng(0)
    constants = {
        "w": (noise(16, 16, 3, 3) / 9).astype(np.float16 if dtype == "float16" else np.float32),
        "codes": numbers.integers(0, 256, (8, 8, 16), dtype=np.uint8),
        "flat": np.array([-1]),
    }
    model.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in constants.items())
    return model


def prepare(model: ModelProto, device: DeviceProperties | None = None, *, fusion: bool = True) -> None:
    CompiledCluster(read_model(model), device or DeviceProperties(), LoweringOptions(fusion=fusion)).prepare()


def placed() -> ModelProto:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
        """ g (float[3, 64] x, float[16] s0, float[4] t) => (float[3, 8] y, float[20] z)
        { s = Exp(s0) z = Concat<axis = 0>(s, t)
          y = com.microsoft.MatMulNBits<K = 64, N = 8, bits = 4, block_size = 32>(x, codes, s) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((8, 2, 16), np.uint8), "codes"))
    return model


@pytest.mark.parametrize("fusion", [True, False])
def test_a_rewriting_that_forgets_what_conversions_read_is_found(fusion: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DeviceProperties.gpu((9, 0))
    prepare(quantized("float16"), gpu, fusion=fusion)
    prepare(placed())
    monkeypatch.setattr(Conversion, "map_tensors", lambda self, function: self)
    with pytest.raises(InvalidProgramError, match=r"^pass layout_propagation, step \d+: product, node y .* 3: "):
        prepare(quantized("float16"), gpu, fusion=fusion)
    with pytest.raises(InvalidProgramError, match=r"^pass concat_elimination, step \d+: product, node y"):
        prepare(placed())


# ---- when the verifier runs ----


@pytest.mark.parametrize(("variable", "is_on"), [("VERIFY", "1"), ("EMULATE_CHECK", "1"), ("VERIFY", "0")])
def test_the_environment_asks_for_verification(variable: str, is_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (verify.VERIFY_VARIABLE, verify.CHECK_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert not verify.is_wanted()
    monkeypatch.setenv(f"ORT_CUDA_PLUGIN_{variable}", is_on)
    assert verify.is_wanted() == (is_on == "1")
    monkeypatch.setattr(Conversion, "map_tensors", lambda self, function: self)
    # Without verification only the program after the last pass is checked, for reads before a write.
    after = "concat_elimination" if is_on == "1" else PASSES[-1].name
    with pytest.raises(InvalidProgramError, match=f"^pass {after}, .* invariant 3: "):
        prepare(placed())


def test_the_tests_verify_programs() -> None:
    assert verify.is_wanted()
