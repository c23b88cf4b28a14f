"""Random models of elementwise operators, data movement, shape arithmetic, reductions and products."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dim = int | str
"""A size: a number, or the name of a size that is known only at Run time ("b", "s", or a product such as "b*s")."""


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)


class ModelMaker:
    """Builds a graph of random nodes over float tensors. ``foreign`` allows CumSum, which the plugin may decline."""

    def __init__(self, seed: int, foreign: bool) -> None:
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs = [Tensor("x", ("b", "s", 8)), Tensor("y", ("b", 1, 8)), Tensor("z", ("s", 8))]
        self.tensors = list(self.inputs)
        self.makers = [
            self.unary,
            self.binary,
            self.binary,
            self.transpose,
            self.merge_dims,
            self.concat,
            self.slice,
            self.split,
            self.gather,
            self.reduce,
            self.softmax,
            self.unsqueeze,
            self.linear,
            self.expand,
        ] + [self.cumsum] * (2 if foreign else 0)

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **attributes))
        return names

    def pick(self, condition: Callable[[Tensor], object] = lambda tensor: True) -> Tensor | None:
        suitable = [tensor for tensor in self.tensors if condition(tensor)]
        # Choose mostly among the latest tensors, so that models are deep.
        return self.random.choice(suitable[-4:] if self.random.random() < 0.7 else suitable) if suitable else None

    def any(self) -> Tensor:
        picked = self.pick()
        assert picked is not None
        return picked

    def static_axis(self, x: Tensor, least: int = 1) -> int | None:
        axes = [axis for axis, dim in enumerate(x.shape) if isinstance(dim, int) and dim >= least]
        return self.random.choice(axes) if axes else None

    # ---- makers: each adds a random node, and returns its result; None if no tensor suits the node ----

    def unary(self) -> Tensor | None:
        x = self.any()
        return Tensor(self.node(self.random.choice(["Neg", "Relu", "Tanh", "Abs"]), x.name)[0], x.shape)

    def binary(self) -> Tensor | None:
        a, b = self.any(), self.any()
        shape = broadcast(a.shape, b.shape)
        op_type = self.random.choice(["Add", "Sub", "Mul", "Max"])
        return None if shape is None else Tensor(self.node(op_type, a.name, b.name)[0], shape)

    def transpose(self) -> Tensor | None:
        x = self.pick(lambda tensor: tensor.rank)
        if x is None:
            return None
        perm = self.random.sample(range(x.rank), x.rank)
        return Tensor(self.node("Transpose", x.name, perm=perm)[0], tuple(x.shape[axis] for axis in perm))

    def merge_dims(self) -> Tensor | None:
        """Add a Reshape that merges two adjacent dimensions, with a computed shape as in exported models."""
        x = self.pick(lambda tensor: 2 <= tensor.rank <= 4)
        if x is None:
            return None
        axis = self.random.randrange(x.rank - 1)
        (shape,) = self.node("Shape", x.name)
        parts = []
        for i in range(x.rank):
            (dim,) = self.node("Gather", shape, self.constant(np.array([i])))
            parts.append(dim)
        (merged,) = self.node("Mul", parts[axis], parts[axis + 1])
        parts[axis : axis + 2] = [merged] if self.random.random() < 0.5 else [self.constant(np.array([-1]))]
        (target,) = self.node("Concat", *parts, axis=0)
        a, b = x.shape[axis : axis + 2]
        both: Dim = a * b if isinstance(a, int) and isinstance(b, int) else f"({a}*{b})"
        return Tensor(self.node("Reshape", x.name, target)[0], (*x.shape[:axis], both, *x.shape[axis + 2 :]))

    def concat(self) -> Tensor | None:
        x = self.any()
        axis = self.static_axis(x)
        if axis is None or size_of(x, axis) > 16:
            return None
        others = [
            t
            for t in self.tensors
            if t.rank == x.rank
            and all(i == axis or a == b for i, (a, b) in enumerate(zip(t.shape, x.shape, strict=True)))
            and isinstance(t.shape[axis], int)
        ]
        y = self.random.choice(others)
        shape = list(x.shape)
        shape[axis] = size_of(x, axis) + size_of(y, axis)
        return Tensor(self.node("Concat", x.name, y.name, axis=axis)[0], tuple(shape))

    def slice(self) -> Tensor | None:
        x = self.any()
        axis = self.static_axis(x, 2)
        if axis is None:
            return None
        size = size_of(x, axis)
        step = self.random.choice([1, 1, 2, -1])
        places = list(range(size))[self.random.randrange(size) :: step]
        start, end = places[0], (places[-1] + 1 if step > 0 else -size - 1)
        arguments = [self.constant(np.array([value])) for value in (start, end, axis, step)]
        shape = (*x.shape[:axis], len(places), *x.shape[axis + 1 :])
        return Tensor(self.node("Slice", x.name, *arguments)[0], shape)

    def split(self) -> Tensor | None:
        x = self.pick(lambda tensor: tensor.rank and isinstance(tensor.shape[-1], int) and tensor.shape[-1] >= 2)
        if x is None:
            return None
        size = size_of(x, -1)
        first = self.random.randrange(1, size)
        sizes = self.constant(np.array([first, size - first]))
        names = self.node("Split", x.name, sizes, outputs=2, axis=-1)
        which = self.random.randrange(2)
        return Tensor(names[which], (*x.shape[:-1], (first, size - first)[which]))

    def gather(self) -> Tensor | None:
        x = self.any()
        axis = self.static_axis(x)
        if axis is None:
            return None
        indices = self.rng.integers(-size_of(x, axis), size_of(x, axis), self.random.randint(1, 4))
        (name,) = self.node("Gather", x.name, self.constant(indices), axis=axis)
        return Tensor(name, (*x.shape[:axis], len(indices), *x.shape[axis + 1 :]))

    def reduce(self) -> Tensor | None:
        x = self.pick(lambda tensor: tensor.rank)
        if x is None:
            return None
        axis, keep = self.random.randrange(x.rank), self.random.random() < 0.5
        (name,) = self.node("ReduceMean", x.name, axes=[axis], keepdims=int(keep))
        return Tensor(name, (*x.shape[:axis], *([1] if keep else []), *x.shape[axis + 1 :]))

    def softmax(self) -> Tensor | None:
        x = self.pick(lambda tensor: tensor.rank)
        return x and Tensor(self.node("Softmax", x.name, axis=self.random.randrange(x.rank))[0], x.shape)

    def unsqueeze(self) -> Tensor | None:
        x = self.pick(lambda tensor: tensor.rank < 4)
        if x is None:
            return None
        axis = self.random.randint(0, x.rank)
        (name,) = self.node("Unsqueeze", x.name, self.constant(np.array([axis])))
        return Tensor(name, (*x.shape[:axis], 1, *x.shape[axis:]))

    def linear(self) -> Tensor | None:
        x = self.pick(lambda tensor: tensor.rank >= 2 and isinstance(tensor.shape[-1], int))
        if x is None:
            return None
        size = size_of(x, -1)
        weights = self.rng.standard_normal((size, 8), dtype=np.float32) / np.float32(np.sqrt(size))
        return Tensor(self.node("MatMul", x.name, self.constant(weights))[0], (*x.shape[:-1], 8))

    def expand(self) -> Tensor | None:
        a, b = self.any(), self.any()
        shape = broadcast(a.shape, b.shape)
        if shape != b.shape:
            return None
        return Tensor(self.node("Expand", a.name, self.node("Shape", b.name)[0])[0], b.shape)

    def cumsum(self) -> Tensor | None:
        x = self.pick(lambda tensor: tensor.rank)
        return x and Tensor(self.node("CumSum", x.name, self.constant(np.array(0)))[0], x.shape)

    # ---- the model ----

    def model(self, size: int) -> onnx.ModelProto:
        """Return a model of ``size`` random nodes, whose outputs are the last three tensors and one from the middle."""
        while size:
            made = self.random.choice(self.makers)()
            if made is not None:
                self.tensors.append(made)
                size -= 1
        new = self.tensors[len(self.inputs) :]
        outputs = {tensor.name: tensor for tensor in (*new[-3:], new[len(new) // 2])}
        graph = helper.make_graph(
            self.nodes,
            "random",
            [helper.make_tensor_value_info(t.name, TensorProto.FLOAT, t.shape) for t in self.inputs],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.initializers,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def size_of(x: Tensor, axis: int) -> int:
    size = x.shape[axis]
    assert isinstance(size, int)
    return size


def broadcast(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...] | None:
    """Return the shape to which both broadcast for all values of symbolic sizes; None if there is none."""
    rank = max(len(a), len(b))
    result = []
    for p, q in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if p != q and 1 not in (p, q):
            return None
        result.append(q if p == 1 else p)
    return tuple(result)


def feed(b: int, s: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random inputs of a `ModelMaker` model, for sizes b and s."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (b, s, 8), "y": (b, 1, 8), "z": (s, 8)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
