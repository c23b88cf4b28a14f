"""Check of weight streaming: weights several times larger than the emulated device's memory, compared with the CPU.

``python bench/weight_streaming.py`` makes 3 GiB of random weights and runs them in 512 MiB of device memory. It prints
the bytes that each Run copies, and fails unless they are within 2 % of the weights minus the resident ones. It needs
about 10 GiB of host memory, and 3 GiB in the folder of temporary files.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WIDTH = 4096
LAYER_BYTES = WIDTH * WIDTH * 4


def make_model(path: Path, layers: int) -> None:
    """Write the model y = tanh(tanh(x w0) w1)... of x [batch, WIDTH] with external weights."""
    rng = np.random.default_rng(0)
    data = path.with_suffix(".data")
    weights, nodes = [], []
    with data.open("wb") as file:
        for layer in range(layers):
            weight = rng.random((WIDTH, WIDTH), np.float32)
            weight -= 0.5
            weight *= np.float32((12 / WIDTH) ** 0.5)
            tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data.name), ("offset", file.tell()), ("length", weight.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            weight.tofile(file)
            weights.append(tensor)
            result = f"x{layer + 1}" if layer < layers - 1 else "y"
            nodes += [
                helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [f"p{layer}"]),
                helper.make_node("Tanh", [f"p{layer}"], [result]),
            ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x0", "y")]
    graph = helper.make_graph(nodes, "layers", ports[:1], ports[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48, help="number of weights of 64 MiB")
    parser.add_argument("--memory", default="512M", help="memory of the emulated device")
    parser.add_argument("--budget", default="448M", help="value of the option weight_budget")
    parser.add_argument("--runs", type=int, default=4, help="number of Runs")
    arguments = parser.parse_args()
    os.environ["ORT_CUDA_PLUGIN_EMULATE_MEMORY"] = arguments.memory

    import onnxruntime as ort

    import ort_cuda_plugin

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.onnx"
        make_model(path, arguments.layers)
        feeds = {"x0": np.random.default_rng(1).standard_normal((1, WIDTH), np.float32)}
        (expected,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
        begun = time.perf_counter()
        session = ort_cuda_plugin.session(path, emulate=True, provider_options={"weight_budget": arguments.budget})
        resident = ort_cuda_plugin.counters()["weight_bytes"]
        total = arguments.layers * LAYER_BYTES
        print(
            f"session of {total >> 20} MiB of weights, {resident >> 20} resident: {time.perf_counter() - begun:.1f} s"
        )
        is_right = True
        for number in range(arguments.runs):
            before, begun = ort_cuda_plugin.counters(), time.perf_counter()
            (result,) = session.run(None, feeds)
            seconds, after = time.perf_counter() - begun, ort_cuda_plugin.counters()
            copied = after["weight_bytes_streamed"] - before["weight_bytes_streamed"]
            error = float(np.abs(result - expected).max())
            replays = after["graph_replays"] - before["graph_replays"]
            print(f"Run {number}: {copied >> 20} MiB copied, error {error:.1e}, graphs {replays}, {seconds:.1f} s")
            is_right &= error < 1e-4 and abs(copied - (total - resident)) <= 0.02 * (total - resident)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
