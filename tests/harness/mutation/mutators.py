"""Mutators: functions that change something in a model. Each returns whether it found something to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from mutation.subject import TYPES, Subject, fresh_name, make_attribute, random_array

Mutator = Callable[[Subject], bool]
MUTATORS: dict[str, tuple[Mutator, int]] = {}
"""The mutators by name, each with its weight: its relative probability."""


def mutator(weight: int) -> Callable[[Mutator], Mutator]:
    def enter(function: Mutator) -> Mutator:
        MUTATORS[function.__name__] = (function, weight)
        return function

    return enter


# ---- attributes ----

_MODES = (
    "",
    "NOTSET",
    "SAME_UPPER",
    "SAME_LOWER",
    "VALID",
    "linear",
    "cubic",
    "nearest",
    "constant",
    "reflect",
    "edge",
)


def _value(subject: Subject, old: Any) -> Any:
    """Return a random attribute value of the type of ``old``."""
    rng = subject.rng
    if isinstance(old, float):
        return subject.number()
    if isinstance(old, int):
        return old + rng.choice([-1, 1]) if rng.random() < 0.3 and abs(old) < 2**62 else subject.integer()
    if isinstance(old, bytes | str):
        return rng.choice(_MODES) if rng.random() < 0.5 else subject.text()
    if isinstance(old, list):
        changed = list(old)
        kind = rng.randrange(6)
        if kind == 0:
            return []
        if kind == 1:
            return changed + [changed[-1] if changed else 0] * rng.choice([1, 1, 2, 40, 1000])
        if kind == 2:
            return changed[: rng.randrange(len(changed) + 1)]
        if kind == 3:
            rng.shuffle(changed)
        elif changed:
            index = rng.randrange(len(changed))
            changed[index] = _value(subject, changed[index])
        return changed
    return subject.integer()


@mutator(14)
def change_attribute(subject: Subject) -> bool:
    nodes = [node for graph in subject.graphs() for node in graph.node if node.attribute]
    if not nodes:
        return False
    node = subject.rng.choice(nodes)
    attribute = subject.rng.choice(node.attribute)
    if attribute.type in (AttributeProto.TENSOR, AttributeProto.GRAPH, AttributeProto.UNDEFINED):
        return False
    try:
        old = helper.get_attribute_value(attribute)
    except ValueError:
        return False
    new = _value(subject, list(old) if not isinstance(old, int | float | bytes | str) else old)
    attribute.CopyFrom(make_attribute(attribute.name, new))
    return True


@mutator(1)
def change_attribute_type(subject: Subject) -> bool:
    nodes = [node for graph in subject.graphs() for node in graph.node if node.attribute]
    if not nodes:
        return False
    attribute = subject.rng.choice(subject.rng.choice(nodes).attribute)
    if subject.rng.random() < 0.3:  # declares a type that contradicts the field that is set
        attribute.type = subject.rng.choice([0, 1, 2, 3, 4, 6, 7, 8, 13, 14])
        return True
    options: list[Any] = [1, 1.5, "x", [1, 2], [1.5], ["a"], numpy_helper.from_array(np.arange(3))]
    attribute.CopyFrom(make_attribute(attribute.name, subject.rng.choice(options)))
    return True


@mutator(6)
def remove_attribute(subject: Subject) -> bool:
    nodes = [node for graph in subject.graphs() for node in graph.node if node.attribute]
    if not nodes:
        return False
    node = subject.rng.choice(nodes)
    del node.attribute[subject.rng.randrange(len(node.attribute))]
    return True


@mutator(6)
def add_attribute(subject: Subject) -> bool:
    """Add or replace an attribute, mostly one of the operator's, with a value of its type."""
    node = subject.node()
    if node is None:
        return False
    known = _known_attributes(node)
    if not known or subject.rng.random() < 0.1:
        node.attribute.append(make_attribute(subject.rng.choice(["axis", "x", subject.text()]), subject.integer()))
        return True
    name = subject.rng.choice(sorted(known))
    rng = subject.rng
    integers = [subject.integer() for _ in range(rng.randrange(5))]
    makers: dict[str, Any] = {
        "INT": rng.choice([0, 1, subject.integer()]),
        "FLOAT": subject.number(),
        "STRING": rng.choice(_MODES),
        "INTS": integers,
        "FLOATS": [subject.number() for _ in range(rng.randrange(4))],
        "STRINGS": [rng.choice(_MODES) for _ in range(rng.randrange(4))],
        "TENSOR": numpy_helper.from_array(np.array(integers, np.int64)),
    }
    value = makers.get(known[name])
    if value is None:
        return False
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.append(make_attribute(name, value))
    return True


