"""Loads models by path, or by the name of an architecture in the `onnx` wheel, and prepares them for comparisons.

In the wheel's ``light_*`` models all elements of a weight have the same value (``ConstantOfShape``), so any two inputs
give the same output and no comparison could fail. `with_noise_weights` replaces them by seeded noise. `before_softmax`
adds the input of the final Softmax as an output, because the Softmax of noise gives nearly equal classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .abi.errors import Error
from .abi.message_texts import did_you_mean

SOFTMAX_OPS = ("Softmax", "LogSoftmax")
WEIGHTED_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
BATCH_NORMALIZATION_ROLES = {1: "scale", 2: "bias", 3: "mean", 4: "variance"}


class ModelNotFoundError(Error, ValueError):
    """The argument is neither a file nor the name of a model in the onnx wheel."""


def wheel_models() -> dict[str, Path]:
    """Return names and files of the architectures in the installed `onnx` wheel, e.g. ``light_resnet50``."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return {path.stem: path for path in sorted(folder.glob("light_*.onnx"))}


def find_model(name_or_path: str, others: Collection[str] = ()) -> Path:
    """Return the file of a model: a path, or a name in the wheel of onnx.

    Raises:
        ModelNotFoundError: there is no such model. The message has the names of the wheel's models, and suggests a
            similar name of these or of ``others``, which the caller knows.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    models = wheel_models()
    if name_or_path in models:
        return models[name_or_path]
    question = did_you_mean(path.name, [*models, *others])
    hint = f", {question}" if question else "."
    raise ModelNotFoundError(
        f"{name_or_path!r} is neither a file nor a light model{hint} Give the path of an ONNX file, or a light model "
        f"of the installed onnx wheel: {', '.join(models) or 'it has none'}"
    )


def is_wheel_model(path: Path) -> bool:
    """Return whether the file is one of the wheel's light models, whose weights are ConstantOfShape nodes."""
    return path in wheel_models().values()


def with_noise_weights(model: onnx.ModelProto, seed: int = 0) -> onnx.ModelProto:
    """Return a copy in which each ConstantOfShape of a known shape is an initializer of seeded noise.

    Weights of convolutions and matrix products are He-scaled normal noise (standard deviation ``sqrt(2 / fan_in)``),
    scales and variances are around 1, biases and means around 0, so that activations neither vanish nor explode.
    """
    noisy = onnx.ModelProto()
    noisy.CopyFrom(model)
    graph = noisy.graph
    rng = np.random.default_rng(seed)
    shapes = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.INT64
    }
    roles = dict(_weight_roles(graph))
    kept = []
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            shape = tuple(int(dim) for dim in shapes[node.input[0]])
            values = _noise(rng, roles.get(node.output[0], "bias"), shape)
            tensor = graph.initializer.add(name=node.output[0], data_type=onnx.TensorProto.FLOAT, dims=shape)
            tensor.raw_data = values.tobytes()
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
    used = {name for node in kept for name in node.input} | {output.name for output in graph.output}
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in used:
            del graph.initializer[index]
    names = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in shapes or value.name in names]
    del graph.input[:]
    graph.input.extend(inputs)
    return noisy


