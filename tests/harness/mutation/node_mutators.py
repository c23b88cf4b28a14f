"""Mutators that change, wrap in control flow, insert and append nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from mutation.mutators import mutator
from mutation.subject import Subject, fresh_name


@mutator(10)
def rewire_input(subject: Subject) -> bool:
    graph = subject.graph()
    nodes = [node for node in graph.node if node.input]
    if not nodes:
        return False
    index = subject.rng.randrange(len(nodes))
    node, place = nodes[index], subject.rng.randrange(len(nodes[index].input))
    choice = subject.rng.random()
    if choice < 0.1:
        name = ""
    elif choice < 0.13:
        name = subject.text()
    elif choice < 0.18:  # any value of the graph; one that depends on this node makes a cycle
        name = subject.rng.choice(subject.names(graph))
    else:
        earlier = [info.name for info in graph.input] + [tensor.name for tensor in graph.initializer]
        earlier += [name for other in nodes[:index] for name in other.output]
        if choice < 0.9:
            types = subject.inferred_types()
            earlier = [name for name in earlier if types.get(name) == types.get(node.input[place])]
        name = subject.rng.choice(earlier) if earlier else ""
    node.input[place] = name
    return True


@mutator(4)
def change_number_of_inputs(subject: Subject) -> bool:
    graph = subject.graph()
    if not graph.node:
        return False
    node = subject.rng.choice(graph.node)
    kind = subject.rng.randrange(4)
    if kind == 0 and node.input:
        del node.input[-1]
    elif kind == 1 and node.input:
        del node.input[subject.rng.randrange(len(node.input))]
    elif kind == 2 and len(node.input) > 1:
        node.input[subject.rng.randrange(1, len(node.input))] = ""
    else:
        node.input.append(subject.rng.choice(subject.names(graph) or [""]))
    return True


@mutator(2)
def change_node_outputs(subject: Subject) -> bool:
    node = subject.node()
    if node is None or not node.output:
        return False
    index = subject.rng.randrange(len(node.output))
    kind = subject.rng.randrange(5)
    if kind < 3:
        node.output.append(fresh_name(subject))
        if node.op_type in ("BatchNormalization", "MaxPool", "LSTM", "GRU", "TopK", "Unique", "Dropout"):
            subject.model.graph.output.append(onnx.ValueInfoProto(name=node.output[-1]))
    elif kind == 3:
        node.output[index] = subject.rng.choice(["", *subject.names(subject.model.graph)])
    else:
        del node.output[index]
    return True


@mutator(4)
def delete_node(subject: Subject) -> bool:
    """Delete a node. Readers of its first output then read its first input, or a missing value."""
    graph = subject.graph()
    if not graph.node:
        return False
    index = subject.rng.randrange(len(graph.node))
    node = graph.node[index]
    if node.input and node.output and subject.rng.random() < 0.8:
        _rename_uses(graph, node.output[0], node.input[0])
    del graph.node[index]
    return True


def _rename_uses(graph: GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == old:
                node.input[i] = new
    for output in graph.output:
        if output.name == old:
            output.name = new


@mutator(4)
def duplicate_node(subject: Subject) -> bool:
    graph = subject.graph()
    if not graph.node:
        return False
    copy = NodeProto()
    copy.CopyFrom(subject.rng.choice(graph.node))
    if subject.rng.random() < 0.85:
        for i in range(len(copy.output)):
            copy.output[i] = fresh_name(subject)
    graph.node.append(copy)
    if subject.rng.random() < 0.5 and copy.output:
        graph.output.append(onnx.ValueInfoProto(name=copy.output[0]))
    return True


@mutator(2)
def reorder_nodes(subject: Subject) -> bool:
    graph = subject.graph()
    nodes = list(graph.node)
    subject.rng.shuffle(nodes)
    del graph.node[:]
    graph.node.extend(nodes)
    return len(nodes) > 1


@mutator(4)
def rename_nodes(subject: Subject) -> bool:
    """Give nodes unusual or empty names. Equal names are rare, because ONNX Runtime refuses them."""
    nodes = [node for graph in subject.graphs() for node in graph.node]
    name, same = subject.text(), subject.rng.random() < 0.1
    for number, node in enumerate(nodes):
        if subject.rng.random() < 0.6:
            node.name = name if same or not name else f"{name}{number}"
    return bool(nodes)


@mutator(2)
def rename_value(subject: Subject) -> bool:
    graph = subject.model.graph
    names = [name for node in graph.node for name in node.output if name]
    if not names:
        return False
    old, new = subject.rng.choice(names), subject.text()
    for node in graph.node:
        for i, name in enumerate(node.output):
            if name == old:
                node.output[i] = new
    _rename_uses(graph, old, new)
    return True


_FAMILIES = (
    ("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Max", "Min", "Equal", "Less", "And", "PRelu", "BitShift", "Where"),
    ("Relu", "Abs", "Neg", "Sqrt", "Exp", "Sigmoid", "Not", "IsNaN", "Round", "Sign", "Identity", "Cast", "Erf"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ArgMax", "ReduceProd", "ReduceL2", "Softmax", "LogSoftmax", "Hardmax"),
    ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Shape", "Size", "Slice", "Split"),
    ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot", "TopK", "Compress", "NonZero"),
    ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "MatMulInteger", "ConvInteger"),
    ("MaxPool", "AveragePool", "GlobalAveragePool", "LpPool", "InstanceNormalization", "LayerNormalization"),
    ("LSTM", "GRU", "RNN", "Resize", "Pad", "Concat", "CumSum", "Range", "ConstantOfShape", "Trilu", "EyeLike"),
    ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv"),
    ("Constant", "Loop", "If", "SequenceAt", "SequenceConstruct", "Optional", "Custom", "Unique", "StringNormalizer"),
)


@mutator(6)
def change_operator(subject: Subject) -> bool:
    """Change a node's operator, mostly to a similar one."""
    node = subject.node()
    if node is None:
        return False
    same = [family for family in _FAMILIES if node.op_type in family]
    family = same[0] if same and subject.rng.random() < 0.7 else subject.rng.choice(_FAMILIES)
    node.op_type = subject.rng.choice(family)
    if subject.rng.random() < 0.05:
        node.op_type = subject.text()
    if subject.rng.random() < 0.05:
        node.domain = subject.rng.choice(["com.microsoft", "ai.onnx.ml", "x", "ai.onnx", subject.text()])
    return True


