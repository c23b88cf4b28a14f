"""Compares layers with PyTorch's on one GPU, each as a model of one node; the two sides alternate. Needs PyTorch.

    python bench/pytorch_layers.py [--runs N]

Prints median microseconds of a layer with operands on the device: the wall time of many executions, divided by their
number.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_measurements import Bound, OneNode
from onnx import TensorProto

import ort_cuda_plugin

INNER = 20
"""Number of back-to-back executions of a layer in one timing."""
HALF = TensorProto.FLOAT16


def layers(torch: Any) -> list[tuple[OneNode, Callable[..., Any]]]:
    """Return models of one node, with PyTorch's function for each."""
    functions = torch.nn.functional
    return [
        (OneNode("MatMul", ((4096, 4096),) * 2, HALF), torch.matmul),
        (OneNode("MatMul", ((16, 768), (768, 3072)), HALF), torch.matmul),
        (
            OneNode("Conv", ((32, 128, 28, 28), (128, 128, 3, 3)), HALF, (("pads", [1] * 4),)),
            lambda x, w: functions.conv2d(x, w, padding=1),
        ),
        (OneNode("Softmax", ((12288, 128),), HALF, (("axis", -1),)), lambda x: torch.softmax(x, -1)),
        (OneNode("Add", ((1 << 26,),) * 2, HALF), torch.add),
        (OneNode("ReduceSum", ((16384, 4096),), HALF, (("axes", [1]), ("keepdims", 0)), 11), lambda x: x.sum(1)),
        (OneNode("Transpose", ((8192, 8192),), HALF, (("perm", [1, 0]),)), lambda x: x.t().contiguous()),
    ]


def theirs(torch: Any, function: Callable[..., Any], tensors: list[Any]) -> float:
    """Return PyTorch's mean seconds of an execution, over many back-to-back executions."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(INNER):
        function(*tensors)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / INNER


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    ort_cuda_plugin.register(emulate=False)
    for layer, function in layers(torch):
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(shape, np.float32).astype(np.float16) for shape in layer.shapes]
        feeds = {f"x{i}": array for i, array in enumerate(arrays)}
        bound = Bound(layer.model().SerializeToString(), feeds, emulate=False)
        tensors = [torch.from_numpy(array).cuda() for array in arrays]
        expected = function(*tensors).float().cpu().numpy()
        error = float(np.abs(expected - bound.results[0].astype(np.float32)).max())
        turns = [(bound.batch(INNER)[0], theirs(torch, function, tensors)) for _ in range(runs + 2)]
        # The first two turns are a warm-up, in which CUDA graphs are captured and algorithms chosen.
        plugin, pytorch = (statistics.median(times) * 1e6 for times in zip(*turns[2:], strict=True))
        print(
            f"{layer.name:48} plugin {plugin:9.1f} us   PyTorch {pytorch:9.1f} us   {pytorch / plugin:.2f} x"
            f"   largest difference {error:.1e}"
        )


if __name__ == "__main__":
    main()
