"""Random networks that are evaluated while they are built.

`Grower.add` runs each new node alone on ONNX Runtime's CPU provider, once for each Run of the finished network. So a
maker may propose any operator with any inputs: a node that the CPU provider refuses, or whose result is too large or
not finite, is not added. The results are the expected values for the plugin.

Each value is computed twice, on two tracks: on the second track a random rounding error is added after each inexact
operator. The distance of the tracks estimates how much another order of rounding may change the value. A node whose
results are too far apart is not added, so a comparison of floats, or a Floor, is part of a network only if its result
does not depend on rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array: TypeAlias = NDArray[Any]
Dims: TypeAlias = tuple[int | str | None, ...]
Rounding: TypeAlias = Literal["exact", "element", "sum"]
"""Rounding error of an operator: none, relative to each element, or (of sums) relative to the largest element."""

FLOAT, FLOAT16, BFLOAT16 = int(TensorProto.FLOAT), int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)
INT64, INT32, BOOL = int(TensorProto.INT64), int(TensorProto.INT32), int(TensorProto.BOOL)
INT8, UINT8 = int(TensorProto.INT8), int(TensorProto.UINT8)
FLOATS = (FLOAT, FLOAT16, BFLOAT16)
DTYPES: Mapping[int, np.dtype[Any]] = {
    FLOAT: np.dtype(np.float32),
    FLOAT16: np.dtype(np.float16),
    BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    INT64: np.dtype(np.int64),
    INT32: np.dtype(np.int32),
    BOOL: np.dtype(np.bool_),
    INT8: np.dtype(np.int8),
    UINT8: np.dtype(np.uint8),
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
EPSILON = {FLOAT: 2.0**-22, FLOAT16: 2.0**-10, BFLOAT16: 2.0**-7}
"""Relative rounding error of one operator, by element type."""
TF32_EPSILON = 2.0**-9
"""Relative error of a float32 GEMM with operands in TF32, with a margin for cancellation."""
DRIFT = {FLOAT: 2e-3, FLOAT16: 0.1, BFLOAT16: 0.15}
"""Maximum distance of the tracks by element type, relative to the largest element."""
LARGEST = {FLOAT: 1e4, FLOAT16: 500.0, BFLOAT16: 1e4}
LARGEST_INTEGER = 2**31 - 2  # the CPU provider saturates larger values to int32
MAX_RANK = 6
MAX_ELEMENTS = 4096


@dataclass(frozen=True)
class Value:
    """A tensor of a network, with its contents in each Run on both tracks."""

    name: str
    kind: int
    clean: tuple[Array, ...]
    noisy: tuple[Array, ...]

    @property
    def rank(self) -> int:
        return self.clean[0].ndim

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(array.shape for array in self.clean)

    @property
    def is_float(self) -> bool:
        return self.kind in FLOATS

    def same_size(self, axis: int) -> int | None:
        """Return the size of an axis if it is the same in all Runs, else None."""
        sizes = {shape[axis] for shape in self.shapes}
        return sizes.pop() if len(sizes) == 1 else None

    def drift(self) -> float:
        """Return the largest distance between the two tracks."""
        pairs = zip(self.clean, self.noisy, strict=True)
        return max((float(np.abs(wide(a) - wide(b)).max(initial=0.0)) for a, b in pairs), default=0.0)

    def largest(self) -> float:
        return max((float(np.abs(wide(array)).max(initial=0.0)) for array in self.clean), default=0.0)


@dataclass(frozen=True)
class Case:
    """A finished network with its expected results."""

    nodes: tuple[bytes, ...]
    constants: Mapping[str, Array]
    inputs: Mapping[str, Dims | None]
    """The declared shape of each input, None for an unknown rank."""
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    """All tensors except constants, by name."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the provider."""
    optimized: bool = True
    opset: int = 21

    @property
    def runs(self) -> int:
        return len(next(iter(self.values.values())).clean)

    def feed(self, run: int) -> list[Array]:
        return [self.values[name].clean[run] for name in self.inputs]

    def model(self) -> bytes:
        graph = helper.make_graph(
            [onnx.NodeProto.FromString(node) for node in self.nodes],
            "random",
            [helper.make_tensor_value_info(name, self.values[name].kind, dims) for name, dims in self.inputs.items()],
            [
                helper.make_tensor_value_info(name, self.values[name].kind, [None] * self.values[name].rank)
                for name in self.outputs
            ],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        return _serialized(graph, self.opset)


def _serialized(graph: onnx.GraphProto, opset: int) -> bytes:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    data: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return data


def wide(array: Array) -> NDArray[np.float64]:
    return array.astype(np.float64)


class Grower:
    """Builds a network. ``runs`` has the sizes of symbolic dimensions by name, for each Run."""

    def __init__(self, seed: int, runs: Sequence[Mapping[str, int]], tf32: bool = False, opset: int = 21) -> None:
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.runs, self.tf32, self.opset = runs, tf32, opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.inputs: dict[str, Dims | None] = {}
        self.values: dict[str, Value] = {}
        self._used: set[str] = set()

    # ---- inputs, constants and nodes ----

    def input(self, kind: int, dims: Sequence[int | str], make: Callable[[tuple[int, ...]], Array]) -> Value:
        """Add an input; ``make`` returns its contents for a shape. Some of its sizes are declared as unknown."""
        name = f"x{len(self.inputs)}"
        arrays = tuple(
            make(tuple(dim if isinstance(dim, int) else run[dim] for dim in dims)).astype(DTYPES[kind])
            for run in self.runs
        )
        declared = tuple(None if self.random.random() < 0.15 else dim for dim in dims)
        self.inputs[name] = None if self.random.random() < 0.05 else declared
        self.values[name] = Value(name, kind, arrays, arrays)
        return self.values[name]

    def constant(self, array: Array | Sequence[float] | float, kind: int | None = None, shared: bool = True) -> Value:
        """Return a constant: an equal one of the network, sometimes another one of equal shape, or a new one."""
        array = np.asarray(array)
        array = array if kind is None else array.astype(DTYPES[kind])
        for name, known in self.constants.items():
            alike = known.dtype == array.dtype and known.shape == array.shape
            if alike and (np.array_equal(known, array) or (shared and array.size > 8 and self.random.random() < 0.4)):
                return self._constant(name, known)
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return self._constant(name, array)

    def _constant(self, name: str, array: Array) -> Value:
        return Value(name, KINDS[array.dtype], (array,) * len(self.runs), (array,) * len(self.runs))

    def weights(self, *shape: int, kind: int = FLOAT) -> Value:
        return self.constant(self.rng.standard_normal(shape) / np.sqrt(max(1, shape[0])), kind)

    def pick(self, condition: Callable[[Value], object] = lambda value: True) -> Value | None:
        """Return a random tensor that fulfills the condition, mostly one of the latest, so that networks are deep."""
        suitable = [value for value in self.values.values() if condition(value)]
        if not suitable:
            return None
        return self.random.choice(suitable[-5:] if self.random.random() < 0.6 else suitable)

    def add(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        kinds: Sequence[int],
        rounding: Rounding = "exact",
        captured: Sequence[Value] = (),
        domain: str = "",
        **attributes: Any,
    ) -> list[Value] | None:
        """Add a node with results of the element types ``kinds``, and return them.

        Return None, and do not add the node, if the CPU provider refuses it or a result is unsuitable (`_is_tame`).
        ``captured`` are the outer tensors that bodies in its attributes read.
        """
        number = len(self.nodes)
        names = [f"t{number}_{i}" if kind else "" for i, kind in enumerate(kinds)]
        node = helper.make_node(
            op_type,
            ["" if value is None else value.name for value in inputs],
            names,
            name=f"node{number}",
            domain=domain,
            **attributes,
        )
        given = [value for value in (*inputs, *captured) if value is not None]
        tracks = self._evaluate(node, given, [kind for kind in kinds if kind])
        if tracks is None:
            return None
        results = []
        for (name, kind), clean, noisy in zip(
            ((name, kind) for name, kind in zip(names, kinds, strict=True) if kind), *tracks, strict=True
        ):
            shaken = tuple(self._shake(array, kind, rounding) for array in noisy)
            value = Value(name, kind, tuple(clean), shaken)
            if not _is_tame(value):
                return None
            results.append(value)
        self.nodes.append(node)
        self._used |= {value.name for value in given}
        self.values |= {value.name: value for value in results}
        return results

    def case(self, options: Mapping[str, str], optimized: bool, read_outputs: float = 0.15) -> Case:
        """Return the finished network. Its outputs are all unread tensors, and a fraction of the other tensors."""
        made = [name for name in self.values if name not in self.inputs]
        outputs = [name for name in made if name not in self._used or self.random.random() < read_outputs]
        self.random.shuffle(outputs)
        return Case(
            tuple(node.SerializeToString() for node in self.nodes),
            dict(self.constants),
            {name: dims for name, dims in self.inputs.items() if name in self._used},
            tuple(outputs),
            dict(self.values),
            options,
            optimized,
            self.opset,
        )

    # ---- evaluation ----

    def _evaluate(
        self, node: onnx.NodeProto, given: Sequence[Value], kinds: Sequence[int]
    ) -> tuple[list[list[Array]], list[list[Array]]] | None:
        """Return both tracks of each result, None if the CPU provider refuses the node.

        bfloat16, which the CPU provider lacks, is evaluated in float32 and rounded.
        """
        feeds = {value.name: value for value in given}
        if node.op_type == "Cast" and kinds == [BFLOAT16]:
            node = helper.make_node("Cast", node.input, node.output, to=FLOAT)
        graph = helper.make_graph(
            [node],
            "node",
            [helper.make_tensor_value_info(name, _evaluated(value.kind), None) for name, value in feeds.items()],
            [
                helper.make_tensor_value_info(name, _evaluated(kind), None)
                for name, kind in zip((name for name in node.output if name), kinds, strict=True)
            ],
        )
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(_serialized(graph, self.opset), options, providers=["CPUExecutionProvider"])
            tracks = []
            for track in ("clean", "noisy"):
                runs = []
                for run in range(len(self.runs)):
                    feed = {name: _as_evaluated(getattr(value, track)[run]) for name, value in feeds.items()}
                    runs.append(session.run(None, feed))
                    if any(array.size > MAX_ELEMENTS for array in runs[-1]):
                        return None
                tracks.append(
                    [[np.asarray(outputs[i]).astype(DTYPES[kind]) for outputs in runs] for i, kind in enumerate(kinds)]
                )
        except Exception:  # the CPU provider refuses the node, with errors of several types
            return None
        return tracks[0], tracks[1]

    def _shake(self, array: Array, kind: int, rounding: Rounding) -> Array:
        if rounding == "exact" or kind not in FLOATS:
            return array
        epsilon = TF32_EPSILON if self.tf32 and kind == FLOAT and rounding == "sum" else EPSILON[kind]
        exact = wide(array)
        if not np.isfinite(exact).all():
            return array
        scale = np.abs(exact) if rounding == "element" else np.abs(exact).max(initial=0.0)
        shaken: Array = (exact + self.rng.choice((-epsilon, epsilon), array.shape) * scale).astype(array.dtype)
        return shaken


def _evaluated(kind: int) -> int:
    return FLOAT if kind == BFLOAT16 else kind


def _as_evaluated(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == DTYPES[BFLOAT16] else array


def _is_tame(value: Value) -> bool:
    """Return whether a value suits a network: finite, not too large, of one rank in all Runs, tracks close together."""
    if len({array.ndim for array in value.clean}) > 1 or value.rank > MAX_RANK:
        return False
    if value.shapes != tuple(array.shape for array in value.noisy):
        return False
    if not value.is_float:
        return value.largest() <= LARGEST_INTEGER and all(map(np.array_equal, value.clean, value.noisy))
    if not all(np.isfinite(wide(array)).all() for array in (*value.clean, *value.noisy)):
        return False
    return value.largest() <= LARGEST[value.kind] and value.drift() <= DRIFT[value.kind] * max(value.largest(), 1e-3)