@mutator(5)
def insert_before(subject: Subject) -> bool:
    """Insert a node between a value and one of its readers."""
    graph = subject.graph()
    places = [(n, i) for n, node in enumerate(graph.node) for i, name in enumerate(node.input) if name]
    if not places:
        return False
    position, index = subject.rng.choice(places)
    reader = graph.node[position]
    source, name = reader.input[index], fresh_name(subject)
    inserted = [
        helper.make_node("Identity", [source], [name]),
        helper.make_node("Cast", [source], [name], to=subject.rng.choice([1, 1, 6, 7, 9, 10, 11, 16, 3])),
        helper.make_node("Transpose", [source], [name]),
        helper.make_node("Abs", [source], [name]),
        helper.make_node(
            "Expand", [source, _constant(subject, np.array([subject.rng.choice([1, 1, 2, 3, 0])]))], [name]
        ),
        helper.make_node(
            "Reshape", [source, _constant(subject, np.array([subject.rng.choice([1, 2, 0]), -1]))], [name]
        ),
        helper.make_node("Flatten", [source], [name]),
        helper.make_node("Shape", [source], [name]),
        helper.make_node("Neg", [source], [name]),
        helper.make_node("Softmax", [source], [name]),
        helper.make_node("NonZero", [source], [name]),
    ]
    reader.input[index] = name
    nodes = list(graph.node)
    nodes.insert(position, subject.rng.choice(inserted))
    del graph.node[:]
    graph.node.extend(nodes)
    return True


# ---- new structure ----


