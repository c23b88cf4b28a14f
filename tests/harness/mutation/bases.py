"""Base models of the mutation fuzzer: ONNX's operator tests, and models with typical patterns of exporters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from encoder import encoder, encoder_inputs
from mutation.subject import Feeds
from ort_cuda_plugin.conformance.cases import load_cases
from random_models import ModelMaker, feed

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
_LARGE = 40_000
"""Maximum bytes of a model, and maximum elements of an input; larger tests would only take more time."""
PER_OPERATOR = 3
_CPU_DIFFERS = {"node/maxunpool_export_with_output_shape"}
"""ONNX tests that the CPU provider fails and the plugin passes; they are not used."""


@dataclass(frozen=True)
class Base:
    model: bytes
    feeds: Feeds


def patterns() -> dict[str, Base]:
    """Return models of several nodes, with patterns that exporters write."""
    found = {f"random{seed}": _random(seed) for seed in range(6)}
    small = encoder(layers=1, hidden=8, heads=2, vocabulary=11, decomposed=True)
    found["encoder"] = Base(small.SerializeToString(), encoder_inputs(2, 3, vocabulary=11))
    for name, make in {
        "classifier": _classifier,
        "dynamic_reshape": _dynamic_reshape,
        "selection": _selection,
        "control_flow": _control_flow,
        "quantized": _quantized,
        "wrong_value_info": _wrong_value_info,
        "recurrent": _recurrent,
        "strings_between": _strings_between,
        "shape_chain": _shape_chain,
        "scan": _scan,
        "sequences": _sequences,
        "unknown_rank": _unknown_rank,
    }.items():
        found[name] = make()
    return found


def operators(per_operator: int = PER_OPERATOR) -> dict[str, Base]:
    """Return tests of single operators from the `onnx` wheel, at most ``per_operator`` for each operator."""
    counts: dict[str, int] = {}
    found = {}
    for key, case in load_cases().items():
        if not key.startswith("node/") or "_expanded" in key or key in _CPU_DIFFERS:
            continue
        model = case.model()
        op_type = model.graph.node[-1].op_type if model.graph.node else ""
        if counts.get(op_type, 0) >= per_operator or model.ByteSize() > _LARGE:
            continue
        inputs, _ = next(iter(case.data_sets(model)))
        if not all(isinstance(value, np.ndarray) and value.size <= _LARGE for value in inputs):
            continue
        counts[op_type] = counts.get(op_type, 0) + 1
        names = [value.name for value in model.graph.input]
        found[key] = Base(model.SerializeToString(), dict(zip(names, inputs, strict=False)))
    return found


# ---- the patterns ----


def _info(name: str, kind: int, shape: list[int | str | None] | None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _base(
    nodes: list[NodeProto],
    inputs: list[ValueInfoProto],
    outputs: list[str],
    feeds: Feeds,
    constants: Feeds | None = None,
    value_info: list[ValueInfoProto] | None = None,
    opset: int = 17,
) -> Base:
    graph = helper.make_graph(
        nodes,
        "pattern",
        inputs,
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
        value_info=value_info or [],
    )
    model: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return Base(model.SerializeToString(), feeds)


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def _random(seed: int) -> Base:
    return Base(ModelMaker(seed, foreign=seed % 2 == 1).model(10).SerializeToString(), feed(2, 3, seed))


def _classifier() -> Base:
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "s", "b1", "m", "v"], ["n1"]),
        helper.make_node("Relu", ["n1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Resize", ["p1", "", "scales"], ["up"], mode="linear"),
        helper.make_node("Add", ["up", "r1"], ["sum"]),
        helper.make_node("GlobalAveragePool", ["sum"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w2", "b2"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["y"], axis=-1),
    ]
    constants = {
        "w1": _floats(4, 3, 3, 3),
        "b1": _floats(4),
        "s": np.ones(4, np.float32),
        "m": np.zeros(4, np.float32),
        "v": np.ones(4, np.float32),
        "w2": _floats(5, 4),
        "b2": _floats(5),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    return _base(nodes, [_info("x", FLOAT, ["n", 3, 6, 8])], ["y"], {"x": _floats(2, 3, 6, 8)}, constants)


def _dynamic_reshape() -> Base:
    """Return a model with a shape that is an input, a computed shape, and a Slice between them."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Slice", ["r", "starts", "ends", "axes"], ["cut"]),
        helper.make_node("Shape", ["cut"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["zeros"]),
        helper.make_node("Add", ["cut", "zeros"], ["a"]),
        helper.make_node("Expand", ["a", "wide"], ["e"]),
        helper.make_node("Tile", ["e", "repeats"], ["t"]),
        helper.make_node("Pad", ["t", "pads"], ["y"]),
    ]
    constants = {
        "axes": np.array([1]),
        "wide": np.array([2, 1, 1]),
        "repeats": np.array([1, 2, 1]),
        "pads": np.array([0, 1, 0, 0, 0, 2]),
    }
    inputs = [_info("x", FLOAT, ["n", "m"]), _info("shape", INT64, [2])]
    inputs += [_info("starts", INT64, [1]), _info("ends", INT64, [1])]
    feeds: Feeds = {"x": _floats(4, 6), "shape": np.array([3, -1]), "starts": np.array([1]), "ends": np.array([6])}
    return _base(nodes, inputs, ["y"], feeds, constants)