def _known_attributes(node: NodeProto) -> dict[str, str]:
    """Return the names and types of the operator's attributes."""
    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: attribute.type.name for name, attribute in schema.attributes.items()}  # type: ignore[attr-defined]


# ---- shapes that the model declares ----


def _random_dim(subject: Subject, dim: Any) -> None:
    dim.Clear()
    kind = subject.rng.randrange(4)
    if kind == 0:
        dim.dim_value = subject.integer()
    elif kind < 3:
        dim.dim_param = subject.text()


@mutator(12)
def change_declared_dim(subject: Subject) -> bool:
    infos = [info for info in subject.value_infos() if info.type.tensor_type.shape.dim]
    if not infos:
        return False
    _random_dim(subject, subject.rng.choice(subject.rng.choice(infos).type.tensor_type.shape.dim))
    return True


@mutator(5)
def change_declared_rank(subject: Subject) -> bool:
    infos = subject.value_infos()
    if not infos:
        return False
    kind = subject.rng.choice(infos).type.tensor_type
    choice = subject.rng.randrange(4)
    if choice == 0:
        kind.ClearField("shape")
    elif choice == 1:
        _random_dim(subject, kind.shape.dim.add())
    elif choice == 2 and kind.shape.dim:
        del kind.shape.dim[subject.rng.randrange(len(kind.shape.dim))]
    else:
        for _ in range(subject.rng.choice([2, 9, 70])):
            kind.shape.dim.add().dim_value = 1
    return True


@mutator(4)
def name_all_dims_alike(subject: Subject) -> bool:
    """Declare many sizes, which differ, as one symbolic dimension."""
    infos = subject.value_infos()
    name = subject.text()
    for info in infos:
        for dim in info.type.tensor_type.shape.dim:
            if subject.rng.random() < 0.7:
                dim.dim_param = name
    return bool(infos)


@mutator(6)
def forget_declared_sizes(subject: Subject) -> bool:
    """Give every size of an input a name of its own, so that plans are symbolic."""
    infos = [*subject.model.graph.input]
    for info in infos:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            dim.dim_param = f"{info.name}_{axis}"
    for info in subject.model.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    return bool(infos)


@mutator(8)
def declare_intermediate(subject: Subject) -> bool:
    """Declare type and shape of an intermediate value, mostly wrong ones."""
    graph = subject.graph()
    outputs = [name for node in graph.node for name in node.output if name]
    if not outputs:
        return False
    shape = [subject.rng.choice([1, 2, 3, 4, "b", "n", None]) for _ in range(subject.rng.randrange(5))]
    name = subject.rng.choice(outputs)
    kind = subject.rng.choice(TYPES)
    if subject.rng.random() < 0.8:
        kind = subject.inferred_types().get(name) or TensorProto.FLOAT
    dims = None if subject.rng.random() < 0.2 else shape
    graph.value_info.append(helper.make_tensor_value_info(name, kind, dims))
    return True


@mutator(2)
def change_declared_type(subject: Subject) -> bool:
    infos = subject.value_infos()
    if not infos:
        return False
    info = subject.rng.choice(infos)
    if subject.rng.random() < 0.15:
        inner = onnx.TypeProto()
        inner.CopyFrom(info.type)
        if subject.rng.random() < 0.5:
            info.type.sequence_type.elem_type.CopyFrom(inner)
        else:
            info.type.optional_type.elem_type.CopyFrom(inner)
    else:
        info.type.tensor_type.elem_type = subject.rng.choice(TYPES)
    return True


# ---- initializers ----