def _reachable(subject: Subject) -> str | None:
    """Return a random value of the main graph for new nodes to read, None if there is none."""
    names = [name for name in subject.names(subject.model.graph) if name]
    return subject.rng.choice(names) if names else None


def _constant(subject: Subject, values: object) -> str:
    name = fresh_name(subject, "c")
    subject.model.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
    return name


def _leave(subject: Subject, name: str, element_type: int | None = None) -> None:
    info = onnx.ValueInfoProto(name=name)
    if element_type is not None:
        info.type.tensor_type.elem_type = element_type
    subject.model.graph.output.append(info)


@mutator(6)
def add_size_arithmetic(subject: Subject) -> bool:
    """Add a chain of shape arithmetic over a dimension of a value; its result is a shape or an output."""
    source = _reachable(subject)
    if source is None:
        return False
    graph, rng = subject.model.graph, subject.rng

    def node(op_type: str, *inputs: str, **attributes: Any) -> str:
        name = fresh_name(subject)
        graph.node.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    shape = node("Shape", source)
    values = [node("Gather", shape, _constant(subject, np.array([rng.choice([0, 0, 1, -1])])))]
    for _ in range(rng.choice([2, 5, 10, 20, 40])):
        a = values[-1] if rng.random() < 0.7 else rng.choice(values)
        b = rng.choice(values) if rng.random() < 0.4 else _constant(subject, np.array([subject.integer()]))
        values.append(node(rng.choice(["Add", "Sub", "Mul", "Mul", "Div", "Div", "Mod", "Max", "Min"]), a, b))
    kind = rng.randrange(4)
    if kind == 0:
        _leave(subject, values[-1])
    elif kind == 1:
        four = _constant(subject, np.array([5]))
        small = node("Mod", values[-1], four)
        _leave(subject, node("ConstantOfShape", small))
    elif kind == 2:
        _leave(
            subject,
            node(
                "Range", _constant(subject, np.array(0)), node("Squeeze", values[-1]), _constant(subject, np.array(1))
            ),
        )
    else:
        minus = _constant(subject, np.array([-1]))
        _leave(subject, node("Reshape", source, node("Concat", values[-1], minus, axis=0)))
    return True


@mutator(1)
def add_deep_chain(subject: Subject) -> bool:
    """Add a chain of 60 to 600 nodes, of shape arithmetic or of floats."""
    source = _reachable(subject)
    if source is None:
        return False
    graph, rng = subject.model.graph, subject.rng
    shapes = rng.random() < 0.7
    last = fresh_name(subject)
    graph.node.append(helper.make_node("Shape" if shapes else "Identity", [source], [last]))
    constants = [_constant(subject, np.array([k], np.int64 if shapes else np.float32)) for k in (1, 2, 3)]
    families = [["Add"], ["Div", "Add"], ["Max", "Add"], ["Mod", "Mul"], ["Add", "Sub", "Div", "Mul", "Min"]]
    kinds = rng.choice(families)
    for _ in range(rng.choice([60, 200, 600])):
        name = fresh_name(subject)
        graph.node.append(helper.make_node(rng.choice(kinds), [last, rng.choice(constants)], [name]))
        last = name
    _leave(subject, last)
    return True


@mutator(3)
def wrap_in_if(subject: Subject) -> bool:
    """Move a node into both branches of an If, or into up to 30 nested Ifs."""
    graph = subject.model.graph
    candidates = [i for i, node in enumerate(graph.node) if node.output]
    if not candidates:
        return False
    index = subject.rng.choice(candidates)
    moved = NodeProto()
    moved.CopyFrom(graph.node[index])
    outputs = [name for name in moved.output if name]
    if not outputs:
        return False
    condition = _constant(subject, np.array(subject.rng.random() < 0.5))
    if subject.rng.random() < 0.3:
        condition = fresh_name(subject)
        graph.input.append(helper.make_tensor_value_info(condition, TensorProto.BOOL, []))
        subject.feeds[condition] = np.array(subject.rng.random() < 0.5)
    plain = _branch(subject, moved, outputs)
    for _ in range(subject.rng.choice([1, 1, 1, 2, 5, 30])):
        branches = {"then_branch": _branch(subject, moved, outputs), "else_branch": plain}
        moved = helper.make_node("If", [condition], outputs, **branches)
    graph.node[index].CopyFrom(moved)
    return True