def before_softmax(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Return a copy with the input of the final Softmax as an additional output, and that output's name.

    If no graph output is the result of a Softmax, the model is unchanged and the name is that of its first output.
    """
    outputs = {output.name: output for output in model.graph.output}
    for node in reversed(model.graph.node):
        if node.op_type in SOFTMAX_OPS and node.output[0] in outputs and node.input[0] not in outputs:
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            element_type = outputs[node.output[0]].type.tensor_type.elem_type
            changed.graph.output.append(helper.make_tensor_value_info(node.input[0], element_type, None))
            return changed, node.input[0]
    return model, model.graph.output[0].name


def random_inputs(
    model: onnx.ModelProto, seed: int = 0, dims: Mapping[str, int] | None = None, skip: Collection[str] = ()
) -> dict[str, NDArray[np.generic]]:
    """Return seeded values for every graph input: 0 or 1 for integers and bool, else normal noise.

    Noise of rank 3 or more has an offset per channel.

    Because of the offsets, a network that averages over the image gets different numbers for different seeds.
    A symbolic dimension takes its size from ``dims`` by name, else 1. Inputs in ``skip`` are left out.
    Raises ValueError for an input that is not a tensor of numbers, has a negative size, or exceeds the host memory.
    """
    rng = np.random.default_rng(seed)
    initializers = {tensor.name for tensor in model.graph.initializer}
    values: dict[str, NDArray[np.generic]] = {}
    for value in model.graph.input:
        if value.name in initializers or value.name in skip:
            continue
        tensor_type = value.type.tensor_type
        if not tensor_type.elem_type:
            raise ValueError(
                f"input {value.name!r} is not a tensor, and random values can be generated only for tensors"
            )
        if tensor_type.elem_type == onnx.TensorProto.STRING:
            raise ValueError(f"input {value.name!r} has strings, and only tensors of numbers can get random values")
        shape = [
            dim.dim_value if dim.HasField("dim_value") else (dims or {}).get(dim.dim_param, 1)
            for dim in tensor_type.shape.dim
        ]
        if any(size < 0 for size in shape):
            raise ValueError(f"input {value.name!r}: got the size {min(shape)} in its shape, expected at least 0")
        dtype = helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)
        try:
            is_whole = np.issubdtype(dtype, np.integer) or dtype == np.bool_
            values[value.name] = (rng.integers(0, 2, shape) if is_whole else _signal(rng, shape)).astype(dtype)
        except MemoryError as error:
            raise ValueError(f"input {value.name!r}: not enough host memory for random values: {error}") from error
    return values


def with_input_shapes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Return a copy whose inputs have these shapes, for `random_inputs`.

    Raises:
        ValueError: the model has no such input, or the input has another rank.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    inputs = {value.name: value for value in changed.graph.input}
    for name, shape in shapes.items():
        if name not in inputs:
            raise ValueError(f"{name!r} is not an input of the model, expected one of {', '.join(inputs)}")
        given = inputs[name].type.tensor_type.shape
        if inputs[name].type.tensor_type.HasField("shape") and len(given.dim) != len(shape):
            raise ValueError(f"input {name!r}: got {len(shape)} sizes, expected {len(given.dim)}")
        del given.dim[:]
        for size in shape:
            given.dim.add(dim_value=size)
    return changed


def relative_error(actual: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """Return max|a-b| / max|b| over finite values; infinity if shapes, or positions of NaN and infinities, differ.

    a is ``actual``, b is ``expected``. If b is 0 everywhere: max|a|. For strings: 0 if they are equal, else infinity.
    """
    if actual.shape != expected.shape:
        return math.inf
    if expected.dtype.kind in "OSU":
        return 0.0 if np.array_equal(actual, expected) else math.inf
    if actual.size == 0:
        return 0.0
    a = actual.astype(np.float64)
    b = expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    difference = float(np.max(np.abs(a - b), where=finite, initial=0.0))
    scale = float(np.max(np.abs(b), where=finite, initial=0.0))
    return difference / scale if scale else difference


def _signal(rng: np.random.Generator, shape: list[int]) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) >= 3:
        values += 2 * rng.standard_normal([*shape[:2], *[1] * (len(shape) - 2)], dtype=np.float32)
    return values


def _weight_roles(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yield name and role of each weight. The role, such as "scale" or "bias", selects the distribution of its noise.

    Nodes between a weight and its user that only reorder or reshape elements are skipped.
    """
    origin: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in ("Reshape", "Unsqueeze", "Transpose", "Identity"):
            origin[node.output[0]] = origin.get(node.input[0], node.input[0])
        for index, name in enumerate(node.input):
            source = origin.get(name, name)
            if node.op_type in WEIGHTED_OPS and index == 1:
                yield source, _fan_role(node)
            elif node.op_type == "BatchNormalization" and index in BATCH_NORMALIZATION_ROLES:
                yield source, BATCH_NORMALIZATION_ROLES[index]
            elif node.op_type == "Mul" and index == 1:
                yield source, "scale"


def _fan_role(node: onnx.NodeProto) -> str:
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    return "weight" if node.op_type == "Conv" or transposed else "weight_kn"


def _noise(rng: np.random.Generator, role: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, dtype=np.float32)
    scaled: Callable[[], NDArray[np.float32]] = {
        "weight": lambda: values * np.float32(math.sqrt(2.0 / max(1, math.prod(shape[1:])))),
        "weight_kn": lambda: values * np.float32(math.sqrt(2.0 / max(1, shape[0] if shape else 1))),
        "scale": lambda: 1 + np.float32(0.1) * values,
        "variance": lambda: np.exp(np.float32(0.1) * values),
        "mean": lambda: np.float32(0.1) * values,
        "bias": lambda: np.float32(0.1) * values,
    }[role]
    return np.asarray(scaled(), np.float32)
