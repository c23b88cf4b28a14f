"""Estimates the time of models on a GPU by the performance model (docs/estimates.md). No GPU is needed.

    python bench/estimates.py [--device h100] [--models resnet50-1,bert-32-float16] [--against FOLDER] [--save FOLDER]
    python bench/estimates.py --models suite --against FOLDER --markdown

Prints a line for each model: steps, time, bytes of device memory traffic, and two rooflines, of the model and of its
steps, with the ratio to each. ``--save`` writes the work of each Run in the format of estimate/work.py; ``--against``
compares with such files of another version of the plugin, under the same performance model. ``suite`` means all models.
``bert`` is the encoder of tests/harness with 6 layers of width 384, for 128 tokens; the other models are those of the
command `bench`, at its sizes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import onnx

    from ort_cuda_plugin.estimate.model import Estimate

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]

LENGTH = 128
Sized: TypeAlias = "tuple[onnx.ModelProto, Mapping[str, Sequence[int]]]"
"""A model, and the shapes of its inputs."""


def light(name: str, batch: int) -> Sized:
    """Return one of the onnx wheel's light models, and the shapes of its inputs."""
    import onnx

    from ort_cuda_plugin.estimate.gather import optimized
    from ort_cuda_plugin.models import find_model

    path = find_model(name)
    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    image = next(info for info in graph.input if info.name not in weights)
    sizes = [dim.dim_value for dim in image.type.tensor_type.shape.dim]
    shapes = {image.name: (batch, *sizes[1:])}
    return optimized(path, shapes), shapes


def network(name: str, batch: int) -> Sized:
    """Return a network of ort_cuda_plugin/networks with symbolic batch and length, as in exported models."""
    import onnx

    from ort_cuda_plugin.estimate.gather import optimized
    from ort_cuda_plugin.networks import NETWORKS, build

    model = build(name)
    sizes = {**NETWORKS[name.split(":")[0]].sizes, "batch": batch}
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes = {
        info.name: [dim.dim_value or sizes[dim.dim_param] for dim in info.type.tensor_type.shape.dim]
        for info in model.graph.input
        if info.name not in weights
    }
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder, "model.onnx"))
        return optimized(Path(folder, "model.onnx")), shapes


def bert(batch: int, half: bool) -> Sized:
    """Return the encoder of tests/harness with its sizes as constants."""
    import numpy as np
    import onnx
    from onnx import TensorProto, numpy_helper

    from encoder import encoder
    from ort_cuda_plugin.estimate.gather import optimized

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
        return optimized(Path(folder, "bert.onnx")), {}


MODELS: dict[str, Callable[[], Sized]] = {
    "resnet50-1": partial(light, "light_resnet50", 1),
    "resnet50-32": partial(light, "light_resnet50", 32),
    "bert-1-float32": partial(bert, 1, False),
    "bert-32-float32": partial(bert, 32, False),
    "bert-1-float16": partial(bert, 1, True),
    "bert-32-float16": partial(bert, 32, True),
}


def suite() -> dict[str, Callable[[], Sized]]:
    """Return all models at two batches."""
    from ort_cuda_plugin.models import wheel_models
    from ort_cuda_plugin.networks import NETWORKS

    found = dict(MODELS)
    for name in wheel_models():
        found |= {f"{name}-{batch}": partial(light, name, batch) for batch in (1, 32)}
    for name in NETWORKS:
        for dtype in ("float32", "float16"):
            found |= {f"{name}-{batch}-{dtype}": partial(network, f"{name}:{dtype}", batch) for batch in (1, 16)}
    return {name: make for name, make in found.items() if name not in ("light_resnet50-1", "light_resnet50-32")}


HEADINGS = ("steps", "us", "DRAM MB", "model's", "ratio", "steps'", "ratio", "before", "times")


def figures(found: Estimate, before: Estimate | None) -> list[str]:
    """Return a model's figures for the columns of `HEADINGS`."""
    from ort_cuda_plugin.gpus import accuracy

    shown = [f"{len(found.steps)}", accuracy.range_text(accuracy.run_range(found.seconds), 0)]
    shown.append(f"{found.dram / 1e6:.1f}")
    shown += [f"{found.roofline * 1e6:.1f}", f"{found.ratio:.2f}"]
    shown += [f"{found.steps_roofline * 1e6:.0f}", f"{found.steps_ratio:.2f}"]
    return [*shown, f"{before.seconds * 1e6:.0f}", f"{before.seconds / found.seconds:.2f}"] if before else shown


def line(name: str, shown: Sequence[str], markdown: bool) -> str:
    if markdown:
        return f"| {' | '.join([name, *shown, *[''] * (len(HEADINGS) - len(shown))])} |"
    return f"{name:32}" + "".join(f"{each:>10}" for each in shown)


def main() -> int:
    from ort_cuda_plugin import gpus
    from ort_cuda_plugin.estimate import gather
    from ort_cuda_plugin.estimate.model import estimate
    from ort_cuda_plugin.estimate.work import from_json, to_json
    from ort_cuda_plugin.gpus import accuracy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=gpus.names(), default="h100")
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help=f"suite (all), or names of models with commas between them; default: {','.join(MODELS)}",
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    gpu = gpus.gpu(arguments.device)
    print(f"{gpu.name}. {accuracy.error_text()}")
    print(line("model", HEADINGS, arguments.markdown))
    if arguments.markdown:
        print(f"|---|{'---:|' * len(HEADINGS)}")
    models = suite()
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
    for name in models if arguments.models == "suite" else arguments.models.split(","):
        work = gather.work_of_model(*models[name](), gpu=gpu)
        if arguments.save:
            (arguments.save / f"{name}.json").write_text(to_json(work))
        other = arguments.against / f"{name}.json" if arguments.against else None
        before = None
        if other is not None and other.exists():
            before = estimate(replace(from_json(other.read_text()), products=work.products), gpu)
        print(line(name, figures(estimate(work, gpu), before), arguments.markdown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
