"""A model that is being mutated, its inputs, and queries and random choices for mutators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx.helper import tensor_dtype_to_np_dtype

Feeds = dict[str, np.ndarray[Any, np.dtype[Any]]]

NOT_UTF8 = "N\u2603TUTF8"
"""A placeholder in names, which `Subject.serialize` replaces by bytes of invalid UTF-8."""
_BROKEN = b"\xff\xfe\xc0\x80\xed\xa0\x80\xf5\x80"
assert len(NOT_UTF8.encode()) == len(_BROKEN)

HUGE = (2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1)
SMALL = (0, 1, -1, 2, -2, 3, 4, 5, 7, 8, 16, -3, -7, 33, 100)
TYPES = (
    *[TensorProto.FLOAT] * 3,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.INT8,
    TensorProto.UINT8,
    TensorProto.UINT64,
    TensorProto.BOOL,
    TensorProto.STRING,
    TensorProto.INT4,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.COMPLEX64,
    0,
    99,
)


@dataclass
class Subject:
    """A model and its inputs. Mutators change them in place, and make all random choices with ``rng``."""

    model: ModelProto
    feeds: Feeds
    rng: random.Random = field(default_factory=random.Random)

    # ---- queries ----

    def graphs(self) -> list[GraphProto]:
        """Return the main graph, and all graphs in attributes of nodes."""
        return list(_nested(self.model.graph))

    def graph(self) -> GraphProto:
        """Return a random graph, mostly the main one."""
        return self.model.graph if self.rng.random() < 0.6 else self.rng.choice(self.graphs())

    def node(self) -> NodeProto | None:
        nodes = self.graph().node
        return self.rng.choice(nodes) if nodes else None

    def names(self, graph: GraphProto) -> list[str]:
        """Return the names of all values of the graph, without the empty name."""
        values = [value.name for value in (*graph.input, *graph.initializer)]
        return [name for name in (*values, *(name for node in graph.node for name in node.output)) if name]

    def value_infos(self) -> list[ValueInfoProto]:
        return [
            info
            for graph in self.graphs()
            for info in (*graph.input, *graph.output, *graph.value_info)
            if info.type.HasField("tensor_type")
        ]

    def initializers(self) -> list[TensorProto]:
        """Return all initializers, and all tensors in attributes."""
        found = [tensor for graph in self.graphs() for tensor in graph.initializer]
        for graph in self.graphs():
            for node in graph.node:
                found += [a.t for a in node.attribute if a.type == AttributeProto.TENSOR]
        return found

    def inferred_types(self) -> dict[str, int]:
        """Return the element types of the main graph's values that ONNX can infer, by name."""
        try:
            graph = onnx.shape_inference.infer_shapes(self.model).graph
        except Exception:
            graph = self.model.graph
        infos = (*graph.input, *graph.output, *graph.value_info)
        types = {info.name: info.type.tensor_type.elem_type for info in infos}
        return types | {tensor.name: tensor.data_type for tensor in graph.initializer}

    # ---- random numbers and texts ----

    def integer(self) -> int:
        return self.rng.choice(HUGE) if self.rng.random() < 0.3 else self.rng.choice(SMALL)

    def number(self) -> float:
        return self.rng.choice(
            [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"), 2.5]
        )

    def text(self) -> str:
        """Return an unusual name."""
        kind = self.rng.randrange(8)
        if kind == 0:
            return "n" * self.rng.choice([300, 5000, 100_000])
        if kind == 1:
            return self.rng.choice(["", " ", "?", "-1", "0", "None", "%s%n%d", "{0}", "a\nb", "'\"", "\\", "../../x"])
        if kind == 2:
            return self.rng.choice(["\u00e9\u4e2d\U0001f600", "\u202e\u0000", "\ufeffn", NOT_UTF8])
        if kind == 3:
            return f"floor({self.rng.choice('bsn')}*{self.integer()}/0)+max(n,-1)"
        if kind == 4:
            depth = self.rng.choice([20, 400, 5000])
            return "(" * depth + "n" + "+1)" * depth
        return self.rng.choice(["b", "s", "n", "batch", "sequence", "x", "unk__0"])

    # ---- serialization ----

    def serialize(self) -> bytes:
        return bytes(self.model.SerializeToString()).replace(NOT_UTF8.encode(), _BROKEN)


def _nested(graph: GraphProto) -> Iterator[GraphProto]:
    waiting = [graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    waiting.append(attribute.g)
                waiting += attribute.graphs


def fresh_name(subject: Subject, prefix: str = "m") -> str:
    """Return a random name that the model does not use."""
    return f"{prefix}_{subject.rng.getrandbits(48):x}"


def declared(info: ValueInfoProto) -> list[int | str | None] | None:
    """Return the declared shape of a value, None for an unknown rank."""
    if not info.type.tensor_type.HasField("shape"):
        return None
    dims: list[int | str | None] = []
    for dim in info.type.tensor_type.shape.dim:
        kind = dim.WhichOneof("value")
        dims.append(dim.dim_value if kind == "dim_value" else dim.dim_param if kind else None)
    return dims


def complete_feeds(subject: Subject) -> None:
    """Give each input of the model an array, of the declared element type if NumPy has it; keep suitable ones."""
    initialized = {tensor.name for tensor in subject.model.graph.initializer}
    sizes: dict[str, int] = {}
    wanted: Feeds = {}
    for info in subject.model.graph.input:
        known = subject.feeds.get(info.name)
        if info.name in initialized and known is None:
            continue
        dtype = _numpy(info.type.tensor_type.elem_type)
        if known is None:
            shape = []
            for dim in declared(info) or []:
                size = dim if isinstance(dim, int) else sizes.setdefault(dim or "", subject.rng.randint(1, 4))
                shape.append(size if 0 <= size <= 64 else 1)
            known = random_array(subject.rng, shape[:8], dtype or np.dtype(np.float32))
        elif dtype is not None and known.dtype != dtype:
            with np.errstate(all="ignore"):
                known = np.asarray(np.nan_to_num(known)).astype(dtype) if known.dtype.kind in "fiub" else known
        wanted[info.name] = known
    subject.feeds = wanted


def _numpy(element_type: int) -> np.dtype[Any] | None:
    try:
        dtype = np.dtype(tensor_dtype_to_np_dtype(element_type))
    except (KeyError, TypeError):
        return None
    return dtype if dtype.num < 256 and dtype.kind in "fiub" else None


def random_array(rng: random.Random, shape: list[int], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    random_bits = np.random.default_rng(rng.getrandbits(32))
    if dtype.kind == "f":
        return random_bits.standard_normal(shape).astype(dtype)
    return random_bits.integers(0, 4, shape).astype(dtype)


def make_attribute(name: str, value: Any) -> AttributeProto:
    """Return an attribute. An empty list, which `helper.make_attribute` refuses, becomes a list of integers."""
    if isinstance(value, list) and not value:
        return AttributeProto(name=name, type=AttributeProto.INTS)
    return helper.make_attribute(name, value)


def parse(data: bytes) -> ModelProto:
    return onnx.load_model_from_string(data)
