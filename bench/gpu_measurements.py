"""Times kernels and Runs on a GPU, for fitting the constants of the performance model.

    python bench/gpu_measurements.py --output FILE.json [--runs N] [--models NAME ...] [--device cuda|emulated]

Each kernel is measured as a model of one node. Its Runs are enqueued back to back with operands on the device, so a Run
takes as long as its kernel. A kernel that takes hardly longer than its enqueueing is too short to measure and is left
out. Runs of whole models are measured in the same way. Every third measurement is held out of the fit. The last lines
are the median error of the held-out estimates, and their rank correlation with the measurements.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin import gpus, models, networks
from ort_cuda_plugin.benchmark.sides import plugin_place
from ort_cuda_plugin.estimate import fit, gather

Shape = tuple[int, ...]
MODELS = ("resnet50:float16", "mobilenet_v2", "bert_base:float16")
BATCH = 8
PIPELINED = 20
"""Runs that are timed together, back to back."""
HOST_SHARE = 0.8
"""Maximum share of a Run's time that enqueueing may take; otherwise the kernel is left out."""


@dataclass(frozen=True)
class OneNode:
    """A model of one node with inputs of these shapes. In ``opset`` 11 the axes of reductions are attributes."""

    op_type: str
    shapes: tuple[Shape, ...]
    element: int
    attributes: tuple[tuple[str, Any], ...] = ()
    opset: int = 17

    @property
    def name(self) -> str:
        sizes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.op_type} {sizes} {TensorProto.DataType.Name(self.element).lower()}"

    def model(self) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(f"x{i}", self.element, shape) for i, shape in enumerate(self.shapes)]
        node = helper.make_node(self.op_type, [value.name for value in inputs], ["y"], **dict(self.attributes))
        outputs = [helper.make_empty_tensor_value_info("y")]
        graph = helper.make_graph([node], self.op_type, inputs, outputs)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        return onnx.shape_inference.infer_shapes(made)


