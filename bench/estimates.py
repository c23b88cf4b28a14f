"""What models would take on a GPU, by the model of it (docs/estimates.md). No GPU is needed.

    python bench/estimates.py [--device h100] [--models resnet50-1,bert-32-float16] [--against FOLDER] [--save FOLDER]

A line for each model: steps, time, bytes of the device's memory, the roofline, and the ratio to it, without launches
and with them. ``--save`` writes what the Runs do, in the form of estimate/work.py; ``--against`` compares with such
files of another state of the plugin, with the same model of the GPU. ResNet-50 is the onnx wheel's; BERT is the encoder
of tests/harness with 6 layers of 384, at a length of 128.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

    from ort_cuda_plugin.estimate.model import Estimate

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]

LENGTH = 128


def resnet50(batch: int) -> onnx.ModelProto:
    from ort_cuda_plugin.estimate.gather import optimised
    from ort_cuda_plugin.models import find_model

    return optimised(find_model("light_resnet50"), {"gpu_0/data_0": (batch, 3, 224, 224)})


def bert(batch: int, half: bool) -> onnx.ModelProto:
    """The encoder with its sizes stated."""
    import numpy as np
    import onnx
    from onnx import TensorProto, numpy_helper

    from encoder import encoder
    from ort_cuda_plugin.estimate.gather import optimised

    model = encoder()
    for info in model.graph.input:
        for dim, size in zip(info.type.tensor_type.shape.dim, (batch, LENGTH), strict=True):
            dim.dim_value = size
    if half:
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                narrow = numpy_helper.to_array(tensor).astype(np.float16)
                tensor.CopyFrom(numpy_helper.from_array(narrow, tensor.name))
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.FLOAT16
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16
        del model.graph.value_info[:]
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder, "bert.onnx"))
        return optimised(Path(folder, "bert.onnx"))


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "resnet50-1": lambda: resnet50(1),
    "resnet50-32": lambda: resnet50(32),
    "bert-1-float32": lambda: bert(1, False),
    "bert-32-float32": lambda: bert(32, False),
    "bert-1-float16": lambda: bert(1, True),
    "bert-32-float16": lambda: bert(32, True),
}


def line(name: str, found: Estimate) -> str:
    return (
        f"{name:24}{len(found.steps):7}{found.seconds * 1e6:11.0f}{found.dram / 1e6:11.1f}{found.roofline * 1e6:11.1f}"
        f"{found.ratio:10.2f}{found.ratio_with_launches:10.2f}"
    )


def main() -> int:
    from ort_cuda_plugin.estimate import devices, gather
    from ort_cuda_plugin.estimate.model import estimate
    from ort_cuda_plugin.estimate.work import from_json, to_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=devices.names(), default="h100")
    parser.add_argument("--models", default=",".join(MODELS), help=f"default: {','.join(MODELS)}")
    parser.add_argument("--against", type=Path, metavar="FOLDER")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    gpu = devices.gpu(arguments.device)
    print(f"{gpu.name}, estimated")
    columns = ("steps", "us", "DRAM MB", "roofline", "ratio", "+launches")
    print(
        f"{'model':24}"
        + "".join(f"{name:>{width}}" for name, width in zip(columns, (7, 11, 11, 11, 10, 10), strict=True))
    )
    for name in arguments.models.split(","):
        work = gather.work_of_model(MODELS[name](), {})
        if arguments.save:
            (arguments.save / f"{name}.json").write_text(to_json(work))
        found = estimate(work, gpu)
        print(line(name, found), flush=True)
        other = arguments.against / f"{name}.json" if arguments.against else None
        if other is not None and other.exists():
            before = estimate(replace(from_json(other.read_text()), products=work.products), gpu)
            print(
                line("  the other state", before) + f"   {before.seconds / found.seconds:.2f} times as long", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