def _selection() -> Base:
    """Return a model with data-dependent sizes."""
    nodes = [
        helper.make_node("Greater", ["x", "limit"], ["mask"]),
        helper.make_node("NonZero", ["mask"], ["places"]),
        helper.make_node("Transpose", ["places"], ["rows"]),
        helper.make_node("GatherND", ["x", "rows"], ["found"]),
        helper.make_node("TopK", ["x", "k"], ["best", "where"], axis=-1),
        helper.make_node("Gather", ["table", "where"], ["looked_up"]),
        helper.make_node("ReduceSum", ["looked_up", "last"], ["total"], keepdims=0),
        helper.make_node("Mul", ["best", "total"], ["y"]),
        helper.make_node("Shape", ["found"], ["count"]),
        helper.make_node("Unique", ["where"], ["distinct"]),
    ]
    constants = {
        "limit": np.array(0.0, np.float32),
        "k": np.array([2]),
        "table": _floats(5, 3),
        "last": np.array([-1]),
    }
    outputs = ["y", "found", "count", "distinct"]
    return _base(nodes, [_info("x", FLOAT, ["n", 5])], outputs, {"x": _floats(4, 5)}, constants)


def _control_flow() -> Base:
    def branch(name: str, op_type: str) -> onnx.GraphProto:
        node = helper.make_node(op_type, ["a"], [name])
        return helper.make_graph([node], name, [], [_info(name, FLOAT, None)])

    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["still"]),
            helper.make_node("Add", ["carried", "x"], ["next"]),
            helper.make_node("ReduceMean", ["next"], ["mean"], keepdims=0),
        ],
        "body",
        [_info("i", INT64, []), _info("go", TensorProto.BOOL, []), _info("carried", FLOAT, None)],
        [_info("still", TensorProto.BOOL, []), _info("next", FLOAT, None), _info("mean", FLOAT, [])],
    )
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["a"]),
        helper.make_node("If", ["flag"], ["b"], then_branch=branch("t", "Neg"), else_branch=branch("e", "Exp")),
        helper.make_node("Min", ["count", "most"], ["few"]),
        helper.make_node("Loop", ["few", "", "b"], ["c", "means"], body=body),
        helper.make_node("Add", ["c", "a"], ["y"]),
    ]
    inputs = [_info("x", FLOAT, ["n", 3]), _info("flag", TensorProto.BOOL, [])]
    feeds: Feeds = {"x": _floats(2, 3), "flag": np.array(True)}
    return _base(nodes, inputs, ["y", "means"], feeds, {"count": np.array(3), "most": np.array(5)})