def _branch(subject: Subject, node: NodeProto, outputs: list[str]) -> GraphProto:
    """Return a graph with a copy of the node, whose outputs get new names."""
    names = {name: fresh_name(subject, name) for name in outputs}
    body = NodeProto()
    body.CopyFrom(node)
    body.output[:] = [names.get(name, name) for name in body.output]
    return helper.make_graph([body], "branch", [], [onnx.ValueInfoProto(name=name) for name in names.values()])


@mutator(2)
def add_loop(subject: Subject) -> bool:
    """Add a Loop of at most 5 iterations that carries a value of the graph."""
    source = _reachable(subject)
    if source is None:
        return False
    graph, rng = subject.model.graph, subject.rng
    count, keep = _constant(subject, np.array(rng.choice([0, 1, 3, -1, 2]))), _constant(subject, np.array(True))
    i, c, v, w, d, few = (fresh_name(subject) for _ in range(6))
    # Limits the trip count, because another mutation may make it so huge that no provider finishes.
    graph.node.append(helper.make_node("Min", [count, _constant(subject, np.array(5))], [few]))
    element = rng.choice([1, 1, 1, 7])
    body = helper.make_graph(
        [helper.make_node("Identity", [c], [d]), helper.make_node(rng.choice(["Neg", "Relu", "Abs"]), [v], [w])],
        "body",
        [
            helper.make_tensor_value_info(i, TensorProto.INT64, []),
            helper.make_tensor_value_info(c, TensorProto.BOOL, []),
            helper.make_tensor_value_info(v, element, None),
        ],
        [helper.make_tensor_value_info(d, TensorProto.BOOL, []), helper.make_tensor_value_info(w, element, None)],
    )
    result = fresh_name(subject)
    graph.node.append(helper.make_node("Loop", [few, keep, source], [result], body=body))
    after = fresh_name(subject)
    graph.node.append(helper.make_node("Add", [result, source], [after]))
    _leave(subject, after)
    return True


@mutator(2)
def quantize_value(subject: Subject) -> bool:
    """Add QuantizeLinear and DequantizeLinear of a value, with a valid or invalid scale."""
    source = _reachable(subject)
    if source is None:
        return False
    scale = _constant(subject, np.float32(subject.rng.choice([0.1, 1.0, 0.0, 1e-30, float("nan"), -1.0])))
    zero = _constant(subject, subject.rng.choice([np.uint8(3), np.int8(0), np.uint16(7)]))
    quantized, back = fresh_name(subject), fresh_name(subject)
    subject.model.graph.node.append(helper.make_node("QuantizeLinear", [source, scale, zero], [quantized]))
    subject.model.graph.node.append(helper.make_node("DequantizeLinear", [quantized, scale, zero], [back]))
    _leave(subject, back)
    return True


@mutator(1)
def call_function(subject: Subject) -> bool:
    """Replace a node by a call of a local function of the model that contains the node."""
    model = subject.model
    nodes = [node for node in model.graph.node if len(node.output) == 1 and node.input and not node.domain]
    if not nodes:
        return False
    node = subject.rng.choice(nodes)
    body = NodeProto()
    body.CopyFrom(node)
    inputs = [f"i{k}" for k in range(len(node.input))]
    body.input[:] = [name if original else "" for name, original in zip(inputs, node.input, strict=True)]
    body.output[:] = ["o"]
    name = fresh_name(subject, "Function")
    imports = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    model.functions.append(helper.make_function("local", name, inputs, ["o"], [body], imports))
    if not any(entry.domain == "local" for entry in model.opset_import):
        model.opset_import.add(domain="local", version=1)
    node.op_type, node.domain = name, "local"
    del node.attribute[:]
    return True