@mutator(8)
def change_initializer_contents(subject: Subject) -> bool:
    tensors = [tensor for tensor in subject.initializers() if not tensor.external_data]
    if not tensors:
        return False
    tensor = subject.rng.choice(tensors)
    try:
        array = numpy_helper.to_array(tensor).copy()
    except Exception:
        return False
    if not array.size or array.dtype.num >= 256:
        return False
    flat = array.reshape(-1)
    for _ in range(subject.rng.choice([1, 1, 2, flat.size])):
        index = subject.rng.randrange(flat.size)
        if array.dtype.kind == "f":
            with np.errstate(all="ignore"):
                flat[index] = subject.number()
        elif array.dtype.kind in "iu":
            flat[index] = np.array(subject.integer() & (2**64 - 1), np.uint64).astype(array.dtype)
        elif array.dtype.kind == "b":
            flat[index] = not flat[index]
        else:
            flat[index] = subject.rng.choice(["", "x" * 4000, "\u4e2d"])
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return True


@mutator(6)
def change_initializer_shape(subject: Subject) -> bool:
    """Change the dims of an initializer; its data may no longer fit them."""
    tensors = subject.initializers()
    if not tensors:
        return False
    tensor = subject.rng.choice(tensors)
    kind = subject.rng.randrange(6)
    if kind == 0:
        tensor.dims.append(1)
    elif kind == 1 and tensor.dims:
        del tensor.dims[subject.rng.randrange(len(tensor.dims))]
    elif kind == 2 and tensor.dims:
        tensor.dims[subject.rng.randrange(len(tensor.dims))] = subject.integer()
    elif kind == 3:
        dims = [*tensor.dims]
        subject.rng.shuffle(dims)
        tensor.dims[:] = dims
    elif kind == 4:
        tensor.dims.insert(0, 0)
        tensor.ClearField("raw_data")
    else:
        size = int(np.prod(tensor.dims, dtype=np.float64)) if len(tensor.dims) < 9 else 0
        tensor.dims[:] = [size] if 0 < size < 10**6 else []
    return True


@mutator(2)
def change_initializer_storage(subject: Subject) -> bool:
    tensors = subject.initializers()
    if not tensors:
        return False
    tensor = subject.rng.choice(tensors)
    kind = subject.rng.randrange(5)
    if kind == 0:
        tensor.data_type = subject.rng.choice(TYPES)
    elif kind == 1:
        tensor.raw_data = tensor.raw_data[: subject.rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == 2:
        tensor.raw_data += b"\x7f" * subject.rng.choice([1, 3, 8, 4096])
    elif kind == 3:
        tensor.ClearField("raw_data")
    else:
        tensor.float_data.extend([1.0] * subject.rng.randrange(1, 5))
    return True


@mutator(1)
def make_initializer_external(subject: Subject) -> bool:
    """Make an initializer refer to external data that is missing, forbidden, or out of range."""
    tensors = subject.initializers()
    if not tensors:
        return False
    tensor = subject.rng.choice(tensors)
    size = len(tensor.raw_data) or 4
    tensor.data_location = TensorProto.EXTERNAL
    tensor.ClearField("raw_data")
    locations = ["/etc/passwd", "../../../../etc/passwd", "", ".", "/dev/zero", "x\0y", "no/such", "/proc/self/mem"]
    entries = {"location": subject.rng.choice(locations)}
    if subject.rng.random() < 0.8:
        entries["offset"] = str(subject.rng.choice([0, -1, 1, 2**31, 2**63 - 1, 2**64, "x"]))
    if subject.rng.random() < 0.8:
        entries["length"] = str(subject.rng.choice([size, 0, -1, 2**40, 2**63 - 1, "y"]))
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return True


@mutator(3)
def input_instead_of_initializer(subject: Subject) -> bool:
    """Turn an initializer into an input, or add an input that can override it. It may be a shape."""
    graph = subject.model.graph
    usable = [t for t in graph.initializer if not t.external_data and t.data_type in (1, 6, 7, 9, 10, 11)]
    if not usable:
        return False
    tensor = subject.rng.choice(usable)
    try:
        array = numpy_helper.to_array(tensor)
    except Exception:
        return False
    if tensor.name not in {info.name for info in graph.input}:
        graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, array.shape))
    if subject.rng.random() < 0.7:
        graph.initializer.remove(tensor)
        subject.feeds[tensor.name] = array
    return True


