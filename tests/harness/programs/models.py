"""The models that `programs.campaign` compares, with inputs for a Run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from fuzzing.profiles import Profile, make_case
from ort_cuda_plugin.networks import NETWORKS
from ort_cuda_plugin.networks.graph import NetworkGraph
from programs.values import Array

IMAGE = 32
"""Height and width of the input images of convolutional networks, in pixels."""
PARTS: Mapping[str, Mapping[str, int]] = {
    "bert_base": {"layers": 1, "tokens": 64},
    "llama_prefill": {"layers": 1, "tokens": 64},
    "llama_decode": {"layers": 1, "tokens": 64},
    "vit_b_16": {"layers": 1},
    "whisper_tiny_encoder": {"layers": 1},
}
"""Arguments of the functions that write networks, for smaller networks: numbers of layers, sizes of vocabularies."""
SIZES: Mapping[str, Mapping[str, int]] = {
    "bert_base": {"sequence": 24},
    "llama_prefill": {"sequence": 16, "past": 0},
    "llama_decode": {"sequence": 1, "past": 40},
}


@dataclass(frozen=True)
class Model:
    """A model, and the contents of its inputs in a Run."""

    name: str
    proto: onnx.ModelProto
    feeds: Sequence[Array]

    def other_sizes(self) -> Iterator[list[Array]]:
        """Yield inputs of other sizes: each symbolic size n in turn becomes n + 1, and 2 n."""
        shapes = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in self.proto.graph.input]
        for name in dict.fromkeys(dim for shape in shapes for dim in shape if dim):
            for factor, added in ((1, 1), (2, 0)):
                yield [
                    np.resize(array, [factor * size + added if dim == name else size
                                      for size, dim in zip(array.shape, shape or [""] * array.ndim, strict=True)])
                    for array, shape in zip(self.feeds, shapes, strict=True)
                ]  # fmt: skip


def random_model(profile: Profile, number: int) -> Model:
    """Return a random network of `fuzzing`, with the inputs of its first Run."""
    case = make_case(profile, number)
    return Model(f"{profile} {number}", onnx.ModelProto.FromString(case.model()), case.feed(0))


def network(name: str, dtype: str, batch: int = 1) -> Model:
    """Return a network of `ort_cuda_plugin.networks` with few layers, or with small images if it is convolutional."""
    graph = NetworkGraph(name, dtype, 0)
    NETWORKS[name].write(graph, **PARTS.get(name, {}))
    proto, numbers = graph.model(), np.random.default_rng(1)
    is_convolutional = name not in PARTS
    feeds = []
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = []
        for axis, dim in enumerate(kind.shape.dim):
            if is_convolutional and axis > 1:
                dim.dim_value = IMAGE
            sizes = {"batch": batch, **SIZES.get(name, {})}
            shape.append(sizes[dim.dim_param] if dim.dim_param in sizes else dim.dim_value or sizes["sequence"])
        element = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        random = numbers.integers(0, 4, shape) if element.kind in "iu" else numbers.standard_normal(shape)
        feeds.append(np.asarray(random, element))
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    return Model(f"{name}:{dtype}", proto, feeds)
