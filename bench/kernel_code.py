"""Reports defects in the machine code of models' kernels on GPUs. No GPU is needed.

    python bench/kernel_code.py [--models resnet50:float16,unet] [--batches 1,32] [--arch sm_80] [--json FILE]

Each model is planned for a GPU, with NVIDIA's libraries and without them, for each batch. Its kernels are compiled for
sm_80, sm_90, sm_100 and sm_120. Some of their blocks run on the emulated device in a mode that counts memory accesses.
Prints a line for each finding of ``estimate/findings.py``: spills, GEMMs without tensor cores, accesses of contiguous
data by less than 16 bytes, and bank conflicts of more than two ways. Exits with 1 if there is any finding. Needs
nvdisasm (``pip install nvidia-cuda-nvdisasm``). Default of ``--models``: all networks and the wheel's light models.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

    from ort_cuda_plugin.estimate.findings import Finding

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]


def models(names: Sequence[str]) -> list[str]:
    from ort_cuda_plugin.models import wheel_models
    from ort_cuda_plugin.networks import DTYPES, NETWORKS

    networks = [f"{name}:{dtype}" for name in NETWORKS for dtype in DTYPES]
    return list(names) or [*networks, *wheel_models()]


def at_batch(name: str, batch: int) -> onnx.ModelProto:
    """Return the model with the input sizes of a benchmark."""
    import tempfile

    import onnx

    from ort_cuda_plugin.estimate.gather import optimized
    from ort_cuda_plugin.models import find_model
    from ort_cuda_plugin.networks import NETWORKS, build, split_name

    parts = split_name(name)
    if parts is None:
        path = find_model(name)
        graph = onnx.load(path, load_external_data=False).graph
        weights = {tensor.name for tensor in graph.initializer}
        info = next(info for info in graph.input if info.name not in weights)
        sizes = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        return optimized(path, {info.name: (batch, *sizes[1:])})
    model = build(name)
    known = {"batch": batch, **NETWORKS[parts[0]].sizes}
    for info in model.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = known[dim.dim_param]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(model, path)
        del model
        return optimized(path)


def main() -> int:
    from ort_cuda_plugin.estimate.findings import ARCHITECTURES, COUNTED, Inspector
    from ort_cuda_plugin.estimate.gather import LIBRARIES
    from ort_cuda_plugin.estimate.sass import disassembler

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names of models, with commas between them; default: all")
    parser.add_argument("--batches", default="1,32", help="batch sizes; default: 1,32")
    parser.add_argument(
        "--arch", default=",".join(ARCHITECTURES), help=f"GPU architectures; default: {','.join(ARCHITECTURES)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings to this file")
    arguments = parser.parse_args()
    if disassembler() is None:
        parser.error("nvdisasm is not installed: run pip install nvidia-cuda-nvdisasm")
    inspector = Inspector(arguments.arch.split(","))
    found: dict[str, list[Finding]] = {}
    for name in models([name for name in arguments.models.split(",") if name]):
        for batch in map(int, arguments.batches.split(",")):
            model = at_batch(name, batch)
            for libraries in (LIBRARIES, frozenset[str]()):
                title = f"{name}, batch {batch}{'' if libraries else ', own kernels'}"
                found[title] = inspector.look(model, libraries)
                print(f"{title}: {len(found[title])}", flush=True)
                for one in found[title]:
                    print(f"    {one.kernel}{f' on {one.where}' if one.where else ''}: {one.what}", flush=True)
    total = sum(map(len, found.values()))
    print(f"{len(inspector.code[COUNTED])} kernels, {len(inspector.code)} architectures, {total} findings")
    if arguments.json:
        arguments.json.write_text(json.dumps({name: [asdict(one) for one in each] for name, each in found.items()}))
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
