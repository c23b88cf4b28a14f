"""Shape arithmetic that mixes host values with integers computed on the device, for several values per session."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import parser

import ort_cuda_plugin
from ort_cuda_plugin.model.ir import DType
from ort_cuda_plugin.program.expressions.symbolic import symbol
from ort_cuda_plugin.program.lowering.context import DeviceProperties, Lowering, Tensor

SIZES = {
    "Shape": "s = Shape(x)",
    "Size": "q = Size(x) s = Unsqueeze(q, zero)",
    "arithmetic": "n = Shape(x) k = Add(n, n) s = Mul(k, n)",
    "a part of a shape": "n = Shape(x) w = Concat<axis = 0>(n, n) s = Gather(w, zero)",
}
CONCATENATIONS = {
    "last": "c = Concat<axis = 0>(t, t, s)",
    "in the middle": "c = Concat<axis = 0>(t, s, t)",
    "twice": "c = Concat<axis = 0>(s, t, s)",
    "after one": "c = Concat<axis = 0>(t, s)",
    "of what is made of both": "a = Add(s, t) c = Concat<axis = 0>(a, s)",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"fusion": "0"}, {"automatic_cuda_graphs": "0"}], ids=str)
def test_a_size_that_is_an_output_and_a_part_of_a_concatenation_is_that_of_the_run(
    options: dict[str, str], size: str
) -> None:
    for joined in CONCATENATIONS.values():
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 21]> g (float[b] x, int64[1] m) => (int64[1] s, int64[k] c)'
            f" <int64[1] zero = {{0}}> {{ {SIZES[size]} t = Neg(m) {joined} }}"
        ).SerializeToString()
        ours, theirs = ort.SessionOptions(), ort.SessionOptions()
        ours.graph_optimization_level = theirs.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort_cuda_plugin.session(model, emulate=True, provider_options=options, sess_options=ours)
        cpu = ort.InferenceSession(model, theirs, providers=["CPUExecutionProvider"])
        for n in (4, 3, 5, 4):
            feeds = {"x": np.ones(n, np.float32), "m": np.array([-n])}
            for got, want in zip(session.run(None, feeds), cpu.run(None, feeds), strict=True):
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=f"{joined} of {n}")


def _with_host_value() -> tuple[Lowering, Tensor]:
    ctx = Lowering(DeviceProperties())
    return ctx, ctx.host_tensor([symbol(0, "n", 3, 1, None), 2], (2,), DType.INT64)


def test_a_materialization_serves_those_that_read_it_in_one_recording() -> None:
    ctx, x = _with_host_value()
    assert ctx.materialize(x).buffer is ctx.materialize(x).buffer
    assert len(ctx.trace.steps) == 1


def test_a_recording_that_is_dropped_takes_its_materializations_with_it() -> None:
    ctx, x = _with_host_value()
    with ctx.recording() as dropped:
        inner = ctx.materialize(x)
    assert [step.writes for step in dropped] == [(inner.buffer,)]
    assert not ctx.trace.steps
    outer = ctx.materialize(x)
    assert outer.buffer is not inner.buffer
    assert [step.writes for step in ctx.trace.steps] == [(outer.buffer,)]
    with ctx.recording() as steps:
        assert ctx.materialize(x).buffer is not outer.buffer
    assert len(steps) == 1
    assert ctx.materialize(x).buffer is outer.buffer


def test_a_recording_that_ends_with_an_error_gives_the_trace_back() -> None:
    ctx, x = _with_host_value()
    steps = ctx.trace.steps
    with pytest.raises(TypeError, match="expected a contiguous tensor"), ctx.recording():
        ctx.memset(ctx.view(ctx.materialize(x), (2,), (2,)), 0)
    assert ctx.trace.steps is steps
    assert not steps


def test_a_size_of_an_input_of_unknown_rank_is_read_at_the_rank_that_it_comes_with() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[] x) => (int64[k] y)'
        " <int64 zero = {0}, int64 one = {1}> { n = Squeeze(x) y = Range(zero, n, one) }"
    ).SerializeToString()
    session = ort_cuda_plugin.session(model, emulate=True)
    for x in (np.array([3]), np.array(5), np.array([[4]]), np.array([0])):
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.arange(x.item()))


def test_shape_arithmetic_on_an_input_of_unknown_rank_is_read_back() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[b] x, int64[] s) => (float[k] y)'
        " <int64[1] zero = {0}> { n = Squeeze(s, zero) m = Add(n, n) e = Unsqueeze(m, zero) y = Slice(x, zero, e) }"
    ).SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
    x = np.arange(9, dtype=np.float32)
    for n in (1, 3, 0):
        np.testing.assert_array_equal(session.run(None, {"x": x, "s": np.array([n])})[0], x[: 2 * n])


def test_a_claimed_node_whose_rank_sizes_decide_gets_its_plan_from_the_shapes_of_the_run() -> None:
    """At claim time, the declared shape of x shows that the Slice is empty, which decides the rank of Expand's result.

    The plan must derive the same rank from the shapes of the Run.
    """
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[?, n, 2] x, int64 m) => (int64[?] y)'
        " <int64[1] zero = {0}, int64[2] parts = {2, 1}, int64[1] last = {-1}, int64[1] one = {1}>"
        " { s = Shape(x) a, start = Split<axis = 0>(s, parts) v = Unsqueeze(m, zero) end = Unsqueeze(m, zero)"
        "   size = Slice(v, start, end, last, one) y = Expand(v, size) }"
    ).SerializeToString()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort_cuda_plugin.session(model, emulate=True, sess_options=options)
    for m in (3, 1, 5):
        (y,) = session.run(None, {"x": np.zeros((1, 4, 2), np.float32), "m": np.array(m)})
        np.testing.assert_array_equal(y, [m])
