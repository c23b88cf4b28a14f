"""Networks that are evaluated while they grow.

`Grower.add` runs each new node by itself on ONNX Runtime's CPU provider, once for each Run of the finished network. So
a maker may propose any operator with any inputs: a node that the CPU provider refuses, or whose result is too large or
not finite, is not added. The results are what the plugin has to compute.

Each value has two tracks. The second differs by a rounding error after each inexact operator. The distance of the two
tracks is what rounding in another order may change; a node that enlarges it too much is not added. So a comparison of
floats, or a Floor, enters a network only where its result does not depend on rounding.
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
"""What an operator rounds: nothing, each element by itself, or sums, whose error is relative to the largest element."""

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
"""Relative error of one operator."""
TF32_EPSILON = 2.0**-9
"""Relative error of a product of float32 whose operands are rounded to TF32, with some room for cancellation."""
DRIFT = {FLOAT: 2e-3, FLOAT16: 0.1, BFLOAT16: 0.15}
"""Maximum distance of the tracks, relative to the largest element."""
LARGEST = {FLOAT: 1e4, FLOAT16: 500.0, BFLOAT16: 1e4}
LARGEST_INTEGER = 2**31 - 2  # the CPU provider saturates what exceeds int32
MAX_RANK = 6
MAX_ELEMENTS = 4096


@dataclass(frozen=True)
class Value:
    """A tensor of a network, with its contents in each Run."""

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
        """The size of an axis where all Runs have the same, else None."""
        sizes = {shape[axis] for shape in self.shapes}
        return sizes.pop() if len(sizes) == 1 else None

    def drift(self) -> float:
        """The largest distance of the two tracks."""
        pairs = zip(self.clean, self.noisy, strict=True)
        return max((float(np.abs(wide(a) - wide(b)).max(initial=0.0)) for a, b in pairs), default=0.0)

    def largest(self) -> float:
        return max((float(np.abs(wide(array)).max(initial=0.0)) for array in self.clean), default=0.0)


@dataclass(frozen=True)
class Case:
    """A finished network: what runs, and what has to come out."""

    nodes: tuple[bytes, ...]
    constants: Mapping[str, Array]
    inputs: Mapping[str, Dims | None]
    """Their declared sizes, None for an unknown rank."""
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    """Every tensor that is no constant."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the provider."""
    optimised: bool = True
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
    """Grows a network over Runs of the sizes ``runs``, each a mapping from names of sizes to sizes."""

    def __init__(self, seed: int, runs: Sequence[Mapping[str, int]], tf32: bool = False, opset: int = 21) -> None:
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.runs, self.tf32, self.opset = runs, tf32, opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.inputs: dict[str, Dims | None] = {}
        self.values: dict[str, Value] = {}
        self._used: set[str] = set()

    # ---- what a network is made of ----

    def input(self, kind: int, dims: Sequence[int | str], make: Callable[[tuple[int, ...]], Array]) -> Value:
        """A new input. Some of its sizes are declared, some are left open."""
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
        """A constant; one that the network has already where type and shape are the same, in some cases."""
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
        """A tensor that fulfils the condition, mostly a new one, so that networks are deep."""
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
        """The results of a new node with these element types, or None where the network is better without it.

        ``captured`` are the tensors that bodies in its attributes use.
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

    def case(self, options: Mapping[str, str], optimised: bool, read_outputs: float = 0.15) -> Case:
        """The network with outputs that keep all nodes alive, and a share of the tensors that nodes read as well."""
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
            optimised,
            self.opset,
        )

    # ---- evaluation ----

    def _evaluate(
        self, node: onnx.NodeProto, given: Sequence[Value], kinds: Sequence[int]
    ) -> tuple[list[list[Array]], list[list[Array]]] | None:
        """Both tracks of each result, or None where the CPU provider refuses the node. bfloat16 is evaluated as
        float32 and rounded, since the CPU provider lacks it."""
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
        except Exception:  # any error of the CPU provider about a node that does not fit
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
    """Whether numbers are finite and not too large, the rank is the same in all Runs, and both tracks agree."""
    if len({array.ndim for array in value.clean}) > 1 or value.rank > MAX_RANK:
        return False
    if value.shapes != tuple(array.shape for array in value.noisy):
        return False
    if not value.is_float:
        return value.largest() <= LARGEST_INTEGER and all(map(np.array_equal, value.clean, value.noisy))
    if not all(np.isfinite(wide(array)).all() for array in (*value.clean, *value.noisy)):
        return False
    return value.largest() <= LARGEST[value.kind] and value.drift() <= DRIFT[value.kind] * max(value.largest(), 1e-3)