def _quantized() -> Base:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        helper.make_node("QLinearConv", ["q", "xs", "xz", "w", "ws", "wz", "ys", "xz", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("DequantizeLinear", ["c", "ys", "xz"], ["d"]),
        helper.make_node("DynamicQuantizeLinear", ["d"], ["dq", "ds", "dz"]),
        helper.make_node("Cast", ["dq"], ["i"], to=TensorProto.INT32),
        helper.make_node("DequantizeLinear", ["dq", "ds", "dz"], ["y"]),
    ]
    constants: Feeds = {
        "xs": np.array(0.05, np.float32),
        "xz": np.array(128, np.uint8),
        "w": np.arange(-18, 18, dtype=np.int8).reshape(2, 2, 3, 3),
        "ws": np.array([0.02, 0.03], np.float32),
        "wz": np.array([0, 0], np.int8),
        "ys": np.array(0.1, np.float32),
        "b": np.array([5, -5], np.int32),
    }
    return _base(
        nodes, [_info("x", FLOAT, ["n", 2, 5, 5])], ["y", "i"], {"x": _floats(1, 2, 5, 5)}, constants, opset=13
    )


def _wrong_value_info() -> Base:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["p"]),
        helper.make_node("ReduceSum", ["p", "axes"], ["r"]),
        helper.make_node("Div", ["p", "r"], ["y"]),
    ]
    wrong = [_info("t", FLOAT, ["n", 3]), _info("p", FLOAT, ["n", "n", 1])]
    return _base(
        nodes, [_info("x", FLOAT, ["n", 3])], ["y"], {"x": _floats(4, 3)}, {"axes": np.array([1])}, value_info=wrong
    )


def _recurrent() -> Base:
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["h", "last", "cell"], hidden_size=4),
        helper.make_node("Squeeze", ["last", "zero"], ["state"]),
        helper.make_node("LayerNormalization", ["state", "scale"], ["y"], axis=-1),
        helper.make_node("CumSum", ["x", "axis"], ["sums"]),
    ]
    constants: Feeds = {
        "w": _floats(1, 16, 3),
        "r": _floats(1, 16, 4),
        "zero": np.array([0]),
        "scale": np.ones(4, np.float32),
        "axis": np.array(0),
    }
    return _base(nodes, [_info("x", FLOAT, ["t", "b", 3])], ["y", "sums", "cell"], {"x": _floats(5, 2, 3)}, constants)


def _strings_between() -> Base:
    """Return a model with nodes that only the CPU provider runs between nodes of the plugin."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["a"]),
        helper.make_node("Cast", ["a"], ["text"], to=TensorProto.STRING),
        helper.make_node("Cast", ["text"], ["d"], to=FLOAT),
        helper.make_node("Reshape", ["d", "flat"], ["f"]),
        helper.make_node("Add", ["f", "f"], ["y"]),
    ]
    return _base(nodes, [_info("x", FLOAT, ["n", "m"])], ["y"], {"x": _floats(2, 3)}, {"flat": np.array([-1])})


def _shape_chain() -> Base:
    """Return a model with a chain of shape arithmetic, such as for a patch embedding with padding."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["m"]),
        helper.make_node("Add", ["m", "three"], ["up"]),
        helper.make_node("Div", ["up", "four"], ["parts"]),
        helper.make_node("Mul", ["parts", "four"], ["full"]),
        helper.make_node("Sub", ["full", "m"], ["missing"]),
        helper.make_node("Concat", ["none", "none", "none", "missing"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["p"]),
        helper.make_node("Concat", ["minus", "parts", "four"], ["shape"], axis=0),
        helper.make_node("Reshape", ["p", "shape"], ["r"]),
        helper.make_node("Range", ["first", "last", "step"], ["range"]),
        helper.make_node("Squeeze", ["parts"], ["last"]),
        helper.make_node("ReduceMax", ["r"], ["top"], axes=[2], keepdims=0),
        helper.make_node("Max", ["m", "four"], ["clamped"]),
        helper.make_node("Mod", ["clamped", "four"], ["rest"]),
    ]
    nodes[10], nodes[11] = nodes[11], nodes[10]
    constants: Feeds = {
        "one": np.array([1]),
        "three": np.array([3]),
        "four": np.array([4]),
        "none": np.array([0]),
        "minus": np.array([-1]),
        "first": np.array(0),
        "step": np.array(1),
    }
    outputs = ["r", "top", "range", "rest"]
    return _base(nodes, [_info("x", FLOAT, ["n", "m"])], outputs, {"x": _floats(2, 7)}, constants)


