"""Layers beside PyTorch's on one GPU: each is a model of one node, and both sides take turns. Needs PyTorch.

    python bench/pytorch_layers.py [--runs N]

Printed are median microseconds of a layer whose operands are on the device, divided from the wall time of many of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

import ort_cuda_plugin
from ort_cuda_plugin.api import chosen_device

INNER = 20
"""Layers that are timed together."""


def layers(torch: Any) -> dict[str, tuple[str, list[tuple[int, ...]], dict[str, Any], Callable[..., Any]]]:
    """Operator, shapes of its operands (float16), attributes, and what PyTorch computes."""
    functions = torch.nn.functional
    return {
        "product 4096": ("MatMul", [(4096, 4096)] * 2, {}, torch.matmul),
        "product 16x768x3072": ("MatMul", [(16, 768), (768, 3072)], {}, torch.matmul),
        "conv 3x3 128 @28, batch 32": (
            "Conv",
            [(32, 128, 28, 28), (128, 128, 3, 3)],
            {"pads": [1] * 4},
            lambda x, w: functions.conv2d(x, w, padding=1),
        ),
        "softmax 12288x128": ("Softmax", [(12288, 128)], {"axis": -1}, lambda x: torch.softmax(x, -1)),
        "add 64 Mi": ("Add", [(1 << 26,)] * 2, {}, torch.add),
        "sum 16384x4096": ("ReduceSum", [(16384, 4096)], {"keepdims": 0, "axes": [1]}, lambda x: x.sum(1)),
        "transpose 8192x8192": ("Transpose", [(8192, 8192)], {"perm": [1, 0]}, lambda x: x.t().contiguous()),
    }


def model(op_type: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any]) -> bytes:
    opset = 11 if op_type == "ReduceSum" else 17
    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT16, s) for i, s in enumerate(shapes)]
    node = helper.make_node(op_type, [value.name for value in inputs], ["y"], **attributes)
    graph = helper.make_graph([node], op_type, inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(made.SerializeToString())


def ours(session: Any, binding: Any, options: Any) -> None:
    for _ in range(INNER):
        session.run_with_iobinding(binding, options)
    binding.synchronize_outputs()


def theirs(torch: Any, function: Callable[..., Any], tensors: list[Any]) -> None:
    for _ in range(INNER):
        function(*tensors)
    torch.cuda.synchronize()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    ort_cuda_plugin.register(emulate=False)
    place = chosen_device(False, {}).memory_info(ort.OrtDeviceMemoryType.DEFAULT)
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    for name, (op_type, shapes, attributes, function) in layers(torch).items():
        arrays = [np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16) for shape in shapes]
        session = ort_cuda_plugin.session(model(op_type, shapes, attributes), emulate=False)
        binding = session.io_binding()
        for i, array in enumerate(arrays):
            value = ort.OrtValue.ortvalue_from_numpy(array, "gpu", place.device_id, place.device_vendor_id)
            binding.bind_ortvalue_input(f"x{i}", value)
        result = session.run(None, {f"x{i}": array for i, array in enumerate(arrays)})[0]
        output = ort.OrtValue.ortvalue_from_numpy(result, "gpu", place.device_id, place.device_vendor_id)
        binding.bind_ortvalue_output("y", output)
        tensors = [torch.from_numpy(array).cuda() for array in arrays]
        error = float(np.abs(function(*tensors).float().cpu().numpy() - result.astype(np.float32)).max())

        sides = {
            "plugin": partial(ours, session, binding, options),
            "pytorch": partial(theirs, torch, function, tensors),
        }
        times: dict[str, list[float]] = {"plugin": [], "pytorch": []}
        for turn in range(runs + 2):
            for side, run in sides.items():
                begun = time.perf_counter()
                run()
                if turn >= 2:  # the first ones make graphs and choose algorithms
                    times[side].append((time.perf_counter() - begun) / INNER * 1e6)
        medians = {side: statistics.median(found) for side, found in times.items()}
        ratio = medians["pytorch"] / medians["plugin"]
        print(
            f"{name:28} plugin {medians['plugin']:9.1f} us   PyTorch {medians['pytorch']:9.1f} us   {ratio:.2f} x"
            f"   largest difference {error:.1e}"
        )


if __name__ == "__main__":
    main()
