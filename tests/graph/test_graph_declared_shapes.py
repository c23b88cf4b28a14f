"""Wrong shape declarations in a model. ONNX Runtime warns and runs the model, and so does the plugin.

Both reject a fed input whose rank or size differs from the declaration, unless it declares a scalar.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import ort_cuda_plugin

HEAD = '<ir_version: 9, opset_import: ["" : 18]> declared '
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
f32 = np.float32
RUNS = {
    # ORT cannot infer the rank of Squeeze's result and keeps the declared rank 1, which is wrong for most feeds.
    "intermediate-rank": (
        """(float[n, m] x) => (float[p, q] y) <float[a] s> {
            s = Squeeze (x)
            y = Relu (s)
        }""",
        [{"x": np.ones(shape, f32)} for shape in ((2, 3), (1, 3), (1, 1), (4, 2))],
    ),
    "intermediate-size": (
        """(float[n] x, int64[2] shape) => (float[p, q] y) <float[7, 9] r> {
            r = Expand (x, shape)
            y = Concat <axis = 0> (r, r)
        }""",
        [{"x": np.arange(3, dtype=f32), "shape": np.array(shape)} for shape in ([2, 3], [1, 3])],
    ),
    "output-rank": (
        "(float[n, m] x) => (float[p] y) { y = Squeeze (x) }",
        [{"x": np.ones(shape, f32)} for shape in ((2, 3), (1, 3), (4, 2))],
    ),
    "output-size": (
        "(float[n, m] x) => (float[1, 5] y) { y = Transpose <perm = [1, 0]> (x) }",
        [{"x": np.ones(shape, f32)} for shape in ((2, 3), (5, 1), (4, 0))],
    ),
    "output-of-data": (
        "(float[n] x) => (int64[1, 2] y) { y = NonZero (x) }",
        [{"x": np.array(values, f32)} for values in ([1, 0, 3], [0, 0], [1, 2, 3, 4])],
    ),
    "one-name-for-two-sizes": (
        "(float[n, n] x, float[n] v) => (float[n, n] y) { y = Add (x, v) }",
        [{"x": np.ones((2, size), f32), "v": np.arange(size, dtype=f32)} for size in (2, 3, 5)],
    ),
    # ORT does not check the shape of a fed input that the model declares as a scalar.
    "scalar-input": (
        "(float[n] x, float low) => (float[n] y) { y = Add (x, low) }",
        [{"x": np.arange(4, dtype=f32), "low": low} for low in (np.ones((), f32), np.ones(1, f32), np.ones(4, f32))],
    ),
    "scalar-that-the-host-reads": (
        "(float[n] x, int64 axes) => (float[p, q] y) { y = Unsqueeze (x, axes) }",
        [{"x": np.arange(4, dtype=f32), "axes": np.array([axis])} for axis in (0, 1, -1)],
    ),
}


def sessions(text: str, level: ort.GraphOptimizationLevel) -> tuple[Any, Any]:
    """Return a session that runs every node on the plugin, and one on the CPU provider."""
    data = onnx.parser.parse_model(HEAD + text).SerializeToString()
    made = []
    for ours in (True, False):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.log_severity_level = 4
        if ours:
            made.append(ort_cuda_plugin.session(data, emulate=True, sess_options=options))
        else:
            made.append(ort.InferenceSession(data, options, providers=["CPUExecutionProvider"]))
    parts = made[0].get_provider_graph_assignment_info()
    assert {part.ep_name for part in parts} == {ort_cuda_plugin.get_ep_name()}
    return made[0], made[1]


@pytest.mark.parametrize(
    "level", [ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL]
)
@pytest.mark.parametrize("name", RUNS)
def test_a_declaration_that_nothing_depends_on_may_be_wrong(name: str, level: ort.GraphOptimizationLevel) -> None:
    text, feeds = RUNS[name]
    ours, cpu = sessions(text, level)
    for feed in feeds * 2:
        for actual, expected in zip(ours.run(None, feed), cpu.run(None, feed), strict=True):
            np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize(
    ("text", "feed", "message"),
    [
        ("(float[2, n] x) => (float[2, n] y) { y = Relu (x) }", {"x": np.ones((3, 4), f32)}, "Got: 3 Expected: 2"),
        ("(float[2, n] x) => (float[2, n] y) { y = Relu (x) }", {"x": np.ones(2, f32)}, "Got: 1 Expected: 2"),
    ],
)
def test_a_graph_input_of_another_shape_is_refused_in_the_words_of_the_cpu_provider(
    text: str, feed: dict[str, np.ndarray], message: str
) -> None:
    for session in sessions(text, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        with pytest.raises(Exception, match=message):
            session.run(None, feed)


def test_a_size_that_contradicts_another_one_at_run_time_names_the_node() -> None:
    ours, cpu = sessions(
        "(float[n] x, float[n] v) => (float[n] y) { y = Add (x, v) }", ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    )
    feed: Arrays = {"x": np.ones(2, f32), "v": np.ones(3, f32)}
    for session in (ours, cpu):
        with pytest.raises(Exception, match=r"Add"):
            session.run(None, feed)


def test_an_error_that_comes_of_a_wrong_declaration_says_so() -> None:
    """The plugin claims Transpose by the declared rank of a CPU node's result; in the Run, the rank is another."""
    text = """(float[n, m, k] x, int64[1] axes) => (float[p, q, r] y) <float[m, n, o] a> {
        letters = Cast <to = 8> (x)
        squeezed = Squeeze (letters, axes)
        a = Cast <to = 1> (squeezed)
        y = Transpose <perm = [2, 1, 0]> (a)
    }"""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    data = onnx.parser.parse_model(HEAD + text).SerializeToString()
    session = ort_cuda_plugin.session(data, emulate=True, sess_options=options)
    wrong = r"y \(Transpose\): .*The model declares other shapes: a: FLOAT32\[m, n, o\] is \[2, 3\] in the Run"
    with pytest.raises(Exception, match=wrong):
        session.run(None, {"x": np.ones((1, 2, 3), f32), "axes": np.array([0])})