def kernels(largest: int = 1 << 26) -> Iterator[OneNode]:
    """Yield about a hundred kernels: elementwise, row-wise, reductions, transposes, copies, GEMMs and convolutions."""
    for element, count in itertools.product(
        (TensorProto.FLOAT, TensorProto.FLOAT16), (1 << 20, 1 << 22, 1 << 24, 1 << 26)
    ):
        if count > largest:
            continue
        yield OneNode("Add", ((count,), (count,)), element)
        yield OneNode("Sigmoid", ((count,),), element)
        yield OneNode("Erf", ((count,),), element)
        for columns in (128, 1024, 4096):
            rows = (count // columns, columns)
            yield OneNode("Softmax", (rows,), element, (("axis", -1),))
            yield OneNode("ReduceSum", (rows,), element, (("axes", [1]), ("keepdims", 0)), 11)
        yield OneNode("ReduceMax", ((count,),), element, (("axes", [0]), ("keepdims", 0)), 11)
        yield OneNode("Transpose", ((count // 1024, 1024),), element, (("perm", [1, 0]),))
        yield OneNode("Concat", ((count // 2,), (count // 2,)), element, (("axis", 0),))
    for element, size in itertools.product((TensorProto.FLOAT, TensorProto.FLOAT16), (512, 1024, 2048, 4096)):
        if size * size > largest:
            continue
        yield OneNode("MatMul", ((size, size), (size, size)), element)
        yield OneNode("MatMul", ((16, size), (size, 4 * size)), element)
    for element, channels in itertools.product((TensorProto.FLOAT, TensorProto.FLOAT16), (64, 128, 256, 512)):
        image = 3584 // channels
        shapes = ((16, channels, image, image), (channels, channels, 3, 3))
        if 16 * channels * image * image <= largest:
            yield OneNode("Conv", shapes, element, (("pads", [1, 1, 1, 1]),))


class Bound:
    """A session with all inputs and outputs on the device."""

    def __init__(self, model: bytes, feeds: dict[str, np.ndarray], emulate: bool) -> None:
        place = plugin_place(emulate)
        self.session = ort_cuda_plugin.session(model, emulate=emulate)
        self.results = self.session.run(None, feeds)
        self.binding = self.session.io_binding()
        for name, array in feeds.items():
            self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, *place))
        for output, array in zip(self.session.get_outputs(), self.results, strict=True):
            self.binding.bind_ortvalue_output(output.name, ort.OrtValue.ortvalue_from_numpy(array, *place))
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def batch(self, runs: int) -> tuple[float, float]:
        """Return the mean seconds of a Run over ``runs`` back-to-back Runs, and the mean seconds of its enqueueing."""
        self.binding.synchronize_outputs()
        begun = time.perf_counter()
        for _ in range(runs):
            self.session.run_with_iobinding(self.binding, self._options)
        enqueued = time.perf_counter()
        self.binding.synchronize_outputs()
        return (time.perf_counter() - begun) / runs, (enqueued - begun) / runs


def measured(model: onnx.ModelProto, dims: dict[str, int], runs: int, emulate: bool) -> tuple[float, float]:
    """Return the median seconds of a Run, and of its enqueueing on the host."""
    bound = Bound(model.SerializeToString(), dict(models.random_inputs(model, dims=dims)), emulate)
    bound.batch(PIPELINED)  # makes the CUDA graph, and lets the clocks rise
    times, host = zip(*(bound.batch(PIPELINED) for _ in range(runs)), strict=True)
    return statistics.median(times), statistics.median(host)


def measure(
    name: str, model: onnx.ModelProto, dims: dict[str, int], runs: int, emulate: bool
) -> fit.Measurement | None:
    """Measure a model; return None if enqueueing takes more than `HOST_SHARE` of a Run."""
    seconds, host = measured(model, dims, runs, emulate)
    if not emulate and host > HOST_SHARE * seconds:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(model, path)
        shapes = {key: array.shape for key, array in models.random_inputs(model, dims=dims).items()}
        work = gather.work_of_model(gather.optimized(path, shapes), shapes, gpu=gpus.gpu(gpu_name()[0]))
    return fit.Measurement(name, seconds, work)


def gpu_name() -> tuple[str, str]:
    """Return the name of the GPU's description (the H100's if there is none), and the driver's name of the GPU."""
    driver = next((device.name for device in ort_cuda_plugin.devices() if not device.emulated), "emulated")
    squeezed = driver.replace(" ", "").lower()
    return next((name for name in gpus.names() if name in squeezed), "h100"), driver


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=[*MODELS, *networks.NETWORKS])
    parser.add_argument(
        "--largest", type=int, default=1 << 26, help="number of elements of the largest kernel operand that is measured"
    )
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    given = parser.parse_args(arguments)
    emulate = given.device == "emulated"
    ort_cuda_plugin.register(emulate=emulate)
    found: list[fit.Measurement] = []
    todo: list[tuple[str, onnx.ModelProto, dict[str, int]]] = [
        (one.name, one.model(), {}) for one in kernels(given.largest)
    ]
    todo += [
        (name, networks.build(name), {"batch": BATCH, **networks.NETWORKS[name.partition(":")[0]].sizes})
        for name in given.models
    ]
    for name, model, dims in todo:
        one = measure(name, model, dims, given.runs, emulate)
        print(f"{name}: {'left out' if one is None else f'{one.seconds * 1e6:.1f} us'}", flush=True)
        if one is not None:
            found.append(one)
    key, driver = gpu_name()
    given.output.write_text(fit.measurements_json(key, driver, found))
    if found:
        fitted = fit.fit(key, found)
        print(f"constants: {fitted.constants}")
        for held, seconds, guess in fitted.estimates:
            print(f"held out: {held}: {seconds * 1e6:.1f} us, estimated {guess * 1e6:.1f} us")
        print(
            f"{len(found)} measurements, {len(fitted.estimates)} held out: median error {fitted.error:.0%}, rank"
            f" correlation {fitted.rank_correlation:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
