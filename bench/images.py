"""Networks and layers over large images, against the CPU provider with the same number of threads.

    python bench/images.py [NAME ...] [--runs N] [--seconds S] [--threads T] [--device emulated|cuda] [--list] [--json]

Runs alternate between the two sessions of one process, so that other load on the machine slows both. Prints the median
times of a Run, and the median ratio of neighboring Runs. NAME selects all names that begin with it: the networks of
`u_networks` ("u2net", "u2netp", "isnet", "isnetp"; with "/f16", or "/u8" for dynamic quantization) and the layers
below. Without NAME: all layers, and the networks in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from u_networks import NETWORKS, build

import ort_cuda_plugin

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A model of one node. Its inputs have the shapes ``inputs``, then come constants: arrays, or shapes of noise."""

    name: str
    op_type: str
    inputs: tuple[Shape, ...]
    weights: tuple[Shape | np.ndarray | None, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    dtype: int = TensorProto.FLOAT
    outputs: int = 1

    def model(self) -> bytes:
        element = helper.tensor_dtype_to_np_dtype(self.dtype)
        values = [helper.make_tensor_value_info(f"x{i}", self.dtype, x) for i, x in enumerate(self.inputs)]
        names, constants = [value.name for value in values], []
        for i, weight in enumerate(self.weights):
            names.append("" if weight is None else f"w{i}")
            if weight is not None:
                array = weight if isinstance(weight, np.ndarray) else noise(weight, element)
                constants.append(numpy_helper.from_array(array, f"w{i}"))
        results = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op_type, names, results, **self.attributes)
        out = [helper.make_empty_tensor_value_info(name) for name in results]
        graph = helper.make_graph([node], self.name, values, out, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        return bytes(onnx.shape_inference.infer_shapes(model).SerializeToString())


def noise(shape: Shape, dtype: np.dtype | type = np.float32) -> np.ndarray:
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    return (rng.standard_normal(shape, dtype=np.float32) * 0.1).astype(dtype)


def conv(
    name: str, x: Shape, w: Shape, stride: int = 1, dilation: int = 1, group: int = 1, dtype: int = TensorProto.FLOAT
) -> Layer:
    pads = [dilation * (k // 2) for k in w[2:]] * 2
    attributes = {"strides": [stride] * 2, "dilations": [dilation] * 2, "pads": pads, "group": group}
    return Layer(f"conv/{name}", "Conv", (x,), (w, w[:1]), attributes, dtype)


def transposed(name: str, x: Shape, w: Shape, stride: int, pad: int = 0, group: int = 1) -> Layer:
    attributes = {"strides": [stride] * 2, "pads": [pad] * 4, "group": group}
    return Layer(f"transposed/{name}", "ConvTranspose", (x,), (w, (w[1] * group,)), attributes)


def pool(name: str, op_type: str, x: Shape, kernel: int, stride: int, pad: int = 0) -> Layer:
    attributes: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    return Layer(f"pool/{name}", op_type, (x,), (), attributes)


def resize(name: str, x: Shape, factor: float, **attributes: object) -> Layer:
    scales = np.array([1, 1, factor, factor], np.float32)
    return Layer(f"resize/{name}", "Resize", (x,), (None, scales), attributes)


def large(channels: int, size: int = 1024) -> Shape:
    return (1, channels, size, size)


half = TensorProto.FLOAT16
LAYERS = (
    conv("3x3 64-1 @1024", large(64), (1, 64, 3, 3)),
    conv("3x3 64-1 @1024 f16", large(64), (1, 64, 3, 3), dtype=half),
    conv("3x3 16-1 @1024", large(16), (1, 16, 3, 3)),
    conv("3x3 512-1 @64", large(512, 64), (1, 512, 3, 3)),
    conv("3x3 32-2 @1024", large(32), (2, 32, 3, 3)),
    conv("3x3 32-3 @1024", large(32), (3, 32, 3, 3)),
    conv("3x3 32-8 @1024", large(32), (8, 32, 3, 3)),
    conv("3x3 64-16 @1024", large(64), (16, 64, 3, 3)),
    conv("3x3 16-16 @1024", large(16), (16, 16, 3, 3)),
    conv("3x3 16-16 @1024 f16", large(16), (16, 16, 3, 3), dtype=half),
    conv("3x3 32-64 @1024", large(32), (64, 32, 3, 3)),
    conv("3x3 16-16 dilation 2 @512", large(16, 512), (16, 16, 3, 3), dilation=2),
    conv("3x3 16-16 dilation 8 @512", large(16, 512), (16, 16, 3, 3), dilation=8),
    conv("3x3 256-256 dilation 8 @32", large(256, 32), (256, 256, 3, 3), dilation=8),
    conv("3x3 24-40 @512", large(24, 512), (40, 24, 3, 3)),
    conv("3x3 3-64 stride 2 @1024", large(3), (64, 3, 3, 3), stride=2),
    conv("7x7 3-64 stride 2 @1024", large(3), (64, 3, 7, 7), stride=2),
    conv("7x7 3-16 @512", large(3, 512), (16, 3, 7, 7)),
    conv("1x1 7-1 @1024", large(7), (1, 7, 1, 1)),
    conv("1x1 64-2 @1024", large(64), (2, 64, 1, 1)),
    conv("1x1 16-16 @1024", large(16), (16, 16, 1, 1)),
    conv("1x1 64-64 @512", large(64, 512), (64, 64, 1, 1)),
    conv("1x1 512-64 @64", large(512, 64), (64, 512, 1, 1)),
    conv("depthwise 3x3 32 @1024", large(32), (32, 1, 3, 3), group=32),
    conv("depthwise 3x3 96 stride 2 @512", large(96, 512), (96, 1, 3, 3), stride=2, group=96),
    conv("depthwise 7x7 64 @256", large(64, 256), (64, 1, 7, 7), group=64),
    conv("depthwise 3x3 144 @128", large(144, 128), (144, 1, 3, 3), group=144),
    conv("3x3 64-64 in 4 groups @256", large(64, 256), (64, 16, 3, 3), group=4),
    conv("3x3 64-64 in 16 groups @256", large(64, 256), (64, 4, 3, 3), group=16),
    conv("3x3 128-128 in 32 groups @128", large(128, 128), (128, 4, 3, 3), group=32),
    transposed("2x2 stride 2 64-32 @256", large(64, 256), (64, 32, 2, 2), 2),
    transposed("4x4 stride 2 64-32 @256", large(64, 256), (64, 32, 4, 4), 2, 1),
    transposed("4x4 stride 2 16-1 @512", large(16, 512), (16, 1, 4, 4), 2, 1),
    transposed("3x3 stride 1 32-32 @256", large(32, 256), (32, 32, 3, 3), 1, 1),
    transposed("4x4 stride 2 depthwise 32 @256", large(32, 256), (32, 1, 4, 4), 2, 1, 32),
    pool("max 2x2 stride 2 64 @1024", "MaxPool", large(64), 2, 2),
    pool("max 3x3 stride 2 64 @512", "MaxPool", large(64, 512), 3, 2, 1),
    pool("max 5x5 stride 1 64 @256", "MaxPool", large(64, 256), 5, 1, 2),
    pool("average 2x2 stride 2 64 @1024", "AveragePool", large(64), 2, 2),
    pool("average 3x3 stride 1 32 @512", "AveragePool", large(32, 512), 3, 1, 1),
    Layer("pool/global average 16 @1024", "GlobalAveragePool", (large(16),)),
    Layer("pool/global max 16 @1024", "GlobalMaxPool", (large(16),)),
    Layer("pool/global average 1 @1024", "GlobalAveragePool", (large(1),)),
    Layer("pool/global average 512 @16", "GlobalAveragePool", (large(512, 16),)),
    resize("linear x2 64 @512", large(64, 512), 2, mode="linear", coordinate_transformation_mode="pytorch_half_pixel"),
    resize("linear x2 64 @512 align", large(64, 512), 2, mode="linear", coordinate_transformation_mode="align_corners"),
    resize("linear x32 1 @32", large(1, 32), 32, mode="linear"),
    resize("linear x0.5 16 @1024", large(16), 0.5, mode="linear"),
    resize("linear antialias x0.5 3 @1024", large(3), 0.5, mode="linear", antialias=1),
    resize("cubic x2 16 @512", large(16, 512), 2, mode="cubic"),
    resize("nearest x2 64 @512", large(64, 512), 2, coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    resize("nearest x0.5 16 @1024", large(16), 0.5),
    Layer("normalization/instance 32 @512", "InstanceNormalization", (large(32, 512),), ((32,), (32,))),
    Layer("normalization/instance 2 @1024", "InstanceNormalization", (large(2),), ((2,), (2,))),
    Layer("normalization/batch 64 @512", "BatchNormalization", (large(64, 512),),
          ((64,), (64,), (64,), np.ones(64, np.float32))),
    Layer("normalization/layer 256 x 4096", "LayerNormalization", ((1, 4096, 256),), ((256,), (256,))),
    Layer("reduce/mean over 2,3 16 @1024", "ReduceMean", (large(16),), (np.array([2, 3]),)),
    Layer("reduce/mean over all 16 @1024", "ReduceMean", (large(16),), (np.array([0, 1, 2, 3]),)),
    Layer("reduce/max over 1 16 @1024", "ReduceMax", (large(16),), (np.array([1]),)),
    Layer("reduce/argmax over 1 21 @512", "ArgMax", (large(21, 512),), (), {"axis": 1}),
    Layer("reduce/softmax over 1 21 @512", "Softmax", (large(21, 512),), (), {"axis": 1}),
    Layer("move/concat 64 and 64 @512", "Concat", (large(64, 512),) * 2, (), {"axis": 1}),
    Layer("move/concat 4 of 1 @1024", "Concat", (large(1),) * 4, (), {"axis": 1}),
    Layer("move/transpose to NHWC 64 @512", "Transpose", (large(64, 512),), (), {"perm": [0, 2, 3, 1]}),
    Layer("move/depth to space 64 @512", "DepthToSpace", (large(64, 512),), (), {"blocksize": 2}),
    Layer("move/pad reflect 32 @512", "Pad", (large(32, 512),), (np.array([0, 0, 1, 1, 0, 0, 1, 1]),),
          {"mode": "reflect"}),
    Layer("move/slice 64 @512", "Slice", (large(64, 512),), (np.array([0, 0]), np.array([510, 510]), np.array([2, 3]))),
    Layer("move/grid sample 16 @512", "GridSample", (large(16, 512), (1, 512, 512, 2)), (), {"mode": "bilinear"}),
    Layer("map/relu 64 @512", "Relu", (large(64, 512),)),
    Layer("map/sigmoid 64 @512", "Sigmoid", (large(64, 512),)),
    Layer("map/add 64 @512", "Add", (large(64, 512),) * 2),
    Layer("quantized/dynamic quantize 32 @512", "DynamicQuantizeLinear", (large(32, 512),), outputs=3),
    Layer("quantized/conv 3x3 64-64 @256", "ConvInteger", (large(64, 256),), ((64, 64, 3, 3),),
          {"pads": [1] * 4}, TensorProto.UINT8),
    Layer("quantized/conv 3x3 64-16 @256", "ConvInteger", (large(64, 256),), ((16, 64, 3, 3),),
          {"pads": [1] * 4}, TensorProto.UINT8),
)  # fmt: skip


def network(name: str, size: int) -> bytes:
    base, _, kind = name.partition("/")
    model = build(NETWORKS[base], size)
    if kind == "f16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        model = convert_float_to_float16(model, keep_io_types=True)
    elif kind == "u8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        with tempfile.TemporaryDirectory() as folder:
            before, after = Path(folder, "float.onnx"), Path(folder, "quantized.onnx")
            onnx.save(model, before)
            quantize_dynamic(before, after, weight_type=QuantType.QUInt8)
            model = onnx.load(after)
    return bytes(model.SerializeToString())


@dataclass
class Result:
    """Median times of Runs. ``error`` is max|a-b| against the CPU provider; for floats divided by its max|b|."""

    name: str
    plugin_ms: float
    cpu_ms: float
    ratio: float
    error: float


def measure(name: str, model: bytes, emulate: bool, threads: int, runs: int, seconds: float) -> Result:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    own = ort_cuda_plugin.session(model, emulate=emulate)
    cpu = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {
        entry.name: noise(tuple(entry.shape), np.uint8 if entry.type == "tensor(uint8)" else np.float32).astype(
            {"tensor(float16)": np.float16}.get(entry.type, np.uint8 if "uint8" in entry.type else np.float32)
        )
        for entry in own.get_inputs()
    }
    error = max(difference(a, b) for a, b in zip(own.run(None, feeds), cpu.run(None, feeds), strict=True))
    times: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    while len(times[0]) < runs and (len(times[0]) < 3 or time.perf_counter() - started < seconds):
        for session, spent in zip((own, cpu), times, strict=True):
            spent.append(timed(partial(session.run, None, feeds)))
    ratios = [a / b for a, b in zip(*times, strict=True)]
    plugin, base = (statistics.median(spent) * 1e3 for spent in times)
    return Result(name, plugin, base, statistics.median(ratios), error)


def timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind != "f":
        return float(np.abs(a.astype(np.int64) - b).max())
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--runs", type=int, default=15, help="maximum number of Runs of each layer; at least 3")
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        help="time limit of each layer, for plugin and CPU provider together, after 3 Runs",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--size", type=int, default=1024, help="height and width of the networks' images")
    parser.add_argument("--list", action="store_true", help="print only the names of the layers")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["ORT_CUDA_PLUGIN_EMULATE_WORKERS"] = str(arguments.threads)
    models: dict[str, Callable[[], bytes]] = {layer.name: layer.model for layer in LAYERS}
    for name in NETWORKS:
        for variant in (name, f"{name}/f16", f"{name}/u8"):
            models[variant] = partial(network, variant, arguments.size)
    if arguments.names:
        # A name that matches exactly does not also select the names that begin with it.
        exact = {name for name in arguments.names if name in models}
        prefixes = tuple(name for name in arguments.names if name not in exact)
        chosen = [name for name in models if name in exact or (prefixes and name.startswith(prefixes))]
    else:
        chosen = [name for name in models if "/" not in name or name.split("/")[0] not in NETWORKS]
    if arguments.list:
        print("\n".join(chosen))
        return
    results = []
    for name in chosen:
        result = measure(
            name, models[name](), arguments.device == "emulated", arguments.threads, arguments.runs, arguments.seconds
        )
        results.append(result)
        if not arguments.json:
            print(
                f"{name:40} {result.plugin_ms:10.2f} ms   CPU provider {result.cpu_ms:10.2f} ms   "
                f"{result.ratio:6.2f} x   error {result.error:.1e}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps([vars(result) for result in results]))


if __name__ == "__main__":
    main()
