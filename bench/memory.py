"""Memory and memory traffic of models on one device, and the cost of an allocation.

    python bench/memory.py [MODEL ...] [--device emulated|cuda]

Models are the onnx wheel's light models, and the encoder and the decoder of tests/harness, whose sizes are dynamic. The
first table has MiB of device memory in a Run, measured in a process for each model: weights; the slab of intermediate
tensors; the peak of intermediate tensors alive at once, which is a lower bound of the slab; inputs and outputs; the
peak of bytes in use; and the peak of bytes that the arena got from the driver. Automatic CUDA graphs are off, since
they keep slabs.

The second table has MiB of memory traffic on a GPU, computed without one: the bytes that the fused steps must read and
write, and the bytes that the launches of a Run load and store, with the plugin's kernels alone and with cuBLASLt and
cuDNN. ort_cuda_plugin/program/analysis/traffic.py defines both. The last line is the time of an allocation from a
cached chunk and of its free (bench/allocation_time.c).

Exits with 1 if a model exceeds a limit: the slab may be at most 1.15 times the peak of live tensors, and the traffic of
the plugin's kernels at most 1.3 times the minimum of the steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

    from ort_cuda_plugin.program.analysis.traffic import ProgramTraffic

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "harness")]

from build_plugin import Builder  # noqa: E402

MIB = 1 << 20
MEMORY = ["weights", "planned", "alive at once", "in and out", "peak in use", "peak held"]
TRAFFIC = ["compulsory", "our kernels", "with libraries"]
LIMITS = {("planned", "alive at once"): 1.15, ("our kernels", "compulsory"): 1.3}
SEQUENCES = {"encoder": (8, 128), "decoder": (8, 1, 200), "decoder_prompt": (8, 64, 0)}
"""Batch and length of the inputs; for the decoder also the length of the past."""


def source_of(name: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a model and its feeds."""
    import onnx

    from ort_cuda_plugin import models

    if name == "encoder":
        from encoder import encoder, encoder_inputs

        return encoder(), encoder_inputs(*SEQUENCES[name])
    if name in SEQUENCES:
        from decoder import decoder, decoder_inputs

        model = decoder(layers=6, hidden=384, heads=12)
        return model, decoder_inputs(model, *SEQUENCES[name])
    model = models.with_noise_weights(onnx.load(models.wheel_models()[name]))
    return model, models.random_inputs(model)


def measure(name: str, emulated: bool) -> dict[str, float]:
    """Return MiB by column, of one Run in this process."""
    import ort_cuda_plugin
    from ort_cuda_plugin.ep import boundary

    model, feeds = source_of(name)
    # extend_strategy 1: each region is only as large as the request, so the arena holds no spare memory.
    options = {"arena.extend_strategy": 1, "automatic_cuda_graphs": 0}
    session = ort_cuda_plugin.session(model.SerializeToString(), emulate=emulated, provider_options=options)
    outputs = session.run(None, feeds)
    (provider,) = boundary.PROVIDERS.values()
    plans = [fused.plan_memory() for fused in provider.fused_nodes]
    own, libraries = traffic(model, feeds)
    stats = ort_cuda_plugin.memory_stats(provider.device.info)["device"]
    values = [
        stats["Weights"],
        sum(planned for planned, _ in plans),
        sum(alive for _, alive in plans),
        sum(array.nbytes for array in [*feeds.values(), *outputs]),
        stats["MaxInUse"],
        stats["TotalAllocated"],
        own.compulsory.total,
        own.asked.total,
        libraries.asked.total,
    ]
    return {column: value / MIB for column, value in zip([*MEMORY, *TRAFFIC], values, strict=True)}


def traffic(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[ProgramTraffic]:
    """Return the traffic of the whole model on a GPU, with the plugin's kernels alone and with vendor libraries."""
    import onnx
    import onnxruntime as ort

    from ort_cuda_plugin.clusters.cluster import CompiledCluster
    from ort_cuda_plugin.model.onnx_graph import read_model
    from ort_cuda_plugin.program.lowering.context import DeviceProperties

    with tempfile.TemporaryDirectory() as folder:
        # Applies the optimizations that ONNX Runtime makes before it asks the provider for claims.
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(Path(folder, "model.onnx"))
        options.log_severity_level = 3
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        model = onnx.shape_inference.infer_shapes(onnx.load(options.optimized_model_filepath))
    found = []
    for libraries in (frozenset[str](), frozenset({"cublaslt", "cudnn"})):
        cluster = CompiledCluster(read_model(model), DeviceProperties(emulated=False, libraries=libraries))
        if cluster.prepare().plan is None:
            cluster.build([feeds[value.name].shape for value in cluster.inputs], [])
        assert cluster.traffic is not None
        found.append(cluster.traffic)
    return found


def line(title: str, columns: list[str], figures: dict[str, float] | None = None) -> str:
    """Format the columns' names, or their figures and the ratio that `LIMITS` limits."""
    if figures is None:
        return f"{title:24}" + "".join(f"{column:>15}" for column in columns) + f"{'ratio':>9}"
    ratio = next(figures[a] / figures[b] for a, b in LIMITS if a in columns)
    return f"{title:24}" + "".join(f"{figures[column]:15.2f}" for column in columns) + f"{ratio:9.3f}"


def main() -> int:
    from ort_cuda_plugin import models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*sorted(models.wheel_models()), *SEQUENCES])
    parser.add_argument("--device", choices=["emulated", "cuda"], default="emulated")
    parser.add_argument("--one", action="store_true", help="print one model's figures as JSON, from this process")
    arguments = parser.parse_args()
    emulated = arguments.device == "emulated"
    if arguments.one:
        print(json.dumps(measure(arguments.models[0], emulated)))
        return 0
    found: dict[str, dict[str, float]] = {}
    print(line("memory, MiB", MEMORY), flush=True)
    for name in arguments.models:
        command = [sys.executable, __file__, name, "--device", arguments.device, "--one"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(line(name, MEMORY, found[name]), flush=True)
    print(line("traffic on a GPU, MiB", TRAFFIC))
    for name, figures in found.items():
        print(line(name, TRAFFIC, figures))
    work = ROOT / "build" / "bench"
    program = Builder(work, work, []).program("allocation_time", [ROOT / "bench" / "allocation_time.c"])
    subprocess.run([program] if emulated else [program, "cuda"], check=True)
    missed = [
        f"{name}: {a} is more than {limit} times {b}"
        for name, figures in found.items()
        for (a, b), limit in LIMITS.items()
        if figures[a] > limit * figures[b]
    ]
    print("\n".join(missed), end="\n" if missed else "")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