@mutator(3)
def initializer_instead_of_input(subject: Subject) -> bool:
    names = [info.name for info in subject.model.graph.input if info.name in subject.feeds]
    if not names:
        return False
    name = subject.rng.choice(names)
    array = subject.feeds[name]
    if not isinstance(array, np.ndarray) or array.dtype.num >= 256 or array.dtype.kind not in "fiub":
        return False
    subject.model.graph.initializer.append(numpy_helper.from_array(array, name))
    if subject.rng.random() < 0.7:
        kept = [info for info in subject.model.graph.input if info.name != name]
        del subject.model.graph.input[:]
        subject.model.graph.input.extend(kept)
        del subject.feeds[name]
    return True


# ---- feeds ----


@mutator(8)
def change_feed(subject: Subject) -> bool:
    """Change an element of an input to a special number, or the input's shape."""
    arrays = {n: a for n, a in subject.feeds.items() if isinstance(a, np.ndarray) and a.dtype.kind in "fiub"}
    arrays = {n: a for n, a in arrays.items() if a.dtype.num < 256}
    if not arrays:
        return False
    name = subject.rng.choice(list(arrays))
    array = arrays[name].copy()
    if subject.rng.random() < 0.5 and array.size:
        flat = array.reshape(-1)
        index = subject.rng.randrange(flat.size)
        with np.errstate(all="ignore"):
            if array.dtype.kind == "f":
                flat[index] = subject.number()
            else:
                flat[index] = np.array(subject.integer() & (2**64 - 1), np.uint64).astype(array.dtype)
        subject.feeds[name] = flat.reshape(array.shape)
        return True
    shape = list(array.shape)
    kind = subject.rng.randrange(4)
    if kind == 0:
        shape.insert(subject.rng.randrange(len(shape) + 1), 1)
    elif shape and kind == 1:
        del shape[subject.rng.randrange(len(shape))]
    elif shape:
        axis = subject.rng.randrange(len(shape))
        shape[axis] = subject.rng.choice([0, 1, shape[axis] + 1, max(shape[axis] - 1, 0), 2 * shape[axis]])
    if int(np.prod(shape)) > 10**5:
        return False
    subject.feeds[name] = random_array(subject.rng, shape, array.dtype)
    return True


# ---- opsets, inputs and outputs of the model ----


@mutator(2)
def change_opset(subject: Subject) -> bool:
    imports = subject.model.opset_import
    if not imports or subject.rng.random() < 0.1:
        imports.add(domain=subject.rng.choice(["", "ai.onnx", "ai.onnx.ml", "com.microsoft", "x"]), version=1)
    entry = subject.rng.choice(imports)
    entry.version = subject.rng.choice([0, -1, 2**62, 1, 6, 7, 9, 10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 22, 23, 24])
    return True


@mutator(2)
def change_ir_version(subject: Subject) -> bool:
    subject.model.ir_version = subject.rng.choice([0, 1, 3, 4, 7, 8, 10, 99])
    return True


@mutator(4)
def change_outputs(subject: Subject) -> bool:
    """Make a value of the graph an output, remove an output, or repeat one."""
    graph = subject.model.graph
    kind = subject.rng.randrange(5)
    if kind < 3:
        names = subject.names(graph)
        if not names:
            return False
        graph.output.append(onnx.ValueInfoProto(name=subject.rng.choice(names)))
    elif kind == 3 and graph.output:
        del graph.output[subject.rng.randrange(len(graph.output))]
    elif graph.output:
        graph.output.append(subject.rng.choice(graph.output))
    return True


@mutator(2)
def change_inputs(subject: Subject) -> bool:
    graph = subject.model.graph
    kind = subject.rng.randrange(3)
    if kind == 0:
        graph.input.append(helper.make_tensor_value_info(fresh_name(subject), TensorProto.FLOAT, ["b", 3]))
    elif graph.input and kind == 1:
        del graph.input[subject.rng.randrange(len(graph.input))]
    elif graph.input:
        graph.input.append(subject.rng.choice(graph.input))
    return True


@mutator(1)
def cut_bytes(subject: Subject) -> bool:
    """Change a byte of the serialized model such that it still parses."""
    data = bytearray(subject.model.SerializeToString())
    for _ in range(8):
        changed = bytearray(data)
        changed[subject.rng.randrange(len(changed))] = subject.rng.randrange(256)
        try:
            subject.model.ParseFromString(bytes(changed))
        except Exception:
            continue
        return True
    subject.model.ParseFromString(bytes(data))
    return False
