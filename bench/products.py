"""Matrix products and convolutions at the sizes of ResNet-50, VGG-19 and BERT, against the CPU provider.

    python bench/products.py [NAME ...] [--device emulated|cuda] [--seconds S] [--json]

Prints GMAC/s: billions of multiply-adds per second of the process's CPU time. So on the emulated device other load on
the machine matters little, and the number is the rate of one core. On a GPU the plugin's number is per second of wall
time. NAME selects the layers whose name begins with it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ort_cuda_plugin


@dataclass(frozen=True)
class Layer:
    """A model of one node: shapes of its input ``x`` and its ``weights``, and attributes of a convolution."""

    name: str
    operator: str
    x: tuple[int, ...]
    weights: tuple[int, ...]
    stride: int = 1
    pad: int = 0
    group: int = 1

    @property
    def attributes(self) -> dict[str, Any]:
        if self.operator == "Conv":
            return {"strides": [self.stride] * 2, "pads": [self.pad] * 4, "group": self.group}
        return {"transB": 1} if self.operator == "Gemm" else {}

    @property
    def macs(self) -> int:
        if self.operator == "Conv":
            places = [
                (n + 2 * self.pad - k) // self.stride + 1 for n, k in zip(self.x[2:], self.weights[2:], strict=True)
            ]
            return self.x[0] * math.prod(places) * math.prod(self.weights)
        columns = self.weights[0] if self.operator == "Gemm" else self.weights[-1]
        return math.prod(self.x) * columns

    def model(self) -> bytes:
        """Return the layer as a model. Weights of rank above 2 of a MatMul are an input as well, as in attention."""
        shape = list(self.weights)
        two = len(shape) > 2 and self.operator == "MatMul"
        values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.x)]
        constants = []
        if two:
            values.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, shape))
        else:
            constants.append(numpy_helper.from_array(noise(shape), "w"))
        node = helper.make_node(self.operator, ["x", "w"], ["y"], **self.attributes)
        out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        graph = helper.make_graph([node], self.name, values, out, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())


LAYERS = (
    Layer("resnet/7x7 stride 2", "Conv", (1, 3, 224, 224), (64, 3, 7, 7), 2, 3),
    Layer("resnet/1x1 64-64 @56", "Conv", (1, 64, 56, 56), (64, 64, 1, 1)),
    Layer("resnet/3x3 64-64 @56", "Conv", (1, 64, 56, 56), (64, 64, 3, 3), 1, 1),
    Layer("resnet/1x1 64-256 @56", "Conv", (1, 64, 56, 56), (256, 64, 1, 1)),
    Layer("resnet/1x1 256-128 stride 2", "Conv", (1, 256, 56, 56), (128, 256, 1, 1), 2),
    Layer("resnet/3x3 128-128 @28", "Conv", (1, 128, 28, 28), (128, 128, 3, 3), 1, 1),
    Layer("resnet/1x1 512-256 @14", "Conv", (1, 512, 14, 14), (256, 512, 1, 1)),
    Layer("resnet/3x3 256-256 @14", "Conv", (1, 256, 14, 14), (256, 256, 3, 3), 1, 1),
    Layer("resnet/3x3 512-512 @7", "Conv", (1, 512, 7, 7), (512, 512, 3, 3), 1, 1),
    Layer("resnet/1x1 512-2048 @7", "Conv", (1, 512, 7, 7), (2048, 512, 1, 1)),
    Layer("resnet/fc", "Gemm", (1, 2048), (1000, 2048)),
    Layer("vgg/3x3 64-64 @224", "Conv", (1, 64, 224, 224), (64, 64, 3, 3), 1, 1),
    Layer("vgg/3x3 512-512 @28", "Conv", (1, 512, 28, 28), (512, 512, 3, 3), 1, 1),
    Layer("vgg/fc", "Gemm", (1, 25088), (4096, 25088)),
    Layer("shufflenet/depthwise", "Conv", (1, 136, 28, 28), (136, 1, 3, 3), 1, 1, 136),
    Layer("shufflenet/1x1 in 4 groups", "Conv", (1, 272, 28, 28), (272, 68, 1, 1), 1, 0, 4),
    Layer("bert/qkv", "MatMul", (1, 128, 768), (768, 768)),
    Layer("bert/ffn", "MatMul", (1, 128, 768), (768, 3072)),
    Layer("bert/scores", "MatMul", (1, 12, 128, 64), (1, 12, 64, 128)),
)


def noise(shape: tuple[int, ...] | list[int]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def rate(session: ort.InferenceSession, layer: Layer, seconds: float, cpu_time: bool) -> float:
    """Return the GMAC/s of Runs after the first one, repeated for ``seconds``."""
    feeds = {entry.name: noise([int(dim) for dim in entry.shape]) for entry in session.get_inputs()}
    clock = time.process_time if cpu_time else time.perf_counter
    for _ in range(2):
        session.run(None, feeds)
    runs, started = 0, clock()
    while clock() - started < seconds:
        session.run(None, feeds)
        runs += 1
    return runs * layer.macs / (clock() - started) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    emulate = arguments.device == "emulated"
    results = []
    for layer in LAYERS:
        if not layer.name.startswith(tuple(arguments.names)):
            continue
        model = layer.model()
        own = rate(ort_cuda_plugin.session(model, emulate=emulate), layer, arguments.seconds, emulate)
        cpu = rate(ort.InferenceSession(model, providers=["CPUExecutionProvider"]), layer, arguments.seconds, True)
        results.append({"layer": layer.name, "mmac": layer.macs / 1e6, "plugin": own, "cpu": cpu})
        if not arguments.json:
            print(
                f"{layer.name:30} {layer.macs / 1e6:8.1f} MMAC {own:7.2f} GMAC/s   CPU provider {cpu:7.2f}", flush=True
            )
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