def _scan() -> Base:
    """Return a recurrence as a Scan of fixed length, with an If in its body that depends on a size."""
    branches = {
        name: helper.make_graph([helper.make_node(op_type, ["sum"], [name])], name, [], [_info(name, FLOAT, None)])
        for name, op_type in (("then_branch", "Tanh"), ("else_branch", "Neg"))
    }
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "row"], ["sum"]),
            helper.make_node("Size", ["sum"], ["size"]),
            helper.make_node("Less", ["size", "limit"], ["small"]),
            helper.make_node("If", ["small"], ["next"], **branches),
            helper.make_node("MatMul", ["next", "w"], ["product"]),
            helper.make_node("Abs", ["product"], ["out"]),  # distinct value: the CPU provider confuses equal results
        ],
        "body",
        [_info("state", FLOAT, [3]), _info("row", FLOAT, [3])],
        [_info("next", FLOAT, [3]), _info("out", FLOAT, [2])],
    )
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["start"], axes=[0], keepdims=0),
        helper.make_node("Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1),
        helper.make_node("Softmax", ["y"], ["z"]),
    ]
    constants: Feeds = {"limit": np.array(4), "w": _floats(3, 2)}
    return _base(nodes, [_info("x", FLOAT, [4, 3])], ["z", "last"], {"x": _floats(4, 3)}, constants)


def _sequences() -> Base:
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("SequenceConstruct", ["a", "x"], ["s"]),
        helper.make_node("SequenceInsert", ["s", "x", "place"], ["t"]),
        helper.make_node("SequenceAt", ["t", "place"], ["b"]),
        helper.make_node("SequenceErase", ["t"], ["u"]),
        helper.make_node("SequenceLength", ["u"], ["n"]),
        helper.make_node("ConcatFromSequence", ["u"], ["c"], axis=0),
        helper.make_node("SplitToSequence", ["c", "parts"], ["v"], axis=1),
        helper.make_node("SequenceAt", ["v", "one"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    constants: Feeds = {"parts": np.array([1, 2]), "one": np.array(1), "w": _floats(2, 2)}
    inputs = [_info("x", FLOAT, ["n", 3]), _info("place", INT64, [])]
    return _base(nodes, inputs, ["y", "b", "n"], {"x": _floats(2, 3), "place": np.array(1)}, constants)


def _unknown_rank() -> Base:
    """Return a model of values of unknown rank: they follow a Reshape to a shape of unknown length."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("ReduceMax", ["r"], ["top"], axes=[-1], keepdims=1),
        helper.make_node("Sub", ["r", "top"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Shape", ["b"], ["sizes"]),
        helper.make_node("Reshape", ["b", "flat"], ["f"]),
        helper.make_node("Gather", ["b", "first"], ["g"], axis=0),
        helper.make_node("Concat", ["b", "b"], ["c"], axis=-1),
        helper.make_node("Softmax", ["c"], ["y"], axis=-1),
    ]
    constants: Feeds = {"w": _floats(2, 3), "flat": np.array([-1]), "first": np.array(0)}
    inputs = [_info("x", FLOAT, ["n"]), _info("shape", INT64, ["k"])]
    feeds: Feeds = {"x": _floats(12), "shape": np.array([3, 2, 2])}
    return _base(nodes, inputs, ["y", "f", "g", "sizes"], feeds, constants)
